"""Traces written for other programs.

    dynande     CSV of DynaNDE, whose simulator reads one (moe_routing_trace_path): layer_id, token_id and the score of
                every expert, 0 where it is not chosen. Encoder/routing.csv has the prompts' tokens one after another,
                Decoder/1st/routing.csv, ... the first, second, ... decode token of every request, token_id its number
    gate-stats  gate_stats.json for a CUSTOM gate of LLMServingSim 2.0, which asks how many experts a batch of tokens
                activates: mean distinct experts by layer and number of tokens, and how much falls on each expert

Knows their layouts. `dynande` is read back by traces/published.py.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from ndp_device.common.outputs import require_own_folder
from vllm_ndp.traces.trace import Trace

_LEAST = 1e-9
"""A chosen expert's score at least: 0 says not chosen."""
Choices = tuple[NDArray[Any], NDArray[np.float32]]
"""ids and weights, both [..., L, k]."""


def export_trace(trace: Trace, kind: str, out: Path) -> list[Path]:
    """The files written. Raises TraceError in one sentence before any is."""
    if kind not in EXPORTERS:
        nearest = difflib.get_close_matches(kind, EXPORTERS, n=1, cutoff=0.0)[0]
        raise TraceError(f"format must be one of {', '.join(EXPORTERS)}, got {kind!r}: did you mean {nearest!r}?")
    require_own_folder(out)
    if not trace.sequences:
        raise TraceError("the trace has no request to export")
    written = []
    for name, text in EXPORTERS[kind](trace):
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


def _gate_stats(trace: Trace) -> Iterator[tuple[str, str]]:
    p = trace.provenance
    prompts = [s.prompt_ids for s in trace.sequences if len(s.prompt_ids)]
    decodes = [s.decode_ids for s in trace.sequences if len(s.decode_ids)]
    steps = min((len(ids) for ids in decodes), default=0)
    batch = np.stack([ids[:steps] for ids in decodes], axis=1) if steps else np.zeros((0, 0, p.num_layers, p.top_k))
    known = {"prefill": _distinct(prompts, p.num_experts), "decode": _distinct(list(batch), p.num_experts)}
    loads = [np.bincount(trace.ids[:, layer].ravel(), minlength=p.num_experts) for layer in range(p.num_layers)]
    layers = [
        {
            "layer": layer,
            "expert_loads": (loads[layer] / max(int(loads[layer].sum()), 1)).round(9).tolist(),
            "distinct_experts": {
                phase: {str(tokens): float(means[layer]) for tokens, means in curve.items()}
                for phase, curve in known.items()
            },
        }
        for layer in range(p.num_layers)
    ]
    about = {"model": p.model, "num_experts": p.num_experts, "num_experts_per_tok": p.top_k, "source": p.source}
    yield "gate_stats.json", json.dumps(about | {"layers": layers}, indent=1) + "\n"


def _distinct(groups: list[NDArray[Any]], experts: int) -> dict[int, NDArray[np.float64]]:
    """Distinct experts of so many neighbouring tokens within a group [T, L, k], mean over all places: tokens -> [L].

    For 1, 2, 4, ... tokens up to the longest group. A group: a prompt's tokens, or those of one decode step.
    """
    longest, curve = max((len(group) for group in groups), default=0), {}
    for tokens in (1 << power for power in range(longest.bit_length())):
        parts = [g[at : at + tokens] for g in groups for at in range(0, len(g) - tokens + 1, tokens)]
        curve[tokens] = np.mean([_count(part, experts) for part in parts], axis=0)
    return curve


def _count(part: NDArray[Any], experts: int) -> NDArray[np.int64]:
    """[L], of choices [T, L, k]."""
    layers = part.shape[1]
    used = np.zeros((layers, experts), np.bool_)
    used[np.arange(layers)[None, :, None], part.astype(np.int64)] = True
    return np.asarray(used.sum(axis=1))


EXPORTERS: dict[str, Callable[[Trace], Iterator[tuple[str, str]]]] = {"dynande": _dynande, "gate-stats": _gate_stats}
"""Name -> the files of it, name and text."""
