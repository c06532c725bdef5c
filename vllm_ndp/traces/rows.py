"""Rows that say what one layer chose for one token, gathered into requests.

Rows may come in any order. If two rows tell one cell, the last row counts: an engine runs a preempted token again. A
token without some layer refuses the recording: a trace with holes would look like one with less memory.

What a recording holds that no router chose is told by values alone. A token never chooses one expert twice. So a cell
(token, layer) whose ids are all one number chose nothing: engines fill it with 0, -1 or a number above the experts.

    dense layers      cells of every token are blank
    padding           cells of a token are blank in every other layer, at an end of its request
    shared experts    a column that names no routed expert: an engine computes them as one more choice of every token

All three are left out and counted. Whatever is left is checked as any trace is (format.require_choices).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError

MOST_ROWS = 1 << 26
MOST_BYTES, MOST_VALUES = 64 << 20, 5 << 20
"""Largest JSON of one request: 8000 tokens of 58 layers, top-8, are 3.7 M values."""


class Told(NamedTuple):
    """What a source holds, as its container's reader gives it."""

    source: Path
    fields: dict[str, str]
    """What a field means -> its name in the source."""
    parts: Iterator[tuple[str, Any]]
    """(where, contents)"""
    top_k: int


class Logged(NamedTuple):
    """One request, tokens in order; where the name is empty, many requests whose borders nothing tells."""

    name: str
    ids: NDArray[Any]  # [T, L, k]
    weights: NDArray[np.float32] | None
    prompt_len: int | None = None


Found = tuple[list[Logged], dict[str, int]]
"""(requests, rows left out by reason)"""


@dataclass(frozen=True)
class Rows:
    """N rows, in the order in which they were told."""

    request: NDArray[np.int64]  # [N], places in names
    token: NDArray[np.int64]  # [N]
    layer: NDArray[np.int64]  # [N]
    ids: NDArray[Any]  # [N, k]
    weights: NDArray[np.float32] | None  # [N, k]
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.token)

    def taken(self, rows: NDArray[Any]) -> Rows:
        """Take these rows, in that order."""
        weights = None if self.weights is None else self.weights[rows]
        return Rows(self.request[rows], self.token[rows], self.layer[rows], self.ids[rows], weights, self.names)

    def sorted_cells(self) -> Rows:
        """Sort by request, token and layer. If a cell occurs twice, the last one stays."""
        order = np.lexsort((self.layer, self.token, self.request))  # stable: told later, sorted later
        keys = np.stack([self.request, self.token, self.layer])[:, order]
        is_last = np.append((keys[:, 1:] != keys[:, :-1]).any(axis=0), True)
        return self.taken(order[is_last])


def count_of(where: str, row: dict[str, Any], name: str, least: int = 0) -> int:
    value = row.get(name)
    if type(value) is not int or value < least:
        raise TraceError(f"{where} must have a whole {name} of at least {least}, got {value!r}")
    return value


def requests_of(source: object, rows: Rows, prompts: Mapping[str, int] | None = None) -> list[Logged]:
    """Requests in the order of the names. prompts: lengths that the source tells."""
    cells, layers = rows.sorted_cells(), np.unique(rows.layer)
    ends = np.searchsorted(cells.request, np.arange(len(rows.names) + 1))
    return [
        _request(source, cells.taken(np.arange(start, end)), rows.names[number], layers, prompts or {})
        for number, (start, end) in enumerate(itertools.pairwise(ends.tolist()))
        if end > start
    ]


def _request(source: object, cells: Rows, name: str, layers: NDArray[np.int64], prompts: Mapping[str, int]) -> Logged:
    tokens = np.unique(cells.token)
    gaps = np.flatnonzero(np.diff(tokens) > 1)
    if len(gaps):
        raise TraceError(f"{source}: request {name!r} has no row of token {tokens[gaps[0]] + 1}")
    there = np.zeros((len(tokens), len(layers)), np.bool_)
    there[cells.token - tokens[0], np.searchsorted(layers, cells.layer)] = True
    if not there.all():
        token, layer = np.argwhere(~there)[0].tolist()
        raise TraceError(f"{source}: request {name!r} has no row of token {tokens[token]} in layer {layers[layer]}")
    shape = (len(tokens), len(layers), -1)
    weights = None if cells.weights is None else cells.weights.reshape(shape)
    return Logged(name, cells.ids.reshape(shape), weights, prompts.get(name))


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
        one = one._replace(prompt_len=max(one.prompt_len - int(there[0]), 0))
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
