"""How much faster is the best plan over tiers and widths at the same loss, by GPU memory, and what do 8 bits add?

`joint` at the losses of `balanced` at 2 and 3 bits, on synthetic routing (signal 1) of four shapes with an ideal DRAM,
batch 1, prompts of 256 and 256 decode tokens, a device of 4 TB and a host of 2. `joint` has replicas of 1 to 4 bits
and the checkpoint's 16; `joint, 8 bits` has replicas of 8 bits, too, on GPU and device, which lose as nominal losses
fall, 4.4 times less per bit. `of_8_bits` sets both beside each other at one limit of the expected loss. --svg draws
curves of time against loss, those of the paper's system, GPU memory alone and a joint plan that knows the decode too.
Everything is simulated but the planner's own milliseconds, which are printed alone. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from measured import Measurement, add_json_option

from ndp_device.errors import NdpError
from vllm_ndp.lab.compare import CompareSettings, Replays, Workload
from vllm_ndp.lab.frontier import ROOMY
from vllm_ndp.planning.bitwidths import LossTable, nominal_loss
from vllm_ndp.planning.joint import least_time
from vllm_ndp.planning.joint_problem import Choice, JointProblem
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace

GB = 10**9
CELLS = {
    "mixtral-8x7b": (8, 16, 24),
    "qwen3-30b-a3b": (8, 12, 16),
    "qwen3-235b-a22b": (24, 48, 80),
    "deepseek-v3": (48, 80, 160),
}
LAYERS = 4
AVG_BITS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
LOSSES = (0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.006, 0.003, 0.001, 0.0003)
COLOURS = {
    "paper": "#888888",
    "balanced": "#1f77b4",
    "GPU only": "#2ca02c",
    "joint": "#d62728",
    "joint, 8 bits": "#9467bd",
    "joint, oracle": "#f7a8a8",
}

_DECADES = 3.7
"""Decades of loss below 1 that are drawn."""
_ROOMIER: dict[str, str | int] = {"dram.capacity_bytes": 4 * 10**12}
"""For every width of DeepSeek-V3."""
_NO_PLAN = 1e6
"""A loss of 8 bits that no plan takes."""


def losses_of(experts: int, at_8: float) -> LossTable:
    """Nominal losses of replicas with 8 bits."""
    nominal = LossTable.nominal(LAYERS, experts)
    return dataclasses.replace(nominal, at_8=np.full((LAYERS, experts), at_8))


class Cell:
    """One model on one size of GPU memory."""

    def __init__(self, model: str, size: int, workload: Workload) -> None:
        self.model, self.size, self._workload = model, size, workload

    def rows(self, system: str, policy: str = "prefill", avg_bits: float = 2.0, **own: float | str) -> list[Any]:
        """The rows of a system that fit; none where nothing does. `at_8` of `own`: what 8 bits of replicas lose."""
        at_8 = own.pop("at_8", None)
        overrides = {"dram.kind": "ideal", **ROOMY, **_ROOMIER, "gpu.hbm_capacity_bytes": self.size * GB}
        settings = CompareSettings(
            model=self.model,
            overrides=overrides,
            systems=(system,),
            policies=(policy,),
            num_hot=self._workload.trace.provenance.num_experts,
            avg_bits=avg_bits,
            fit=True,
            options=own,
        )
        try:
            experts = self._workload.trace.provenance.num_experts
            losses = None if at_8 is None else losses_of(experts, float(at_8))
            replays = Replays(self._workload, settings, losses)
            return [replays.replay(combination)[0].row for combination in replays.combinations]
        except NdpError:
            return []

    def joint(self, loss: float, at_8: float = _NO_PLAN, policy: str = "prefill") -> list[Any]:
        """A joint plan expected to lose no more."""
        return self.rows("joint", policy, at_8=at_8, max_gate_loss=loss)

    def of_8_bits(self) -> list[dict[str, Any]]:
        """[tokens/s, loss] of joint plans at each limit, without 8 bits and with them."""
        out = []
        for limit in LOSSES:
            for without, having in zip(self.joint(limit), self.joint(limit, nominal_loss(8)), strict=True):
                speeds = [[round(row.decode_tokens_per_s, 2), round(row.loss, 6)] for row in (without, having)]
                gain = having.decode_tokens_per_s / without.decode_tokens_per_s - 1
                place = {"model": self.model, "memory_gb": self.size, "limit": limit}
                out.append({**place, "without": speeds[0], "with_8": speeds[1], "gain": round(gain, 4)})
        return out

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Name -> (loss, ms per decode token), by falling loss."""
        found = {
            "paper": [row for bits in AVG_BITS for row in self.rows("context_aware", avg_bits=bits)],
            "balanced": [row for bits in AVG_BITS for row in self.rows("balanced", avg_bits=bits, spill_bits=3)],
            "GPU only": self.rows("quantized")
            + [row for loss in LOSSES for row in self.rows("joint", tiers="gpu", max_gate_loss=loss)],
            "joint": [row for loss in LOSSES for row in self.joint(loss)],
            "joint, 8 bits": [row for loss in LOSSES for row in self.joint(loss, nominal_loss(8))],
            "joint, oracle": [row for loss in LOSSES for row in self.joint(loss, policy="oracle")],
        }
        return {
            name: sorted((row.loss, 1e3 / row.decode_tokens_per_s) for row in rows)[::-1]
            for name, rows in found.items()
        }

    def at_equal_loss(self) -> list[dict[str, Any]]:
        """`joint` at most at the loss of `balanced`, and how much faster; none where balanced does not fit."""
        out = []
        for bits in (2.0, 3.0):
            for rival in self.rows("balanced", avg_bits=bits, spill_bits=3):
                limit = rival.loss
                for _ in range(4):  # what is expected and what comes differ by a few percent
                    (row,) = self.joint(limit)
                    if row.loss <= rival.loss:
                        break
                    limit *= 0.99 * rival.loss / row.loss
                out.append(
                    {
                        "model": self.model,
                        "memory_gb": self.size,
                        "avg_bits": bits,
                        "balanced": [rival.decode_tokens_per_s, rival.loss],
                        "joint": [row.decode_tokens_per_s, row.loss],
                        "gain": row.decode_tokens_per_s / rival.decode_tokens_per_s - 1,
                    }
                )
        return out


def planning_ms(layers: int = 94, experts: int = 128, repeats: int = 30) -> list[float]:
    """The planner's CPU milliseconds, quantiles of several problems: skewed use, a twentieth to a half of the
    full-precision bytes on the GPU."""
    generator = np.random.default_rng(0)
    full, times = 18_874_368, []
    menu = tuple(
        Choice(tier, bits, full if bits == 16 else int(full * (bits + 0.25) / 16))
        for tier, widths in (("gpu", (16, 8, 4, 3, 2)), ("device", (16, 4, 3, 2, 1)))
        for bits in widths
    )
    for turn in range(repeats):
        share = generator.dirichlet(np.full(experts, 0.5), size=layers)
        own = generator.lognormal(0.0, 0.3, size=share.shape)
        rate = {"gpu": 3.0, "device": 0.5}
        used = np.minimum(8 * share, 1.0)
        ps = np.array([used * c.held_bytes / rate[c.tier] for c in menu])
        loss = np.array([share * own * (0.0 if c.bits == 16 else 4.4 ** (1 - c.bits)) for c in menu])
        budget = {"gpu": (0.05, 0.1, 0.2, 0.5)[turn % 4] * full * share.size}
        problem = JointProblem(menu, ps, loss, budget, used=used)
        started = time.process_time()
        least_time(problem, 0.02 * layers)
        times.append(1e3 * (time.process_time() - started))
    return [float(q) for q in np.quantile(times, (0, 0.5, 0.9))]


def svg(curves: dict[tuple[str, int], dict[str, list[tuple[float, float]]]]) -> str:
    """A panel for each model and size: loss to the right (logarithmic), milliseconds per token upwards from 0."""
    width, height, pad = 250, 170, 34
    models = list(dict.fromkeys(model for model, _ in curves))
    columns = max(sum(model == name for model, _ in curves) for name in models)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * width + 20}" height="{len(models) * height + 40}" '
        'font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>'
    ]
    for at, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{30 + 120 * at}" y="14" fill="{colour}" font-weight="bold">{name}</text>')
    for (model, size), lines in curves.items():
        row, column = models.index(model), [s for m, s in curves if m == model].index(size)
        left, top = column * width + pad + 6, row * height + pad
        inner_w, inner_h = width - pad - 16, height - pad - 22
        most = 1.05 * max((ms for name in ("joint", "balanced") for _, ms in lines[name]), default=1.0)
        parts.append(f'<rect x="{left}" y="{top}" width="{inner_w}" height="{inner_h}" fill="none" stroke="#ccc"/>')
        parts.append(f'<text x="{left + 4}" y="{top - 4}">{model}, {size} GB: ms/token, 0 to {most:.3g}</text>')
        for exponent in (-3, -2, -1):
            x = left + inner_w * (exponent + _DECADES) / _DECADES
            parts.append(f'<text x="{x - 8:.0f}" y="{top + inner_h + 11}">1e{exponent}</text>')
        for name, points in lines.items():
            shown = [
                (left + inner_w * (np.log10(loss) + _DECADES) / _DECADES, top + inner_h * (1 - ms / most))
                for loss, ms in points
                if 10**-_DECADES <= loss <= 1 and ms <= most
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.6"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{COLOURS[name]}"/>' for x, y in shown]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(CELLS))
    parser.add_argument("--svg", type=Path, help="draw the curves here")
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement = Measurement(str(__doc__))
    milliseconds = planning_ms()
    print("94 x 128 experts planned in {:.1f} / {:.1f} / {:.1f} ms of CPU (least, median, 90 %)".format(*milliseconds))
    print(f"\n{'model':16} {'GB':>4} {'bits':>4}  balanced tokens/s, loss   joint tokens/s, loss    faster")
    drawn, equal, of_8 = {}, [], []
    for model in arguments.models.split(","):
        settings = SyntheticSettings.of_shape(model, num_requests=6, prompt_len=256, decode_len=256)
        workload = Workload(synthetic_trace(dataclasses.replace(settings, num_layers=LAYERS), model))
        for size in CELLS[model]:
            cell = Cell(model, size, workload)
            for line in cell.at_equal_loss():
                equal.append(line)
                ours, theirs = line["joint"], line["balanced"]
                print(
                    f"{model:16} {size:4} {line['avg_bits']:4g} {theirs[0]:12.1f} {theirs[1]:10.4f} "
                    f"{ours[0]:14.1f} {ours[1]:9.4f} {100 * line['gain']:8.1f} %",
                    flush=True,
                )
            of_8 += cell.of_8_bits()
            if arguments.svg:
                drawn[model, size] = cell.curves()
    if arguments.svg:
        arguments.svg.write_text(svg(drawn))
    curves = [{"model": model, "memory_gb": size, "curves": lines} for (model, size), lines in drawn.items()]
    measurement.end({"equal_loss": equal, "of_8_bits": of_8, "curves": curves}, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
