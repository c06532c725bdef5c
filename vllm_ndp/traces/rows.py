"""Rows that say what one layer chose for one token, gathered into requests. Knows completeness, not formats.

Rows may come in any order. If two rows tell one cell, the last row counts: an engine runs a preempted token again. A
token without some layer refuses the recording: a trace with holes would look like one with less memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError

MOST_ROWS = 1 << 26
MOST_BYTES, MOST_VALUES = 64 << 20, 5 << 20
"""Largest JSON of one request: 8000 tokens of 58 layers, top-8, are 3.7 M values."""


class Logged(NamedTuple):
    """One request, tokens in order; where the name is empty, many requests whose borders nothing tells."""

    name: str
    ids: NDArray[Any]  # [T, L, k]
    weights: NDArray[np.float32] | None
    prompt_len: int | None = None


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


def lacks_its_beginning(first: int) -> str:
    """The rest of a sentence that begins with the name of a request whose first token in the source is that."""
    return f"begins with token {first}, and a trace needs every token: record from the start, without a prefix cache"


def chosen(scores: NDArray[Any], top_k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(ids, weights), both [N, k], of router logits [N, E]: the largest, of equal ones the lower id; their softmax."""
    if not 0 < top_k <= scores.shape[-1]:
        raise TraceError(f"logits of {scores.shape[-1]} experts need --top-k 1..{scores.shape[-1]}, got {top_k}")
    ids = np.argsort(-scores.astype(np.float32), axis=-1, kind="stable")[..., :top_k]
    return ids, softmax(np.take_along_axis(scores, ids, axis=-1))


def softmax(logits: NDArray[Any]) -> NDArray[np.float32]:
    """Over the last axis."""
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float32)
