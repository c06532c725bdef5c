"""Traces written for other programs.

    dynande     CSV of DynaNDE, whose simulator reads one (moe_routing_trace_path): layer_id, token_id and the score of
                every expert, 0 where it is not chosen. Encoder/routing.csv has the prompts' tokens one after another,
                Decoder/1st/routing.csv, ... the first, second, ... decode token of every request, token_id its number
    policylang  Parquet of moe-policylang (TraceRecording.load): a row a prompt, token and layer

Knows their layouts. traces/importers.py reads both back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError, nearest
from ndp_device.common.outputs import require_own_folder
from vllm_ndp.traces.trace import Trace

KINDS = ("dynande", "policylang")
_LEAST = 1e-9
"""A chosen expert's score at least: 0 says not chosen."""
Choices = tuple[NDArray[Any], NDArray[np.float32]]
"""ids and weights, both [..., L, k]."""


def export_trace(trace: Trace, kind: str, out: Path) -> list[Path]:
    """The files written. Raises TraceError in one sentence before any is."""
    if kind not in KINDS:
        raise TraceError(f"format must be {' or '.join(KINDS)}, got {kind!r}{nearest(kind, KINDS)}")
    require_own_folder(out)
    if not trace.sequences:
        raise TraceError("the trace has no request to export")
    if kind == "policylang":
        out.mkdir(parents=True, exist_ok=True)
        pq.write_table(_policylang(trace), out / "trace.parquet", compression="zstd")
        return [out / "trace.parquet"]
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


def _policylang(trace: Trace) -> pa.Table:
    _, num_layers, top_k = trace.ids.shape
    parts = [
        (number, np.concatenate([s.prompt_ids, s.decode_ids]), np.concatenate([s.prompt_weights, s.decode_weights]))
        for number, s in enumerate(trace.sequences)
    ]
    lengths = [len(ids) for _, ids, _ in parts]
    prompt = np.concatenate([np.arange(n) < len(s.prompt_ids) for n, s in zip(lengths, trace.sequences, strict=True)])
    ids, weights = (np.concatenate([part[which] for part in parts]).ravel() for which in (1, 2))
    lists = [pa.array(ids.astype(np.int32)), pa.array(weights.astype(np.float32))]
    starts = pa.array(np.arange(sum(lengths) * num_layers + 1, dtype=np.int32) * top_k)
    return pa.table(
        {
            "prompt_id": np.repeat(np.arange(len(parts), dtype=np.int32), np.array(lengths) * num_layers),
            "token_idx": np.repeat(np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]), num_layers),
            "layer_idx": np.tile(np.arange(num_layers, dtype=np.int32), sum(lengths)),
            "selected_experts": pa.ListArray.from_arrays(starts, lists[0]),
            "router_scores": pa.ListArray.from_arrays(starts, lists[1]),
            "phase": np.repeat(np.where(prompt, "prefill", "decode"), num_layers),
        }
    )


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
