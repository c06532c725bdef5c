"""The pairs of one Execute grouped by expert: each (expert, bits) once, in the order in which they first appear.

Knows what the active plan allows. `distinct` is ndp_device/csrc/commands.cpp where that is built, else the Python below
that it is held equal to.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FLAG_OF_BITS

_FLAGS = np.frombuffer(FLAG_OF_BITS, np.uint8)


class DistinctPairs(NamedTuple):
    """P pairs on D distinct (expert, bits)."""

    rows: NDArray[np.int32]  # [P], a copy: a request that lies in shared memory can change after it was checked
    places: NDArray[np.int32]  # [P], which of the D each pair asks for
    experts: list[int]  # [D]
    bits: list[int]  # [D]
    counts: list[int]  # [D], pairs of each


def distinct(
    rows: NDArray[np.int32],
    experts: NDArray[np.int32],
    bits: NDArray[np.uint8],
    flags: NDArray[np.uint8],
    num_rows: int,
) -> DistinctPairs | None:
    """flags [E]: the widths that each expert of this layer is served at.

    None unless every pair points at one of num_rows rows and at an expert that is served at its bits.
    """
    grouped = _distinct(rows, experts, bits, flags, _FLAGS, num_rows)
    return None if grouped is None else DistinctPairs._make(grouped)


def _distinct_in_python(
    rows: NDArray[np.int32],
    experts: NDArray[np.int32],
    bits: NDArray[np.uint8],
    flags: NDArray[np.uint8],
    flag_of_bits: NDArray[np.uint8],
    num_rows: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], list[int], list[int], list[int]] | None:
    rows = rows.copy()
    pairs = list(zip(experts.tolist(), bits.tolist(), strict=True))
    if len(rows) != len(pairs) or (rows < 0).any() or (rows >= num_rows).any():
        return None
    place: dict[tuple[int, int], int] = {}
    index = np.array([place.setdefault(pair, len(place)) for pair in pairs], np.int32)
    for expert, width in place:
        if not 0 <= expert < len(flags) or not flags[expert] & flag_of_bits[width]:
            return None
    counts = np.bincount(index, minlength=len(place)).tolist()
    return rows, index, [expert for expert, _ in place], [width for _, width in place], counts


_distinct: Callable[..., Any] = _distinct_in_python
with contextlib.suppress(ImportError):  # not built: the same values, slower
    _distinct = importlib.import_module("ndp_device._commands").distinct
