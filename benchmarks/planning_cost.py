"""How much CPU time does planning one prompt take on the host, with up to 24 576 experts?

What the plugin does between two steps when a prefill has ended: statistics of the prompt out of its routing, score,
which streamed experts the slots keep, placement and bits, what the device is told, and which experts go into which
slots. Copying experts and the device's part are not in it. Thread CPU time, the smallest of several runs, so that
neighbours matter less; the limit is the issue's 20 ms.

    python benchmarks/planning_cost.py                       # published models with many experts, half of them hot
    python benchmarks/planning_cost.py qwen3-next --tokens 2048 --requests 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from measured import Measurement, add_json_option
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ndp_device.model_shape import ModelShape
from ndp_device.timing.shapes import SHAPES, public_shape
from vllm_ndp.config import NdpSettings
from vllm_ndp.integration.hot_slots import HotSlots, SlotWeights
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import union_of_widths
from vllm_ndp.planning.replanner import Replanner
from vllm_ndp.planning.stats import RoutingStats

LIMIT_MS = 20.0
DEFAULT = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "kimi-k2", "qwen3-next")
PARTS = ("statistics", "score", "keep", "plan", "announce", "slots")


class NoKernel:
    """Slots are found, not filled."""

    def check_slots(self, num_slots: int) -> None:
        """Any number fits."""


def choices(shape: ModelShape, tokens: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Routing without any signal: the hot set turns over as much as it can."""
    random = np.random.default_rng(seed)
    ids = np.empty((tokens, shape.num_layers, shape.top_k), np.int64)
    for token in range(tokens):
        draws = random.random((shape.num_layers, shape.num_experts), dtype=np.float32)
        ids[token] = draws.argpartition(shape.top_k - 1, axis=1)[:, : shape.top_k]
    return ids, random.random(ids.shape, dtype=np.float32)


def slots_of(shape: ModelShape, num_hot: int) -> list[HotSlots]:
    held = SlotWeights(torch.zeros(num_hot, 2, 1), torch.zeros(num_hot, 1, 1))
    layers = [HotSlots(NoKernel(), held, shape.num_experts) for _ in range(shape.num_layers)]  # type: ignore[arg-type]
    for slots in layers:
        slots.expert_in[:] = np.arange(num_hot)
    return layers


def measure(shape: ModelShape, tokens: int, requests: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each part, and how many experts one plan moves."""
    num_hot, where = shape.num_experts // 2, (shape.num_layers, shape.num_experts)
    routed, layers = choices(shape, tokens, 0), slots_of(shape, num_hot)
    others = [RoutingStats.from_choices(*choices(shape, 64, n), shape.num_experts) for n in range(1, requests)]
    best: dict[str, float] = dict.fromkeys(PARTS, float("inf"))
    moved = 0
    for _ in range(rounds):
        rules = NdpSettings(hot_experts=num_hot).planner_rules(shape.num_experts, LossTable.nominal(*where))
        planner = Replanner(rules, *where)
        scores = {str(n): planner.score(stats) for n, stats in enumerate(others)}

        def timed(part: str, work: Callable[[], Any]) -> Any:
            start = time.thread_time()
            result = work()
            best[part] = min(best[part], 1e3 * (time.thread_time() - start))
            return result

        stats = timed("statistics", lambda: RoutingStats.from_choices(*routed, shape.num_experts))
        scores["new"] = timed("score", lambda planner=planner, stats=stats: planner.score(stats))

        timed(
            "keep",
            lambda planner=planner, scores=scores: planner.keep(list(scores.values()), np.zeros(where, np.bool_)),
        )
        change = timed("plan", lambda planner=planner, scores=scores: planner.replan(scores))
        plans = [plan.bits for plan in change.plans.values()]
        timed("announce", lambda plans=plans: union_of_widths(plans, where))
        hot = change.placement.hot
        timed("slots", lambda hot=hot: [slots.exchange(row) for slots, row in zip(layers, hot, strict=True)])
        moved = change.num_moved
    return best | {"moved_experts": float(moved)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"published: {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt")
    parser.add_argument("--requests", type=int, default=1, help="that run, the new one among them")
    parser.add_argument("--rounds", type=int, default=7)
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement = Measurement(__doc__ or "")
    rows = {}
    for name in arguments.models or DEFAULT:
        rows[name] = measure(public_shape(name), arguments.tokens, arguments.requests, arguments.rounds)
    title = f"measured CPU ms, a prompt of {arguments.tokens} tokens, {arguments.requests} running, limit {LIMIT_MS:g}"
    table = Table(title=title)
    for column in ("model", "experts", *PARTS, "all", "experts to move"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, row in rows.items():
        shape, total = SHAPES[name], sum(row[part] for part in PARTS)
        cells = [f"{row[part]:.2f}" for part in PARTS]
        count = str(shape.num_layers * shape.num_experts)
        table.add_row(name, count, *cells, f"{total:.2f}", f"{row['moved_experts']:.0f}")
    Console(width=140).print(table)
    figures = {
        name: {f"measured_{part}_ms": round(row[part], 3) for part in PARTS}
        | {
            "measured_all_ms": round(sum(row[part] for part in PARTS), 3),
            "experts": SHAPES[name].num_layers * SHAPES[name].num_experts,
            "moved": int(row["moved_experts"]),
        }
        for name, row in rows.items()
    }
    measurement.end({"tokens": arguments.tokens, "requests": arguments.requests, "models": figures}, arguments.json)


if __name__ == "__main__":
    main()
