"""The host's end of the device: one deadline per call, never a wrong number, never a wait for a device that is down.

    down -> connecting -> greeting -> replaying the plan -> up        any fault: back to down, retry after 5..200 ms

Coming back is driven by `poll` and `begin_execute`, a step at a time, without waiting. A result is used only if its
id, incarnation, epoch, shape, dtype and checksum agree and it is finite wherever its input was. One thread per client.
Knows the protocol and a transport; does not know vLLM, experts, or what the caller does when the device is down.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ndp_device.errors import ConfigError, DeviceError, DeviceUnavailable, LocalProtocolError, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.protocol.codec import Frames
from ndp_device.protocol.session import listed
from ndp_device.transport.base import ClientTransport
from ndp_device.transport.zmq_client import ZmqTransport
from vllm_ndp.device.calls import (
    AnnouncedPlan,
    ControlCall,
    Counters,
    ExecuteHandle,
    ExecuteResult,
    is_finite,
    lie_of,
    named,
)
from vllm_ndp.device.process import DeviceProcess

__all__ = ["Counters", "DeviceClient", "DeviceProcess", "ExecuteHandle", "ExecuteResult"]

MAX_IN_FLIGHT = 8
RETRY_FIRST_S, RETRY_LAST_S = 0.005, 0.2
GREETING_S = 1.0  # a device that is connected but does not answer Hello for so long gets a new connection

_log = logging.getLogger(__name__)


class DeviceClient:
    """One connection to one device, made again whenever it breaks."""

    def __init__(
        self,
        address: str,
        expected_digest: str = "",
        *,
        deadline_ms: float = 1000.0,
        control_deadline_ms: float = 60_000.0,
        name: str = "vllm-ndp",
        shared_memory: bool = True,
        transport: Callable[[str], ClientTransport] = ZmqTransport,
        accept: Callable[[msg.Welcome], object] = lambda welcome: None,
    ) -> None:
        """accept: raises ConfigError for a device that serves something else than its host plans with; asked at every
        connection, because a device may come back as another one."""
        self.address, self.expected_digest, self.name = address, expected_digest, name
        self.counters = Counters()
        self.welcome: msg.Welcome | None = None
        self._deadline_s, self._control_s = deadline_ms / 1e3, control_deadline_ms / 1e3
        self._make_transport, self._accept_welcome = transport, accept
        self._transport: ClientTransport | None = None
        self._pid = os.getpid()
        self._up = False
        self._incarnation: str | None = None
        self.uses_shared_memory = False  # messages lie in shared memory, as long as they fit
        self._shares_memory, self._doubts_memory = (
            shared_memory,
            False,
        )  # in doubt, the next connection takes the socket
        self._handles: dict[int, ExecuteHandle] = {}
        self._control: ControlCall | None = None
        self._replay: deque[tuple[msg.Message, AnnouncedPlan]] = deque()
        self._active: AnnouncedPlan | None = None
        self._installed: AnnouncedPlan | None = None  # wanted, not yet activated
        self._installing: ControlCall | None = None  # its request, until its answer is waited for
        self._last_id = 0
        self._retry_at_s, self._retry_s = 0.0, RETRY_FIRST_S
        self._jitter = random.Random(self._pid)
        self._reason: Exception = DeviceUnavailable(f"the device at {address} was not asked yet")

    @property
    def state(self) -> Literal["up", "down"]:
        return "up" if self._up else "down"

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
        deadline = time.monotonic() + timeout_s
        while not self._up:
            self.poll()
            if isinstance(self._reason, DeviceError) and not self._reason.retryable:
                raise self._reason
            if isinstance(self._reason, ConfigError):
                raise self._reason
            if isinstance(self._reason, codec.VersionMismatch):
                raise codec.VersionMismatch(f"the device at {self.address} cannot be used: {self._reason}")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise DeviceUnavailable(
                    f"no device answered at {self.address} within {timeout_s:g} s: {self._reason}; is it running?"
                )
            if self._transport is None:
                time.sleep(min(max(self._retry_at_s - time.monotonic(), 0.0), remaining))
            else:
                self._receive(min(remaining, 0.02))
        assert self.welcome is not None
        return self.welcome

    def poll(self) -> bool:
        """Look at what has arrived and go on with a reconnection, without waiting. True if the device is up."""
        if self._pid != os.getpid():
            self._forget_parent()
        if self._transport is None:
            if time.monotonic() < self._retry_at_s:
                return False
            self._transport = self._make_transport(self.address)
        while self._transport is not None and self._receive(0.0) and not self._up:
            pass
        if self._control is not None and not self._up and time.monotonic() > self._control.deadline_s:
            self._fail(DeviceUnavailable("the device is connected but does not answer"))
        return self._up

    def install_plan(self, epoch: int, replicas: NDArray[np.uint8]) -> list[tuple[int, int, int]]:
        """Announce the widths a plan will use: uint8 [L, E], bit i = widths.PLAN_BITS[i].

        Returns the (layer, expert, bits) the device cannot serve. Raises DeviceUnavailable or DeviceError; after
        DeviceUnavailable the plan stays wanted and is installed when the device is back.
        """
        self.begin_install_plan(epoch, replicas)
        return self.finish_install_plan()

    def begin_install_plan(self, epoch: int, replicas: NDArray[np.uint8]) -> None:
        """The first half of install_plan, which sends and does not wait. A device that is down shows in the second."""
        if epoch <= self._active_epoch:
            raise LocalProtocolError(f"a new plan needs an epoch above {self._active_epoch}, got {epoch}")
        plan = self._installed = AnnouncedPlan(epoch, replicas.copy())
        self._installing = self._begin(self._install_message(plan, self._active_epoch), plan) if self.poll() else None

    def finish_install_plan(self) -> list[tuple[int, int, int]]:
        """The second half: wait for the answer."""
        if self._installed is None:
            raise LocalProtocolError("a plan must be on its way before its answer is waited for")
        installing, self._installing = self._installing, None
        if installing is None:
            raise DeviceUnavailable(f"the device is down: {self._reason}")
        self._finish(installing)
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
    ) -> ExecuteHandle:
        """Send the pairs without waiting. A device that is down shows in finish_execute, not here."""
        if self._active is None:
            raise LocalProtocolError("a plan must be activated before the first Execute")
        if len(self._handles) >= MAX_IN_FLIGHT:
            raise LocalProtocolError(f"at most {MAX_IN_FLIGHT} Execute may be in flight: finish one first")
        now = time.monotonic()
        handle = ExecuteHandle(self._next_id(), self._active.epoch, x, submit_ps, now + self._deadline_s)
        if not self._up or self._pid != os.getpid():
            self.poll()
        if not self._up:
            handle.failure = DeviceUnavailable(f"the device is down: {self._reason}")
            return handle
        request = msg.Execute(
            handle.id,
            epoch=handle.epoch,
            layer=layer,
            step=step,
            submit_ps=submit_ps,
            ttl_us=round(self._deadline_s * 1e6),
        )
        tensors = {
            "x": x,
            "pair_rows": pair_rows,
            "pair_experts": pair_experts,
            "pair_bits": pair_bits,
            "gates": gates,
        }
        self._handles[handle.id] = handle
        self._send(codec.encode(request, tensors))
        return handle

    def finish_execute(self, handle: ExecuteHandle) -> ExecuteResult:
        """The result of `handle`. Raises DeviceUnavailable, within the deadline that began with begin_execute."""
        while handle.result is None and handle.failure is None:
            remaining = handle.deadline_s - time.monotonic()
            self._receive(max(remaining, 0.0))  # at least one look, however late we come
            if remaining <= 0 and handle.result is None and handle.failure is None:
                self._fail(DeviceUnavailable(f"no answer within {self._deadline_s * 1e3:g} ms"))
        if handle.result is not None:
            self.counters.executed += 1
            return handle.result
        if isinstance(handle.failure, DeviceUnavailable):
            self.counters.unavailable += 1
            raise handle.failure
        raise DeviceUnavailable(f"the device gave no usable result: {handle.failure}") from handle.failure

    def close(self) -> None:
        """Drop the connection for good; calls that still wait fail."""
        self._reason = DeviceUnavailable("the client was closed")
        self._drop(self._reason)
        self._retry_at_s = float("inf")
        self._up = False

    # -- below: one reply at a time, and what follows from it ------------------------------------------------

    def _receive(self, timeout_s: float) -> bool:
        """Handle at most one message. True if something happened, so that another look may pay."""
        transport = self._transport
        if transport is None:
            return False
        try:
            frames = transport.receive(timeout_s)
            if frames is None:
                return self._greet()
            self._accept(transport, frames)
        except (DeviceUnavailable, RemoteProtocolError, DeviceError, ConfigError) as error:
            self._fail(error)
        return True

    def _greet(self) -> bool:
        """Say Hello as soon as there is a connection to say it on."""
        if self._up or self._control is not None or self._transport is None:
            return False
        hello = msg.Hello(
            self._next_id(),
            versions=(msg.VERSION, msg.VERSION),
            client=self.name,
            model_digest=self.expected_digest,
            wants_slots=self._shares_memory and self._transport.can_share_memory and not self._doubts_memory,
        )
        if not self._transport.send(codec.encode(hello)):
            return False
        self._doubts_memory = False
        self._control = ControlCall(hello.id, "Hello", msg.Welcome, time.monotonic() + GREETING_S)
        return True

    def _accept(self, transport: ClientTransport, frames: Frames) -> None:
        reply, tensors = codec.decode_reply(frames[0], frames[1])
        if self._incarnation is None:
            self._incarnation = reply.incarnation
        elif reply.incarnation != self._incarnation:
            raise RemoteProtocolError("a reply came from another incarnation of the device")
        if handle := self._handles.pop(reply.id, None):
            self._settle(handle, reply, tensors)
        elif self._control is not None and self._control.id == reply.id:
            self._advance(transport, self._control, reply, tensors)
        elif 0 < reply.id <= self._last_id:
            self.counters.ignored += 1
        else:
            raise RemoteProtocolError(
                f"the device answered request {reply.id}, which was never made, by {named(reply)}"
            )

    def _settle(self, handle: ExecuteHandle, reply: msg.AnyReply, tensors: codec.Tensors) -> None:
        if isinstance(reply, msg.Refusal):
            handle.failure = DeviceError(reply.code, reply.message, retryable=reply.retryable)
            self.counters.refused += 1
            if reply.code in ("no_session", "stale_epoch"):
                raise handle.failure  # the device lost our session: greet and install again
            return
        y = tensors.get("y")
        if not isinstance(reply, msg.Result) or y is None or reply.epoch != handle.epoch or y.shape != handle.x.shape:
            handle.failure = RemoteProtocolError(
                f"an Execute of {list(handle.x.shape)} under epoch {handle.epoch} was answered by {named(reply)}"
            )
            raise handle.failure
        assert self.welcome is not None
        if lie := lie_of(reply.timing, handle.submit_ps, self.welcome.config_hash):
            handle.failure = RemoteProtocolError(f"a result came with a simulated time {lie}")
            raise handle.failure
        if not np.isfinite(y).all() and is_finite(handle.x):
            handle.failure = RemoteProtocolError("the result is not finite though the input is")
            self.counters.nonfinite += 1
            return
        self._retry_s = RETRY_FIRST_S
        handle.result = ExecuteResult(y.copy(), reply.timing)  # the device's frame is read-only

    def _advance(
        self, transport: ClientTransport, control: ControlCall, reply: msg.AnyReply, tensors: codec.Tensors
    ) -> None:
        """Note the answer to Hello, InstallPlan or ActivatePlan; while coming back, ask the next thing."""
        self._control = None
        if isinstance(reply, msg.Refusal):
            raise DeviceError(reply.code, reply.message, retryable=reply.retryable)
        plan = control.plan
        if type(reply) is not control.expects or (plan is not None and getattr(reply, "epoch", None) != plan.epoch):
            raise RemoteProtocolError(f"{control.asked} was answered by {named(reply)}")
        if plan is not None and isinstance(reply, msg.PlanInstalled):
            missing = tensors["missing"]
            if missing.shape != plan.replicas.shape or (missing & ~plan.replicas).any():
                raise RemoteProtocolError(f"{control.asked} was answered by {named(reply)}")
            plan.missing = missing.copy()
        control.reply = reply
        if self._up:
            return
        if isinstance(reply, msg.Welcome):
            self._accept_welcome(reply)
            self.welcome = reply
            self.uses_shared_memory = reply.slots is not None and transport.attach(reply.slots)
            self._replay = self._plans_to_replay()
        if self._replay:
            message, plan = self._replay.popleft()
            self._begin(message, plan)
        else:
            self._up = True
            self.counters.connected += 1
            _log.info("NDP device at %s is up (incarnation %.8s)", self.address, self._incarnation)

    def _plans_to_replay(self) -> deque[tuple[msg.Message, AnnouncedPlan]]:
        steps: deque[tuple[msg.Message, AnnouncedPlan]] = deque()
        if self._active:
            steps.append((self._install_message(self._active, 0), self._active))
            steps.append((msg.ActivatePlan(self._next_id(), epoch=self._active.epoch), self._active))
        if self._installed:
            steps.append((self._install_message(self._installed, self._active_epoch), self._installed))
        return steps

    def _begin(self, message: msg.Message, plan: AnnouncedPlan) -> ControlCall:
        """Send a control request."""
        asked = f"{type(message).__name__} of epoch {plan.epoch}"
        expects = msg.PlanInstalled if isinstance(message, msg.InstallPlan) else msg.PlanActivated
        control = self._control = ControlCall(message.id, asked, expects, time.monotonic() + self._control_s, plan)
        tensors = {"replicas": plan.replicas} if isinstance(message, msg.InstallPlan) else None
        self._send(codec.encode(message, tensors))
        return control

    def _finish(self, control: ControlCall) -> None:
        """Wait for the answer to a control request."""
        while control.reply is None:
            if self._control is not control:
                raise self._reason
            remaining = control.deadline_s - time.monotonic()
            self._receive(max(remaining, 0.0))
            if remaining <= 0 and control.reply is None:
                self._fail(DeviceUnavailable(f"no answer within {self._control_s:g} s"))

    def _send(self, frames: Frames) -> None:
        try:
            if self._transport is not None and not self._transport.send(frames):
                self._fail(DeviceUnavailable("the device takes no more requests"))
        except RemoteProtocolError as error:
            self._fail(error)

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
        elif type(reason) is not type(self._reason) and isinstance(reason, ConfigError):
            _log.warning("the NDP device that answers now is not used: %s", reason)
        self._reason = reason
        self._up = False
        self._drop(DeviceUnavailable(f"the device was lost: {reason}"))
        self._retry_at_s = time.monotonic() + self._retry_s * self._jitter.uniform(0.5, 1.0)
        self._retry_s = min(2 * self._retry_s, RETRY_LAST_S)

    def _drop(self, failure: DeviceUnavailable) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
        self._incarnation = None
        self._control = None
        self._replay.clear()
        for handle in self._handles.values():
            handle.failure = failure
        self._handles.clear()

    def _forget_parent(self) -> None:
        """We are a forked child: the socket is our parent's, so it is neither used nor closed here."""
        self._parents_transport, self._transport = self._transport, None
        self._pid = os.getpid()
        self._drop(DeviceUnavailable("the process was forked"))
        self._up = False
        self._retry_at_s = 0.0

    @property
    def _active_epoch(self) -> int:
        return self._active.epoch if self._active else 0

    def _install_message(self, plan: AnnouncedPlan, expected_epoch: int) -> msg.InstallPlan:
        return msg.InstallPlan(self._next_id(), epoch=plan.epoch, expected_epoch=expected_epoch)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id
