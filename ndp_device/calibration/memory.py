"""How much private memory a calibration takes at most: from sizes alone, before anything is loaded.

    what the model keeps beside its experts + what all sequences carry through a layer
    + for each of the experts side by side, the expert and its solver

The memory map of the checkpoint is not in it: its pages are the system's to take back. Knows which arrays live at the
same time; tests/ndp_device/calibration/test_calibration_streamed.py holds a real run to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from ndp_device.calibration import calibrated, gptq
from ndp_device.calibration.data_free import ROWS_BYTES
from ndp_device.calibration.text import HELD_OUT_EVERY
from ndp_device.common.errors import ConfigError
from ndp_device.common.machine_memory import required_memory
from ndp_device.replicas.checkpoint import CheckpointExperts

_PROGRAMS = 700 << 20
"""torch, transformers, numpy and their libraries: measured 0.28 GB after the imports. Room for BLAS's buffers, and for
what the allocator keeps of an expert while the next ones are made."""
_PART_OF_MACHINE = 0.8
"""Of memory, for experts side by side; one expert takes what it needs."""
_FLOAT = 4


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of private memory that a calibration has at the same time, at most."""

    programs: int
    beside_experts: int  # attention, norms, embeddings in the dtype in which the model runs
    sequences: int  # hidden states between layers, what enters the experts, their answers
    expert: int  # one in float32
    solver: int
    weighing: int = 0  # all that the last pass has, which is in float32
    experts: int = 1  # side by side

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what they are for; those of an expert and its solver for each of the experts side by side."""
        sizes = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("experts", "weighing")
        }
        return sizes | {name: self.experts * sizes[name] for name in ("expert", "solver")}

    @property
    def total(self) -> int:
        return max(sum(self.parts.values()), self.weighing)

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {_gb(size)}" for name, size in self.parts.items())
        together = f", {self.experts} experts side by side" if self.experts > 1 else ""
        return f"{_gb(self.total)} GB at most{together} ({parts})"


def side_by_side(peak: PeakMemory, most: int, stated: int | None = None) -> PeakMemory:
    """The same with as many experts side by side, up to `most`, as the stated bytes have room for, or this machine.

    Raises ConfigError where the stated bytes do not hold one.
    """
    if stated is not None and stated < peak.total:
        raise ConfigError(f"--memory gives {_gb(stated)} GB, and calibration takes {peak}")
    room = (int(_PART_OF_MACHINE * required_memory().usable) if stated is None else stated) - sum(peak.parts.values())
    return replace(peak, experts=max(1, min(most, 1 + room // (peak.expert + peak.solver))))


def peak_memory(
    checkpoint: CheckpointExperts,
    *,
    num_tokens: int,
    between_layers: int,
    group_size: int,
    num_widths: int,
    num_tracks: int,
    num_planes: int,
    item: int,
) -> PeakMemory:
    """A token takes `between_layers` bytes from one layer to the next (streamed.bytes_between_layers).

    `num_tracks` widths are solved together, and leave `num_planes` bit planes of each weight. The text, and the experts
    that it passes, have `item` bytes a value.
    """
    shape, layout, tensors = checkpoint.shape, checkpoint.layout, checkpoint.tensors
    hidden, inner = shape.hidden_size, shape.intermediate_size
    of_experts = {name for layer in layout.layers for name in layer.tensors(shape.num_experts)}
    beside = sum(math.prod(info.shape) for name, info in tensors.items() if name not in of_experts)
    matrices = ((2 * inner, hidden), (hidden, inner))
    square = _FLOAT * max(columns for _, columns in matrices) ** 2
    routed = min(num_tokens, 2 * num_tokens * shape.top_k // shape.num_experts)  # to one expert: twice an even share
    solving = square + max(gptq.peak_bytes(rows, columns, group_size, num_tracks) for rows, columns in matrices)
    rows = min(num_tokens, calibrated.ROWS_AT_ONCE)
    moments = 2 * square + rows * (item * hidden + (item + 4 * _FLOAT) * inner)
    kept = num_planes * shape.weights_per_expert // 8 + num_widths * 4 * shape.weights_per_expert // group_size
    # weights of one width in float, the rows they are tested on and what they make of these
    tested = min(num_tokens // HELD_OUT_EVERY, calibrated.TEST_ROWS)
    losing = _FLOAT * (shape.weights_per_expert + 2 * inner * hidden) + 6 * min(ROWS_BYTES, tested * 2 * inner * 4)
    losing += tested * hidden * (3 * _FLOAT + 2 * 8) + kept

    def sequences(size: int) -> int:
        return num_tokens * (between_layers * size // _FLOAT + 2 * hidden * size + shape.top_k * 16)

    return PeakMemory(
        programs=_PROGRAMS,
        beside_experts=item * beside,
        sequences=sequences(item),
        expert=item * shape.weights_per_expert,
        solver=max(solving, moments, losing) + 2 * item * hidden * routed,  # what it answers, joined
        weighing=_PROGRAMS + _FLOAT * (beside + 2 * shape.weights_per_expert) + sequences(_FLOAT),
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"
