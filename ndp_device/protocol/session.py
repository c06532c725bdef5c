"""Order of one client's requests: a plan before Execute, one epoch at a time. Pure, no socket, no clock.

A Hello begins a new Session, without a plan. The device keeps one per client. A request that is out of order raises
DeviceError, whose code goes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device import _commands
from ndp_device.common.errors import DeviceError
from ndp_device.common.widths import FLAG_OF_BITS, PLAN_BITS
from ndp_device.protocol.messages import (
    MAX_PAIRS,
    MAX_TOKENS,
    VERSION,
    ActivatePlan,
    Execute,
    Hello,
    InstallPlan,
)

_FLAGS = np.array([FLAG_OF_BITS[bits] for bits in PLAN_BITS], np.uint8)
_FLAG_OF_BITS = np.frombuffer(FLAG_OF_BITS, np.uint8)


@dataclass(frozen=True)
class ServedPlan:
    """One epoch and what may be asked under it: flags uint8 [L, E], bit i = widths.PLAN_BITS[i]."""

    epoch: int
    flags: NDArray[np.uint8]


class DistinctPairs(NamedTuple):
    """The P pairs of one Execute on D distinct (expert, bits), each once, in the order in which they first appear."""

    rows: NDArray[np.int32]  # [P], a copy: a request that lies in shared memory can change after it was checked
    places: NDArray[np.int32]  # [P], which of the D each pair asks for
    experts: list[int]  # [D]
    bits: list[int]  # [D]
    counts: list[int]  # [D], pairs of each


def check_hello(hello: Hello, model_digest: str) -> None:
    """Raise DeviceError unless host and device speak one protocol about one model."""
    lowest, highest = hello.versions
    if not lowest <= VERSION <= highest and VERSION >> 8 not in (lowest >> 8, highest >> 8):
        raise DeviceError(
            "version",
            f"this device speaks {_version(VERSION)}, the host {_version(lowest)} to {_version(highest)}: install the "
            "same major version on both",
        )
    if hello.model_digest not in ("", model_digest):
        raise DeviceError(
            "digest",
            f"the host serves model {hello.model_digest}, this device holds {model_digest}: "
            "start the device with the same checkpoint",
        )


@dataclass
class Session:
    """One client, from its Hello to its next, of a device that holds a model of L layers, E experts, H hidden size."""

    num_layers: int
    num_experts: int
    hidden_size: int
    active: ServedPlan | None = None
    installed: dict[int, ServedPlan] = field(default_factory=dict)  # at most one that is not active

    @property
    def active_epoch(self) -> int:
        return self.active.epoch if self.active else 0

    @property
    def plans(self) -> list[ServedPlan]:
        """Installed and active ones: what may be asked for now or after the next message."""
        return [*self.installed.values(), *([self.active] if self.active else [])]

    def check_install(self, request: InstallPlan, replicas: NDArray[np.uint8]) -> None:
        if replicas.shape != (self.num_layers, self.num_experts):
            raise DeviceError(
                "bad_request",
                f"a plan for this model is [{self.num_layers}, {self.num_experts}], got {list(replicas.shape)}",
            )
        if (replicas >> len(PLAN_BITS)).any():
            raise DeviceError(
                "bad_request", f"flags of a plan must be below {1 << len(PLAN_BITS)}, got {replicas.max()}"
            )
        if request.expected_epoch != self.active_epoch or request.epoch <= self.active_epoch:
            raise DeviceError(
                "stale_epoch",
                f"epoch {self.active_epoch} is active: expect it and install a higher one, got expected_epoch "
                f"{request.expected_epoch} and epoch {request.epoch}",
                retryable=True,
            )

    def install(self, plan: ServedPlan) -> None:
        """The latest installed plan replaces one that was never activated."""
        self.installed = {plan.epoch: plan}

    def activate(self, request: ActivatePlan) -> None:
        if request.epoch == self.active_epoch:
            return  # asked twice
        plan = self.installed.pop(request.epoch, None)
        if plan is None:
            raise DeviceError(
                "stale_epoch", f"epoch {request.epoch} is not installed: install it first", retryable=True
            )
        self.active = plan

    def check_execute(
        self,
        request: Execute,
        x_shape: tuple[int, ...],
        pair_rows: NDArray[np.int32],
        pair_experts: NDArray[np.int32],
        pair_bits: NDArray[np.uint8],
        gates: NDArray[np.float32],
    ) -> DistinctPairs:
        """The pairs by expert. The kernel may rely on: indices in range, one length, every replica promised."""
        if self.active is None or request.epoch != self.active.epoch:
            raise DeviceError(
                "stale_epoch",
                f"no plan of epoch {request.epoch} is active here, but that of epoch {self.active_epoch}: install and "
                "activate it, then ask again",
                retryable=True,
            )
        rows, hidden_size = x_shape
        if hidden_size != self.hidden_size or rows > MAX_TOKENS:
            raise DeviceError(
                "bad_request", f"x must be [at most {MAX_TOKENS}, {self.hidden_size}], got {list(x_shape)}"
            )
        if request.layer >= self.num_layers:
            raise DeviceError("bad_request", f"layer must be below {self.num_layers}, got {request.layer}")
        if not len(pair_rows) == len(pair_experts) == len(pair_bits) == len(gates):
            lengths = sorted({len(pair_rows), len(pair_experts), len(pair_bits), len(gates)})
            raise DeviceError("bad_request", f"the pair tensors must have one length, got {lengths}")
        if len(pair_rows) > MAX_PAIRS:
            raise DeviceError("bad_request", f"an Execute may have {MAX_PAIRS} pairs, got {len(pair_rows)}")
        flags = self.active.flags[request.layer]  # [E]: the widths that each expert of this layer is served at
        pairs = _commands.distinct(pair_rows, pair_experts, pair_bits, flags, _FLAG_OF_BITS, rows)
        if pairs is None:
            raise self._refused_pair(request, rows, pair_rows, pair_experts, pair_bits, flags)
        return DistinctPairs._make(pairs)

    def _refused_pair(
        self,
        request: Execute,
        rows: int,
        pair_rows: NDArray[np.int32],
        pair_experts: NDArray[np.int32],
        pair_bits: NDArray[np.uint8],
        flags: NDArray[np.uint8],
    ) -> DeviceError:
        """Which pair it is that may not be computed."""
        for row, expert, bits in zip(pair_rows.tolist(), pair_experts.tolist(), pair_bits.tolist(), strict=True):
            if not 0 <= row < rows:
                return DeviceError("bad_request", f"pair_rows must be one of the {rows} rows of x, got {row}")
            if not 0 <= expert < self.num_experts:
                return DeviceError("bad_request", f"pair_experts must lie in 0..{self.num_experts - 1}, got {expert}")
            if not flags[expert] & FLAG_OF_BITS[bits]:
                return DeviceError(
                    "not_loaded",
                    f"expert {expert} of layer {request.layer} at {bits} bits "
                    f"is not in the plan of epoch {request.epoch}: install one that has it",
                )
        return DeviceError("bad_request", "the pairs changed while they were checked")


def listed(flags: NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """List (layer, expert, bits) of every flag that is set in flags [L, E], layer by layer."""
    places = np.argwhere(flags[:, :, None] & _FLAGS).tolist()
    return [(layer, expert, PLAN_BITS[index]) for layer, expert, index in places]


def _version(version: int) -> str:
    return f"protocol {version >> 8}.{version & 255}"
