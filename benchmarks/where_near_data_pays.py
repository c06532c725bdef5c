"""Which system decodes fastest on cards of 8 to 96 GB, where near-data computing wins, and what would make it win?

The cells of vllm_ndp/lab/frontier.py for five public models under the assumptions that decide, one changed at a time:
routing, the price of a hop, host memory, H100 rates at every size; then devices that are faster than the paper's. An
ideal DRAM, batch 1. Everything is simulated. One command reproduces every figure of the page:

    python benchmarks/where_near_data_pays.py --out docs/map.md
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ndp.lab.compare import CompareSettings
from vllm_ndp.lab.frontier import CARDS, DEVICE, LIMITS, SHAPES, Cell, frontier_of_shapes


@dataclass(frozen=True)
class Assumed:
    """What a map is drawn for."""

    routing: str = "auto"
    overrides: dict[str, str | int] = field(default_factory=dict)
    on_cards: bool = True


BAND = {
    "as fitted": Assumed(),
    "every model memoryless": Assumed(routing="memoryless"),
    "every model as sticky as Qwen3-30B": Assumed(routing="qwen3-30b-a3b"),
    "hops by DMA": Assumed(overrides={"link.launch": "dma"}),
    "host 80 GB/s": Assumed(overrides={"host.memory_bytes_per_s": 80 * 10**9}),
    "host 614 GB/s": Assumed(overrides={"host.memory_bytes_per_s": 614 * 10**9}),
    "H100 rates at every size": Assumed(on_cards=False),
}
DEVICES = {
    "device 1 TB/s": Assumed(overrides={"dram.ideal_bytes_per_s": 1024 * 10**9}),
    "device 2 TB/s, twice the arrays": Assumed(overrides={"dram.ideal_bytes_per_s": 2048 * 10**9, "array.units": 128}),
    "load-to-use 150 ns": Assumed(overrides={"link.load_to_use_ps": 150_000}),
    "arrays that dequantise to fp16": Assumed(overrides={"array.pe_mode": "fp16_dequant"}),
    "host 80 GB/s, device 1 TB/s": Assumed(
        overrides={"host.memory_bytes_per_s": 80 * 10**9, "dram.ideal_bytes_per_s": 1024 * 10**9}
    ),
}
OLD = {
    "mixtral-8x7b": ("device 90", "device 126", "device 126", "4 bits 373", "4 bits 373", "4 bits 373", "4 bits 373"),
    "qwen3-30b-a3b": ("device 504", "device 635", "4 bits 955", "4 bits 955", "8 bits 759", "8 bits 759", "8 bits 759"),
    "gpt-oss-120b": ("-", "device 285", "device 309", "device 333", "device 364", "4 bits 668", "4 bits 668"),
    "qwen3-235b-a22b": ("-", "-", "device 61", "device 65", "device 72", "device 85", "device 90"),
    "deepseek-v3": ("-", "-", "-", "-", "device 38", "device 41", "device 43"),
}
"""The map of 2026-11-22, at 8, 16, 24, 32, 48, 80 and 96 GB with H100 rates."""


def cells_of(model: str, assumed: Assumed) -> list[Cell]:
    settings = CompareSettings(overrides=assumed.overrides)
    cards = CARDS if assumed.on_cards else {}
    return frontier_of_shapes([model], settings, tuple(CARDS), assumed.routing, cards)


def as_dict(cell: Cell) -> dict[str, Any]:
    rows = [
        {
            "system": row.system,
            "policy": row.policy,
            "tokens_per_s": round(row.decode_tokens_per_s, 2),
            "loss": round(row.loss, 4),
            "hits": round(row.hit_mass, 3),
            "gpu_gb": round(row.gpu_gb, 1),
            "routing": row.routing,
        }
        for row in cell.rows
    ]
    return {"model": cell.model, "memory_gb": cell.memory_gb, "rows": rows}


def said(cell: dict[str, Any], limit: float) -> str:
    """Winner and runner-up within the limit; the device's speed where it is neither."""
    rows = [row for row in cell["rows"] if row["loss"] <= round(limit, 4)]
    if not rows:
        return "nothing fits"
    first = rows[0]
    second = next((row for row in rows if _side(row) != _side(first)), None)
    text = f"{_name(first)} {first['tokens_per_s']:.0f}"
    if _side(first) == "device":
        text = f"**{text}**"
    if second is not None:
        text += f", {_name(second)} {second['tokens_per_s']:.0f}"
    device = next((row for row in rows if _side(row) == "device"), None)
    if device is not None and device not in (first, second):
        text += f" (device {device['tokens_per_s']:.0f})"
    return text


def _side(row: dict[str, Any]) -> str:
    return "device" if row["system"] in DEVICE else str(row["system"])


def _name(row: dict[str, Any]) -> str:
    short = {"expert_cache": "cache", "ktransformers": "ktransformers", "quantized": "all", "llama_cpp": "llama.cpp"}
    words = row["policy"].split(",")[0]
    if row["system"] in DEVICE:
        return "device" if row["system"] == "balanced" else "joint"
    if row["system"] == "ktransformers":
        words = "4/4" if row["policy"].endswith("GPU 4") else row["policy"].split("CPU ")[1]
    return f"{short.get(row['system'], row['system'])} {words}"


def table(cells: list[dict[str, Any]], limit: float) -> list[str]:
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    at = {(cell["model"], cell["memory_gb"]): cell for cell in cells}
    lines = ["| GB | " + " | ".join(models) + " |", "|---|" + "---|" * len(models)]
    for size in CARDS:
        lines.append(f"| {size} | " + " | ".join(said(at[model, size], limit) for model in models) + " |")
    return lines


def wins(cells: list[dict[str, Any]], limit: float) -> str:
    """How many cells the device wins, and which."""
    won = [cell for cell in cells if said(cell, limit).startswith("**")]
    filled = [cell for cell in cells if said(cell, limit) != "nothing fits"]
    listed = ", ".join(f"{cell['model']} {cell['memory_gb']}" for cell in won) or "none"
    return f"{len(won)} of {len(filled)}: {listed}"


def page(maps: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        f"# {(__doc__ or '').splitlines()[0]}",
        "",
        "Written by `benchmarks/where_near_data_pays.py`; simulated.",
        "",
    ]
    for name, limit in LIMITS.items():
        lines += [f"## Loss at most that of {name} everywhere ({limit:.4f}), as fitted", ""]
        lines += [*table(maps["as fitted"], limit), ""]
    lines += ["## Cells that the device wins", "", "| assumed | at 4 bits' loss | at 3 bits' |", "|---|---|---|"]
    lines += [f"| {n} | {wins(c, LIMITS['4 bits'])} | {wins(c, LIMITS['3 bits'])} |" for n, c in maps.items()]
    lines += ["", "## Cell by cell: the map before, the same cell at H100 rates, and now", ""]
    lines += [
        "Before: no expert cache, no joint plan, no 4 bits on KTransformers' GPU; a hop to the host cost 7 us, to the"
    ]
    lines += ["device 1.1; routing without memory. H100 rates: all of that mended. Now: the card's own rates too.", ""]
    lines += ["| model | GB | before | H100 rates | now |", "|---|---|---|---|---|"]
    now, same = ({(c["model"], c["memory_gb"]): c for c in maps[n]} for n in ("as fitted", "H100 rates at every size"))
    for model, old in OLD.items():
        for size, before in zip(CARDS, old, strict=True):
            if (model, size) in now:
                cells = (said(each[model, size], LIMITS["3 bits"]) for each in (same, now))
                lines.append(f"| {model} | {size} | {before} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the tables here")
    arguments = parser.parse_args()
    maps: dict[str, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        asked = {
            (name, model): pool.submit(cells_of, model, assumed)
            for name, assumed in (BAND | DEVICES).items()
            for model in arguments.models.split(",")
        }
        for (name, model), cells in asked.items():
            maps.setdefault(name, []).extend(as_dict(cell) for cell in cells.result())
            print(f"{name}: {model}", file=sys.stderr, flush=True)
    if arguments.out:
        arguments.out.write_text(page(maps))
    print(
        json.dumps(
            {
                name: {"4 bits": wins(c, LIMITS["4 bits"]), "3 bits": wins(c, LIMITS["3 bits"])}
                for name, c in maps.items()
            }
        )
    )


if __name__ == "__main__":
    main()
