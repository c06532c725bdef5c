"""What a recording holds that no router chose: dense layers, padding and shared experts, told by values alone.

A token never chooses one expert twice. So a cell (token, layer) whose ids are all one number chose nothing: engines
fill it with 0, -1 or a number above the experts.

    dense layers      cells of every token are blank
    padding           cells of a token are blank in every other layer, at an end of its request
    shared experts    a column that names no routed expert: an engine computes them as one more choice of every token

All three are left out and counted. Whatever is left is checked as any trace is (format.require_choices). Knows values,
not formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from vllm_ndp.traces.rows import Logged

_FEW = 16
"""So many cells that all say the same are no chance."""


def without_blanks(requests: Sequence[Logged], num_experts: int) -> tuple[list[Logged], dict[str, int]]:
    """(requests with choices alone, what was left out by reason). num_experts 0: not known.

    Raises TraceError where the shapes of requests differ, nothing is left, or padding lies within a request.
    """
    shapes = sorted({one.ids.shape[1:] for one in requests})
    if len(shapes) != 1 or len(shapes[0]) != 2 or 0 in shapes[0]:
        raise TraceError(f"every request must have the same [layers, k], got {[list(shape) for shape in shapes]}")
    if wrong := sorted({str(one.ids.dtype) for one in requests if one.ids.dtype.kind not in "iu"}):
        raise TraceError(f"expert ids must be whole numbers, got {', '.join(wrong)}")
    columns = ~_unrouted_columns(requests, num_experts)
    requests = [_taken(one, 2, columns) for one in requests]
    blank = [_blank(one.ids, num_experts) for one in requests]
    layers = ~_dense(requests, blank, num_experts)
    requests = [_taken(one, 1, layers) for one in requests]
    rows = [np.asarray(~cells[:, layers].all(axis=1)) for cells in blank]
    if not any(kept.any() for kept in rows):
        raise TraceError("the recording chooses no expert: all of its ids are padding")
    left_out = Counter[str]()
    left_out["columns of shared experts or padding"] = int((~columns).sum())
    left_out["layers without experts"] = int((~layers).sum())
    left_out["rows of padding"] = sum(int((~kept).sum()) for kept in rows)
    left_out["requests without a choice"] = sum(not kept.any() for kept in rows)
    found = [_trimmed(one, kept, number) for number, (one, kept) in enumerate(zip(requests, rows, strict=True))]
    return [one for one in found if len(one.ids)], {why: count for why, count in left_out.items() if count}


def _trimmed(one: Logged, kept: NDArray[np.bool_], number: int) -> Logged:
    """The request without its padding; its prompt is as much shorter as it began later."""
    there = np.flatnonzero(kept)
    if one.name and len(there) and not kept[there[0] : there[-1]].all():
        hole = int(there[0] + np.argmin(kept[there[0] :]))
        raise TraceError(
            f"request {number} has no choice of token {hole}, but of tokens before and after it: a trace "
            "needs every token"
        )
    if one.prompt_len is not None and len(there):
        one = one._replace(prompt_len=min(max(one.prompt_len - int(there[0]), 0), len(there)))
    return _taken(one, 0, kept)


def _taken(one: Logged, axis: int, kept: NDArray[np.bool_]) -> Logged:
    if kept.all():
        return one
    weights = None if one.weights is None else one.weights.compress(kept, axis)
    return one._replace(ids=one.ids.compress(kept, axis), weights=weights)


def _unrouted_columns(requests: Sequence[Logged], num_experts: int) -> NDArray[np.bool_]:
    """Columns [k] that name no routed expert in any cell.

    Their ids are below 0, or not below num_experts. Where that is not known: always the largest id, alone.
    """
    cells = np.concatenate([one.ids[~_blank(one.ids, num_experts)] for one in requests])
    if not len(cells):
        return np.zeros(cells.shape[1], np.bool_)
    highest = cells.max(axis=0).astype(np.int64)
    lowest = np.where(cells >= 0, cells, highest).min(axis=0).astype(np.int64)
    unrouted = highest < 0
    if num_experts:
        shared = lowest >= num_experts
    else:
        shared = (lowest == highest) & (highest == highest.max()) & ((highest == highest.max()).sum() == 1)
    if len(cells) >= _FEW and not shared.all():
        unrouted = unrouted | shared
    return np.asarray(unrouted)


def _blank(ids: NDArray[Any], num_experts: int) -> NDArray[np.bool_]:
    """Cells that chose nothing [T, L]; at top-1 those outside of the experts."""
    first = ids[..., 0]
    if ids.shape[2] > 1:
        return np.asarray((ids == first[..., None]).all(axis=-1))
    return np.asarray((first < 0) | ((first >= num_experts) & (num_experts > 0)))


def _dense(requests: Sequence[Logged], blank: Sequence[NDArray[np.bool_]], num_experts: int) -> NDArray[np.bool_]:
    """Layers [L] in which no token chose; at top-1, where 0 is a choice, too, those in which many chose only 0."""
    dense = np.logical_and.reduce([cells.all(axis=0) for cells in blank])
    if requests[0].ids.shape[2] == 1 and num_experts != 1 and sum(len(one.ids) for one in requests) >= _FEW:
        dense |= np.logical_and.reduce([(one.ids[..., 0] <= 0).all(axis=0) for one in requests])
    return np.asarray(dense)
