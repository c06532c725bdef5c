"""One connection to a device: what was asked on it, which answers are possible, and that all of it ends together.

    CONNECTING -> GREETING -> REPLAYING -> UP        any of them -> CLOSED, for good

The client uses a result only if its id, incarnation, epoch, shape, dtype, checksum and simulated time are possible. The
result must also be finite if its input was.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import DeviceError, DeviceUnavailable, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.timing.work import BOUNDS, Timing
from ndp_device.transport.sender_thread import Order, SendOutcome
from ndp_device.transport.shm import Sound

if TYPE_CHECKING:
    from ndp_device.transport import ZmqTransport

_ANSWERS: dict[type[msg.Message], type[msg.Reply]] = {
    msg.Hello: msg.Welcome,
    msg.InstallPlan: msg.PlanInstalled,
    msg.ActivatePlan: msg.PlanActivated,
}
_SESSION_LOST = ("no_session", "stale_epoch")
_LATEST_PS = 1 << 62  # 53 days
_LONGEST_PS = 3600 * 10**12  # of one Execute: a lie moves the host's simulated clock, which no later answer turns back


@dataclass(frozen=True)
class ExecuteResult:
    y: NDArray[np.float32]  # [T, H], gate-weighted partial sums
    timing: Timing | None  # simulated; None: the device has no simulated time


@dataclass
class ExecuteHandle:
    """One Execute on its way: at the end either `result` or `failure` is set."""

    id: int
    epoch: int
    x: NDArray[Any]
    submit_ps: int  # simulated time at which the host handed the work over
    deadline_s: float
    patience_s: float  # from the beginning to the deadline
    result: ExecuteResult | None = None
    failure: DeviceError | DeviceUnavailable | RemoteProtocolError | None = None


@dataclass
class Counters:
    """Counts of calls and connections since the client was made."""

    executed: int = 0  # results used
    unavailable: int = 0  # calls that found the device down, or lost it
    refused: int = 0  # calls answered by a typed error
    nonfinite: int = 0  # results rejected because they were not finite though their input was
    broken: int = 0  # replies that broke the rules; each costs the connection
    ignored: int = 0  # late or repeated replies
    lost: int = 0  # times the device went from up to down
    connected: int = 0  # times it came up


@dataclass
class AnnouncedPlan:
    """The widths a plan will use, and which of them the device lacks; bit i of a flag = widths.PLAN_BITS[i]."""

    epoch: int
    replicas: NDArray[np.uint8]  # [L, E]
    missing: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 0), np.uint8))


@dataclass
class ControlCall:
    """The one request other than Execute that waits for its answer."""

    id: int
    asked: str  # for the sentence of an error
    expects: type[msg.Reply]
    deadline_s: float
    plan: AnnouncedPlan | None = None
    reply: msg.AnyReply | None = None


class ConnectionStage(enum.Enum):
    CONNECTING = "connecting"  # there is nothing yet to say Hello on
    GREETING = "greeting"  # Hello was sent
    REPLAYING = "replaying"  # the plans in force now are installed, one request at a time
    UP = "up"
    CLOSED = "closed"


class Connection:
    """Made for one transport; whatever breaks it, the next one is another object."""

    def __init__(self, transport: ZmqTransport, counters: Counters) -> None:
        self.stage = ConnectionStage.CONNECTING
        self.handles: dict[int, ExecuteHandle] = {}
        self.control: ControlCall | None = None  # the one request other than Execute that waits for its answer
        self.installed: AnnouncedPlan | None = None  # by what the device has answered
        self.active: AnnouncedPlan | None = None
        self.incarnation = ""
        self.uses_shared_memory = False
        self.transport, self._counters = transport, counters
        self._config_hash = ""
        self._last_id = 0

    @property
    def is_up(self) -> bool:
        return self.stage is ConnectionStage.UP

    def ask(self, request: msg.Message, deadline_s: float, plan: AnnouncedPlan | None = None) -> ControlCall | None:
        """Send a control request; None: there is no connection to send it on yet, or its queue is full."""
        tensors = {"replicas": plan.replicas} if isinstance(request, msg.InstallPlan) and plan is not None else None
        if not self._send(request, tensors):
            return None
        epoch = f" of epoch {plan.epoch}" if plan is not None else ""
        asked = f"{type(request).__name__}{epoch}"
        self.control = ControlCall(request.id, asked, _ANSWERS[type(request)], deadline_s, plan)
        return self.control

    def execute(self, handle: ExecuteHandle, asked: Sequence[int], tensors: Sequence[NDArray[Any]]) -> None:
        """Send an Execute: its fields, and its tensors. Raises DeviceUnavailable if the device takes no more."""
        self.handles[handle.id] = handle
        self._last_id = max(self._last_id, handle.id)
        if self.transport.send_execute(asked, tensors):
            return
        if not self._send(msg.Execute(*asked), dict(zip(msg.TENSORS[msg.Execute], tensors, strict=True))):
            raise DeviceUnavailable("the device takes no more requests")

    def execute_ahead(self, order: Order, asked: Sequence[int]) -> bool:
        """Have an Execute sent when its packet is there. False: the transport cannot."""
        self._last_id = max(self._last_id, asked[0])
        return self.transport.send_ahead(order, asked)

    def executed_ahead(self, handle: ExecuteHandle, outcome: SendOutcome, y: NDArray[np.float32] | None) -> None:
        """It has left, and perhaps its answer is here: then y are the sums."""
        self.handles[handle.id] = handle
        self.transport.sent_ahead(outcome)
        if outcome.reply is not None:
            assert y is not None
            self._handle(outcome.reply, {"y": y}, is_sound=True)

    def welcomed(self, welcome: msg.Welcome) -> None:
        """Use what the device offers."""
        self._config_hash = welcome.config_hash
        self.uses_shared_memory = welcome.slots is not None and self.transport.attach(welcome.slots)

    def receive(self, timeout_s: float) -> bool:
        """Handle one message at most. False: none came. The connection is of no use after any error."""
        received = self.transport.receive(timeout_s)
        if received is None:
            return False
        reply: msg.AnyReply
        if is_sound := isinstance(received, Sound):
            reply, tensors = received.reply, {"y": received.y}
        else:
            reply, tensors = codec.decode_reply(received[0], received[1])
        self._handle(reply, tensors, is_sound=is_sound)
        return True

    def _handle(self, reply: msg.AnyReply, tensors: codec.Tensors, *, is_sound: bool) -> None:
        self.incarnation = self.incarnation or reply.incarnation
        if reply.incarnation != self.incarnation:
            raise RemoteProtocolError("a reply came from another incarnation of the device")
        if handle := self.handles.pop(reply.id, None):
            self._settle(handle, reply, tensors, is_sound=is_sound)
        elif self.control is not None and self.control.id == reply.id:
            self._answer(self.control, reply, tensors)
        elif 0 < reply.id <= self._last_id:
            self._counters.ignored += 1  # late or repeated
        else:
            raise RemoteProtocolError(
                f"the device answered request {reply.id}, which was never made, by {named(reply)}"
            )

    def close(self, failure: DeviceUnavailable) -> None:
        """End it, and every call on it."""
        self.transport.close()
        self.abandon(failure)

    def abandon(self, failure: DeviceUnavailable) -> None:
        """The same in a forked child, whose parent owns the socket."""
        self.stage = ConnectionStage.CLOSED
        self.control = None
        for handle in self.handles.values():
            handle.failure = failure
        self.handles.clear()

    def _send(self, request: msg.Message, tensors: codec.Tensors | None) -> bool:
        self._last_id = max(self._last_id, request.id)
        return self.transport.send(codec.encode(request, tensors))

    def _settle(self, handle: ExecuteHandle, reply: msg.AnyReply, tensors: codec.Tensors, *, is_sound: bool) -> None:
        """is_sound: the sums are known to be finite, and lie in memory of their own."""
        if isinstance(reply, msg.Refusal):
            handle.failure = DeviceError(reply.code, reply.message, retryable=reply.retryable)
            self._counters.refused += 1
            if reply.code in _SESSION_LOST:
                raise handle.failure  # greet and install again
            return
        y = tensors.get("y")
        if y is not None and not is_sound:
            y = y.copy()  # before it is looked at: it may lie in memory that the device can still write
        if not isinstance(reply, msg.Result) or y is None or reply.epoch != handle.epoch or y.shape != handle.x.shape:
            handle.failure = RemoteProtocolError(
                f"an Execute of {list(handle.x.shape)} under epoch {handle.epoch} was answered by {named(reply)}"
            )
            raise handle.failure
        if lie := lie_of(reply.timing, handle.submit_ps, self._config_hash):
            handle.failure = RemoteProtocolError(f"a result came with a simulated time {lie}")
            raise handle.failure
        if not is_sound and not np.isfinite(y).all() and is_finite(handle.x):
            handle.failure = RemoteProtocolError("the result is not finite though the input is")
            self._counters.nonfinite += 1
            return
        handle.result = ExecuteResult(y, reply.timing)

    def _answer(self, control: ControlCall, reply: msg.AnyReply, tensors: codec.Tensors) -> None:
        self.control = None
        if isinstance(reply, msg.Refusal):
            raise DeviceError(reply.code, reply.message, retryable=reply.retryable)
        plan = control.plan
        if type(reply) is not control.expects or (plan is not None and getattr(reply, "epoch", None) != plan.epoch):
            raise RemoteProtocolError(f"{control.asked} was answered by {named(reply)}")
        if plan is not None and isinstance(reply, msg.PlanInstalled):
            missing = tensors["missing"].copy()  # as above
            if missing.shape != plan.replicas.shape or (missing & ~plan.replicas).any():
                raise RemoteProtocolError(f"{control.asked} was answered by {named(reply)}")
            plan.missing = missing
            self.installed = plan
        elif isinstance(reply, msg.PlanActivated):
            self.active = plan
        control.reply = reply


def is_finite(x: NDArray[Any]) -> bool:
    if x.dtype == np.uint16:  # bfloat16: all eight exponent bits set means infinite or not a number
        return bool(((x & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(x).all())


def lie_of(timing: Timing | None, submit_ps: int, config_hash: str) -> str | None:
    """Say what is impossible about a simulated time; None where nothing is, or where an answer has no time."""
    if timing is None:
        return None
    if timing.config_hash != config_hash:
        return f"of hardware {timing.config_hash:.12} where {config_hash:.12} greeted"
    if timing.submit_ps != submit_ps or not submit_ps <= timing.start_ps <= timing.done_ps < _LATEST_PS:
        return (
            f"from {timing.submit_ps} over {timing.start_ps} to {timing.done_ps} ps for work handed over at {submit_ps}"
        )
    if timing.total_ps != timing.done_ps - submit_ps or timing.total_ps > _LONGEST_PS:
        return f"of {timing.total_ps} ps in all between {submit_ps} and {timing.done_ps}"
    parts = (
        *(timing.launch_ps, timing.link_in_ps, timing.queue_ps, timing.dram_ps, timing.compute_ps, timing.dequant_ps),
        *(timing.vector_ps, timing.overlap_saved_ps, timing.link_out_ps, timing.completion_ps, timing.weight_bytes),
        *(timing.bytes_in, timing.bytes_out, timing.row_activations, timing.refresh_stall_ps, timing.energy_pj),
    )
    if min(parts) < 0 or max(parts) >= _LATEST_PS or timing.bound not in BOUNDS:
        return "with a negative or endless part"
    if not (0 <= timing.array_utilisation < math.inf and 0 <= timing.dram_efficiency < math.inf):
        return "with an impossible utilisation"
    return None


def named(reply: msg.AnyReply) -> str:
    shapes = "".join(f" {spec.name}{list(spec.shape)}" for spec in reply.tensors)
    return f"{type(reply).__name__}{shapes} under epoch {getattr(reply, 'epoch', '?')}"
