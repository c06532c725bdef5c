"""What do low-bit experts lose on subjects that no calibration text covers: uniform auto-gptq, our default, and tuned?

    python benchmarks/quality_uncovered.py [--sequences 2] [--harness-sequences 16] [--cache DIR] [--json FILE]

The six held-out domains in two halves (uncovered_text.py). Each half is measured with replicas that were calibrated on
the bundled text less everything of its three domains, the same text for every arm. Bytes are equal: every arm reads the
same average bits per weight, with scales of the same groups.

    served   through vLLM, the plugin and a device process, as quality_served.py does: one request at a time, the prompt
             in full precision, every later token forced; execution as in the paper, so that hot experts stay in full
             precision
    harness  the same by quality.py's own forward, for more sequences

Each number is the mean over sequences of the nll above full precision with the standard error of the paired mean, and
its part of what uniform auto-gptq loses on the same sequences, with a jackknife error. What is measured is kept in the
cache directory, so that a run goes on where it was stopped. Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measured
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from quality import MODEL, SELECTORS, Cell, MixedModel, held_out_sequences, loss_tables, mean_and_error, plan_bits
from quality_served import served_nll
from rich.console import Console
from rich.table import Table
from torch import Tensor
from uncovered_text import FOLDS, text_without

from ndp_device.calibration.build import build_calibrated, build_tuned, run_job
from ndp_device.experts.expert import QuantizedMatrix
from ndp_device.kernels.reference import ReferenceKernel
from ndp_device.replicas.format import LayerReplicas, ReplicaFiles
from ndp_device.replicas.store import ExpertStore
from vllm_ndp.planning.importance import ImportanceScore

CELLS = ((3.0, 0), (3.0, 4), (2.0, 0), (2.0, 4))
"""Average bits, hot experts of 8."""
_AT_ONCE = 16
Losses = NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """One way to make replicas, and to deal bits."""

    name: str
    solver: Any
    tuned: bool
    selector: str
    shrink: float = 0.0


ARMS = (
    Arm("auto-gptq, uniform", "auto-gptq", tuned=False, selector="uniform"),
    Arm("nested", "nested", tuned=False, selector="relative"),
    Arm("nested, tuned", "nested", tuned=True, selector="relative"),
    Arm("independent", "independent", tuned=False, selector="relative"),
    Arm("independent, tuned", "independent", tuned=True, selector="relative"),
    Arm("nested, shrunk", "nested", tuned=False, selector="relative", shrink=0.3),
    Arm("nested, shrunk, tuned", "nested", tuned=True, selector="relative", shrink=0.3),
    Arm("independent, shrunk", "independent", tuned=False, selector="relative", shrink=0.1),
)
"""The first is the yardstick: auto-gptq with its best flags (asymmetric, mse search, act-order)."""


class Study:
    """The replicas of every arm and fold, made once, and what was measured of them."""

    def __init__(self, cache: Path, tune_steps: int) -> None:
        self.cache, self.tune_steps = cache, tune_steps
        cache.mkdir(parents=True, exist_ok=True)

    def replicas(self, arm: Arm, fold: int) -> Path:
        text = self.cache / f"without-{'-'.join(FOLDS[fold])}.txt"
        text.write_text(text_without(MODEL, FOLDS[fold]))
        base = self.cache / f"{arm.solver}-{arm.shrink:g}-{fold}"
        build_calibrated(MODEL, base, text, solver=arm.solver, shrink=arm.shrink)
        if arm.solver == "auto-gptq":
            return with_one_bit(base)
        if not arm.tuned:
            return base
        tuned = base.with_name(f"{base.name}-tuned-{self.tune_steps}")
        build_tuned(MODEL, base, tuned, text, steps=self.tune_steps)
        return tuned

    def losses(self, how: str, arm: Arm, replicas: Path, sequences: Tensor) -> dict[tuple[float, int], Losses]:
        """(average bits, hot experts) -> nll of each sequence above full precision."""
        digest = ReplicaFiles(replicas, check_contents=False).manifest.digest
        of_sequences = hashlib.blake2b(sequences.numpy().tobytes(), digest_size=4).hexdigest()
        path = self.cache / f"{how}-{arm.selector}-{digest}-{of_sequences}.json"
        nll: dict[str, list[float]] = json.loads(path.read_text()) if path.exists() else {}
        model = MixedModel(MODEL, ExpertStore(MODEL, replicas, kernel=ReferenceKernel()))
        for bits, hot in CELLS:
            if f"{bits:g} {hot}" not in nll:
                cell = Cell(bits, hot, arm.selector, "prefill")
                measured_nll = (
                    served(replicas, sequences, cell) if how == "served" else harness(model, replicas, sequences, cell)
                )
                nll[f"{bits:g} {hot}"] = measured_nll.tolist()
                path.write_text(json.dumps(nll))
        full = harness(model, replicas, sequences, None)
        return {(bits, hot): np.array(nll[f"{bits:g} {hot}"]) - full for bits, hot in CELLS}


def with_one_bit(replicas: Path) -> Path:
    """auto-gptq's replicas with a place-holder at 1 bit, which it cannot make and the plugin wants; no plan names it.

    It is the first plane of 2 bits: levels in the middle of the two that share it.
    """
    files, out = ReplicaFiles(replicas), replicas.with_name(f"{replicas.name}-with-1")
    wanted = msgspec.structs.replace(files.manifest, bits=(1, *files.manifest.bits), layers={})

    def halved(matrix: QuantizedMatrix) -> QuantizedMatrix:
        offset = (matrix.offset + matrix.scale / 2).astype(np.float16)
        scale = (2 * matrix.scale).astype(np.float16)
        return dataclasses.replace(matrix, bits=1, planes=matrix.planes[:1], scale=scale, offset=offset)

    def make_layer(layer: int, advance: Callable[[], None]) -> LayerReplicas:
        experts = []
        for expert in range(wanted.model.num_experts):
            made = {bits: files.expert(layer, expert, bits) for bits in files.manifest.bits}
            one = dataclasses.replace(made[2], bits=1, w13=halved(made[2].w13), w2=halved(made[2].w2))
            experts.append({1: one} | made)
            advance()
        losses = [table.copy() for table in files.layer_losses(layer)]
        for table in losses:
            table[:, 0] = 10 * table[:, 1]
        return LayerReplicas(tuple(experts), *losses, *files.calibration_of(layer))  # type: ignore[call-arg]

    run_job(out, wanted, make_layer, show_progress=False)
    return out


def served(replicas: Path, sequences: Tensor, cell: Cell) -> Losses:
    settings = {
        "avg_bits": cell.avg_bits,
        "hot_experts": cell.hot_experts,
        "bit_rule": SELECTORS[cell.selector][0],
        "execution": "paper",
        "replicas": str(replicas),
    }
    nll, totals = served_nll(sequences, settings)
    if totals["fallback_pairs"] or not totals["cold_pairs"]:
        raise SystemExit(f"{totals['fallback_pairs']} of {totals['cold_pairs']} pairs were not computed by the device")
    return nll


def harness(model: MixedModel, replicas: Path, sequences: Tensor, cell: Cell | None) -> Losses:
    """cell: None for full precision."""
    nobody = ImportanceScore.from_weights(np.ones((len(model.experts), model.experts[0].num_experts)))
    nll = []
    for batch in sequences.split(_AT_ONCE):
        prompts = model.prefill(batch)
        plans = None if cell is None else [plan_bits(cell, p, p, nobody, loss_tables(replicas)) for p in prompts]
        nll.append(model.decode(None if plans is None else np.stack(plans)))
    return np.concatenate(nll)


def part_of(losses: Losses, yardstick: Losses) -> tuple[float, float]:
    """Ratio of the means, and its jackknife error."""
    n = len(losses)
    left_out = (losses.sum() - losses) / (yardstick.sum() - yardstick)
    return float(losses.mean() / yardstick.mean()), float(
        np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=2, help="served, per domain")
    parser.add_argument("--harness-sequences", type=int, default=16, help="per domain")
    parser.add_argument("--tune-steps", type=int, default=300)
    parser.add_argument("--arms", nargs="+", default=[arm.name for arm in ARMS])
    parser.add_argument("--cache", type=Path, default=measured.ROOT / ".cache" / "quality")
    measured.add_json_option(parser)
    arguments = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(1)
    measurement = measured.Measurement(str(__doc__))
    study = Study(arguments.cache.resolve(), arguments.tune_steps)
    found: dict[tuple[str, float, int, str], Losses] = {}
    for fold, domains in enumerate(FOLDS):
        for arm in (arm for arm in ARMS if arm.name in arguments.arms):
            replicas = study.replicas(arm, fold)
            for how, count in (("served", arguments.sequences), ("harness", arguments.harness_sequences)):
                if count:
                    sequences = torch.cat([held_out_sequences(MODEL, count)[domain] for domain in domains])
                    for (bits, hot), losses in study.losses(how, arm, replicas, sequences).items():
                        key = how, bits, hot, arm.name
                        found[key] = np.concatenate([found.get(key, np.empty(0)), losses])
    rows = []
    for (how, bits, hot, arm), losses in found.items():
        loss, error = mean_and_error(losses)
        row: dict[str, Any] = {"how": how, "avg_bits": bits, "hot_experts": hot, "arm": arm, "sequences": len(losses)}
        row |= {"delta_nll": round(loss, 5), "standard_error": round(error, 5)}
        if (how, bits, hot, ARMS[0].name) in found:
            part, part_error = part_of(losses, found[how, bits, hot, ARMS[0].name])
            row |= {"part_of_auto_gptq": round(part, 3), "part_error": round(part_error, 3)}
        rows.append(row)
    print_table(rows)
    measurement.end({"tune_steps": arguments.tune_steps, "folds": FOLDS, "rows": rows}, arguments.json)


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title="nll above full precision on uncovered domains (standard error), part of auto-gptq (error)")
    for name in ("", "average bits", "hot", *dict.fromkeys(row["arm"] for row in rows)):
        table.add_column(name, justify="right")
    by_place: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        place = row["how"], f"{row['avg_bits']:g}", str(row["hot_experts"])
        text = f"{row['delta_nll']:.4f} ({row['standard_error']:.4f})"
        if "part_of_auto_gptq" in row:
            text += f" {row['part_of_auto_gptq']:.2f} ({row['part_error']:.2f})"
        by_place.setdefault(place, []).append(text)
    for place, texts in by_place.items():
        table.add_row(*place, *texts)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
