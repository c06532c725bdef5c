"""Rows that say what one layer chose for one token, gathered into requests. Knows completeness, not formats.

Rows may come in any order. If two rows tell one cell, the last row counts: an engine runs a preempted token again. A
token without some layer refuses the recording: a trace with holes would look like one with less memory.
"""

from __future__ import annotations

import itertools
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


def requests_of(source: object, rows: Rows, prompts: Mapping[str, int] | None = None) -> list[Logged]:
    """Requests in the order of the names. prompts: lengths that the source tells."""
    if not len(rows):
        raise TraceError(f"{source} holds no row of routing")
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


def chosen(scores: NDArray[Any], top_k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(ids, weights), both [N, k], of router logits [N, E]: the largest, of equal ones the lower id; their softmax."""
    if not 0 < top_k <= scores.shape[-1]:
        raise TraceError(f"logits of {scores.shape[-1]} experts need --top-k 1..{scores.shape[-1]}, got {top_k}")
    ids = np.argsort(-scores.astype(np.float32), axis=-1, kind="stable")[..., :top_k]
    logits = np.take_along_axis(scores, ids, axis=-1).astype(np.float64)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return ids, np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)
