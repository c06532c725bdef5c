"""Several devices asked like one: a message to each that is concerned, all sent before any answer is waited for.

    pairs -> route -> one call per device -> partial sums added up         a call that fails -> route again, without it

The pairs of a failed call go to the devices that hold the other copies, within the one deadline of all. They fail only
where an expert has no copy on a device that is up. Where each device computes a part of every expert there are no other
copies. No answer is used then, so that no unit counts twice. Has the methods of `client.DeviceClient` that its caller
uses.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import DeviceError, DeviceUnavailable
from ndp_device.timing.work import Timing
from ndp_device.transport.base import Clock
from vllm_ndp.device_client.client import DeviceClient
from vllm_ndp.device_client.connection import ExecuteHandle, ExecuteResult

Route = Callable[[int, NDArray[np.int32], NDArray[np.uint8], Sequence[bool]], Sequence[tuple[int, NDArray[np.int64]]]]
"""(layer, expert of each pair, bits of each pair, which devices may be asked) -> (device, its pairs) of each message.
If several messages hold a pair, each of their devices computes a part of it. A pair in no message stays unserved."""


@dataclass
class _Message:
    """Message to one device: its part of a call."""

    device: int
    pairs: NDArray[np.int64]  # of the call
    rows: NDArray[np.int64]  # of the call's x
    handle: ExecuteHandle


@dataclass
class GroupHandle:
    """A layer's call that waits for answers."""

    layer: int
    step: int
    submit_ps: int
    x: NDArray[Any]
    pair_rows: NDArray[np.int32]
    pair_experts: NDArray[np.int32]
    pair_bits: NDArray[np.uint8]
    gates: NDArray[np.float32]
    deadline_s: float
    messages: list[_Message] = field(default_factory=list)
    answered: list[tuple[_Message, ExecuteResult]] = field(default_factory=list)
    unserved: list[NDArray[np.int64]] = field(default_factory=list)  # pairs without a copy on a device that is up


class DeviceGroup:
    def __init__(
        self,
        clients: Sequence[DeviceClient],
        route: Route,
        holds: Callable[[int], NDArray[np.bool_]],
        slowest: Callable[[Sequence[Timing]], Timing],
        *,
        num_copies: int,
        deadline_ms: float,
        clock: Clock = time,
    ) -> None:
        """holds: [L, E], the experts that a device has copies of, as of the plan that is announced next. num_copies: of
        each expert."""
        self.clients = list(clients)
        self._route, self._holds, self._slowest = route, holds, slowest
        self._num_copies, self._deadline_s, self._clock = num_copies, deadline_ms / 1e3, clock
        self.availability = Availability()

    @property
    def alive(self) -> tuple[bool, ...]:
        """[D]"""
        return tuple(client.state == "up" for client in self.clients)

    @property
    def state(self) -> Literal["up", "down"]:
        """Down where no device is up."""
        return "up" if any(self.alive) else "down"

    @property
    def missing(self) -> list[tuple[int, int, int]]:
        """(layer, expert, bits) of the active plan that a device cannot serve though it should."""
        return sorted({at for client in self.clients for at in client.missing})

    def begin_install_plan(self, epoch: int, replicas: NDArray[np.uint8]) -> None:
        """Announce to each device the widths of the experts that it has copies of; waits for none."""
        for device, client in enumerate(self.clients):
            with contextlib.suppress(DeviceUnavailable, DeviceError):  # it installs the plan when it is back
                client.begin_install_plan(epoch, np.where(self._holds(device), replicas, 0).astype(np.uint8))

    def finish_install_plan(self, patience_s: float | None = None) -> list[tuple[int, int, int]]:
        for client in self.clients:
            with contextlib.suppress(DeviceUnavailable, DeviceError):
                client.finish_install_plan(patience_s)
        return self.missing

    def activate_plan(self, epoch: int) -> bool:
        """False: some device is down and will follow when it is back."""
        followed = [client.activate_plan(epoch) for client in self.clients]
        return all(followed)

    def begin_execute(
        self,
        layer: int,
        step: int,
        submit_ps: int,
        x: NDArray[Any],  # [T, H]
        pair_rows: NDArray[np.int32],
        pair_experts: NDArray[np.int32],
        pair_bits: NDArray[np.uint8],
        gates: NDArray[np.float32],
    ) -> GroupHandle:
        """Send every device its pairs, without waiting. Arrays must stay as they are until the call has ended."""
        deadline_s = self._clock.monotonic() + self._deadline_s
        handle = GroupHandle(layer, step, submit_ps, x, pair_rows, pair_experts, pair_bits, gates, deadline_s)
        usable = self.availability.note([client.state == "up" or client.poll() for client in self.clients])
        self._send(handle, np.arange(len(pair_rows)), usable)
        return handle

    def finish_execute(self, handle: GroupHandle) -> ExecuteResult:
        """The sum of all parts, and the time of the slowest device. Raises DeviceUnavailable, within the deadline,
        where a pair was served by no device."""
        usable = [True] * len(self.clients)  # for what is still to be served
        while handle.messages:
            messages, handle.messages = handle.messages, []
            lost = []
            for message in messages:
                try:
                    handle.answered.append((message, self.clients[message.device].finish_execute(message.handle)))
                except DeviceUnavailable:
                    usable[message.device] = False
                    lost.append(message.pairs)
            if lost:
                self.availability.lose()
                up = zip(usable, self.alive, strict=True)
                self._send(handle, np.unique(np.concatenate(lost)), [is_usable and is_up for is_usable, is_up in up])
        if handle.unserved:
            count = sum(len(pairs) for pairs in handle.unserved)
            raise DeviceUnavailable(
                f"{count} of {len(handle.pair_rows)} pairs have no copy on a device that is up", cause="down"
            )
        return self._sum(handle)

    def _send(self, handle: GroupHandle, pairs: NDArray[np.int64], usable: Sequence[bool]) -> None:
        """Send these pairs to devices that may be asked. Half of the time that is left is for them. The other half is
        for devices that hold the other copies, as long as there may be some."""
        routed = self._route(handle.layer, handle.pair_experts[pairs], handle.pair_bits[pairs], usable)
        is_served = np.zeros(len(pairs), np.bool_)
        for _, places in routed:
            is_served[places] = True
        if not is_served.all():
            handle.unserved.append(pairs[~is_served])
        deadline_s = handle.deadline_s
        if self._num_copies > 1 and sum(usable) > 1:
            now = self._clock.monotonic()
            deadline_s = now + max(deadline_s - now, 0.0) / 2
        for device, places in routed:
            own = pairs[places]
            if len(own) == len(handle.pair_rows):
                rows, local, x = np.arange(len(handle.x)), handle.pair_rows, handle.x
                of_own = handle.pair_experts, handle.pair_bits, handle.gates
            else:
                rows, place_of_row = np.unique(handle.pair_rows[own], return_inverse=True)
                local, x = place_of_row.reshape(-1).astype(np.int32), handle.x[rows]
                of_own = handle.pair_experts[own], handle.pair_bits[own], handle.gates[own]
            asked = self.clients[device].begin_execute(
                handle.layer, handle.step, handle.submit_ps, x, local, *of_own, deadline_s=deadline_s
            )
            handle.messages.append(_Message(device, own, rows.astype(np.int64), asked))

    def _sum(self, handle: GroupHandle) -> ExecuteResult:
        """Add up the answers in the order of devices, not of arrival. Without a time where one answer has none."""
        answered = sorted(handle.answered, key=lambda one: (one[0].device, one[0].pairs[0]))
        timings = [result.timing for _, result in answered if result.timing is not None]
        timing = self._slowest(timings) if len(timings) == len(answered) else None
        if len(answered) == 1:
            return ExecuteResult(answered[0][1].y, timing)
        y = np.zeros(handle.x.shape, np.float32)
        for message, result in answered:
            y[message.rows] += result.y
        return ExecuteResult(y, timing)


class Availability:
    """Device availability that the running step went by.

    A step that saw one answer from its first layer to its last can be replayed to the picosecond by that answer. One in
    which a device was lost, or came back, cannot: it depends on wall time.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[bool, ...]] = set()
        self._lost = False

    def note(self, up: Sequence[bool]) -> tuple[bool, ...]:
        """Some choice or message goes by this, which is given back."""
        self._seen.add(seen := tuple(up))
        return seen

    def lose(self) -> None:
        """A device that was asked gave no answer."""
        self._lost = True

    def take(self) -> tuple[bool, ...] | None:
        """Take which devices the step saw up [D], and start over. None: that changed meanwhile; (): no call looked."""
        seen, lost = self._seen, self._lost
        self._seen, self._lost = set(), False
        if lost or len(seen) > 1:
            return None
        return next(iter(seen), ())
