"""What do low-bit experts lose on subjects that no calibration text covers: uniform auto-gptq, our default, and tuned?

    python benchmarks/quality_uncovered.py [--model DIR] [--sequences 2] [--harness-sequences 16] [--json FILE]

The six held-out domains in two halves (uncovered_text.py). Each half is measured with replicas that were calibrated on
the bundled text less everything of its three domains, the same text for every arm. Scales are of the same groups. Two
tables stand beside each other:

    at equal bytes   an arm's average is the one at which its plans keep as many bits per cold expert
    at equal time    it is the one at which the simulated device takes as long for decode's cold pairs of these
                     sequences, priced with the experts of mixtral-8x7b: the tiny ones would be priced by fixed costs

Equal to what the yardstick's uniform bits keep or take, that is; searched by planning alone. Widths of single pairs
are compared at equal time alone: their experts are held at all widths.

    served   through vLLM, the plugin and a device process, as quality_served.py does: one request at a time, the prompt
             in full precision, every later token forced; execution as in the paper, so that hot experts stay in full
             precision
    harness  the same by quality.py's own forward, for more sequences

`held` is the average over cold experts, `bits_read` the one over decode's cold pairs. It is higher where bits go to the
experts that are used most. `device_us` is what such a pair takes on the device.

Each number is the mean over sequences of the nll above full precision with the standard error of the paired mean, and
its part of what uniform auto-gptq loses on the same sequences, with a jackknife error. What is measured is kept in the
cache directory, so that a run goes on where it was stopped, and with --json the table as far as it is known after each
cell of each half. Last line of stdout: one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import measured
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from quality import (
    MODEL,
    SELECTORS,
    Cell,
    MixedModel,
    Routing,
    held_out_sequences,
    loss_tables,
    mean_and_error,
    plan_of,
    stacked,
    widths_of,
)
from quality_served import served_nll
from rich.console import Console
from rich.table import Table
from torch import Tensor
from uncovered_text import FOLDS, replicas_without

from ndp_device.calibration.build import build_tuned, run_job
from ndp_device.experts.expert import QuantizedMatrix
from ndp_device.kernels.reference import ReferenceKernel
from ndp_device.replicas.format import LayerReplicas, ReplicaFiles
from ndp_device.replicas.store import ExpertStore
from ndp_device.timing.spec import load_hardware
from ndp_device.widths import WIDTHS
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import BitwidthPlan
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.simulation.costs import Costs, model_named

CELLS = ((3.0, 0.0), (3.0, 0.5), (2.0, 0.0), (2.0, 0.5))
"""Average bits, part of the experts that is hot."""
_AT_ONCE = 16
Losses = NDArray[np.float64]
Sums = NDArray[np.float64]
"""[sequences, 5], see _sums."""
Point = tuple[float, float]
EQUAL = ("bytes", "time")
MODEL_PRICED, HARDWARE = "mixtral-8x7b", "h100-ndp512"
_HALVINGS = 12


@dataclass(frozen=True)
class Measured:
    """Of some sequences at one point."""

    losses: Losses
    sums: Sums


@dataclass(frozen=True)
class Arm:
    """One way to make replicas, and to deal bits."""

    name: str
    solver: Any
    tuned: bool
    selector: str
    shrink: float = 0.0

    @property
    def equal(self) -> tuple[str, ...]:
        """What it can be compared at."""
        return ("time",) if self.selector == "pairs" else EQUAL


ARMS = (
    Arm("auto-gptq, uniform", "auto-gptq", tuned=False, selector="uniform"),
    Arm("nested", "nested", tuned=False, selector="relative"),
    Arm("nested, over layers", "nested", tuned=False, selector="layers"),
    Arm("nested, tuned, over layers", "nested", tuned=True, selector="layers"),
    Arm("nested, by pair", "nested", tuned=False, selector="pairs"),
    Arm("nested, shrunk, over layers", "nested", tuned=False, selector="layers", shrink=0.3),
    Arm("nested, shrunk, tuned, over layers", "nested", tuned=True, selector="layers", shrink=0.3),
    Arm("independent, over layers", "independent", tuned=False, selector="layers"),
)
"""The first is the yardstick: auto-gptq with its best flags (asymmetric, mse search, act-order). By pair is the default
for few requests, over layers for several."""


class Study:
    """The replicas of every arm and fold, made once, and what was measured of them."""

    def __init__(self, model_dir: Path, cache: Path, tune_steps: int) -> None:
        self.model_dir, self.cache, self.tune_steps = model_dir, cache, tune_steps
        cache.mkdir(parents=True, exist_ok=True)

    def replicas(self, arm: Arm, fold: int) -> Path:
        base, text = replicas_without(fold, self.model_dir, MODEL, self.cache, arm.solver, arm.shrink)
        if arm.solver == "auto-gptq":
            return with_one_bit(base)
        made = base
        if arm.tuned:
            made = base.with_name(f"{base.name}-tuned-{self.tune_steps}")
            build_tuned(self.model_dir, base, made, text, steps=self.tune_steps)
        return made

    def measured(self, how: str, arm: Arm, replicas: Path, sequences: Tensor) -> dict[tuple[Point, str], Measured]:
        """(average bits, part hot), equal in what -> what the sequences lost there, kept as soon as it is known."""
        files = ReplicaFiles(replicas, check_contents=False)
        digest = f"{files.manifest.digest}-{files.loss_digest[:8]}"
        of_sequences = hashlib.blake2b(sequences.numpy().tobytes(), digest_size=4).hexdigest()
        path = self.cache / f"{how}-read-{arm.selector}-{digest}-{of_sequences}.json"
        known: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        wanted = [(point, equal) for point in CELLS for equal in arm.equal]
        if {_name(*one) for one in wanted} - known.keys():
            store = ExpertStore(self.model_dir, replicas, kernel=ReferenceKernel())
            forward = Forward(MixedModel(self.model_dir, store), loss_tables(replicas))
            num_experts = store.shape.num_experts
            cells = {
                (point, equal): forward.at_equal(
                    equal, sequences, Cell(point[0], round(point[1] * num_experts), arm.selector, "prefill")
                )
                for point, equal in wanted
            }
            full, by_cell = forward.run(sequences, list(dict.fromkeys(cells.values())))
            for one, cell in cells.items():
                nll, sums = by_cell[cell]
                if _name(*one) in known:
                    continue
                if how == "served":
                    nll = served(self.model_dir, replicas, sequences, cell)
                known[_name(*one)] = {"losses": (nll - full).tolist(), "sums": sums.tolist()}
                path.write_text(json.dumps(known))
        return {one: Measured(**{of: np.array(was) for of, was in known[_name(*one)].items()}) for one in wanted}


def _name(point: Point, equal: str) -> str:
    return f"{point[0]:g} {point[1]:g} {equal}"


class Forward:
    """quality.py's own forward, with plans by one loss table."""

    def __init__(self, model: MixedModel, losses: dict[str, LossTable]) -> None:
        self._model, self._losses = model, losses
        experts = model.experts
        self._nobody = ImportanceScore.from_weights(np.ones((len(experts), experts[0].num_experts)))
        self._routing: list[tuple[RoutingStats, Routing]] = []

    def at_equal(self, what: str, sequences: Tensor, cell: Cell) -> Cell:
        """The cell with the average of bits at which its plans keep, or take, what those of uniform bits do."""
        if cell.selector == "uniform":
            return cell
        if not self._routing:
            for batch in sequences.split(_AT_ONCE):
                prompts = self._model.prefill(batch)
                self._model.decode(None)
                self._routing += zip(prompts, self._model.routing(), strict=True)

        def of(one: Cell) -> float:
            sums = np.sum([_sums(self._plan(one, prompt), decode) for prompt, decode in self._routing], axis=0)
            kept, experts, _, pairs, device_ps = sums.tolist()
            return kept / experts if what == "bytes" else device_ps / pairs

        wanted, low, high = of(dataclasses.replace(cell, selector="uniform")), float(WIDTHS[0]), float(WIDTHS[-1])
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if of(dataclasses.replace(cell, avg_bits=middle)) > wanted else (middle, high)
        return dataclasses.replace(cell, avg_bits=round(low, 4))

    def _plan(self, cell: Cell, prompt: RoutingStats) -> BitwidthPlan:
        return plan_of(cell, prompt, prompt, self._nobody, self._losses)

    def run(self, sequences: Tensor, cells: Sequence[Cell]) -> tuple[Losses, dict[Cell, tuple[Losses, Sums]]]:
        """nll of each sequence in full precision, and at each cell with the bits that its cold pairs read."""
        full, nll, read = [], {cell: [] for cell in cells}, {cell: [] for cell in cells}
        for batch in sequences.split(_AT_ONCE):
            prompts = self._model.prefill(batch)
            full.append(self._model.decode(None))
            decodes = self._model.routing()
            for cell in cells:
                plans = [self._plan(cell, prompt) for prompt in prompts]
                nll[cell].append(self._model.decode(*stacked(plans)))
                read[cell] += [_sums(plan, decode) for plan, decode in zip(plans, decodes, strict=True)]
        return np.concatenate(full), {cell: (np.concatenate(nll[cell]), np.array(read[cell])) for cell in cells}


def _sums(plan: BitwidthPlan, decode: Routing) -> tuple[float, ...]:
    """Of one sequence: bits that its cold experts keep, added up, and how many they are; bits that its cold pairs read,
    how many they are, and simulated picoseconds of the device for them, one row at a time."""
    kept, read = plan.bits[plan.bits > 0], widths_of(plan, decode)
    read = read[read > 0]
    return tuple(float(one) for one in (kept.sum(), len(kept), read.sum(), len(read), _expert_ps()[read].sum()))


@lru_cache
def _expert_ps() -> NDArray[np.float64]:
    """[bits 0 to 4]"""
    costs = Costs(load_hardware(HARDWARE), model_named(MODEL_PRICED))
    return np.array([0.0, *(costs.device_expert_ps(bits, 1) for bits in WIDTHS)])


def with_one_bit(replicas: Path) -> Path:
    """auto-gptq's replicas with a place-holder at 1 bit, which it cannot make and the plugin wants; no plan names it.

    It is the first plane of 2 bits: levels in the middle of the two that share it.
    """
    files, out = ReplicaFiles(replicas), replicas.with_name(f"{replicas.name}-with-1")
    wanted = msgspec.structs.replace(files.manifest.unweighed(), bits=(1, *files.manifest.bits), layers={})

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


def served(model_dir: Path, replicas: Path, sequences: Tensor, cell: Cell) -> Losses:
    settings = {
        "avg_bits": cell.avg_bits,
        "hot_experts": cell.hot_experts,
        "policy_options": {"bit_rule": SELECTORS[cell.selector][0]},  # uniform is an option of policies only
        "execution": "paper",
        "replicas": str(replicas),
    }
    nll, totals = served_nll(sequences, settings, model_dir)
    if totals["fallback_pairs"] or not totals["cold_pairs"]:
        raise SystemExit(f"{totals['fallback_pairs']} of {totals['cold_pairs']} pairs were not computed by the device")
    return nll


def part_of(losses: Losses, yardstick: Losses) -> tuple[float, float]:
    """Ratio of the means, and its jackknife error."""
    n = len(losses)
    left_out = (losses.sum() - losses) / (yardstick.sum() - yardstick)
    return float(losses.mean() / yardstick.mean()), float(
        np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum())
    )


def rows_of(found: dict[tuple[str, str, Point, str], list[Measured]]) -> list[dict[str, Any]]:
    """The table: of one arm at one point in one way a row, over the halves that are measured."""
    rows = []
    for (how, equal, point, arm), halves in found.items():
        losses = np.concatenate([half.losses for half in halves])
        kept, experts, bits, pairs, device_ps = np.concatenate([half.sums for half in halves]).sum(axis=0)
        loss, error = mean_and_error(losses)
        row = {"how": how, "equal": equal, "avg_bits": point[0], "part_hot": point[1], "arm": arm}
        row |= {"sequences": len(losses), "held": round(kept / experts, 3)}
        row |= {"delta_nll": round(loss, 5), "standard_error": round(error, 5), "bits_read": round(bits / pairs, 3)}
        row |= {"device_us": round(device_ps / pairs / 1e6, 3)}
        if yardstick := found.get((how, equal, point, ARMS[0].name)):
            part, part_error = part_of(losses, np.concatenate([half.losses for half in yardstick])[: len(losses)])
            row |= {"part_of_auto_gptq": round(part, 3), "part_error": round(part_error, 3)}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="one with the bundled model's tokenizer")
    parser.add_argument("--sequences", type=int, default=2, help="served, per domain")
    parser.add_argument("--harness-sequences", type=int, default=16, help="per domain")
    parser.add_argument("--tune-steps", type=int, default=300)
    parser.add_argument("--arms", nargs="+", default=[arm.name for arm in ARMS], choices=[arm.name for arm in ARMS])
    parser.add_argument("--cache", type=Path, help="default: .cache/quality/ and the model's name")
    measured.add_json_option(parser)
    arguments = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(1)
    measurement = measured.Measurement(str(__doc__))
    model_dir = arguments.model.resolve()
    cache = arguments.cache or measured.ROOT / ".cache" / "quality" / model_dir.name
    study = Study(model_dir, cache.resolve(), arguments.tune_steps)
    found: dict[tuple[str, str, Point, str], list[Measured]] = {}

    def figures() -> dict[str, Any]:
        told = {"model": model_dir.name, "tune_steps": arguments.tune_steps, "folds": FOLDS}
        return told | {"rows": rows_of(found)}

    for fold, domains in enumerate(FOLDS):
        for arm in (arm for arm in ARMS if arm.name in arguments.arms):
            replicas = study.replicas(arm, fold)
            for how, count in (("served", arguments.sequences), ("harness", arguments.harness_sequences)):
                if count:
                    sequences = torch.cat([held_out_sequences(model_dir, count)[domain] for domain in domains])
                    for (point, equal), half in study.measured(how, arm, replicas, sequences).items():
                        found.setdefault((how, equal, point, arm.name), []).append(half)
                    measurement.save(figures(), arguments.json)
    print_table(rows_of(found))
    measurement.end(figures(), arguments.json)


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title="nll above full precision on uncovered domains (standard error), part of auto-gptq (error)")
    for name in ("", "equal", "average bits", "hot", *dict.fromkeys(row["arm"] for row in rows)):
        table.add_column(name, justify="right")
    by_place: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        place = row["how"], row["equal"], f"{row['avg_bits']:g}", f"{row['part_hot']:g}"
        text = f"{row['delta_nll']:.4f} ({row['standard_error']:.4f})"
        if "part_of_auto_gptq" in row:
            text += f" {row['part_of_auto_gptq']:.2f} ({row['part_error']:.2f})"
        by_place.setdefault(place, []).append(text)
    for place, texts in by_place.items():
        table.add_row(*place, *texts)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
