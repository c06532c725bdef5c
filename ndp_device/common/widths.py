"""The bit widths an expert can have, its activations, how a plan writes a set of widths, and who shares a scale.

    bits    1  2  3  4   16 = the checkpoint's own weights, whatever their dtype    8
    flag    1  2  4  8   16 = the flag of the i-th width is 1 << i                 32

Standard library only: host and device, planning and timing all read it.
"""

from __future__ import annotations

from collections.abc import Collection

WIDTHS = (1, 2, 3, 4)
"""Bits of a quantized replica that a budget deals out; one nested code can serve them all."""

BYTE_BITS = 8
"""Width of a replica beside those, which loses next to nothing; only some replica sets have it."""

REPLICA_WIDTHS = (*WIDTHS, BYTE_BITS)

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of E2M1 codes (OCP Microscaling Formats 1.0)."""

FP4_BITS, FP4_GROUP, NVFP4_GROUP = 4, 32, 16
"""Bits of a code; columns under one power of two of MXFP4, and under one E4M3 scale of NVFP4."""

LIMBS: dict[int, int] = {1: 1, 2: 1, 3: 1, 4: 2, 8: 2}
"""int8 limbs of the activations a replica meets: 1 where text does not show the difference (docs/log/kernels.md)."""

LINEAR_LIMBS = 1
"""Limbs of linear layers. Beside 4-bit weights, 8-bit activations add 0.3 % to the error and take two thirds of the
time (docs/log/kernels.md)."""

FULL_PRECISION_BITS = 16

PLAN_BITS = (*WIDTHS, FULL_PRECISION_BITS, BYTE_BITS)
"""Widths that a plan may name; bit i of a plan's flags stands for the i-th."""

FLAG_OF_BITS = bytes(1 << PLAN_BITS.index(bits) if bits in PLAN_BITS else 0 for bits in range(256))
"""FLAG_OF_BITS[bits] is the flag that stands for a width in a plan, 0 for what is none."""

_WIDE = 1024


def loss_columns(bits: Collection[float | None]) -> tuple[int, ...]:
    """The widths that a loss table of replicas at these widths has a column for."""
    return REPLICA_WIDTHS if BYTE_BITS in bits else WIDTHS


def default_group_size(hidden_size: int, intermediate_size: int) -> int:
    """128 weights share a scale and an offset; 64 where a matrix is narrower than 1024 and 128 would be few groups."""
    return 128 if min(hidden_size, intermediate_size) >= _WIDE else 64


DEFAULT_AVG_BITS = 3.0
"""Average bits of cold experts unless a caller names others. Fewer bits cost quality (docs/log/quality.md)."""
