"""What a near-data device is worth instead of the host, and added to it, on cards of 8 to 96 GB.

The cells of benchmarks/frontier.py for five public models, for hosts of 307 to 614 GB/s and one with the device's DRAM,
then under other assumptions with a host of 461 GB/s. A cell compares three sides within a limit of loss: the fastest
system without the device, the fastest that computes experts on the device and not on the host, and the fastest of all
that uses it. An ideal DRAM; batch 1 where nothing else is said. Everything is simulated. `make map` renews
docs/measured/map.json and its page:

    python benchmarks/where_near_data_pays.py --json docs/measured/map.json && python docs/generate.py
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ndp_device.timing.spec import MEASURED, load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.lab.reproduce import silicon
from vllm_ndp.lab.vectorised.outcome import Summary

sys.path.insert(0, str(Path(__file__).resolve().parent))
from frontier import CARDS, DEVICE, LIMITS, SHAPES, Cell, frontier_of_shapes
from measured import Measurement, add_json_option


@dataclass(frozen=True)
class Assumed:
    """What a map is drawn for."""

    routing: str = "auto"
    overrides: dict[str, str | int] = field(default_factory=dict)
    batch: int = 1
    seed: int = 0


def _host(gigabytes: int, **others: str | int) -> dict[str, str | int]:
    named = {name.replace("__", "."): value for name, value in others.items()}
    return {"host.memory_bytes_per_s": gigabytes * 10**9, **named}


HOSTS = {f"host {rate} GB/s": Assumed(overrides=_host(rate)) for rate in (461, 307, 512, 614)}
"""12 channels of DDR5-4800 (2022), 8 of them (2023's presets), the device's own DRAM, 12 of DDR5-6400 (2024)."""
OTHERS = {
    **{f"batch {batch}": Assumed(overrides=_host(461), batch=batch) for batch in (4, 16)},
    **{f"seed {seed} of the routing": Assumed(overrides=_host(461), seed=seed) for seed in (1, 2)},
    "host reaches 33 % of 461 GB/s": Assumed(overrides=_host(461, host__memory_efficiency_percent=33)),
    "rooflines on every card": Assumed(overrides=_host(461, gpu__times="roofline")),
    "every model as sticky as Qwen3-30B": Assumed(routing="qwen3-30b-a3b", overrides=_host(461)),
    "hops by DMA, 15 us": Assumed(overrides=_host(461, link__launch="dma")),
    "13 us between kernels": Assumed(overrides=_host(461, gpu__layer_overhead_ps=13_000_000)),
    "int8 arrays": Assumed(overrides=_host(461, array__pe_mode="int8")),
}
ASSUMED = HOSTS | OTHERS
_SHORT = {"expert_cache": "cache", "quantized": "all", "llama_cpp": "llama.cpp", "balanced": "paper"}
_LIKE_DESKTOP = ("l40s", "rtxpro6000")
"""Measured cards with GDDR, as desktop cards have."""


def cells_of(model: str, assumed: Assumed) -> list[Cell]:
    settings = CompareSettings(overrides=assumed.overrides, batches=(assumed.batch,))
    return frontier_of_shapes([model], settings, routing=assumed.routing, seed=assumed.seed)


def errors(models: list[str]) -> dict[str, dict[str, float]]:
    """Card -> model -> relative error of its MoE layers: 95 of 100 held-out rows of a measured card are within it. Else
    what the model's layer, one token at 4 bits, takes beyond its roofline on the measured cards with GDDR, the less."""
    held_out = silicon.reproduce().summary["cards"]
    found: dict[str, dict[str, float]] = {}
    for card in CARDS.values():
        times = load_hardware(card).gpu.times
        name = times.removeprefix(MEASURED)
        known = held_out[name]["p95"] if times.startswith(MEASURED) else None
        found[card] = {model: known or min(_beyond(other, model) for other in _LIKE_DESKTOP) for model in models}
    return found


def _beyond(card: str, model: str) -> float:
    took = []
    for hardware in (load_hardware(card), load_hardware(card, times="roofline")):
        costs = Costs(hardware, model_named(model))
        k = costs.shape.top_k
        took.append(costs.gpu.experts_ps(k, k, k * costs.replica_bytes(4)))
    return round(took[0] / took[1] - 1, 4)


def as_rows(name: str, cell: Cell) -> list[dict[str, Any]]:
    """Of each limit of loss that any system keeps: the fastest of each side and of the paper's plan, [name, tokens/s,
    loss, part of choices on the GPU]."""
    told = []
    for limit, loss in LIMITS.items():
        sides: dict[str, Summary] = {}
        for row in cell.rows:
            if row.loss <= loss * (1 + 1e-6):
                for side in _sides(row):
                    sides.setdefault(side, row)
        if sides:
            said = {side: _said(row) for side, row in sides.items()}
            told.append({"assumed": name, "model": cell.model, "gb": cell.memory_gb, "limit": limit, **said})
    return told


def _said(row: Summary) -> tuple[str, float, float, float]:
    return _name(row), round(row.decode_tokens_per_s, 2), round(row.loss, 4), round(row.hit_mass, 3)


def _sides(row: Summary) -> list[str]:
    """A plan that leaves the device idle is no plan with it."""
    if row.system not in DEVICE or row.device_busy == 0:
        return ["without"]
    return ["added", *([] if "host" in row.policy else ["instead"]), *(["paper"] if row.system == "balanced" else [])]


def _name(row: Summary) -> str:
    words = row.policy.split(",")[0]
    if row.system == "joint":
        return "plan " + row.policy.split(", ")[1]
    if row.system == "ktransformers":
        words = "4/4" if row.policy.endswith("GPU 4") else row.policy.split("CPU ")[1]
    return _SHORT.get(row.system, row.system) + ("" if row.system == "balanced" else f" {words}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--assumed", default=";".join(ASSUMED), help="some of the assumptions, with semicolons")
    parser.add_argument("--jobs", type=int, default=2)
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement = Measurement(__doc__)
    models = arguments.models.split(",")
    figures: dict[str, Any] = {
        "limits": {name: round(loss, 4) for name, loss in LIMITS.items()},
        "cards": {str(size): card for size, card in CARDS.items()},
        "models": models,
        "errors": errors(models),
        "assumed": [],
        "cells": [],
    }
    with ProcessPoolExecutor(arguments.jobs) as pool:
        named = arguments.assumed.split(";")
        asked = {name: [pool.submit(cells_of, model, ASSUMED[name]) for model in models] for name in named}
        for name, found in asked.items():
            figures["cells"] += [row for model in found for cell in model.result() for row in as_rows(name, cell)]
            figures["assumed"].append(name)
            measurement.save(figures, arguments.json)
            print(name, file=sys.stderr, flush=True)
    measurement.end(figures, arguments.json)


if __name__ == "__main__":
    main()
