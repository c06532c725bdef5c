"""How well does the loss that a plan is predicted to have agree with what it loses on text that calibration never saw?

    python benchmarks/predicted_loss.py [--models tiny-mixtral tiny-qwen3-moe] [--sequences 4] [--json FILE]

Plans of every bit rule, 1.5 to 4 bits on average, with no expert hot, a quarter and half. Each prompt is planned alone,
and its prediction is by its own prompt's routing, as in the plugin: the weight of each layer in nats, times the mean
loss of its experts. Measured: rise of the negative log-likelihood over full precision on the tokens behind the prompt,
by quality.py's own forward, on held-out text; the error is that of the paired mean over sequences.

Nothing is fitted to this text: the nats come from calibration text alone. `ratio` is measured over predicted loss.
Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import measured
import numpy as np
import torch
from numpy.typing import NDArray
from quality import SELECTORS, Cell, MixedModel, held_out_sequences, loss_tables, mean_and_error
from rich.console import Console
from rich.table import Table

from ndp_device.kernels.reference import ReferenceKernel
from ndp_device.replicas.store import ExpertStore
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import Policy, PolicySettings, load_policy
from vllm_ndp.planning.stats import RoutingStats

RULES = ("uniform", "relative", "layers")
AVG_BITS = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
PARTS_HOT = (0.0, 0.25, 0.5)
_AT_ONCE = 16
BINS = ((0.0, 0.01), (0.01, 0.03), (0.03, 0.1), (0.1, 0.3), (0.3, 10.0))
"""Of predicted nats."""


def plans_of(num_experts: int) -> list[Cell]:
    points = itertools.product(RULES, AVG_BITS, PARTS_HOT)
    return [
        Cell(bits, round(hot * num_experts), rule, "prefill")
        for rule, bits, hot in points
        if bits < max(AVG_BITS) or rule == RULES[0]  # at 4 bits there is nothing to choose
    ]


def planned(cell: Cell, policy: Policy, prompt: RoutingStats, loss: LossTable) -> tuple[NDArray[np.uint8], float]:
    """Bits [L, E], 0 where hot, and the loss that they are predicted to have."""
    budget, score = Budget(cell.hot_experts, cell.avg_bits), policy.score(prompt)
    bits = policy.assign(score, policy.place([score], None, budget), loss, budget).bits
    nats = loss.predicted_nats(score, bits)
    if nats is None:
        raise SystemExit("the replicas do not say how much losses matter: quantize them with text")
    return bits, nats


def measure(model_dir: Path, per_domain: int) -> list[dict[str, Any]]:
    replicas = model_dir.with_name(f"{model_dir.name}-replicas")
    store = ExpertStore(model_dir, replicas, kernel=ReferenceKernel())
    model, loss = MixedModel(model_dir, store), loss_tables(replicas)["relative"]
    cells = plans_of(store.shape.num_experts)
    predicted: dict[Cell, list[float]] = {cell: [] for cell in cells}
    rises: dict[Cell, list[NDArray[np.float64]]] = {cell: [] for cell in cells}
    for batch in torch.cat(list(held_out_sequences(model_dir, per_domain).values())).split(_AT_ONCE):
        prompts, full = model.prefill(batch), model.decode(None)
        for cell in cells:
            policy = load_policy("prefill", PolicySettings(bit_rule=SELECTORS[cell.selector][0]))
            bits, nats = zip(*(planned(cell, policy, prompt, loss) for prompt in prompts), strict=True)
            predicted[cell] += nats
            rises[cell].append(model.decode(np.stack(bits)) - full)
    return [row_of(model_dir.name, cell, predicted[cell], np.concatenate(rises[cell])) for cell in cells]


def row_of(model: str, cell: Cell, predicted: list[float], rise: NDArray[np.float64]) -> dict[str, Any]:
    mean, error = mean_and_error(rise)
    return {
        "model": model,
        "bit_rule": SELECTORS[cell.selector][0],
        "avg_bits": cell.avg_bits,
        "hot_experts": cell.hot_experts,
        "predicted_nats": round(float(np.mean(predicted)), 5),
        "measured_nats": round(mean, 5),
        "standard_error": round(error, 5),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ranks over all plans, and by bins of the prediction what part of it came true."""
    predicted, found, errors = (
        np.array([row[name] for row in rows]) for name in ("predicted_nats", "measured_nats", "standard_error")
    )
    ranks = [np.argsort(np.argsort(values)) for values in (predicted, found)]
    told = found > 2 * errors
    bins = []
    for low, high in BINS:
        inside = told & (predicted >= low) & (predicted < high)
        if inside.any():
            ratio = found[inside] / predicted[inside]
            off = np.median(np.abs(predicted[inside] / found[inside] - 1))
            bins.append(
                {
                    "from_nats": low,
                    "to_nats": high,
                    "plans": int(inside.sum()),
                    "ratio": [round(float(np.quantile(ratio, at)), 2) for at in (0.0, 0.5, 1.0)],
                    "median_error": round(float(off), 3),
                }
            )
    return {
        "plans": len(rows),
        "above_two_errors": int(told.sum()),
        "rank_correlation": round(float(np.corrcoef(*ranks)[0, 1]), 3),
        "median_error": round(float(np.median(np.abs(predicted[told] / found[told] - 1))), 3),
        "bins": bins,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny-mixtral", "tiny-qwen3-moe"], help="under models/")
    parser.add_argument("--sequences", type=int, default=4, help="per domain, of 512 tokens, the first 256 a prompt")
    measured.add_json_option(parser)
    arguments = parser.parse_args()
    measurement = measured.Measurement(str(__doc__))
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for name in arguments.models:
        rows = measure(measured.ROOT / "models" / name, arguments.sequences)
        figures[name] = {**summary(rows), "rows": rows}
        measurement.save(figures, arguments.json)
        print_table(name, figures[name])
    measurement.end(figures, arguments.json)


def print_table(name: str, figures: dict[str, Any]) -> None:
    table = Table(title=f"{name}: {figures['plans']} plans, rank correlation {figures['rank_correlation']}")
    for column in ("predicted nats", "plans", "measured / predicted: least, median, most", "median error"):
        table.add_column(column, justify="right")
    for one in figures["bins"]:
        ratio = ", ".join(f"{value:g}" for value in one["ratio"])
        table.add_row(
            f"{one['from_nats']:g} to {one['to_nats']:g}", str(one["plans"]), ratio, f"{one['median_error']:g}"
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
