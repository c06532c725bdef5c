"""Traces written for other programs.

    dynande     CSV of DynaNDE, whose simulator reads one (moe_routing_trace_path): layer_id, token_id and the score of
                every expert, 0 where it is not chosen. Encoder/routing.csv has the prompts' tokens one after another,
                Decoder/1st/routing.csv, ... the first, second, ... decode token of every request, token_id its number

Knows their layouts. `dynande` is read back by traces/importers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from ndp_device.common.outputs import require_own_folder
from vllm_ndp.traces.trace import Trace

DYNANDE = "dynande"
_LEAST = 1e-9
"""A chosen expert's score at least: 0 says not chosen."""
Choices = tuple[NDArray[Any], NDArray[np.float32]]
"""ids and weights, both [..., L, k]."""


def export_trace(trace: Trace, kind: str, out: Path) -> list[Path]:
    """The files written. Raises TraceError in one sentence before any is."""
    if kind != DYNANDE:
        raise TraceError(f"format must be {DYNANDE}, got {kind!r}")
    require_own_folder(out)
    if not trace.sequences:
        raise TraceError("the trace has no request to export")
    written = []
    for name, text in _dynande(trace):
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(path)
    return written


def _dynande(trace: Trace) -> Iterator[tuple[str, str]]:
    experts = trace.provenance.num_experts
    prompts = [(s.prompt_ids, s.prompt_weights) for s in trace.sequences if len(s.prompt_ids)]
    if prompts:
        ids, weights = (np.concatenate(parts) for parts in zip(*prompts, strict=True))
        yield "Encoder/routing.csv", _table(range(len(ids)), (ids, weights), experts)
    for position in range(max(len(s.decode_ids) for s in trace.sequences)):
        running = [s for s in trace.sequences if len(s.decode_ids) > position]
        at = (
            np.stack([s.decode_ids[position] for s in running]),
            np.stack([s.decode_weights[position] for s in running]),
        )
        yield f"Decoder/{_ordinal(position + 1)}/routing.csv", _table([s.request for s in running], at, experts)


def _table(tokens: Sequence[int], choices: Choices, experts: int) -> str:
    """Rows of choices [T, L, k], layer by layer."""
    ids, weights = choices
    lines = [",".join(["layer_id", "token_id", *(f"expert_{expert}" for expert in range(experts))])]
    for layer in range(ids.shape[1]):
        scores = np.zeros((len(ids), experts))
        np.put_along_axis(scores, ids[:, layer].astype(np.int64), np.maximum(weights[:, layer], _LEAST), axis=1)
        lines += [
            f"{layer},{token}," + ",".join(map("{:.9g}".format, row))
            for token, row in zip(tokens, scores.tolist(), strict=True)
        ]
    return "\n".join(lines) + "\n"


def _ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 21st"""
    last = 0 if number % 100 in (11, 12, 13) else number % 10
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"
