"""Which system decodes fastest on cards of 8 to 96 GB, where near-data computing wins, and what would make it win?

The cells of benchmarks/frontier.py for five public models under the assumptions that decide, one changed at a time:
routing, the price of a hop, host memory, H100 rates at every size; then devices that are faster or slower than the
paper's. An ideal DRAM, batch 1. Everything is simulated. `make map` renews docs/measured/map.json and the page of it:

    python benchmarks/where_near_data_pays.py --json docs/measured/map.json && python docs/generate.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ndp_device.timing.spec import load_hardware
from ndp_device.timing.units import PS_PER_US
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.lab.vectorised.outcome import Summary

sys.path.insert(0, str(Path(__file__).resolve().parent))
from frontier import CARDS, DEVICE, LIMITS, SHAPES, Cell, frontier_of_shapes
from measured import Measurement, add_json_option


@dataclass(frozen=True)
class Assumed:
    """What a map is drawn for."""

    routing: str = "auto"
    overrides: dict[str, str | int] = field(default_factory=dict)
    on_cards: bool = True


AS_FITTED = "as fitted"
BAND = {
    AS_FITTED: Assumed(),
    "every model memoryless": Assumed(routing="memoryless"),
    "every model as sticky as Qwen3-30B": Assumed(routing="qwen3-30b-a3b"),
    "hops by DMA": Assumed(overrides={"link.launch": "dma"}),
    "host 80 GB/s": Assumed(overrides={"host.memory_bytes_per_s": 80 * 10**9}),
    "host 614 GB/s": Assumed(overrides={"host.memory_bytes_per_s": 614 * 10**9}),
    "H100 rates at every size": Assumed(on_cards=False),
}
"""Locality and prices: the range that a cell's ratio is given with."""
_FAST: dict[str, str | int] = {"dram.ideal_bytes_per_s": 2048 * 10**9, "array.units": 128}
PRICES = {
    f"load-to-use {ns} ns": Assumed(overrides={"link.load_to_use_ps": 1000 * ns}) for ns in (500, 1000, 2000, 5000)
}
"""Of a message, beside those that the other assumptions have: 0, 150, 250 (as fitted) and copies by DMA."""
DEVICES = {
    "load-to-use 150 ns": Assumed(overrides={"link.load_to_use_ps": 150_000}),
    "load-to-use 0": Assumed(overrides={"link.load_to_use_ps": 0}),
    "1 TB/s inside": Assumed(overrides={"dram.ideal_bytes_per_s": 1024 * 10**9}),
    "twice the arrays": Assumed(overrides={"array.units": 128}),
    "2 TB/s inside and twice the arrays": Assumed(overrides=_FAST),
    "2 TB/s inside and twice the arrays and 150 ns": Assumed(overrides={**_FAST, "link.load_to_use_ps": 150_000}),
    "int8 arrays": Assumed(overrides={"array.pe_mode": "int8"}),
    "arrays that dequantise to fp16": Assumed(overrides={"array.pe_mode": "fp16_dequant"}),
    "host 80 GB/s and 1 TB/s inside": Assumed(
        overrides={"host.memory_bytes_per_s": 80 * 10**9, "dram.ideal_bytes_per_s": 1024 * 10**9}
    ),
}
"""Devices, and the host beside them: what an architect can change. The paper's has 512 GB/s inside, 64 arrays of
bit-scalable elements, and a load-to-use of 250 ns."""
ASSUMED = BAND | DEVICES | PRICES
_OF_MESSAGES = ("load-to-use 0", "load-to-use 150 ns", AS_FITTED, *PRICES, "hops by DMA")
_SHORT = {"expert_cache": "cache", "quantized": "all", "llama_cpp": "llama.cpp", "balanced": "device"}


def cells_of(model: str, assumed: Assumed) -> list[Cell]:
    settings = CompareSettings(overrides=assumed.overrides)
    cards = CARDS if assumed.on_cards else {}
    return frontier_of_shapes([model], settings, tuple(CARDS), assumed.routing, cards)


def message_us(model: str, assumed: Assumed) -> list[float]:
    """[to the host and back, to the device and back] with one row of the model."""
    openings = Costs(load_hardware(CARDS[80], **assumed.overrides), model_named(model)).openings
    return [round(openings[tier] / PS_PER_US, 2) for tier in ("host", "device")]


def as_rows(name: str, cell: Cell) -> Iterator[dict[str, Any]]:
    """Of each limit of loss: the best row of the two fastest sides, of the device, of joint plans that leave it idle,
    and of the paper's plan; each as [name, side, tokens/s, loss, part of choices on the GPU], fastest first."""
    for limit, loss in LIMITS.items():
        within = [row for row in cell.rows if row.loss <= loss * (1 + 1e-6)]
        best: dict[str, Summary] = {}
        for row in within:
            best.setdefault(_side(row), row)
        ranked = list(best.values())
        paper = next((row for row in within if row.system == "balanced"), None)
        kept = [*ranked[:2], best.get("device"), best.get("joint"), paper]
        told = dict.fromkeys(_said(row) for row in kept if row is not None)
        rows = sorted(told, key=lambda row: -row[2])
        if rows:
            yield {"assumed": name, "model": cell.model, "gb": cell.memory_gb, "limit": limit, "rows": rows}


def _said(row: Summary) -> tuple[str, str, float, float, float]:
    numbers = round(row.decode_tokens_per_s, 2), round(row.loss, 4), round(row.hit_mass, 3)
    return _name(row), _side(row), *numbers


def _side(row: Summary) -> str:
    """A joint plan that leaves the device idle is no win of the device."""
    return "device" if row.system in DEVICE and row.device_busy > 0 else row.system


def _name(row: Summary) -> str:
    words = row.policy.split(",")[0]
    if row.system in DEVICE:
        name = _SHORT.get(row.system, row.system)
        return name if _side(row) == "device" else f"{name}, GPU alone"
    if row.system == "ktransformers":
        words = "4/4" if row.policy.endswith("GPU 4") else row.policy.split("CPU ")[1]
    return f"{_SHORT.get(row.system, row.system)} {words}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--assumed", default=",".join(ASSUMED), help="some of the assumptions, with commas")
    parser.add_argument("--jobs", type=int, default=2)
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement = Measurement(__doc__)
    models = arguments.models.split(",")
    maps = {name: ASSUMED[name] for name in arguments.assumed.split(",")}
    figures: dict[str, Any] = {
        "limits": {name: round(loss, 4) for name, loss in LIMITS.items()},
        "cards": {str(size): card for size, card in CARDS.items()},
        "models": models,
        "band": [],
        "devices": [],
        "prices": {},
        "cells": [],
    }
    with ProcessPoolExecutor(arguments.jobs) as pool:
        asked = {name: [pool.submit(cells_of, model, maps[name]) for model in models] for name in maps}
        for name, found in asked.items():
            figures["cells"] += [row for model in found for cell in model.result() for row in as_rows(name, cell)]
            if name in _OF_MESSAGES:
                figures["prices"][name] = message_us(models[0], maps[name])
            if name not in PRICES:
                figures["band" if name in BAND else "devices"].append(name)
            measurement.save(figures, arguments.json)
            print(name, file=sys.stderr, flush=True)
    measurement.end(figures, arguments.json)


if __name__ == "__main__":
    main()
