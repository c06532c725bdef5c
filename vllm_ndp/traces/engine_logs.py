"""Routing that engines log row by row, read as ids per request; traces/importers.py makes traces of them.

    routelog    JSON lines of vLLM loggers: {"type": "meta", ...}, then {"type": "route", "req_id", "token_idx",
                "layer", "topk_ids", "topk_weights"}, rows of a step interleaved by request; a file, or one per layer

Loggers that know no requests write one req_id, and count token_idx from zero in every step. A row keeps its place in
vLLM's batch until a request comes or goes. So the reader recovers requests while the number of rows in a step stays.
Knows rows as engines write them. Does not know traces.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common import strict_json
from ndp_device.common.errors import TraceError
from ndp_device.common.strict_files import read_lines
from vllm_ndp.traces.rows import MOST_ROWS, Logged, Rows, lacks_its_beginning, requests_of

_WARM_UP = 16
"""Least number of equal rows at the start that mark the engine's profile run; real rows repeat less."""


@dataclass
class _Log:
    """Columns as they are read."""

    names: dict[str, int] = field(default_factory=dict)
    request: array[int] = field(default_factory=lambda: array("q"))
    token: array[int] = field(default_factory=lambda: array("q"))
    layer: array[int] = field(default_factory=lambda: array("q"))
    ids: array[int] = field(default_factory=lambda: array("q"))
    weights: array[float] = field(default_factory=lambda: array("f"))
    prompts: dict[str, int] = field(default_factory=dict)
    top_k: int = 0

    def add(self, where: str, row: dict[str, Any]) -> None:
        ids, weights = _choice(where, row)
        if self.top_k not in (0, len(ids)):
            raise TraceError(f"{where} has {len(ids)} experts where rows before have {self.top_k} experts a token")
        self.top_k = len(ids)
        self.request.append(self.names.setdefault(str(row["req_id"]), len(self.names)))
        self.token.append(_whole(where, row, "token_idx"))
        self.layer.append(_whole(where, row, "layer"))
        self.ids.extend(ids)
        self.weights.extend(weights)

    def rows(self) -> Rows:
        request, token, layer, ids = (
            np.array(column, np.int64) for column in (self.request, self.token, self.layer, self.ids)
        )
        has_weights = len(self.weights) == len(ids)
        weights = np.array(self.weights, np.float32).reshape(len(token), -1) if has_weights else None
        return Rows(request, token, layer, ids.reshape(len(token), -1), weights, tuple(self.names))


def read_routelog(source: Path) -> tuple[list[Logged], dict[str, int]]:
    """A file, or a directory of .jsonl files; (requests, rows left out by reason). Raises TraceError where a row or a
    layer is missing or odd."""
    files = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    if not files:
        raise TraceError(f"{source} holds no .jsonl of a routing log")
    log = _Log()
    for path in files:
        for where, row in _rows(path):
            if row.get("type") == "route":
                log.add(where, row)
            elif "req_id" in row and "prompt_len" in row:
                log.prompts[str(row["req_id"])] = _whole(where, row, "prompt_len")
    if not log.token:
        raise TraceError(f'{source} holds no row of {{"type": "route"}}')
    told = log.rows()
    rows = _without_warm_up(told) if len(log.names) == 1 else told
    left_out = {"rows of warm-up": len(told) - len(rows)}
    if len(log.names) > 1 or not _counts_anew(rows):
        _require_beginnings(source, rows)
        return requests_of(source, rows, log.prompts), left_out
    return _found_again(source, rows, left_out)


def _require_beginnings(source: Path, rows: Rows) -> None:
    """The length of a prompt counts from token 0."""
    order = np.lexsort((rows.token, rows.request))
    requests, at = np.unique(rows.request[order], return_index=True)
    first = rows.token[order][at]
    for number in np.flatnonzero(first)[:1].tolist():
        name = rows.names[int(requests[number])]
        raise TraceError(f"{source}: request {name!r} {lacks_its_beginning(int(first[number]))}")


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(read_lines(path), 1):
        if number > MOST_ROWS:
            raise TraceError(f"{path} has more than {MOST_ROWS} rows: cut it into files of some requests each")
        if line.strip():
            row = strict_json.decode(line)
            where = f"{path.name} line {number}"
            if not isinstance(row, dict):
                raise TraceError(f"{where} must be a JSON object, got {type(row).__name__}")
            yield where, row


def _whole(where: str, row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    if type(value) is not int or value < 0:
        raise TraceError(f"{where} must have a whole {name} of at least 0, got {value!r}")
    return value


def _choice(where: str, row: dict[str, Any]) -> tuple[list[int], list[float]]:
    """(ids, weights), the latter empty where none are told."""
    ids, weights = row.get("topk_ids"), row.get("topk_weights")
    if not isinstance(ids, list) or not ids or any(type(expert) is not int or expert < 0 for expert in ids):
        raise TraceError(f"{where} must have topk_ids, a list of expert ids, got {ids!r}")
    if len(set(ids)) < len(ids):
        raise TraceError(f"{where} chooses an expert twice: {ids}")
    if weights is not None and (not isinstance(weights, list) or len(weights) != len(ids)):
        raise TraceError(f"{where} must have a weight for each of {len(ids)} experts, got {weights!r}")
    return ids, weights or []


def _steps(rows: Rows, layer: int) -> list[NDArray[np.int64]]:
    """Rows of that layer by step: one ends where token_idx does not rise."""
    own = np.flatnonzero(rows.layer == layer)
    return np.split(own, np.flatnonzero(np.diff(rows.token[own]) <= 0) + 1)


def _without_warm_up(rows: Rows) -> Rows:
    """Without the steps that repeat the rows in front, of every layer. Tokens count from those that are left."""
    kept = np.ones(len(rows), np.bool_)
    for layer in np.unique(rows.layer).tolist():
        steps = _steps(rows, layer)
        alike = (rows.ids[np.concatenate(steps)] == rows.ids[steps[0][0]]).all(axis=1)
        in_front = np.concatenate(steps)[: int(np.argmin(np.append(alike, False)))]
        if len(in_front) >= _WARM_UP:
            kept[in_front] = False
            again = [s for s in steps if len(s) >= _WARM_UP and (rows.ids[s] == rows.ids[steps[0][0]]).all()]
            kept[np.concatenate([in_front, *again])] = False
    if kept.all() or not kept.any():
        return rows.taken(np.flatnonzero(kept))
    left = rows.taken(np.flatnonzero(kept))
    return replace(left, token=left.token - left.token.min())


def _counts_anew(rows: Rows) -> bool:
    return len(np.unique(np.stack([rows.token, rows.layer]), axis=1)[0]) < len(rows)


def _found_again(source: Path, rows: Rows, left_out: dict[str, int]) -> tuple[list[Logged], dict[str, int]]:
    """Decode tokens of the requests: the rows at one place of neighbouring steps of one size."""
    layers = np.unique(rows.layer).tolist()
    by_layer = [_steps(rows, layer) for layer in layers]
    sizes = [[len(step) for step in steps] for steps in by_layer]
    if any(own != sizes[0] for own in sizes):
        other = layers[next(n for n, own in enumerate(sizes) if own != sizes[0])]
        raise TraceError(
            f"{source}: one req_id stands for all requests, and layers {layers[0]} and {other} were logged in steps "
            "of different sizes: import each layer's file by itself"
        )
    found, first = [], 0
    for size, run in itertools.groupby(sizes[0]):
        steps = len(list(run))
        if steps > 1:
            places = np.stack([np.stack(own[first : first + steps]) for own in by_layer], axis=2)  # [steps, size, L]
            found += [_at(rows, places[:, place], f"step {first}, row {place}") for place in range(size)]
        first += steps
    kept = sum(len(one.ids) for one in found) * len(layers)
    left_out["rows of steps unlike their neighbours, whose requests nothing tells"] = len(rows) - kept
    if not found:
        raise TraceError(f"{source}: one req_id stands for all requests, and no two steps have the same number of rows")
    return found, left_out


def _at(rows: Rows, places: NDArray[np.int64], name: str) -> Logged:
    """The request whose rows are those [T, L]."""
    return Logged(name, rows.ids[places], None if rows.weights is None else rows.weights[places], 0)
