"""Is running hot experts of little weight on the device worth its cost? Speed and precision of the same sequences.

    python benchmarks/balanced_quality.py [--replicas DIR] [--sequences 8] [--hot-experts 4] [--model-shape SHAPE]

Precision: decode-path nll of tiny-mixtral on held-out text, as benchmarks/quality.py measures it, where in addition a
row whose experts are all hot runs the one of least gate weight at `spill` bits (what the `balanced` system does at
batch 1). Speed: simulated decode tokens/s of the same sequences' routing on the named model, from replay. Differences
are paired by sequence, with standard errors. Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from quality import (
    MODEL,
    Cell,
    MixedExperts,
    MixedModel,
    held_out_sequences,
    loss_tables,
    mean_and_error,
    plan_bits,
    replicas_of,
    static_importance,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ndp_device.kernels.reference import ReferenceKernel
from ndp_device.replicas.store import ExpertStore
from ndp_device.timing.spec import load_hardware
from ndp_device.widths import FULL_PRECISION_BITS
from vllm_ndp.lab.systems import SYSTEMS, ReplayOptions
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.outcome import summarise
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.simulation.costs import Costs, model_named
from vllm_ndp.traces.format import Provenance
from vllm_ndp.traces.trace import Sequence, from_sequences

AVG_BITS = (2.0, 2.5, 3.0)
SPILL_BITS = (0, 3, 2)
"""0: none, the paper's execution."""


class BalancedExperts(MixedExperts):
    """MixedExperts whose rows may spill: with every chosen expert hot, the one of least gate weight runs at `spill`."""

    spill = 0

    def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        self.routed = ids, gates
        if self.bits is None:
            widths = torch.zeros_like(ids)
        else:
            owner = torch.arange(len(x)) // (len(x) // len(self.bits))
            widths = self.bits[owner[:, None], ids]
            if self.spill:
                rows = torch.where((widths == 0).all(dim=1))[0]
                widths[rows, gates[rows].argmin(dim=1)] = self.spill
        y = torch.zeros_like(x)
        for expert, width in {(int(e), int(w)) for e, w in zip(ids.flatten(), widths.flatten(), strict=True)}:
            rows, slots = torch.where((ids == expert) & (widths == width))
            w13, w2 = self.weights[expert, width or FULL_PRECISION_BITS]
            gate, up = (x[rows] @ w13.T).chunk(2, dim=-1)
            part = (torch.nn.functional.silu(gate) * up) @ w2.T
            y.index_add_(0, rows, part * gates[rows, slots, None])
        return y


def routing_of(model: MixedModel) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """ids and weights [B, T, L, k] of the last forward."""
    stacked = [torch.stack(parts, dim=1) for parts in zip(*(e.routed for e in model.experts), strict=True)]
    ids, gates = (part.unflatten(0, (len(model.tokens), -1)).numpy() for part in stacked)
    return ids, gates.astype(np.float32)


def speeds(
    sequences: list[Sequence], provenance: Provenance, shape: str, hot: int, prior: ImportanceScore, loss: LossTable
) -> dict[tuple[float, int], float]:
    """Simulated decode tokens/s for every average width and spill width."""
    batches = Batches.of(from_sequences(provenance, sequences))
    costs = Costs(load_hardware("h100-ndp512"), model_named(shape))
    out = {}
    for bits, spill in itertools.product(AVG_BITS, SPILL_BITS):
        options = ReplayOptions(
            policy=load_policy("prefill", PolicySettings(prior=prior)),
            budget=Budget(hot, bits),
            loss=loss,
            prior=prior,
            own={"spill_bits": spill} if spill else {},
        )
        outcome = SYSTEMS["balanced" if spill else "context_aware"].replay(batches, costs, options)
        out[bits, spill] = summarise(outcome, batches, costs).decode_tokens_per_s
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=Path)
    parser.add_argument("--sequences", type=int, default=8, help="per domain")
    parser.add_argument("--hot-experts", type=int, default=4)
    parser.add_argument("--model-shape", default="mixtral-8x7b")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    replicas = arguments.replicas or replicas_of(MODEL)
    store = ExpertStore(MODEL, replicas, kernel=ReferenceKernel())
    model = MixedModel(MODEL, store)
    for layer, block in enumerate(model.model.model.layers):
        block.mlp.experts = model.experts[layer] = BalancedExperts(store, layer)
    prior, losses = static_importance(model, MODEL), loss_tables(replicas)
    full: list[NDArray[np.float64]] = []
    nll: dict[tuple[float, int], list[NDArray[np.float64]]] = {
        key: [] for key in itertools.product(AVG_BITS, SPILL_BITS)
    }
    routed: list[Sequence] = []
    console = Console(stderr=True)
    for domain, tokens in track(held_out_sequences(MODEL, arguments.sequences).items(), "domains", console=console):
        prompts = model.prefill(tokens)
        prompt_ids, prompt_gates = routing_of(model)
        full.append(model.decode(None))
        decode_ids, decode_gates = routing_of(model)
        decodes = model.routing_stats()
        parts = zip(prompt_ids, prompt_gates, decode_ids, decode_gates, strict=True)
        routed += [Sequence(0, domain, 0.0, *part) for part in parts]
        for bits, spill in nll:
            cell = Cell(bits, arguments.hot_experts, "relative", "prefill")
            plans = [plan_bits(cell, p, d, prior, losses) for p, d in zip(prompts, decodes, strict=True)]
            for experts in model.experts:
                experts.spill = spill
            nll[bits, spill].append(model.decode(np.stack(plans)))
    s = store.shape
    provenance = Provenance(model=s.name, num_layers=s.num_layers, num_experts=s.num_experts, top_k=s.top_k)
    speed = speeds(routed, provenance, arguments.model_shape, arguments.hot_experts, prior, losses["relative"])
    reference = np.concatenate(full)
    table = Table(
        title=f"{len(reference)} sequences, {arguments.hot_experts} hot; speed simulated as {arguments.model_shape}"
    )
    for name in ("avg bits", "spill", "tokens/s", "nll above full precision", "nll above no spill"):
        table.add_column(name, justify="right")
    rows = []
    for (bits, spill), parts in nll.items():
        values, plain = np.concatenate(parts), np.concatenate(nll[bits, 0])
        delta, error = mean_and_error(values - reference)
        extra, extra_error = mean_and_error(values - plain)
        rows.append(
            {
                "avg_bits": bits,
                "spill_bits": spill,
                "simulated_tokens_per_s": round(speed[bits, spill], 1),
                "delta_nll": round(delta, 4),
                "standard_error": round(error, 4),
                "over_no_spill": round(extra, 4),
                "over_no_spill_error": round(extra_error, 4),
            }
        )
        shown = f"{delta:.4f} ({error:.4f})", f"{extra:+.4f} ({extra_error:.4f})"
        table.add_row(f"{bits:g}", str(spill or "-"), f"{speed[bits, spill]:.1f}", *shown)
    Console(width=120).print(table)
    print(json.dumps({"sequences": len(reference), "measured_seconds": round(time.monotonic() - began), "cells": rows}))


if __name__ == "__main__":
    main()
