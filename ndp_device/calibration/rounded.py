"""A matrix at 8 bits: every weight rounded to the nearest of its group's 256 even levels. No data, no solver.

The levels reach from the group's least weight to its largest. On text the loss is within its error of none
(docs/log/calibration.md, "8 bits"), so a solver could not show that its codes are better. Knows numpy arrays. Does not
know experts or files.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import BYTE_BITS
from ndp_device.experts.expert import QuantizedMatrix
from ndp_device.experts.packing import pack

_AT_ONCE = 1 << 20
"""Weights: their planes take eight bytes each while they are cut."""
_TOP = (1 << BYTE_BITS) - 1


def round_to_bytes(weights: NDArray[np.float32], group_size: int) -> QuantizedMatrix:
    """W [N, C] -> the matrix at 8 bits, its columns in their own order."""
    rows, columns = weights.shape
    planes = np.empty((BYTE_BITS, rows, columns // 8), np.uint8)
    scale = np.empty((rows, -(-columns // group_size)), np.float16)
    offset = np.empty_like(scale)
    step = max(1, _AT_ONCE // columns)
    for first in range(0, rows, step):
        some = slice(first, first + step)
        codes, scale[some], offset[some] = _rounded(weights[some], group_size)
        planes[:, some] = pack(codes, BYTE_BITS)
    return QuantizedMatrix(BYTE_BITS, planes, scale, offset, group_size)


def _rounded(
    weights: NDArray[np.float32], group_size: int
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Codes [n, C], scale and offset [n, groups]."""
    starts = np.arange(0, weights.shape[1], group_size)
    least, largest = (extreme.reduceat(weights, starts, axis=1) for extreme in (np.minimum, np.maximum))
    offset = least.astype(np.float16)
    scale = ((largest - offset) / _TOP).astype(np.float16)
    groups = np.arange(weights.shape[1]) // group_size
    # A step of 0: all weights of the group are its offset, as float16 holds it.
    step = np.where(scale > 0, scale, 1).astype(np.float32)
    codes = np.rint((weights - offset.astype(np.float32)[:, groups]) / step[:, groups]).clip(0, _TOP)
    return codes.astype(np.uint8), scale, offset
