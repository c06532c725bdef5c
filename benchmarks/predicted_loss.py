"""How well does the loss that a plan is predicted to have agree with what it loses on subjects that nothing covered?

    python benchmarks/predicted_loss.py [--models tiny-mixtral tiny-qwen3-moe] [--sequences 16] [--json FILE]

The six held-out domains in two halves, each with replicas calibrated on the bundled text less everything of its three
domains (uncovered_text.py). Plans of every bit rule, 1.5 to 4 bits on average, with no expert hot, a quarter and half;
and joint plans of the same GPU memory and no more predicted loss, for experts of the size of Mixtral-8x7B's on the
paper's hardware. Each prompt is planned alone, and its prediction is by its own prompt's routing, as in the plugin: the
weight of each layer in nats, times the mean loss of its experts. Measured: rise of the negative log-likelihood over
full precision on the tokens behind the prompt, by quality.py's own forward, which loses what the plugin does.

Nothing is fitted to this text: the nats come from calibration text alone. `ratio` is measured over predicted loss,
`off` measured less predicted. `pairs` sets plans of the same memory and bits beside each other on the same sequences:
predicted and measured difference. Errors are those of paired means over sequences. Last line of stdout: one JSON
object.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import measured
import numpy as np
import torch
from numpy.typing import NDArray
from quality import MODEL, SELECTORS, Cell, MixedModel, held_out_sequences, loss_tables, mean_and_error
from rich.console import Console
from rich.table import Table
from uncovered_text import FOLDS, replicas_without

from ndp_device.kernels.reference import ReferenceKernel
from ndp_device.replicas.store import ExpertStore
from ndp_device.timing.spec import load_hardware
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.simulation.costs import Costs, model_named
from vllm_ndp.simulation.joint_rule import JointRule

JOINT = "joint"
RULES = ("uniform", "relative", "layers", JOINT)
AVG_BITS = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
PARTS_HOT = (0.0, 0.25, 0.5)
PAIRS = (("layers", "uniform"), (JOINT, "layers"))
PAIRED_AT = (2.0, 3.0, 4.0)
HARDWARE, PRICED = "h100-ndp512", "mixtral-8x7b"
_AT_ONCE = 16
BINS = ((0.0, 0.01), (0.01, 0.03), (0.03, 0.1), (0.1, 0.3), (0.3, 10.0))
"""Of predicted nats."""
Losses = NDArray[np.float64]
Found = dict[Cell, tuple[Losses, Losses]]
"""Predicted and measured nats of every sequence, both [N]."""


def plans_of(num_experts: int) -> list[Cell]:
    points = itertools.product(RULES, AVG_BITS, PARTS_HOT)
    return [
        Cell(bits, round(hot * num_experts), rule, "prefill")
        for rule, bits, hot in points
        if (bits < max(AVG_BITS) or rule in ("uniform", JOINT))  # at 4 bits the others have nothing to choose
        and (hot or rule != JOINT)  # without memory of the GPU a joint plan is the other
    ]


def planned(cell: Cell, prompt: RoutingStats, loss: LossTable, costs: Costs) -> tuple[NDArray[np.uint8], float]:
    """Bits [L, E], 0 or 16 in full precision, and the loss that they are predicted to have."""
    rule = "layers" if cell.selector == JOINT else SELECTORS[cell.selector][0]
    policy, budget = load_policy("prefill", PolicySettings(bit_rule=rule)), Budget(cell.hot_experts, cell.avg_bits)
    score = policy.score(prompt)
    placement = policy.place([score], None, budget)
    plan = policy.assign(score, placement, loss, budget)
    bits = plan.bits
    if cell.selector == JOINT:
        found = JointRule(costs, "gpu+device", loss, cell.hot_experts).plan(score.values, 1, placement, plan)
        bits = np.where(found.placement.hot, found.placement.widths, found.bits.bits).astype(np.uint8)
    nats = loss.predicted_nats(score, bits)
    if nats is None:
        raise SystemExit("the replicas do not say how much losses matter: quantize them with text")
    return bits, nats


def measure(model_dir: Path, per_domain: int) -> Found:
    sequences = held_out_sequences(model_dir, per_domain)
    cache = measured.ROOT / ".cache" / "quality" / model_dir.name
    found: Found = {}
    for fold, domains in enumerate(FOLDS):
        replicas, _ = replicas_without(fold, model_dir, MODEL, cache)
        for cell, (predicted, rise) in measured_plans(
            model_dir, replicas, [sequences[name] for name in domains]
        ).items():
            before = found.get(cell, (np.zeros(0), np.zeros(0)))
            found[cell] = np.concatenate([before[0], predicted]), np.concatenate([before[1], rise])
    return found


def measured_plans(model_dir: Path, replicas: Path, sequences: list[torch.Tensor]) -> Found:
    store = ExpertStore(model_dir, replicas, kernel=ReferenceKernel())
    model, loss, shape = MixedModel(model_dir, store), loss_tables(replicas)["relative"], model_named(PRICED)
    sizes = {name: getattr(store.shape, name) for name in ("num_layers", "num_experts", "top_k")}
    decoder = shape.decoder[:1] * store.shape.num_layers
    costs = Costs(load_hardware(HARDWARE), dataclasses.replace(shape, **sizes, decoder=decoder))
    cells = plans_of(store.shape.num_experts)
    predicted: dict[Cell, list[float]] = {cell: [] for cell in cells}
    rises: dict[Cell, list[Losses]] = {cell: [] for cell in cells}
    for batch in torch.cat(sequences).split(_AT_ONCE):
        prompts, full = model.prefill(batch), model.decode(None)
        for cell in cells:
            bits, nats = zip(*(planned(cell, prompt, loss, costs) for prompt in prompts), strict=True)
            predicted[cell] += nats
            rises[cell].append(model.decode(np.stack(bits)) - full)
    return {cell: (np.array(predicted[cell]), np.concatenate(rises[cell])) for cell in cells}


def row_of(cell: Cell, predicted: Losses, rise: Losses) -> dict[str, Any]:
    mean, error = mean_and_error(rise)
    off, off_error = mean_and_error(rise - predicted)
    return {
        "plan": cell.selector,
        "avg_bits": cell.avg_bits,
        "hot_experts": cell.hot_experts,
        "predicted_nats": round(float(np.mean(predicted)), 5),
        "measured_nats": round(mean, 5),
        "standard_error": round(error, 5),
        "off": round(off, 5),
        "off_error": round(off_error, 5),
    }


def pairs_of(found: Found) -> list[dict[str, Any]]:
    """One plan less another with as many hot experts and bits: what was predicted, and what was measured."""
    rows = []
    for (name, against), bits in itertools.product(PAIRS, PAIRED_AT):
        for one in (cell for cell in found if (cell.selector, cell.avg_bits) == (name, bits)):
            other = dataclasses.replace(one, selector=against if bits < max(AVG_BITS) else "uniform")
            if one == other or other not in found:
                continue
            predicted, rise = (mine - theirs for mine, theirs in zip(found[one], found[other], strict=True))
            row = row_of(one, predicted, rise)
            rows.append({"plan": row.pop("plan"), "against": other.selector, **row})
    return rows


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
    parser.add_argument("--sequences", type=int, default=16, help="per domain, of 512 tokens, the first 256 a prompt")
    measured.add_json_option(parser)
    arguments = parser.parse_args()
    measurement = measured.Measurement(str(__doc__))
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for name in arguments.models:
        found = measure(measured.ROOT / "models" / name, arguments.sequences)
        rows = [row_of(cell, *losses) for cell, losses in found.items()]
        figures[name] = {"sequences": len(next(iter(found.values()))[1]), **summary(rows)}
        figures[name] |= {"pairs": pairs_of(found), "rows": rows}
        measurement.save(figures, arguments.json)
        print_tables(name, figures[name])
    measurement.end(figures, arguments.json)


def print_tables(name: str, figures: dict[str, Any]) -> None:
    table = Table(title=f"{name}: {figures['plans']} plans, rank correlation {figures['rank_correlation']}")
    for column in ("predicted nats", "plans", "measured / predicted: least, median, most", "median error"):
        table.add_column(column, justify="right")
    for one in figures["bins"]:
        ratio = ", ".join(f"{value:g}" for value in one["ratio"])
        table.add_row(
            f"{one['from_nats']:g} to {one['to_nats']:g}", str(one["plans"]), ratio, f"{one['median_error']:g}"
        )
    console = Console(width=120)
    console.print(table)
    table = Table(title="plans of the same memory and bits on the same sequences, nats (error of the paired mean)")
    for column in ("bits", "hot", "plan less plan", "predicted", "measured", "measured less predicted"):
        table.add_column(column, justify="right")
    for row in figures["pairs"]:
        table.add_row(
            f"{row['avg_bits']:g}",
            str(row["hot_experts"]),
            f"{row['plan']} - {row['against']}",
            f"{row['predicted_nats']:+.4f}",
            f"{row['measured_nats']:+.4f} ({row['standard_error']:.4f})",
            f"{row['off']:+.4f} ({row['off_error']:.4f})",
        )
    console.print(table)


if __name__ == "__main__":
    main()
