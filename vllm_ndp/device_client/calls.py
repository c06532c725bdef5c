"""The values of client.py: a call on its way, what it brought, what happened so far. No behaviour."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import DeviceError, DeviceUnavailable, RemoteProtocolError
from ndp_device.protocol import messages as msg
from ndp_device.timing.work import BOUNDS, Timing

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


class Executes(Protocol):
    """Interface of a layer to one device, or to several as to one."""

    def begin_execute(
        self,
        layer: int,
        step: int,
        submit_ps: int,
        x: NDArray[Any],
        pair_rows: NDArray[np.int32],
        pair_experts: NDArray[np.int32],
        pair_bits: NDArray[np.uint8],
        gates: NDArray[np.float32],
    ) -> Any: ...

    def finish_execute(self, handle: Any) -> ExecuteResult: ...


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
