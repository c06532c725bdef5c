"""Published data sets of routing, read as ids per request; traces/importers.py makes traces of them.

    expert-selection  core12345/MoE_expert_selection_trace: a JSON file a request, a list of its forward passes, each
                      {layer: null where it is dense, else [tokens][k] ids}; the first pass is the prompt
    columns           RASMUS/commitmoe-qwen35-fp8: .safetensors of rows with prompt_idx, tok or token, layer (or a
                      folder layer=NN), and top_indices [N, k], logits [N, E] or both, perhaps in files of their own
    dynande           CSV of DynaNDE: layer_id, token_id, expert_0, ...; the score of each expert, 0 where not chosen

Knows layouts. Does not know traces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.checkpoint.tensor_files import safetensors_header
from ndp_device.common import strict_json
from ndp_device.common.errors import TraceError
from ndp_device.common.strict_files import read_lines
from vllm_ndp.traces.rows import MOST_BYTES, MOST_ROWS, MOST_VALUES, Logged, Rows, chosen, requests_of, softmax

_CHOICES = ("top_indices", "logits")
_TENSORS = (*_CHOICES, "prompt_idx", "tok", "token", "layer")
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "u1", "U16": "<u2"}
_LAYER = re.compile(r"layer[=_](\d+)", re.IGNORECASE)
_POSITION = re.compile(r"(\d+)(?:st|nd|rd|th)")


def _files(source: Path, suffix: str) -> list[Path]:
    """Files by the numbers in their names, so that request 9 comes before request 10."""
    found = sorted(source.rglob(f"*{suffix}"), key=lambda path: _by_number(path.relative_to(source)))
    if source.is_dir() and not found:
        raise TraceError(f"{source} holds no {suffix} file")
    return found if source.is_dir() else [source]


def _by_number(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


# -- expert-selection --------------------------------------------------------------------------------------------------


def read_expert_selection(source: Path) -> list[Logged]:
    return [_one_request(path) for path in _files(source, ".json")]


def _one_request(path: Path) -> Logged:
    passes = strict_json.read(path, list[dict[str, Any]], at_most=MOST_BYTES, max_values=MOST_VALUES)
    if not passes:
        raise TraceError(f"{path} must be a list of forward passes, and has none")
    layers = sorted((int(name) for name, chosen in passes[0].items() if chosen is not None))
    parts = [_pass(f"{path} pass {number}", each, layers) for number, each in enumerate(passes)]
    return Logged(path.stem, np.concatenate(parts), None, len(parts[0]))


def _pass(where: str, layers: dict[str, Any], wanted: list[int]) -> NDArray[np.int64]:
    """[tokens, L, k]"""
    there = sorted(int(name) for name, chosen in layers.items() if chosen is not None)
    if there != wanted:
        raise TraceError(f"{where} has layers {there[:4]}... of {len(there)}, the first pass has {len(wanted)} others")
    ids = [np.array(layers[str(layer)]) for layer in wanted]
    if len({each.shape for each in ids}) != 1 or ids[0].ndim != 2 or ids[0].dtype.kind not in "iu":
        raise TraceError(f"{where} must have [tokens][k] whole ids in every layer, got {ids[0].dtype} {ids[0].shape}")
    return np.stack(ids, axis=1).astype(np.int64)


# -- columns -----------------------------------------------------------------------------------------------------------


class _Table(NamedTuple):
    """Rows of one file."""

    cells: NDArray[np.int64]  # [N, 3], request, token, layer
    choices: dict[str, NDArray[Any]]
    """top_indices [N, k], logits [N, E]: what it has of them."""


def read_columns(source: Path, top_k: int) -> list[Logged]:
    """Ids with the softmax of their logits where both are there; of logits alone the top_k largest."""
    tables = [table for path in _files(source, ".safetensors") if (table := _table(path)).choices]
    told, scored = _together(tables, "top_indices"), _together(tables, "logits")
    weights: NDArray[np.float32] | None
    if told is not None:
        cells, ids = told
        weights = None if scored is None else _weights_of(source, told, scored)
    elif scored is not None:
        cells, (ids, weights) = scored[0], chosen(scored[1], top_k)
    else:
        raise TraceError(f"{source} has neither top_indices nor logits beside prompt_idx and tok")
    names, request = np.unique(cells[:, 0], return_inverse=True)
    rows = Rows(request, cells[:, 1], cells[:, 2], ids, weights, [str(name) for name in names.tolist()])
    return [one._replace(prompt_len=0) for one in requests_of(source, rows)]


_Column = tuple[NDArray[np.int64], NDArray[Any]]
"""Cells [N, 3] in order, and a row of values for each."""


def _weights_of(source: Path, told: _Column, scored: _Column) -> NDArray[np.float32]:
    if not np.array_equal(told[0], scored[0]):
        raise TraceError(f"{source}: logits of {len(scored[0])} rows belong to other rows than {len(told[0])} ids")
    return softmax(np.take_along_axis(scored[1], told[1].astype(np.int64), axis=1))


def _table(path: Path) -> _Table:
    """Without choices where the file holds something else, hidden states say."""
    tensors = _tensors(path)
    choices = {name: tensors[name] for name in _CHOICES if name in tensors}
    token = tensors.get("tok", tensors.get("token"))
    if not choices:
        return _Table(np.zeros((0, 3), np.int64), {})
    if token is None or "prompt_idx" not in tensors:
        raise TraceError(f"{path} must have prompt_idx and tok beside its choices, got {sorted(tensors)}")
    layer = tensors["layer"] if "layer" in tensors else np.full(len(token), _layer_of(path))
    cells = np.stack([tensors["prompt_idx"].ravel(), token.ravel(), layer.ravel()], axis=1).astype(np.int64)
    if any(each.ndim != 2 or len(each) != len(cells) for each in choices.values()):
        raise TraceError(f"{path} must have a row of choices for each of {len(cells)} tokens")
    return _Table(cells, choices)


def _layer_of(path: Path) -> int:
    if not (numbers := _LAYER.findall(str(path))):
        raise TraceError(f"{path} has no tensor layer, and no folder layer=NN says which it is")
    return int(numbers[-1])


def _together(tables: list[_Table], name: str) -> _Column | None:
    """The rows of all tables that have it, by request, token and layer."""
    having = [table for table in tables if name in table.choices]
    if not having:
        return None
    cells = np.concatenate([table.cells for table in having])
    if len(cells) > MOST_ROWS:
        raise TraceError(f"at most {MOST_ROWS} rows are read at once, got {len(cells)}: give some of the files")
    order = np.lexsort((cells[:, 2], cells[:, 1], cells[:, 0]))
    return cells[order], np.concatenate([table.choices[name] for table in having])[order]


def _tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Tensors that can matter here; bfloat16 widened to float32."""
    header, first = safetensors_header(path)
    out: dict[str, NDArray[Any]] = {}
    for name in _TENSORS:
        if name in header:
            entry = header[name]
            start, end = entry["data_offsets"]
            kind = np.dtype(_type(path, name, entry["dtype"]))
            if not 0 <= start <= end <= path.stat().st_size - first or (end - start) % kind.itemsize:
                raise TraceError(f"{path}: {name} lies outside of the file or is cut")
            values = np.fromfile(path, kind, (end - start) // kind.itemsize, offset=first + start)
            if entry["dtype"] == "BF16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            out[name] = values.reshape(entry["shape"])
    return out


def _type(path: Path, name: str, dtype: str) -> str:
    if dtype not in _TYPES:
        raise TraceError(f"{path}: {name} must be one of {', '.join(_TYPES)}, got {dtype}")
    return _TYPES[dtype]


# -- dynande -----------------------------------------------------------------------------------------------------------


def read_dynande(source: Path) -> list[Logged]:
    """Read a file of many layers, or its authors' folders with one file a layer: Layer_N.

    With folders of positions (1st, 2nd) within, rows are requests. Without them, rows are the tokens of all requests.
    """
    tables = [(path, _scores(path)) for path in _files(source, ".csv") if "_stats" not in path.stem]
    places = [_place(path, source) for path, _ in tables]
    positions = {position for position, _ in places}
    if None in positions and len(positions) > 1:
        raise TraceError(f"{source} has files within folders 1st, 2nd, ... and others without: give one kind")
    cells, scores = zip(*(_cells(table, *place) for (_, table), place in zip(tables, places, strict=True)), strict=True)
    return _of_scores(source, np.concatenate(cells), np.concatenate(scores), named=None not in positions)


def _scores(path: Path) -> NDArray[np.float64]:
    """[N, 2 + E]"""
    lines = (line.decode() for line in read_lines(path))
    header = next(lines, "").strip().split(",")
    if header[:3] != ["layer_id", "token_id", "expert_0"] or header[-1] != f"expert_{len(header) - 3}":
        raise TraceError(f"{path} must begin with layer_id,token_id,expert_0,..., got {','.join(header[:4])}")
    rows = _numbers(path, lines)
    if rows.ndim != 2 or rows.shape[1] != len(header) or not np.isfinite(rows).all() or rows.min() < 0:
        raise TraceError(f"{path} must have {len(header)} finite numbers of at least 0 in every row")
    return rows


def _numbers(path: Path, lines: Iterable[str]) -> NDArray[np.float64]:
    try:
        return np.loadtxt(lines, delimiter=",", ndmin=2)
    except ValueError as error:
        raise TraceError(f"{path} must hold numbers only: {str(error).splitlines()[0]}") from None


def _place(path: Path, source: Path) -> tuple[int | None, int | None]:
    """(position in the request, layer), as the folders below the source say; None where they do not."""
    parts = path.relative_to(source).parts[:-1]
    positions = [int(found[1]) for part in parts if (found := _POSITION.fullmatch(part))]
    layers = [int(found[1]) for part in parts if (found := _LAYER.fullmatch(part))]
    return (positions[-1] if positions else None), (layers[-1] if layers else None)


def _cells(
    table: NDArray[np.float64], position: int | None, layer: int | None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """([N, 3] request, token and layer, [N, E] scores)"""
    row = table[:, 1]
    layers = table[:, 0] if layer is None else np.full(len(table), layer)
    request, token = (np.zeros(len(table)), row) if position is None else (row, np.full(len(table), position - 1))
    return np.stack([request, token, layers], axis=1).astype(np.int64), table[:, 2:]


def _of_scores(source: Path, cells: NDArray[np.int64], scores: NDArray[Any], *, named: bool) -> list[Logged]:
    counts = (scores > 0).sum(axis=1)
    if counts.min() != counts.max() or not counts.min():
        raise TraceError(f"{source} must have as many experts above 0 in every row, got {counts.min()}..{counts.max()}")
    ids = np.argsort(-scores, axis=1, kind="stable")[:, : int(counts[0])]
    names, request = np.unique(cells[:, 0], return_inverse=True)
    weights = np.take_along_axis(scores, ids, axis=1).astype(np.float32)
    rows = Rows(request, cells[:, 1], cells[:, 2], ids, weights, [str(name) for name in names.tolist()])
    found = requests_of(source, rows)
    return [one._replace(prompt_len=0) for one in found] if named else [found[0]._replace(name="")]
