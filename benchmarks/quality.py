"""What do low-bit cold experts cost on held-out text, and what is it worth to choose their bits from the prompt?

    python benchmarks/quality.py [--replicas DIR] [--sequences 16] [--avg-bits 3 2 1.5] [--hot-experts 4 2 0]

Decode-path negative log-likelihood (nats per token) of the real model: each sequence's prompt runs in full precision,
as prefill does; every later row runs its hot experts in full precision and its cold ones through the dequantized
replicas, at the widths the policy gave this sequence. Two things vary:

    bits        uniform | mse (the selector as published) | importance (its gains weighted by importance) |
                relative (weighted too, and each expert's loss relative to the mean square of its own output) |
                layers (as relative, but all bits wherever they help most, not each layer its share) |
                pairs (as layers, but single pairs by their own router weight; needs a prompt's or a decode's routing)
    importance  prefill (this prompt's routing) | static (routing of the calibration text) | random | oracle (this
                sequence's own decode routing in full precision: not available to any real system)

Every cell is compared with full precision on the same sequences: mean of the paired differences and its standard error.
The forward is transformers' with its experts replaced, in float32, so differences come from the replicas alone.
Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import measured
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from ndp_device.calibration.build import build_data_free
from ndp_device.calibration.weighing import in_float
from ndp_device.checkpoint.files import model_digest
from ndp_device.common.kept import default_cache_dir
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.experts.expert import Expert, FullExpert, to_float32
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.format import MANIFEST, ReplicaFiles, load_losses
from ndp_device.replicas.store import ExpertStore
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore, importance
from vllm_ndp.planning.plan import BitwidthPlan, Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.stats import RoutingStats

MODEL = Path(__file__).resolve().parents[1] / "models" / "tiny-mixtral"
SEQUENCE_TOKENS, PROMPT_TOKENS = 512, 256
CALIBRATION_WINDOWS = 96
BEGIN = 1  # <s>
SELECTORS = {
    "uniform": ("uniform", "mse"),
    "mse": ("mse", "mse"),
    "importance": ("importance", "mse"),
    "relative": ("importance", "relative"),
    "layers": ("layers", "relative"),
    "pairs": ("pairs", "relative"),
}
"""name: (the planning package's rule for bits, the losses it is given)"""
SOURCES = ("prefill", "static", "random", "oracle")
Routing = tuple[NDArray[np.int64], NDArray[np.float32]]
"""ids and gates [T, L, k] of one sequence."""


@dataclass(frozen=True)
class Cell:
    """One point of the experiment."""

    avg_bits: float
    hot_experts: int
    selector: str
    source: str


class MixedExperts(torch.nn.Module):
    """A layer's experts where each sequence has its own widths; remembers how the rows were routed."""

    def __init__(self, store: ExpertStore, layer: int) -> None:
        super().__init__()
        self.num_experts = store.shape.num_experts
        self.weights = {
            (expert, bits): float_weights(store.expert(layer, expert, bits))
            for expert in range(self.num_experts)
            for bits in sorted(store.widths)
        }
        self.bits: Tensor | None = None  # [sequences, E], 0 or 16 = full precision; None = all of them
        self.from_weight: Tensor | None = None  # [sequences, E, 3], as a plan has them
        self.routed: tuple[Tensor, Tensor] | None = None  # ids and weights [rows, k] of the last forward

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        self.routed = ids, gates
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            rows, slots = torch.where(ids == expert)
            if self.bits is None:
                widths = torch.full_like(rows, FULL_PRECISION_BITS)
            else:
                sequences = rows // (len(x) // len(self.bits))
                widths = self.bits[sequences, expert]
                if self.from_weight is not None:
                    wider = (gates[rows, slots, None] >= self.from_weight[sequences, expert]).sum(dim=1)
                    widths = torch.where((widths >= 1) & (widths <= 4), 1 + wider, widths)
            for width in widths.unique().tolist():
                chosen = widths == width
                w13, w2 = self.weights[expert, width or FULL_PRECISION_BITS]
                gate, up = (x[rows[chosen]] @ w13.T).chunk(2, dim=-1)
                part = (torch.nn.functional.silu(gate) * up) @ w2.T
                y.index_add_(0, rows[chosen], part * gates[rows[chosen], slots[chosen], None])
        return y


def float_weights(expert: Expert) -> tuple[Tensor, Tensor]:
    """w13 [2I, H], gate rows first, and w2 [H, I] as float32."""
    full = expert if isinstance(expert, FullExpert) else in_float(expert)
    w13, w2 = (to_float32(part, full.dtype) for part in (np.concatenate([full.w1, full.w3]), full.w2))
    return torch.from_numpy(w13), torch.from_numpy(w2)


class MixedModel:
    """The model with MixedExperts; one batch of sequences at a time: prompt once, decode once per plan."""

    def __init__(self, model_dir: Path, store: ExpertStore) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.experts = [MixedExperts(store, layer) for layer in range(store.shape.num_layers)]
        for block, experts in zip(self.model.model.layers, self.experts, strict=True):
            block.mlp.experts = experts
        self.cache, self.tokens = DynamicCache(), torch.empty(0)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor) -> list[RoutingStats]:
        """Run the prompts of `tokens` [B, T] in full precision; the routing of each."""
        self.cache, self.tokens = DynamicCache(), tokens
        self._run(tokens[:, :PROMPT_TOKENS], None)
        return self.routing_stats()

    @torch.inference_mode()
    def decode(
        self, bits: NDArray[np.uint8] | None, from_weight: NDArray[np.float32] | None = None
    ) -> NDArray[np.float64]:
        """Mean nll of each sequence after its prompt, experts at `bits` [B, L, E], or single pairs at
        those from_weight [B, L, E, 3] says. The first generated token is the prefill's, so T - PROMPT_TOKENS - 1 tokens
        count."""
        logits = self._run(self.tokens[:, PROMPT_TOKENS:], bits, from_weight)[:, :-1]
        self.cache.crop(PROMPT_TOKENS - self.tokens.shape[1])  # negative: how many to drop
        targets = self.tokens[:, PROMPT_TOKENS + 1 :]
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return nll.view(targets.shape).mean(dim=1).double().numpy()

    def routing(self) -> list[Routing]:
        """Of each sequence in the last forward."""
        stacked = [torch.stack(parts, dim=1) for parts in zip(*(e.routed for e in self.experts), strict=True)]
        ids, gates = (part.unflatten(0, (len(self.tokens), -1)).numpy() for part in stacked)  # [B, T, L, k]
        return list(zip(ids, gates, strict=True))

    def routing_stats(self) -> list[RoutingStats]:
        return [RoutingStats.from_choices(*one, self.experts[0].num_experts) for one in self.routing()]

    def _run(
        self, tokens: Tensor, bits: NDArray[np.uint8] | None, from_weight: NDArray[np.float32] | None = None
    ) -> Tensor:
        for layer, experts in enumerate(self.experts):
            experts.from_weight = None if from_weight is None else torch.from_numpy(from_weight[:, layer])
            experts.bits = None if bits is None else torch.from_numpy(bits[:, layer].astype(np.int64))
        return self.model(tokens, past_key_values=self.cache, use_cache=True).logits


def texts_of(model_dir: Path) -> Path:
    """Where held-out and calibration texts lie: the bundled models have one tokenizer and one set of texts."""
    return model_dir if (model_dir / "eval").is_dir() else MODEL


def held_out_sequences(model_dir: Path, per_domain: int) -> dict[str, Tensor]:
    """{domain: [per_domain, T]}: <s> and a window of held-out text, windows spread evenly over the text."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    sequences = {}
    for path in sorted((texts_of(model_dir) / "eval").glob("*.txt")):
        ids = tokenizer.encode(path.read_text(), add_special_tokens=False).ids
        starts = np.linspace(0, len(ids) - SEQUENCE_TOKENS, per_domain).astype(int)
        sequences[path.stem] = torch.tensor([[BEGIN, *ids[s : s + SEQUENCE_TOKENS - 1]] for s in starts])
    return sequences


def static_importance(model: MixedModel, model_dir: Path) -> ImportanceScore:
    """The published formula over the calibration text, which shares nothing with the held-out texts."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ids = tokenizer.encode((texts_of(model_dir) / "calibration.txt").read_text(), add_special_tokens=False).ids
    starts = np.linspace(0, len(ids) - PROMPT_TOKENS, 2 * CALIBRATION_WINDOWS).astype(int)
    windows = torch.tensor([[BEGIN, *ids[s : s + PROMPT_TOKENS - 1]] for s in starts])
    stats = [one for batch in windows.split(32) for one in model.prefill(batch)]
    counts, scores = np.sum([one.counts for one in stats], axis=0), np.sum([one.scores for one in stats], axis=0)
    return importance(RoutingStats(counts, scores, sum(one.num_tokens for one in stats), stats[0].top_k))


def replicas_of(model_dir: Path) -> Path:
    """The replicas that lie beside the model, or else data-free ones from the cache, built there if missing."""
    beside, cached = model_dir.with_name(f"{model_dir.name}-replicas"), default_cache_dir(model_digest(model_dir))
    if (beside / MANIFEST).exists():
        return beside
    if not (cached / MANIFEST).exists():
        build_data_free(model_dir, cached)
    return cached


def loss_tables(replicas: Path) -> dict[str, LossTable]:
    """Expert-output errors on held-out calibration tokens: mean squares, and relative to the output's mean square."""
    kinds = {"mse": "absolute", "relative": "relative"}
    return {name: LossTable.from_measured(*load_losses(replicas, kind)) for name, kind in kinds.items()}


def plan_of(
    cell: Cell, prompt: RoutingStats, decode: RoutingStats, prior: ImportanceScore, losses: dict[str, LossTable]
) -> BitwidthPlan:
    """What the policy decides for one sequence."""
    rule, loss = SELECTORS[cell.selector]
    policy = load_policy(
        "prefill" if cell.source == "oracle" else cell.source, PolicySettings(bit_rule=rule, prior=prior)
    )
    budget = Budget(cell.hot_experts, cell.avg_bits)
    score = policy.score(decode if cell.source == "oracle" else prompt)
    placement = policy.place([score], None, budget)
    return policy.assign(score, placement, losses[loss], budget)


def stacked(plans: Sequence[BitwidthPlan]) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
    """Plans by one rule, as MixedModel.decode takes those of several sequences."""
    from_weight = [plan.from_weight for plan in plans if plan.from_weight is not None]
    return np.stack([plan.bits for plan in plans]), np.stack(from_weight) if from_weight else None


def measure(
    model: MixedModel,
    batches: Iterator[Tensor],
    cells: list[Cell],
    prior: ImportanceScore,
    losses: dict[str, LossTable],
) -> tuple[NDArray[np.float64], dict[Cell, NDArray[np.float64]]]:
    """nll of every sequence: in full precision [N], and in every cell [N]."""
    full, by_cell = [], {cell: [] for cell in cells}
    for tokens in batches:
        prompts = model.prefill(tokens)
        full.append(model.decode(None))
        decodes = model.routing_stats()
        done: dict[bytes, NDArray[np.float64]] = {}
        for cell in cells:
            plans = stacked([plan_of(cell, p, d, prior, losses) for p, d in zip(prompts, decodes, strict=True)])
            known = b"".join(array.tobytes() for array in plans if array is not None)
            if known not in done:  # with no hot expert, uniform bits are the same whatever the importance
                done[known] = model.decode(*plans)
            by_cell[cell].append(done[known])
    return np.concatenate(full), {cell: np.concatenate(parts) for cell, parts in by_cell.items()}


def mean_and_error(differences: NDArray[np.float64]) -> tuple[float, float]:
    return float(differences.mean()), float(differences.std(ddof=1) / len(differences) ** 0.5)


def results(full: NDArray[np.float64], by_cell: dict[Cell, NDArray[np.float64]]) -> list[dict[str, object]]:
    rows = []
    for cell, nll in by_cell.items():
        uniform = by_cell[dataclasses.replace(cell, selector="uniform")]
        delta, error = mean_and_error(nll - full)
        gain, gain_error = mean_and_error(uniform - nll)
        rows.append(
            {
                **dataclasses.asdict(cell),
                "delta_nll": round(delta, 4),
                "standard_error": round(error, 4),
                "better_than_uniform": round(gain, 4),
                "better_than_uniform_error": round(gain_error, 4),
            }
        )
    return rows


def print_table(rows: list[dict[str, object]], full: NDArray[np.float64], console: Console) -> None:
    table = Table(title=f"nll above full precision ({full.mean():.4f}), standard error of the paired mean in brackets")
    for name in ("average bits", "hot", "importance", *SELECTORS):
        table.add_column(name, justify="right")
    by_place: dict[tuple[object, ...], dict[object, str]] = {}
    for row in rows:
        place = by_place.setdefault((row["avg_bits"], row["hot_experts"], row["source"]), {})
        place[row["selector"]] = f"{row['delta_nll']:.4f} ({row['standard_error']:.4f})"
    for place, by_selector in by_place.items():
        table.add_row(*map(str, place), *(by_selector.get(selector, "") for selector in SELECTORS))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--replicas", type=Path, help="default: those beside the model, else data-free ones")
    parser.add_argument("--sequences", type=int, default=16, help="per domain, of 512 tokens, the first 256 a prompt")
    parser.add_argument("--avg-bits", type=float, nargs="+", default=[3, 2, 1.5])
    parser.add_argument("--hot-experts", type=int, nargs="+", default=[4, 2, 0])
    measured.add_json_option(parser)
    arguments = parser.parse_args()
    measurement = measured.Measurement(str(__doc__))
    torch.set_num_threads(1)
    began = time.monotonic()
    replicas = arguments.replicas or replicas_of(arguments.model)
    store = ExpertStore(arguments.model, replicas, kernel=NativeKernel())
    model = MixedModel(arguments.model, store)
    points = itertools.product(arguments.avg_bits, arguments.hot_experts, SELECTORS, SOURCES)
    cells = [Cell(*point) for point in points if point[2] != "pairs" or point[3] in ("prefill", "oracle")]
    prior, losses = static_importance(model, arguments.model), loss_tables(replicas)
    sequences = held_out_sequences(arguments.model, arguments.sequences)
    console = Console(stderr=True)
    full, by_cell = measure(model, track(sequences.values(), "held-out domains", console=console), cells, prior, losses)
    rows = results(full, by_cell)
    print_table(rows, full, Console(width=120))
    manifest = ReplicaFiles(replicas).manifest
    summary = {
        "model_digest": store.model_digest,
        "replicas": store.replica_source,
        "container": manifest.container,
        "solver": manifest.solver,
        "sequences": len(full),
        "decode_tokens": len(full) * (SEQUENCE_TOKENS - PROMPT_TOKENS - 1),
        "full_precision_nll": round(float(full.mean()), 4),
        "measured_seconds": round(time.monotonic() - began),
        "cells": rows,
    }
    measurement.save(summary, arguments.json)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
