"""Routing that llama.cpp's forks log as CSV, read as ids per request; traces/importers.py makes traces of them.

    layer,expert                               a row a choice (pull request 28544, which writes no header)
    phase,token,layer,rank,expert              a row a choice
    pos,layer,id0,id1,...                      a row a token, without a header; pos is below 0 in the prompt
    # phase,n_tokens,layer,token_idx,e0,e1,... a row a token

Rows come pass by pass: layers rise within a pass, tokens follow each other within a layer. A pass of several tokens,
or one that is marked so, is a part of a prompt. Three kinds of rows are left out and counted:

    warm-up         a prompt's part before a larger one
    the last layer  where a prompt ran through it for its last token alone, as llama.cpp does
    misread rows    the k best of each token are a view with gaps; read without them, rows name the ranking of the first
                    token, so that the first two rows share no expert in any layer

Knows rows as llama.cpp's forks write them. Does not know traces.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from ndp_device.common.strict_files import read_lines
from vllm_ndp.traces.rows import MOST_ROWS, Logged

_IDS = re.compile(r"(?:e|id|expert)_?\d+")
_WARM_UP, _MISREAD = "rows of warm-up", "rows of prompts that were logged as the ranking of one token"


class _Columns(NamedTuple):
    """Places in a row."""

    layer: int
    experts: list[int]
    phase: int | None = None
    position: int | None = None
    rank: int | None = None


class _Table(NamedTuple):
    """A row for each token and layer, as they were logged."""

    layers: NDArray[np.int64]  # [N]
    ids: NDArray[np.int64]  # [N, k]
    marked: NDArray[np.bool_] | None
    """[N], rows of prompts; None where the source does not tell."""

    def taken(self, rows: NDArray[np.bool_]) -> _Table:
        return _Table(self.layers[rows], self.ids[rows], None if self.marked is None else self.marked[rows])


class _Pass(NamedTuple):
    ids: NDArray[np.int64]  # [tokens, L, k]
    is_prompt: bool


def read_moe_trace(source: Path) -> tuple[list[Logged], dict[str, int]]:
    """(requests, rows left out by reason); without a name where every pass is of one token and none is marked."""
    table, left_out = _same_layers(source, _table(source))
    passes = list(_passes(table))
    if not any(one.is_prompt for one in passes):
        return [Logged("", np.concatenate([one.ids for one in passes]), None)], left_out
    why = [_why_not(one, after) for one, after in itertools.zip_longest(passes, passes[1:])]
    for reason, one in zip(why, passes, strict=True):
        if reason:
            left_out[reason] += one.ids.shape[0] * one.ids.shape[1]
    return list(_requests(source, passes, why)), left_out


def _table(source: Path) -> _Table:
    lines = csv.reader(line.decode() for line in read_lines(source))
    first = next(lines, [])
    names = [name.strip().lstrip("# ") for name in first]
    has_header = not all(re.fullmatch(r"-?\d+", name) for name in names)
    columns = _columns(source, names, has_header=has_header)
    numbers = [columns.layer, *columns.experts, *(at for at in (columns.position, columns.rank) if at is not None)]
    rows, phases = [], []
    try:
        for row in itertools.chain([] if has_header else [first], lines):
            if row:
                rows.append([int(row[at]) for at in numbers])
                phases.append("" if columns.phase is None else row[columns.phase].strip())
            if len(rows) > MOST_ROWS:
                raise TraceError(f"{source} has more than {MOST_ROWS} rows: cut it into files of some requests each")
    except (ValueError, IndexError) as error:
        raise TraceError(f"{source} must have whole numbers as layer and expert: {error}") from None
    if not rows:
        raise TraceError(f"{source} holds no row of routing")
    return _by_token(source, columns, np.array(rows, np.int64), np.array(phases))


def _columns(source: Path, names: list[str], *, has_header: bool) -> _Columns:
    if not has_header:
        return _Columns(0, [1]) if len(names) == 2 else _Columns(1, list(range(2, len(names))), position=0)
    experts = [at for at, name in enumerate(names) if name == "expert" or _IDS.fullmatch(name)]
    if "layer" not in names or not experts:
        raise TraceError(f"{source} must begin with a header that has layer and expert, got {names}")
    told = (names.index(name) if name in names else None for name in ("phase", "pos", "rank"))
    return _Columns(names.index("layer"), experts, *told)


def _by_token(source: Path, columns: _Columns, rows: NDArray[np.int64], phases: NDArray[np.str_]) -> _Table:
    """The table of rows [N, layer and experts and position or rank]."""
    layers, ids, last = rows[:, 0], rows[:, 1 : 1 + len(columns.experts)], rows[:, -1]
    marked = last < 0 if columns.position is not None else None
    table = _Table(layers, ids, marked if columns.phase is None else phases == "prefill")
    if len(columns.experts) > 1:
        return table
    starts, lengths = _runs(layers)
    whole = lengths[: max(len(lengths) - 1, 1)]  # the last may be cut
    top_k = int(whole.min()) if columns.rank is None else int(last.max()) + 1
    if top_k < 1 or (lengths % top_k).any() or (columns.rank is None and len(lengths) == 1):
        wrong = int(starts[int((lengths % max(top_k, 1) > 0).argmax())])
        raise TraceError(
            f"{source}: rows must come as {top_k} experts of each token, layer by layer; those from row {wrong + 1} "
            "on do not"
        )
    each = np.arange(len(layers)) % top_k == 0
    return table.taken(each)._replace(ids=ids.reshape(-1, top_k))


def _runs(layers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(starts, lengths) of rows of one layer that follow each other."""
    starts = np.flatnonzero(np.diff(layers, prepend=layers[0] - 1))
    return starts, np.diff(starts, append=len(layers))


def _tokens(table: _Table, layers: NDArray[np.int64]) -> NDArray[np.int64]:
    """[passes, L]. With one layer alone every row is a pass."""
    if len(layers) == 1:
        return np.ones((len(table.layers), 1), np.int64)
    starts, lengths = _runs(table.layers)
    which = np.cumsum(np.diff(table.layers[starts], prepend=table.layers[0]) < 0)
    tokens = np.zeros((int(which[-1]) + 1, len(layers)), np.int64)
    tokens[which, np.searchsorted(layers, table.layers[starts])] = lengths
    return tokens


def _same_layers(source: Path, table: _Table) -> tuple[_Table, Counter[str]]:
    """(the rows of the layers that every token ran through, rows left out by reason)."""
    layers = np.unique(table.layers)
    tokens = _tokens(table, layers)
    uneven = tokens != tokens[:, :1]
    if not uneven.any():
        return table, Counter()
    bad = np.argwhere(uneven[:, :-1] | (tokens[:, -1:] == 0))
    if len(bad):
        wrong = int(bad[0, 0])
        at = int(uneven[wrong].argmax())
        raise TraceError(
            f"{source}: pass {wrong + 1} must have {tokens[wrong, 0]} tokens in layer {layers[at]} as in layer "
            f"{layers[0]}, got {tokens[wrong, at]}"
        )
    name = f"rows of layer {layers[-1]}, through which a prompt ran for its last token alone"
    return table.taken(table.layers != layers[-1]), Counter({name: int(tokens[:, -1].sum())})


def _passes(table: _Table) -> Iterator[_Pass]:
    tokens = _tokens(table, np.unique(table.layers))
    width = tokens.shape[1]
    for end, count in zip(np.cumsum(tokens.sum(axis=1)).tolist(), tokens[:, 0].tolist(), strict=True):
        start = end - count * width
        ids = table.ids[start:end].reshape(width, count, -1).transpose(1, 0, 2)
        yield _Pass(ids, count > 1 if table.marked is None else bool(table.marked[start]))


def _why_not(one: _Pass, after: _Pass | None) -> str:
    """Why a pass is left out, empty where it is kept."""
    if not one.is_prompt:
        return ""
    if after is not None and after.is_prompt and len(one.ids) < len(after.ids):  # only a prompt's last part is smaller
        return _WARM_UP
    shares = len(one.ids) == 1 or (one.ids[0][:, :, None] == one.ids[1][:, None, :]).any()
    return "" if shares else _MISREAD


def _requests(source: Path, passes: list[_Pass], why: list[str]) -> Iterator[Logged]:
    """A request ends where a prompt follows decode."""
    begins = [one.is_prompt and not before.is_prompt for before, one in itertools.pairwise(passes)]
    numbers = np.cumsum([0, *begins]).tolist()
    for number, run in itertools.groupby(zip(numbers, passes, why, strict=True), key=lambda each: each[0]):
        kept = [one for _, one, reason in run if not reason]
        if kept:
            prompt_len = sum(len(one.ids) for one in kept if one.is_prompt)
            yield Logged(f"{source.stem} {number}", np.concatenate([one.ids for one in kept]), None, prompt_len)
