"""Does a prompt tell which experts its decode needs, on more than one trained router?

    python benchmarks/trained_routers.py --json docs/measured/trained_routers.json

For each bundled model: the held-out prompts of record_routing.py, 256 tokens each, and 256 tokens after them, which are
sampled from the model or the text's own; and what `vllm-ndp analyze` says of that routing: the share of decode choices
that the hot set covers, when it is chosen by the prompt, by the prompt and a prior, by the prior alone (popularity on
the calibration text), at random, and by an oracle that has seen the decode. Half and a quarter of the experts are hot.
Intervals are 95 % over requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import measured
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from vllm_ndp.lab.analysis import Analysis, Interval, analyse
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.traces.format import Provenance
from vllm_ndp.traces.trace import Sequence, Trace, from_sequences

sys.path.insert(0, str(Path(__file__).parent / "tiny_mixtral"))
import record_routing

MODELS = ("tiny-mixtral", "tiny-qwen3-moe")
AFTER_THE_PROMPT = {"sampled": False, "text": True}
HOT_SHARES = (2, 4)


def trace_of(model: str, routing: record_routing.Routing, num_experts: int) -> Trace:
    prompt = record_routing.PROMPT_TOKENS
    ids, weights = routing.ids, routing.weights.astype(np.float32)
    sequences = [
        Sequence(
            request=n,
            label=routing.domains[routing.domain[n]],
            arrival_s=0.0,
            prompt_ids=ids[n, :prompt],
            prompt_weights=weights[n, :prompt],
            decode_ids=ids[n, prompt:],
            decode_weights=weights[n, prompt:],
        )
        for n in range(len(ids))
    ]
    layers, top_k = ids.shape[2:]
    provenance = Provenance(model=model, num_layers=layers, num_experts=num_experts, top_k=top_k, source="benchmark")
    return from_sequences(provenance, sequences)


def rounded(interval: Interval) -> dict[str, float]:
    return {name: round(value, 4) for name, value in dataclasses.asdict(interval).items()}


def figures_of(found: Analysis) -> dict[str, Any]:
    return {
        "hot_experts": found.num_hot,
        "requests": found.num_requests,
        "coverage": {name: rounded(interval) for name, interval in found.coverage.items()},
        "over_static": {name: rounded(interval) for name, interval in found.over_static.items()},
        "by_domain": {
            domain: {name: round(value, 3) for name, value in of.items()} for domain, of in found.by_domain.items()
        },
        "first_tokens": {str(n): rounded(interval) for n, interval in found.first_tokens.items()},
        "gini": [round(value, 3) for value in found.gini],
        "layers_outside_null": found.layers_outside_null,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-domain", type=int, default=8, help="prompts of each of the six domains")
    measured.add_json_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measurement = measured.Measurement(str(__doc__))
    table = Table(title="share of decode choices covered, 95 % intervals")
    for column in ("model", "after the prompt", "hot", "prefill", "prefill_prior", "static", "random", "oracle"):
        table.add_column(column, no_wrap=True)
    models: dict[str, Any] = {}
    for name in MODELS:
        model = record_routing.load(measured.ROOT / "models" / name)
        num_experts = record_routing.num_experts_of(model)
        prior = ImportanceScore.from_weights(record_routing.popularity(model, num_experts))
        kinds: dict[str, Any] = {}
        for kind, own_text in AFTER_THE_PROMPT.items():
            trace = trace_of(name, record_routing.record(model, arguments.per_domain, own_text=own_text), num_experts)
            kinds[kind] = []
            for share in HOT_SHARES:
                found = analyse(trace, num_experts // share, prior=prior)
                kinds[kind].append(figures_of(found))
                cells = [f"{i.mean:.3f} [{i.low:.3f}, {i.high:.3f}]" for i in found.coverage.values()]
                table.add_row(name, kind, f"{found.num_hot} of {num_experts}", *cells)
        models[name] = {"num_experts": num_experts, "top_k": trace.provenance.top_k, **kinds}
    Console(width=170, stderr=True).print(table)
    measurement.end({"models": models}, arguments.json)


if __name__ == "__main__":
    main()
