"""The device, or several of them, as layers and planner of this worker see it: install plans, submit layers, stand in.

With few rows on a CPU their way to and from an array is one native call: torch's operators cost more there.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.common.errors import DeviceError, DeviceUnavailable, ReplicaError
from ndp_device.common.model_shape import ModelShape
from ndp_device.common.widths import FLAG_OF_BITS
from ndp_device.transport.sender_thread import Order, SendOutcome
from vllm_ndp.device_client.client import DeviceClient
from vllm_ndp.device_client.connection import ExecuteResult
from vllm_ndp.device_client.device_group import DeviceGroup
from vllm_ndp.integration.compat import say
from vllm_ndp.integration.device_members import DeviceMembers
from vllm_ndp.integration.host_replicas import HostExperts
from vllm_ndp.integration.step import Step
from vllm_ndp.layer import _split
from vllm_ndp.layer.devices import Devices, slowest
from vllm_ndp.layer.setup import Setup
from vllm_ndp.layer.split import Pairs

_LEAST_MACS_PER_S = 2.5e9
"""Least speed of a device that computes prompt rows: a fourteenth of one core's with AVX-512 (docs/log/timing.md)."""
_MOST_PROMPT_S = 10.0
"""Most seconds that prompt rows add to a call's deadline: a device that hangs keeps the engine waiting as long, once.
At the speed of one core with AVX-512 they are enough for 2000 pairs of Mixtral-8x7B in one layer."""

_MOST_ROUND_TRIPS = 4096
"""Kept until a step takes them: of steps that fail nobody does."""


FEW_ROWS = 128
_ON_HOST: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype("<f4"),
    torch.float16: np.dtype("<f2"),
    torch.bfloat16: np.dtype("<u2"),
}
"""numpy lacks bfloat16."""


class Gather:
    """Rows of tensors [T, H] as arrays on the host, in memory that the next call writes again."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        self._few: NDArray[Any] = np.empty((FEW_ROWS, hidden), _ON_HOST[dtype])
        self._bytes = self._few.view(np.uint8)

    def rows(self, x: torch.Tensor, rows: NDArray[np.int64]) -> NDArray[Any]:
        """These rows [S], in order: float32 and float16 as they are, bfloat16 as uint16."""
        if len(rows) <= FEW_ROWS and x.device.type == "cpu":
            x = x.contiguous()
            _split.gather(x.data_ptr(), self._bytes.shape[1], rows, self._bytes)
            return self._few[: len(rows)]
        return as_numpy(chosen(x, rows))


def chosen(x: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """These rows [S] of x [T, H], which are distinct and in order."""
    return x if len(rows) == len(x) else x.index_select(0, torch.from_numpy(rows).to(x.device))


def sent_rows(x: torch.Tensor, pairs: Pairs) -> NDArray[np.float32]:
    """The rows of x [T, H] that pairs need, on the host: [S, H]."""
    rows: NDArray[np.float32] = chosen(x, pairs.sent_rows).detach().float().cpu().numpy()
    return rows


def as_numpy(x: torch.Tensor) -> NDArray[Any]:
    """float32 and float16 as they are; bfloat16, which numpy lacks, as uint16."""
    host = x.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(np.uint16)
    return host.numpy()


def as_float32(rows: NDArray[Any]) -> NDArray[np.float32]:
    """Rows in float32, from rows as `as_numpy` has them."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32, copy=False)


def add_sums(out: torch.Tensor, sums: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
    """Add partial sums f32 [S, H] to these rows [S] of out [T, H], which are distinct and in order.

    Each element is rounded once: an answer does not depend on how many rows were sent beside its own.
    """
    if out.device.type == "cpu" and len(rows) <= FEW_ROWS and out.dtype is not torch.float16 and out.is_contiguous():
        _split.add_rows(out.data_ptr(), out.shape[0], sums, rows, out.dtype is torch.bfloat16)
        return
    partial = torch.from_numpy(sums).to(out.device)
    if len(rows) == out.shape[0]:
        out.add_(partial)
    else:
        index = torch.from_numpy(rows).to(out.device)
        out.index_copy_(0, index, out.index_select(0, index).add_(partial))


@dataclass
class DeviceCall:
    """One layer's call under way."""

    pairs: Pairs
    _link: DeviceLink
    _handle: Any = None  # None: the device was away, and nothing was sent
    _sent_s: float = 0.0
    answer: ExecuteResult | None = None
    """Once there is one."""

    def result(self) -> ExecuteResult | None:
        """Wait for the answer, at most until the deadline; None if no valid one came."""
        if self._handle is None:
            self._link.fallbacks["down"] += len(self.pairs.experts)
            return None
        try:
            answer = self._link.client.finish_execute(self._handle)
        except DeviceUnavailable as error:
            self._link.fallbacks[error.cause] += len(self.pairs.experts)
            return None
        self._link.round_trips_s.append(time.perf_counter() - self._sent_s)
        self.answer = answer
        return answer

    def add(self, out: torch.Tensor) -> bool:
        """Add the partial sums to the rows that were sent. False: there was no answer."""
        if (answer := self.result()) is None:
            return False
        add_sums(out, answer.y, self.pairs.sent_rows)
        return True

    def abandon(self) -> None:
        """The step is lost: take the answer all the same, so that it does not count as under way any longer."""
        if self._handle is not None:
            with contextlib.suppress(DeviceUnavailable):
                self._link.client.finish_execute(self._handle)


class DeviceLink:
    """Speaks to the device, or to all of them, by `client`."""

    def __init__(
        self,
        members: DeviceMembers,
        setup: Setup,
        devices: Devices | None,
        shape: ModelShape,
        layers: range,
        dtype: torch.dtype,
        local: HostExperts | None,
    ) -> None:
        """`devices`: where there are several, who holds and serves what. `shape`: of the whole model. `layers`: those
        of its MoE layers that this worker runs, which it counts from 0. `dtype`: of activations. `local`: computes what
        a call did not bring, None where that is done in full precision.
        """
        self.members = members
        self._only = members.clients[0] if devices is None else None
        self.client: DeviceClient | DeviceGroup = members.clients[0]
        if devices is not None:

            def messages(layer: int, *call: Any) -> list[tuple[int, NDArray[np.int64]]]:
                return devices.messages(layer - layers.start, *call)

            def holds(device: int) -> NDArray[np.bool_]:
                return self._of_model(devices.held[:, :, device])

            copies, deadline_ms = devices.num_copies, members.deadline_ms
            how = messages, holds, slowest
            self.client = DeviceGroup(members.clients, *how, num_copies=copies, deadline_ms=deadline_ms)
        self._setup, self._shape, self._layers, self._local = setup, shape, layers, local
        self._gather = Gather(shape.hidden_size, dtype)
        self._installing: int | None = None  # epoch whose plan is on its way
        self.round_trips_s: deque[float] = deque(maxlen=_MOST_ROUND_TRIPS)
        self.fallbacks = Counter[str]()

    def _of_model(self, of_stage: NDArray[Any]) -> NDArray[Any]:
        """[L, E] of the worker's layers -> of the model's, 0 in the others."""
        values = np.zeros((self._shape.num_layers, of_stage.shape[1]), of_stage.dtype)
        values[self._layers.start : self._layers.stop] = of_stage
        return values

    def note_availability(self, alive: tuple[bool, ...]) -> tuple[bool, ...]:
        """[D], which devices a choice of this step was made by."""
        return self.client.availability.note(alive) if isinstance(self.client, DeviceGroup) else alive

    def take_availability(self) -> tuple[bool, ...] | None:
        """[D], which of several devices the step went by; None: that changed within it; (): no device mattered."""
        return self.client.availability.take() if isinstance(self.client, DeviceGroup) else ()

    @property
    def state(self) -> str:
        return self.client.state

    def revive(self) -> None:
        """Between steps: see to devices that died, and whether one is back: layers do not ask, it costs 10 us."""
        self.members.revive()
        if self._only is not None and self._only.state == "down":
            self._only.poll()

    # -- plans ----------------------------------------------------------------------------------------------------

    def begin_install(self, epoch: int, widths: NDArray[np.uint8], hot: NDArray[np.bool_]) -> None:
        """Announce what the plans of an epoch may ask for, without waiting. widths: masks [L, E]; hot [L, E]."""
        if self._setup.spill_bits:
            widths[hot] |= FLAG_OF_BITS[self._setup.spill_bits]
        if self._setup.splits_prefill:  # of hot experts, too: the rule may look at rows alone
            widths |= FLAG_OF_BITS[self._setup.prompt_bits]
        self._installing = epoch = epoch + 1  # nothing is installed in a device's epoch 0
        with contextlib.suppress(DeviceUnavailable, DeviceError):  # the client installs it when the device is back
            self.client.begin_install_plan(epoch, self._of_model(widths))

    def wait_installed(self, patience_s: float | None = None) -> None:
        """Before the first message under a plan: wait until the device has prepared what the plan names. patience_s:
        as DeviceClient.finish_install_plan takes it."""
        if self._installing is None:
            return
        epoch, self._installing = self._installing, None
        with contextlib.suppress(DeviceUnavailable, DeviceError):
            self.client.finish_install_plan(patience_s)
        self.client.activate_plan(epoch)
        if self.client.missing:
            layer, expert, bits = self.client.missing[0]
            say(
                f"the device cannot serve expert {expert} of layer {layer} at {bits} bits ({len(self.client.missing)} "
                "missing), so layers that ask for them are computed here: rebuild the replicas with `vllm-ndp quantize`"
            )

    # -- layers ---------------------------------------------------------------------------------------------------

    def send(self, step: Step, layer: int, x: torch.Tensor, pairs: Pairs) -> DeviceCall:
        """Send the rows of x [T, H] that the pairs need; waits for nothing but a new plan, and never fails."""
        self.wait_installed()
        if self._only is not None and self._only.refuses():
            return DeviceCall(pairs, self)
        rows = self._gather.rows(x, pairs.sent_rows)
        now_ps, more_s = step.parts.run.clock.now_ps, self._prompts_s(step, pairs)
        return self.send_rows(step, layer, now_ps, rows, pairs, more_s=more_s)

    def send_rows(
        self,
        step: Step,
        layer: int,
        submit_ps: int,
        rows: NDArray[Any],
        pairs: Pairs,
        *,
        more_s: float = 0.0,
    ) -> DeviceCall:
        """The same for rows [S, H] that are gathered already.

        submit_ps: the simulated time at which the step hands the layer over. more_s: beyond the deadline of the
        settings, for prompts.
        """
        self.wait_installed()
        sent_s = time.perf_counter()
        _, local, experts, bits, weights = pairs
        asked = self._layers[layer], step.number, submit_ps, rows, local, experts, bits, weights
        handle: Any  # of one device or of several
        if more_s and self._only is not None:  # prompts are split beside one device only
            deadline_s = time.monotonic() + self.members.deadline_ms / 1e3 + more_s
            handle = self._only.begin_execute(*asked, deadline_s=deadline_s)
        else:
            handle = self.client.begin_execute(*asked)
        return DeviceCall(pairs, self, handle, sent_s)

    def send_ahead(self, step: Step, layer: int, order: Order, x: NDArray[Any]) -> Any:
        """The same by a thread, for pairs that it will find: a handle for `sent_ahead`. x [T, H]: rows that may leave.
        None: they must be sent otherwise."""
        self.wait_installed()
        if self._only is None:
            return None
        return self._only.execute_ahead(order, self._layers[layer], step.number, step.parts.run.clock.now_ps, x)

    def sent_ahead(
        self, handle: Any, outcome: SendOutcome, rows: NDArray[Any], pairs: Pairs, y: NDArray[np.float32] | None
    ) -> DeviceCall:
        """The message has left; y: the sums, if the answer is here."""
        assert self._only is not None
        self._only.executed_ahead(handle, outcome, rows, y)
        return DeviceCall(pairs, self, handle, outcome.sent_s)

    def _prompts_s(self, step: Step, pairs: Pairs) -> float:
        """Seconds by which the deadline, which is meant for decode rows, is longer for these pairs."""
        if step.rows.all_decode:
            return 0.0
        prompts = int((~step.rows.decode[pairs.rows]).sum())
        return min(prompts * self._shape.weights_per_expert / _LEAST_MACS_PER_S, _MOST_PROMPT_S)

    def take_round_trips(self) -> list[float]:
        """How long each answered message took since the last time, in seconds on the wall: until the host has it."""
        taken = list(self.round_trips_s)
        self.round_trips_s.clear()
        return taken

    def take_fallbacks(self) -> dict[str, int]:
        """Pairs that no answer came for since the last time, by cause (ndp_device.common.errors.UNAVAILABLE)."""
        taken = dict(self.fallbacks)
        self.fallbacks.clear()
        return taken

    def stand_in(self, layer: int, x: NDArray[np.float32], pairs: Pairs) -> NDArray[np.float32] | None:
        """The pairs of a call that got no answer, with the same replicas and kernel: sums [S, H] of the rows that were
        sent, x [S, H].

        None: the settings ask for full precision instead, or the replicas cannot be read here either.
        """
        if self._local is None:
            return None
        try:
            return self._local.execute(layer, x, pairs)
        except ReplicaError as error:
            say(f"{error}; computing in full precision instead")
            return None


@dataclass
class DeviceView:
    setup: Setup
    """The same on every rank."""
    devices: Devices | None
    """Where there are several: who holds and serves what, the same on every rank."""
    link: DeviceLink | None
    """None: another rank sends, waits, stands in and counts."""
    agreed: tuple[bool, ...] | None = None
    """Devices that all of several ranks use in this step, whatever happens in it."""

    @property
    def up(self) -> tuple[bool, ...]:
        """Which devices are up now [D]."""
        if self.link is not None:
            return self.link.members.up
        return self.agreed or ()

    @property
    def takes_pairs(self) -> bool:
        """Whether this step's hot experts and prompts may have pairs for a device, or for what stands in for it."""
        if self.setup.same_without:
            return True
        if self.link is not None and self.agreed is None and self.devices is None:  # asked in every layer
            return self.link.state == "up"
        return any(self.counted_on())

    @property
    def state(self) -> str:
        return "the leader's" if self.link is None else self.link.state

    def counted_on(self) -> tuple[bool, ...]:
        """[D], which devices this step's experts may run on, for a choice that is made by it."""
        if self.setup.same_without:
            assert self.devices is not None
            return tuple(self.devices.all_alive)
        alive = self.up if self.agreed is None else self.agreed
        return alive if self.link is None else self.link.note_availability(alive)
