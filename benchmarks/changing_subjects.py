"""Where the subject changes while a request decodes, is a plan that follows decode ever worse than static popularity?

Requests spliced from recorded routing of two real routers (the bundled models, their own texts) and from synthetic
routing of 128 experts: the subject stays, changes at a moment drawn for each request, within the prompt, goes back and
forth, lasts some dozen tokens, or gives way to another little by little; and routing with no subject at all. The share
of decode choices found hot, `paper` execution; popularity from requests that are not replayed. Differences are paired,
with the standard error over requests. Simulated.

    python benchmarks/changing_subjects.py [--seed 1] [--requests 36] [--decode 256]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measured import Measurement, add_json_option
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ndp_device.timing.spec import load_hardware
from vllm_ndp.lab.compare import popularity, split_requests
from vllm_ndp.lab.systems import SYSTEMS, ReplayOptions
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.simulation.costs import Costs, model_named
from vllm_ndp.traces.format import Provenance
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace
from vllm_ndp.traces.trace import Sequence, Trace, from_sequences

MODELS = Path(__file__).resolve().parent.parent / "models"
ROWS = (
    ("context_aware", "static"),
    ("context_aware", "prefill"),
    ("context_aware", "prefill_shrunk"),
    ("replanned", "prefill"),
    ("replanned", "prefill_shrunk"),
)


@dataclass(frozen=True)
class Source:
    """Recorded tokens to splice from: of each sequence its subject, and each token's choices [N, T, L, k]."""

    name: str
    model: str
    num_experts: int
    subjects: NDArray[np.int64]
    ids: NDArray[Any]
    weights: NDArray[Any]

    @classmethod
    def bundled(cls, name: str, model: str, num_experts: int) -> Source:
        with np.load(MODELS / name / "traces" / "sampled.npz", allow_pickle=False) as kept:
            return cls(name, model, num_experts, kept["domain"].astype(np.int64), kept["experts"], kept["weights"])

    @classmethod
    def synthetic(cls, seed: int) -> Source:
        """128 experts, top-8, each sequence a subject of its own."""
        settings = SyntheticSettings(4, 128, 8, num_requests=48, prompt_len=256, decode_len=256, seed=seed)
        sequences = synthetic_trace(settings).sequences
        ids = np.stack([np.concatenate([s.prompt_ids, s.decode_ids]) for s in sequences])
        weights = np.stack([np.concatenate([s.prompt_weights, s.decode_weights]) for s in sequences])
        return cls("synthetic, 128 experts", "qwen3-30b-a3b", 128, np.arange(len(ids)), ids, weights)


Pick = Callable[[np.random.Generator, int, int], NDArray[np.int64]]
"""(generator, tokens of a prompt, of decode) -> which of the request's subjects each of its tokens is about."""


def turn(rng: np.random.Generator, prompt: int, decode: int) -> NDArray[np.int64]:
    return (np.arange(prompt + decode) >= prompt + rng.integers(0, decode // 2)).astype(np.int64)


def turn_in_prompt(rng: np.random.Generator, prompt: int, decode: int) -> NDArray[np.int64]:
    return (np.arange(prompt + decode) >= rng.integers(prompt // 4, prompt)).astype(np.int64)


def back_and_forth(rng: np.random.Generator, prompt: int, decode: int) -> NDArray[np.int64]:
    """The prompt's subject and another one in turn, 40 to 80 tokens each."""
    bounds = prompt + np.cumsum(rng.integers(40, 80, decode))
    return np.searchsorted(bounds, np.arange(prompt + decode), "right") % 2


def short_pieces(rng: np.random.Generator, prompt: int, decode: int) -> NDArray[np.int64]:
    """Another subject every 12 to 40 tokens of decode."""
    bounds = prompt + np.cumsum(rng.integers(12, 40, decode)) - 12
    return np.searchsorted(bounds, np.arange(prompt + decode), "right") % 6


def gradual(rng: np.random.Generator, prompt: int, decode: int) -> NDArray[np.int64]:
    return (rng.random(prompt + decode) < (np.arange(prompt + decode) - prompt) / decode).astype(np.int64)


def none(rng: np.random.Generator, prompt: int, decode: int) -> NDArray[np.int64]:
    """Each token from somewhere else."""
    return rng.integers(0, 1 << 30, prompt + decode)


KINDS: dict[str, Pick] = {
    "steady": lambda rng, prompt, decode: np.zeros(prompt + decode, np.int64),
    "no subject": none,
    "gradual": gradual,
    "turn": turn,
    "turn in the prompt": turn_in_prompt,
    "back and forth": back_and_forth,
    "short pieces": short_pieces,
}


def spliced(source: Source, pick: Pick, requests: int, prompt: int, decode: int, seed: int) -> Trace:
    """Every token keeps its place in its own text, as far as that is long enough, so that tokens differ as they do."""
    rng = np.random.default_rng(seed)
    length = source.ids.shape[1]
    sequences = []
    for request in range(requests):
        about = pick(rng, prompt, decode)
        first = int(rng.integers(len(source.ids)))
        others = rng.permutation(np.flatnonzero(source.subjects != source.subjects[first]))
        texts = np.concatenate([[first], others])[about % (len(others) + 1)]
        place = (np.arange(prompt + decode) + rng.integers(length)) % length
        ids = source.ids[texts, place].astype(np.int64)
        weights = source.weights[texts, place].astype(np.float32)
        weights = np.maximum(weights, 1e-6)
        parts = (ids[:prompt], weights[:prompt], ids[prompt:], weights[prompt:])
        sequences.append(Sequence(request, str(source.subjects[first]), 0.0, *parts))
    layers, top_k = source.ids.shape[2:]
    shape = Provenance(model=source.model, num_layers=layers, num_experts=source.num_experts, top_k=top_k)
    return from_sequences(shape, sequences)


def hot_shares(trace: Trace, source: Source, share: float) -> dict[tuple[str, str], NDArray[np.float64]]:
    """(system, policy) -> of each request the share of its decode choices found hot."""
    known, replayed = split_requests(trace)
    prior, layers = popularity(known), trace.provenance.num_layers
    costs = Costs(load_hardware("h100-ndp512"), model_named(source.model))
    one_by_one = [Batches.of(replayed.select([r])) for r in range(len(replayed.prompt_len))]
    found = {}
    for system, policy in ROWS:
        options = ReplayOptions(
            policy=load_policy(policy, PolicySettings(prior=prior)),
            budget=Budget(round(share * source.num_experts), 2.0),
            loss=LossTable.nominal(layers, source.num_experts),
            prior=prior,
            own={"execution": "paper"} if system == "replanned" else {},
        )
        shares = [SYSTEMS[system].replay(batches, costs, options).hit_mass for batches in one_by_one]
        found[system, policy] = np.array(shares)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=48, help="of which every fourth only makes the prior")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--decode", type=int, default=256)
    parser.add_argument("--kinds", default=",".join(KINDS))
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement = Measurement(__doc__)
    sources = (
        (Source.bundled("tiny-mixtral", "mixtral-8x7b", 8), 0.5),
        (Source.bundled("tiny-qwen3-moe", "gpt-oss-20b", 32), 0.25),
        (Source.synthetic(arguments.seed), 0.25),
    )
    rows = []
    for source, share in sources:
        for kind in arguments.kinds.split(","):
            sizes = arguments.requests, arguments.prompt, arguments.decode, arguments.seed
            shares = hot_shares(spliced(source, KINDS[kind], *sizes), source, share)
            static = shares["context_aware", "static"]
            row: dict[str, Any] = {"routing": source.name, "subject": kind, "static": round(100 * static.mean(), 2)}
            for (system, policy), of_row in list(shares.items())[1:]:
                difference = 100 * (of_row - static)
                error = difference.std(ddof=1) / np.sqrt(len(difference))
                row[f"{system}, {policy}"] = [round(difference.mean(), 2), round(error, 2)]
            rows.append(row)
    table = Table(title="decode choices found hot: static in %, others in points above it (standard error)")
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("routing", "subject") else "right")
    for row in rows:
        texts = (
            f"{value[0]:+.1f} ({value[1]:.1f})" if isinstance(value, list) else str(value) for value in row.values()
        )
        table.add_row(*texts)
    Console(width=160).print(table)
    measurement.end({"rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
