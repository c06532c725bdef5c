"""The host's end of the device: one deadline per call, never a wrong number, never a wait for a device that is down.

    no connection -> CONNECTING -> GREETING -> REPLAYING -> UP       any fault: no connection, another after 5..200 ms

`poll` and `begin_execute` bring the connection back, one step at a time, without waiting. The file connection.py says
what a connection is and which answers are possible. This file says when there is a connection and what the client asks
on it. One thread per client.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import (
    ConfigError,
    DeviceError,
    DeviceUnavailable,
    LocalProtocolError,
    RemoteProtocolError,
)
from ndp_device.experts.expert import WHOLE, Part
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.protocol.session import listed
from ndp_device.transport import connect
from ndp_device.transport.base import Clock
from ndp_device.transport.sender_thread import Order, SendOutcome
from vllm_ndp.device_client.connection import (
    AnnouncedPlan,
    Connection,
    ConnectionStage,
    ControlCall,
    Counters,
    ExecuteHandle,
    ExecuteResult,
)

if TYPE_CHECKING:
    from ndp_device.transport import ZmqTransport

MAX_IN_FLIGHT = 8
RETRY_FIRST_S, RETRY_LAST_S = 0.005, 0.2
_LOOKS_AT_ONCE = 64
_GREET_EVERY_S = 0.01  # between two tries to say Hello, each 15 to 70 us of a layer while the device is away
GREETING_S = 1.0  # a device that is connected but does not answer Hello for so long gets a new connection

_log = logging.getLogger(__name__)


class DeviceClient:
    """One device, connected again whenever the connection breaks: plans, deadlines, counters."""

    def __init__(
        self,
        address: str,
        expected_digest: str = "",
        *,
        deadline_ms: float = 1000.0,
        control_deadline_ms: float = 60_000.0,
        name: str = "vllm-ndp",
        shared_memory: bool = True,
        transport: Callable[[str, Path | None], ZmqTransport] = connect,
        keys: Path | None = None,
        part: Part = WHOLE,
        accept: Callable[[msg.Welcome], object] = lambda welcome: None,
        clock: Clock = time,
        jitter: random.Random | None = None,
    ) -> None:
        """`keys`: the file of this host, for a tcp address. `part`: the part of every expert that the device computes.
        `accept`: raises ConfigError for a device that serves something else than its host plans with. The client calls
        `accept` at every connection, because a device may come back as another one."""
        self.address, self.expected_digest, self.name, self.part = address, expected_digest, name, part
        self.counters = Counters()
        self.welcome: msg.Welcome | None = None
        self._deadline_s, self._control_s = deadline_ms / 1e3, control_deadline_ms / 1e3
        self._make_transport, self._accept_welcome, self._clock = partial(transport, address, keys), accept, clock
        self._connection: Connection | None = None
        self._pid = os.getpid()
        self._shares_memory = shared_memory
        self._doubts_memory = False  # then the next connection takes the socket
        self._active: AnnouncedPlan | None = None
        self._installed: AnnouncedPlan | None = None  # wanted, not yet activated
        self._installing: ControlCall | None = None  # its request, until its answer is waited for
        self._last_id = 0
        self._retry_at_s, self._retry_s = 0.0, RETRY_FIRST_S
        self._greet_at_s = 0.0
        self._jitter = jitter or random.Random(self._pid)
        self._reason: Exception = DeviceUnavailable("nobody there has greeted this host")

    @property
    def state(self) -> Literal["up", "down"]:
        return "up" if self._up else "down"

    @property
    def uses_shared_memory(self) -> bool:
        """Messages lie in shared memory, as long as they fit."""
        return self._connection is not None and self._connection.uses_shared_memory

    @property
    def reason(self) -> str:
        """Why the device is or was last down."""
        return str(self._reason)

    @property
    def missing(self) -> list[tuple[int, int, int]]:
        """(layer, expert, bits) of the active plan that the device cannot serve."""
        return listed(self._active.missing) if self._active else []

    def connect(self, timeout_s: float = 5.0) -> msg.Welcome:
        """Wait until the device is up. Raises DeviceError if it refuses us, ConfigError if we do not accept it,
        VersionMismatch, or DeviceUnavailable."""
        deadline = self._clock.monotonic() + timeout_s
        while not self._up:
            self.poll()
            reason = self._reason
            if isinstance(reason, ConfigError) or (isinstance(reason, DeviceError) and not reason.retryable):
                raise reason
            if isinstance(self._reason, codec.VersionMismatch):
                raise codec.VersionMismatch(f"the device at {self.address} cannot be used: {self._reason}")
            remaining = deadline - self._clock.monotonic()
            if remaining <= 0:
                raise DeviceUnavailable(
                    f"no device answered at {self.address} within {timeout_s:g} s: {self._reason}; is it running?"
                )
            if self._connection is None:
                self._clock.sleep(min(max(self._retry_at_s - self._clock.monotonic(), 0.0), remaining))
            else:
                self._receive(min(remaining, 0.02))
        assert self.welcome is not None
        return self.welcome

    def poll(self) -> bool:
        """Look at what has arrived and go on with a reconnection, without waiting. True if the device is up."""
        if self._pid != os.getpid():
            self._forget_parent()
        if self._connection is None:
            if self._clock.monotonic() < self._retry_at_s:
                return False
            try:
                self._connection = Connection(self._make_transport(), self.counters)
                self._greet_at_s = 0.0
            except (DeviceUnavailable, ConfigError) as error:  # no descriptor is left, a file of keys is gone
                self._fail(error)
                return False
        if self._connection.stage is ConnectionStage.CONNECTING:  # asked by every layer while the device is away
            now_s = self._clock.monotonic()
            if now_s < self._greet_at_s:
                return False
            self._greet_at_s = now_s + _GREET_EVERY_S
        for _ in range(_LOOKS_AT_ONCE):  # a device that talks without an end does not keep us
            if self._connection is None or not self._receive(0.0) or self._up:
                break
        asked = None if self._connection is None or self._up else self._connection.control
        if asked is not None and self._clock.monotonic() > asked.deadline_s:
            self._fail(DeviceUnavailable("the device is connected but does not answer"))
        return self._up

    def install_plan(self, epoch: int, replicas: NDArray[np.uint8]) -> list[tuple[int, int, int]]:
        """Announce the widths a plan will use: uint8 [L, E], bit i = widths.PLAN_BITS[i].

        Returns the (layer, expert, bits) the device cannot serve. Raises DeviceUnavailable or DeviceError; after
        DeviceUnavailable the plan stays wanted and is installed when the device is back.
        """
        self.begin_install_plan(epoch, replicas)
        return self.finish_install_plan(self._control_s)

    def begin_install_plan(self, epoch: int, replicas: NDArray[np.uint8]) -> None:
        """The first half of install_plan, which sends and does not wait. A device that is down shows in the second."""
        if epoch <= self._active_epoch:
            raise LocalProtocolError(f"a new plan must have an epoch above {self._active_epoch}, got {epoch}")
        plan = self._installed = AnnouncedPlan(epoch, replicas.copy())
        self._installing = self._begin(self._install_message(plan, self._active_epoch), plan) if self.poll() else None

    def finish_install_plan(self, patience_s: float | None = None) -> list[tuple[int, int, int]]:
        """The second half: wait for the answer, no longer than patience_s after the request; None: than for a call.

        Later, the device counts as down until it has followed: its connection stays, and calls do not wait.
        """
        if self._installed is None:
            raise LocalProtocolError("a plan must be on its way before its answer is waited for")
        installing, self._installing = self._installing, None
        if installing is None:
            raise DeviceUnavailable(f"the device is down: {self._reason}")
        self._finish(installing, patience_s)
        return listed(self._installed.missing)

    def activate_plan(self, epoch: int) -> bool:
        """Every Execute from now on belongs to `epoch`. False: the device is down and will follow when it is back."""
        plan = self._installed
        if plan is None or plan.epoch != epoch:
            raise LocalProtocolError(f"epoch {epoch} must be installed before it is activated")
        self._active, self._installed = plan, None
        try:
            if not self.poll():
                return False
            self._finish(self._begin(msg.ActivatePlan(self._next_id(), epoch=epoch), plan))
        except (DeviceUnavailable, DeviceError):
            return False
        return True

    def begin_execute(
        self,
        layer: int,
        step: int,
        submit_ps: int,
        x: NDArray[Any],  # [T, H] float32, float16, or uint16 holding bfloat16
        pair_rows: NDArray[np.int32],
        pair_experts: NDArray[np.int32],
        pair_bits: NDArray[np.uint8],
        gates: NDArray[np.float32],
        *,
        deadline_s: float | None = None,
    ) -> ExecuteHandle:
        """Send the pairs without waiting. A device that is down shows in finish_execute, not here.

        deadline_s: on the monotonic clock; None = the client's own deadline from now on.
        """
        now = self._clock.monotonic()
        patience_s = self._deadline_s if deadline_s is None else max(deadline_s - now, 0.0)
        handle = self._new_handle(x, submit_ps, now, patience_s)
        if not self._up or self._pid != os.getpid():
            self.poll()
        connection = self._connection
        if connection is None or not connection.is_up:
            handle.failure = DeviceUnavailable(f"the device is down: {self._reason}", cause="down")
            return handle
        asked = handle.id, handle.epoch, layer, step, submit_ps, round(patience_s * 1e6)
        try:
            connection.execute(handle, asked, (x, pair_rows, pair_experts, pair_bits, gates))
        except (DeviceUnavailable, RemoteProtocolError) as error:
            self._fail(error)
        return handle

    def execute_ahead(
        self, order: Order, layer: int, step: int, submit_ps: int, x: NDArray[Any]
    ) -> ExecuteHandle | None:
        """The same for pairs that a thread will find (sender.py). If they leave, `executed_ahead` is the next call.
        x [T, H]: rows that may leave. None: they must be sent otherwise."""
        connection = self._connection
        if connection is None or not connection.is_up or self._pid != os.getpid():
            return None
        handle = self._new_handle(x, submit_ps, self._clock.monotonic(), self._deadline_s)
        asked = handle.id, handle.epoch, layer, step, submit_ps, round(self._deadline_s * 1e6)
        return handle if connection.execute_ahead(order, asked) else None

    def executed_ahead(
        self, handle: ExecuteHandle, outcome: SendOutcome, x: NDArray[Any], y: NDArray[np.float32] | None
    ) -> None:
        """The message has left with rows x; y: the sums of its answer, if that is here."""
        assert self._connection is not None
        handle.x, handle.deadline_s = x, outcome.sent_s + handle.patience_s
        try:
            self._connection.executed_ahead(handle, outcome, y)
        except (DeviceUnavailable, RemoteProtocolError, DeviceError) as error:
            self._fail(error)

    def _new_handle(self, x: NDArray[Any], submit_ps: int, now_s: float, patience_s: float) -> ExecuteHandle:
        if self._active is None:
            raise LocalProtocolError("a plan must be activated before the first Execute")
        if self._connection is not None and len(self._connection.handles) >= MAX_IN_FLIGHT:
            raise LocalProtocolError(f"at most {MAX_IN_FLIGHT} Execute may be in flight: finish one first")
        return ExecuteHandle(self._next_id(), self._active.epoch, x, submit_ps, now_s + patience_s, patience_s)

    def refuses(self) -> bool:
        """Whether a call would end at once: `poll` saw no device last. It need not be made then, and is counted."""
        if self._up:
            return False
        self.counters.unavailable += 1
        return True

    def finish_execute(self, handle: ExecuteHandle) -> ExecuteResult:
        """The result of `handle`. Raises DeviceUnavailable, within the deadline that began with begin_execute."""
        while handle.result is None and handle.failure is None:
            remaining = handle.deadline_s - self._clock.monotonic()
            self._receive(max(remaining, 0.0))  # at least one look, however late we come
            if remaining <= 0 and handle.result is None and handle.failure is None:
                self._fail(DeviceUnavailable(f"no answer within {handle.patience_s * 1e3:g} ms", cause="late"))
        if handle.result is not None:
            self.counters.executed += 1
            self._retry_s = RETRY_FIRST_S
            return handle.result
        if isinstance(handle.failure, DeviceUnavailable):
            self.counters.unavailable += 1
            raise handle.failure
        cause = "refused" if isinstance(handle.failure, DeviceError) else "broken"
        raise DeviceUnavailable(f"the device gave no usable result: {handle.failure}", cause=cause) from handle.failure

    def close(self) -> None:
        """Drop the connection for good; calls that still wait fail."""
        self._reason = DeviceUnavailable("the client was closed")
        self._drop(self._reason)
        self._retry_at_s = float("inf")

    # -- below: one reply at a time, and what follows from it ------------------------------------------------

    @property
    def _up(self) -> bool:
        return self._connection is not None and self._connection.is_up

    def _receive(self, timeout_s: float) -> bool:
        """Handle at most one message. True if something happened, so that another look may pay."""
        connection = self._connection
        if connection is None:
            return False
        asked = connection.control
        try:
            if not connection.receive(timeout_s):
                return connection.stage is ConnectionStage.CONNECTING and self._greet(connection)
            if asked is not None and asked.reply is not None and not connection.is_up:
                self._advance(connection, asked.reply)
        except (DeviceUnavailable, RemoteProtocolError, DeviceError, ConfigError) as error:
            self._fail(error)
        return True

    def _greet(self, connection: Connection) -> bool:
        """Say Hello as soon as there is a connection to say it on."""
        if not connection.transport.is_ready:
            return False
        hello = msg.Hello(
            self._next_id(),
            versions=(msg.VERSION, msg.VERSION),
            client=self.name,
            model_digest=self.expected_digest,
            wants_slots=self._shares_memory and connection.transport.can_share_memory and not self._doubts_memory,
            part=msgspec.UNSET if self.part == WHOLE else (self.part.index, self.part.count),
        )
        if connection.ask(hello, self._clock.monotonic() + GREETING_S) is None:
            return False
        connection.stage = ConnectionStage.GREETING
        self._doubts_memory = False
        return True

    def _advance(self, connection: Connection, reply: msg.AnyReply) -> None:
        """Ask the next question of a connection that is being set up."""
        if isinstance(reply, msg.Welcome):
            self._accept_welcome(reply)
            self.welcome = reply
            connection.welcomed(reply)
            connection.stage = ConnectionStage.REPLAYING
        if (request := self._next_of_plans(connection)) is not None:
            self._begin(*request)
        else:
            connection.stage = ConnectionStage.UP
            self.counters.connected += 1
            back = self.counters.connected > 1
            level, state = (logging.WARNING, "back") if back else (logging.INFO, "up")  # as loud as it went
            _log.log(level, "NDP device at %s is %s (incarnation %.8s)", self.address, state, connection.incarnation)

    def _next_of_plans(self, connection: Connection) -> tuple[msg.Message, AnnouncedPlan] | None:
        """Return the next request that gives the device our plans; found again each time, as plans change meanwhile."""
        active, wanted = self._active, self._installed
        epoch = connection.active.epoch if connection.active else 0
        if active is not None and connection.active is not active:
            if connection.installed is active:
                return msg.ActivatePlan(self._next_id(), epoch=active.epoch), active
            return self._install_message(active, epoch), active
        if wanted is not None and connection.installed is not wanted:
            return self._install_message(wanted, epoch), wanted
        return None

    def _begin(self, message: msg.Message, plan: AnnouncedPlan) -> ControlCall | None:
        """Send a control request; None: the device was lost."""
        assert self._connection is not None
        try:
            control = self._connection.ask(message, self._clock.monotonic() + self._control_s, plan)
            if control is None:
                raise DeviceUnavailable("the device takes no more requests")
        except (DeviceUnavailable, RemoteProtocolError) as error:
            self._fail(error)
            return None
        return control

    def _finish(self, control: ControlCall | None, patience_s: float | None = None) -> None:
        """Wait for the answer to a control request. Raises DeviceError for a refusal, else DeviceUnavailable."""
        patience_s = min(self._deadline_s if patience_s is None else patience_s, self._control_s)
        while control is None or control.reply is None:
            if control is None or self._connection is None or self._connection.control is not control:
                if isinstance(self._reason, DeviceError | DeviceUnavailable):
                    raise self._reason
                raise DeviceUnavailable(f"the device was lost: {self._reason}") from self._reason
            remaining = control.deadline_s - self._control_s + patience_s - self._clock.monotonic()
            self._receive(max(remaining, 0.0))
            if remaining <= 0 and control.reply is None and self._up:
                late = DeviceUnavailable(f"{control.asked} has no answer after {patience_s:g} s")
                if patience_s >= self._control_s:
                    self._fail(late)
                else:
                    self._follow_later(late)
                    raise late

    def _follow_later(self, reason: DeviceUnavailable) -> None:
        """Count the device as down until `poll` has seen the answer to a control request."""
        assert self._connection is not None
        self._connection.stage, self._reason = ConnectionStage.REPLAYING, reason
        self.counters.lost += 1
        _log.warning("NDP device at %s is down until it follows: %s", self.address, reason)

    def _fail(self, reason: Exception) -> None:
        """Replace the connection: late answers and queued requests of the old one can never be seen again."""
        if isinstance(reason, RemoteProtocolError):
            self.counters.broken += 1
            self._doubts_memory = self.uses_shared_memory
        if self._up:
            self.counters.lost += 1
            _log.warning("NDP device at %s is down: %s", self.address, reason)
        elif type(reason) is not type(self._reason) and isinstance(reason, DeviceError):
            _log.warning("NDP device at %s refuses us: %s", self.address, reason)
        elif isinstance(reason, ConfigError) and str(reason) != str(self._reason):
            _log.warning("the NDP device that answers now is not used: %s", reason)
        self._reason = reason
        cause = "broken" if isinstance(reason, RemoteProtocolError) else getattr(reason, "cause", "lost")
        self._drop(DeviceUnavailable(f"the device was lost: {reason}", cause=cause))
        self._retry_at_s = self._clock.monotonic() + self._retry_s * self._jitter.uniform(0.5, 1.0)
        self._retry_s = min(2 * self._retry_s, RETRY_LAST_S)

    def _drop(self, failure: DeviceUnavailable) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(failure)

    def _forget_parent(self) -> None:
        """Drop the socket in a forked child: it is the parent's, so it is neither used nor closed here."""
        self._parents_connection, self._connection = self._connection, None
        if self._parents_connection is not None:
            self._parents_connection.abandon(DeviceUnavailable("the process was forked"))
        self._pid = os.getpid()
        self._retry_at_s = 0.0

    @property
    def _active_epoch(self) -> int:
        return self._active.epoch if self._active else 0

    def _install_message(self, plan: AnnouncedPlan, expected_epoch: int) -> msg.InstallPlan:
        return msg.InstallPlan(self._next_id(), epoch=plan.epoch, expected_epoch=expected_epoch)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id
