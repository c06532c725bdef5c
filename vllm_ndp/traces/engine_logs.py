"""Routing that engines log row by row, read as ids per request; traces/importers.py makes traces of them.

    routelog    JSON lines of vLLM loggers: {"type": "meta", ...}, then {"type": "route", "req_id", "token_idx",
                "layer", "topk_ids", "topk_weights"}, rows of a step interleaved by request; a file, or one per layer
    moe-trace   CSV of llama.cpp forks: columns layer and expert, one row a choice, tokens in order, no requests

A token without some layer refuses the file: a trace with holes would look like one with less memory. Of a row that is
told twice, a warm-up's and the real one, the last counts. Knows rows. Does not know traces.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device import strict_json
from ndp_device.errors import TraceError
from ndp_device.strict_files import read_lines

_MOST_ROWS = 1 << 26


class Logged(NamedTuple):
    """One request, tokens in order."""

    name: str
    ids: NDArray[np.int64]  # [T, L, k]
    weights: NDArray[np.float32] | None
    prompt_len: int | None


Choice = tuple[list[int], list[float] | None]


def read_routelog(source: Path) -> list[Logged]:
    """A file, or a directory of .jsonl files. Raises TraceError where a row or a layer is missing or odd."""
    files = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    if not files:
        raise TraceError(f"{source} holds no .jsonl of a routing log")
    requests: dict[str, dict[tuple[int, int], Choice]] = {}
    prompts: dict[str, int] = {}
    for path in files:
        for where, row in _rows(path):
            if row.get("type") == "route":
                token, layer = _whole(where, row, "token_idx"), _whole(where, row, "layer")
                requests.setdefault(str(row["req_id"]), {})[token, layer] = _choice(where, row)
            elif "req_id" in row and "prompt_len" in row:
                prompts[str(row["req_id"])] = _whole(where, row, "prompt_len")
    if not requests:
        raise TraceError(f'{source} holds no row of {{"type": "route"}}')
    layers = sorted({layer for cells in requests.values() for _, layer in cells})
    return [_request(source, name, cells, layers, prompts.get(name)) for name, cells in requests.items()]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(read_lines(path), 1):
        if number > _MOST_ROWS:
            raise TraceError(f"{path} has more than {_MOST_ROWS} rows: cut it into files of some requests each")
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


def _choice(where: str, row: dict[str, Any]) -> Choice:
    ids, weights = row.get("topk_ids"), row.get("topk_weights")
    if not isinstance(ids, list) or not ids or any(type(expert) is not int or expert < 0 for expert in ids):
        raise TraceError(f"{where} must have topk_ids, a list of expert ids, got {ids!r}")
    if len(set(ids)) < len(ids):
        raise TraceError(f"{where} chooses an expert twice: {ids}")
    if weights is not None and (not isinstance(weights, list) or len(weights) != len(ids)):
        raise TraceError(f"{where} must have a weight for each of {len(ids)} experts, got {weights!r}")
    return ids, weights


def _request(
    source: Path, name: str, cells: dict[tuple[int, int], Choice], layers: list[int], prompt_len: int | None
) -> Logged:
    tokens = sorted({token for token, _ in cells})
    if tokens != list(range(tokens[0], tokens[0] + len(tokens))):
        missing = next(token for token in range(tokens[0], tokens[-1]) if token not in set(tokens))
        raise TraceError(f"{source}: request {name!r} has no row of token {missing}")
    if len(cells) < len(tokens) * len(layers):
        token, layer = next((t, n) for t in tokens for n in layers if (t, n) not in cells)
        raise TraceError(f"{source}: request {name!r} has no row of token {token} in layer {layer}")
    widths = {len(ids) for ids, _ in cells.values()}
    if len(widths) > 1:
        raise TraceError(f"{source}: request {name!r} has {min(widths)} to {max(widths)} experts a token")
    ids = np.array([[cells[token, layer][0] for layer in layers] for token in tokens], np.int64)
    if any(weights is None for _, weights in cells.values()):
        return Logged(name, ids, None, prompt_len)
    weights = np.array([[cells[token, layer][1] for layer in layers] for token in tokens], np.float32)
    return Logged(name, ids, weights, prompt_len)


def read_moe_trace(source: Path) -> NDArray[np.int64]:
    """[T, L, k]. A token ends where a layer comes again after another one; every token must have the same rows."""
    lines = csv.reader(line.decode() for line in read_lines(source))
    header = [name.strip() for name in next(lines, [])]
    if "layer" not in header or "expert" not in header:
        raise TraceError(f"{source} must begin with a header that has layer and expert, got {header}")
    at_layer, at_expert = header.index("layer"), header.index("expert")
    try:
        rows = np.array([(int(row[at_layer]), int(row[at_expert])) for row in lines if row], np.int64)
    except (ValueError, IndexError) as error:
        raise TraceError(f"{source} must have whole numbers as layer and expert: {error}") from None
    if not len(rows):
        raise TraceError(f"{source} has a header and no rows")
    layers = np.unique(rows[:, 0])
    starts = np.flatnonzero(np.diff(rows[:, 0], prepend=-1))
    top_k = int(np.diff(starts, append=len(rows))[0])
    span = top_k * len(layers)
    want = np.tile(np.repeat(rows[:span:top_k, 0], top_k), max(len(rows) // span, 1))
    if len(rows) % span or not np.array_equal(rows[:, 0], want[: len(rows)]):
        wrong = int(np.flatnonzero(rows[: len(want), 0] != want[: len(rows)])[:1].sum()) if len(want) else 0
        raise TraceError(
            f"{source}: rows must come as {top_k} experts of each of {len(layers)} layers, token by token; row "
            f"{wrong + 1} or the file's end does not"
        )
    return rows[:, 1].reshape(-1, len(layers), top_k)
