"""Recordings that say what single tokens chose, and how their requests are told or found again.

    by_name_or_place  rows name their request; loggers that know no requests name one for all, and count tokens from
                      zero in every step. A row keeps its place in vLLM's batch until a request comes or goes. So
                      requests are recovered while the number of rows in a step stays.
    by_name           rows name their request
    by_pass           a pass of the model is one prompt's part or one decoded token; a prompt after decode is a request
    by_folder         a folder a position: row r of each is of request r

Rows come as engines write them.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from vllm_ndp.traces.rows import Found, Logged, Rows, Told, count_of, requests_of

_LEAST_ALIKE = 16
"""Least number of equal rows at the start that mark the engine's profile run; real rows repeat less."""
_LAYER = re.compile(r"layer[=_](\d+)", re.IGNORECASE)
_POSITION = re.compile(r"(\d+)(?:st|nd|rd|th)")


# -- by name, or by place in the batch --------------------------------------------------------------------------------


def by_name_or_place(told: Told) -> Found:
    rows, prompts = _logged_rows(told)
    kept = _without_warm_up(rows) if len(rows.names) == 1 else rows
    left_out = {"rows of warm-up": len(rows) - len(kept)}
    cells = np.unique(np.stack([kept.token, kept.layer]), axis=1)
    if len(kept.names) == 1 and cells.shape[1] < len(kept):  # token_idx counts anew
        return _by_place(told.source, kept, left_out)
    return _named(told.source, kept, prompts), left_out


def by_name(told: Told) -> Found:
    return _named(told.source, *_logged_rows(told)), {}


def _named(source: Path, rows: Rows, prompts: dict[str, int]) -> list[Logged]:
    found = requests_of(source, rows, prompts)
    for number, name in enumerate(rows.names):
        if first := int(rows.token[rows.request == number].min()):
            raise TraceError(
                f"{source}: request {name!r} begins with token {first}, and a trace needs every token: record from the "
                "start, without a prefix cache"
            )
    return found


def _logged_rows(told: Told) -> tuple[Rows, dict[str, int]]:
    """(rows, length of each prompt that is told)"""
    fields, names, prompts = told.fields, dict[str, int](), dict[str, int]()
    columns: dict[str, array[int]] = defaultdict(lambda: array("q"))
    weights, top_k = array("f"), 0
    for where, row in told.parts:
        if row.get("type") == "route":
            ids, own = _choice(where, row, fields)
            if top_k not in (0, len(ids)):
                raise TraceError(f"{where} has {len(ids)} experts where rows before have {top_k} experts a token")
            top_k = len(ids)
            columns["request"].append(names.setdefault(str(row[fields["request"]]), len(names)))
            for name in ("token", "layer"):
                columns[name].append(count_of(where, row, fields[name]))
            columns["ids"].extend(ids)
            weights.extend(own)
        elif fields["request"] in row and fields["prompt_len"] in row:
            prompts[str(row[fields["request"]])] = count_of(where, row, fields["prompt_len"])
    if not top_k:
        raise TraceError(f'{told.source} holds no row of {{"type": "route"}}')
    request, token, layer, flat = (np.array(columns[name], np.int64) for name in ("request", "token", "layer", "ids"))
    shape = (len(token), top_k)
    told_weights = np.array(weights, np.float32).reshape(shape) if len(weights) == len(flat) else None
    return Rows(request, token, layer, flat.reshape(shape), told_weights, tuple(names)), prompts


def _choice(where: str, row: dict[str, Any], fields: dict[str, str]) -> tuple[list[int], list[float]]:
    """(ids, weights), the latter empty where none are told."""
    ids, weights = row.get(fields["ids"]), row.get(fields["weights"])
    if not isinstance(ids, list) or not ids or any(type(expert) is not int or expert < 0 for expert in ids):
        raise TraceError(f"{where} must have {fields['ids']}, a list of expert ids, got {ids!r}")
    if len(set(ids)) < len(ids):
        raise TraceError(f"{where} chooses an expert twice: {ids}")
    if weights is not None and (not isinstance(weights, list) or len(weights) != len(ids)):
        raise TraceError(f"{where} must have a weight for each of {len(ids)} experts, got {weights!r}")
    return ids, weights or []


def _steps(rows: Rows, layer: int) -> list[NDArray[np.int64]]:
    """Rows of that layer by step: one ends where the token's number does not rise."""
    own = np.flatnonzero(rows.layer == layer)
    return np.split(own, np.flatnonzero(np.diff(rows.token[own]) <= 0) + 1)


def _without_warm_up(rows: Rows) -> Rows:
    """Without the steps that repeat the rows in front, of every layer. Tokens count from those that are left."""
    kept = np.ones(len(rows), np.bool_)
    for layer in np.unique(rows.layer).tolist():
        steps = _steps(rows, layer)
        alike = (rows.ids[np.concatenate(steps)] == rows.ids[steps[0][0]]).all(axis=1)
        in_front = np.concatenate(steps)[: int(np.argmin(np.append(alike, False)))]
        if len(in_front) >= _LEAST_ALIKE:
            again = [s for s in steps if len(s) >= _LEAST_ALIKE and (rows.ids[s] == rows.ids[steps[0][0]]).all()]
            kept[np.concatenate([in_front, *again])] = False
    if kept.all() or not kept.any():
        return rows
    left = rows.taken(np.flatnonzero(kept))
    return replace(left, token=left.token - left.token.min())


def _by_place(source: Path, rows: Rows, left_out: dict[str, int]) -> Found:
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
            for place in range(size):
                own = places[:, place]
                weights = None if rows.weights is None else rows.weights[own]
                found.append(Logged(f"step {first}, row {place}", rows.ids[own], weights, 0))
        first += steps
    kept = sum(len(one.ids) for one in found) * len(layers)
    left_out["rows of steps unlike their neighbours, whose requests nothing tells"] = len(rows) - kept
    if not found:
        raise TraceError(f"{source}: one req_id stands for all requests, and no two steps have the same number of rows")
    return found, left_out


# -- by pass ----------------------------------------------------------------------------------------------------------


def by_pass(told: Told) -> Found:
    """Rows of passes one after another. Left out and counted: the last layer where a prompt ran through it for its last
    token alone, and a warm-up, which is a prompt's part before a larger one."""
    ((where, columns),) = told.parts
    layer, token, left_out = columns["layer"], columns["token"], dict[str, int]()
    layers = np.unique(layer)
    number = np.cumsum((layer == layers[0]) & (token == 0)) - 1  # of the pass
    if number[0] < 0:
        raise TraceError(f"{where} must begin with token 0 of layer {layers[0]}, got {token[0]} of layer {layer[0]}")
    tokens = [np.bincount(number[layer == one], minlength=number[-1] + 1) for one in layers[[0, -1]]]
    kept = np.ones(len(layer), np.bool_)
    if ((tokens[0] != tokens[1]) & (tokens[1] > 0)).any():
        kept = layer != layers[-1]
        left_out[f"rows of layer {layers[-1]}, through which a prompt ran for its last token alone"] = int(
            (~kept).sum()
        )
    names = [f"{Path(where).stem} pass {n + 1}" for n in range(int(number[-1]) + 1)]
    rows = Rows(number[kept], token[kept], layer[kept], columns["ids"][kept], None, names)
    passes = [one.ids for one in requests_of(where, rows)]
    is_prompt = [bool(columns["phase"][at] == "prefill") for at in np.unique(number, return_index=True)[1]]
    if not any(is_prompt):
        return [Logged("", np.concatenate(passes), None)], left_out
    requests: list[list[int]] = []
    for at, ids in enumerate(passes):
        if not at or (is_prompt[at] and not is_prompt[at - 1]):
            requests.append([])
        if is_prompt[at] and is_prompt[at + 1 : at + 2] == [True] and len(ids) < len(passes[at + 1]):
            left_out["rows of warm-up"] = left_out.get("rows of warm-up", 0) + ids.shape[0] * ids.shape[1]
        else:
            requests[-1].append(at)
    return [
        Logged(
            f"{Path(where).stem} {n}",
            np.concatenate([passes[at] for at in of]),
            None,
            sum(len(passes[at]) for at in of if is_prompt[at]),
        )
        for n, of in enumerate(requests)
        if of
    ], left_out


# -- by folder --------------------------------------------------------------------------------------------------------


def by_folder(told: Told) -> Found:
    """Scores of experts, 0 where not chosen: a file of many layers, or folders with one file a layer, Layer_N.

    With folders of positions (1st, 2nd) within, rows are requests. Without them, rows are the tokens of all requests.
    """
    parts = list(told.parts)
    places = [_place(Path(where).relative_to(told.source).parts[:-1]) for where, _ in parts]
    positions = {position for position, _ in places}
    if None in positions and len(positions) > 1:
        raise TraceError(f"{told.source} has files within folders 1st, 2nd, ... and others without: give one kind")
    cells = []
    for (_, columns), (position, layer) in zip(parts, places, strict=True):
        row = columns["token"]
        request, token = (row * 0, row) if position is None else (row, row * 0 + position - 1)
        cells.append((request, token, columns["layer"] if layer is None else row * 0 + layer))
    scores = np.concatenate([columns["scores"] for _, columns in parts])
    counts = (scores > 0).sum(axis=1)
    if not np.isfinite(scores).all() or scores.min() < 0 or counts.min() != counts.max() or not counts.min():
        raise TraceError(
            f"{told.source} must have finite scores of at least 0, and as many experts above 0 in every row, got "
            f"{counts.min()}..{counts.max()}"
        )
    ids = np.argsort(-scores, axis=1, kind="stable")[:, : int(counts[0])]
    request, token, layer = (np.concatenate(column) for column in zip(*cells, strict=True))
    names, request = np.unique(request, return_inverse=True)
    weights = np.take_along_axis(scores, ids, axis=1).astype(np.float32)
    found = requests_of(told.source, Rows(request, token, layer, ids, weights, [str(name) for name in names.tolist()]))
    return [one._replace(prompt_len=0) for one in found] if None not in positions else [found[0]._replace(name="")], {}


def _place(folders: tuple[str, ...]) -> tuple[int | None, int | None]:
    """(position in the request, layer), as the folders below the source say; None where they do not."""
    positions = [int(found[1]) for part in folders if (found := _POSITION.fullmatch(part))]
    layers = [int(found[1]) for part in folders if (found := _LAYER.fullmatch(part))]
    return (positions[-1] if positions else None), (layers[-1] if layers else None)
