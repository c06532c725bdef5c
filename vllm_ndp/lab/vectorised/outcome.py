"""Outcome of the replay of one system: simulated times, moved bytes, and the summary that `compare` prints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs, each_case, each_ps
from vllm_ndp.lab.vectorised.batches import Batches

PS_PER_S = 1e12


@dataclass(frozen=True)
class Traffic:
    """Bytes and energy of experts in decode, in the trace's layers. Copies to the GPU are apart: migrated_bytes."""

    hbm_bytes: float = 0.0  # weights read for GPU kernels
    host_bytes: float = 0.0  # weights read for CPU kernels
    link_bytes: float = 0.0  # activations and results on the wire
    device_dram_pj: float = 0.0  # weights read beside the device's arrays
    device_arrays_pj: float = 0.0


@dataclass(frozen=True)
class Cold:
    """Decode pairs that the GPU did not compute in full precision."""

    bits: float = 0.0  # sum over the pairs
    pairs: int = 0
    loss: float = 0.0
    """Mean over all decode pairs of gate * loss of the width it ran at, relative to 1 bit."""


@dataclass
class Outcome:
    """Simulated. G groups, D steps, L layers of the trace; a model with more layers repeats the trace's."""

    policy: str
    moe_ps: NDArray[np.float64]  # [G, D, L], experts of a layer, wherever they ran
    device_ps: NDArray[np.float64]  # [G, D, L], the device's part of it (0 where there is no device)
    prefill_ps: NDArray[np.float64]  # [G, B], of the whole model
    hot_pairs: int  # decode pairs found in GPU memory
    cold: Cold
    traffic: Traffic
    migrated_bytes: float = 0.0  # of the whole model, weights moved to the GPU after or during decode; prefill apart
    migration_ps: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    """[G], of the whole model, before the first decode step; or one for all."""
    over_least: float = float("nan")  # of the last joint plan, how much longer it takes than any must


@dataclass(frozen=True)
class Summary:
    """One row of the comparison."""

    system: str
    policy: str
    batch: int
    decode_tokens_per_s: float
    decode_tokens_per_s_se: float
    """Standard error over groups of requests (jackknife); NaN for one group."""
    ttft_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    moe_ms_per_layer: float
    hit_mass: float
    migrated_gb: float
    device_busy: float
    avg_bits: float
    loss: float
    over_paper: float = float("nan")
    """How much faster decode is than under the paper's system and policy at this batch: 0.2 = 20 %."""
    over_paper_se: float = float("nan")
    """Standard error over the same groups side by side (jackknife)."""
    routing: str = ""
    """Measured model that a synthetic trace resembles, or that it was fitted to nothing."""
    num_hot: int = 0
    """Places for full-precision experts on the GPU, per layer."""
    gpu_gb: float = float("nan")
    device_gb: float = float("nan")
    host_gb: float = float("nan")
    expander_gb: float = float("nan")
    """Memory of the system by place: everything on the GPU, experts elsewhere."""
    energy_link_mj: float = float("nan")
    energy_dram_mj: float = float("nan")
    energy_arrays_mj: float = float("nan")
    energy_gpu_mj: float = float("nan")
    """Millijoules per decode token of what moved, by part (ndp_device/timing/model.py); migration is in it."""
    energy_idle_mj: float = float("nan")
    """Idle energy of GPU, host and a device that computes."""

    @property
    def energy_mj(self) -> float:
        moved = self.energy_link_mj + self.energy_dram_mj + self.energy_arrays_mj + self.energy_gpu_mj
        return moved + self.energy_idle_mj

    def cells(self) -> dict[str, str]:
        """Heading -> text, for tables that people read; what does not apply is a dash."""
        over, error = 100 * self.over_paper, 100 * self.over_paper_se
        return {
            "system": self.system,
            "policy": self.policy,
            "batch": str(self.batch),
            "K": str(self.num_hot),
            "decode tokens/s": _with_error(self.decode_tokens_per_s, self.decode_tokens_per_s_se),
            "over the paper %": f"{over:+.1f}" + (f" ± {error:.1f}" if np.isfinite(error) else "")
            if np.isfinite(over)
            else "-",
            "TTFT ms": _text(self.ttft_ms),
            "TPOT p50 ms": _text(self.tpot_p50_ms),
            "p99 ms": _text(self.tpot_p99_ms),
            "MoE ms/layer": _text(self.moe_ms_per_layer),
            "hit mass": _text(self.hit_mass, 3),
            "moved GB": _text(self.migrated_gb),
            "NDP busy %": _text(100 * self.device_busy, 3),
            "mJ/token": _text(self.energy_mj, 3),
            "GPU GB": _text(self.gpu_gb, 3),
            "bits": _text(self.avg_bits, 3),
            "loss": _text(self.loss, 3),
            **({"routing": self.routing} if self.routing else {}),
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            name: (None if isinstance(value, float) and not np.isfinite(value) else value)
            for name, value in vars(self).items()
        }


def _text(value: float, digits: int = 4) -> str:
    if not np.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def _with_error(value: float, error: float) -> str:
    """The error with the decimals of the value."""
    shown = _text(value)
    decimals = len(shown.partition(".")[2])
    return shown + (f" ± {error:.{decimals}f}" if np.isfinite(error) else "")


def layer_factor(batches: Batches, costs: Costs) -> float:
    """How many layers of the model one layer of the trace stands for."""
    return costs.shape.num_layers / batches.shape[3]


def time_before(compute_ps: NDArray[np.float64], batches: Batches, costs: Costs) -> NDArray[np.float64]:
    """[G, D, L]: how long a copy that starts with the layer before may take unnoticed, from experts' times alike."""
    before: NDArray[np.float64] = np.full(compute_ps.shape, costs.attention_ps(1, int(batches.kv_tokens.max())))
    before[:, :, 1:] += compute_ps[:, :, :-1]
    return before


def attention_ps(batches: Batches, costs: Costs) -> NDArray[np.float64]:
    """[G, D], attention of one layer; 0 where no request decodes any more."""
    return each_case(batches.rows, batches.kv_tokens, costs.attention_ps)


def step_times(outcome: Outcome, batches: Batches, costs: Costs) -> NDArray[np.float64]:
    """[G, D], whole decode steps in picoseconds; NaN where no request decodes any more.

    The hot set moves between the prompt's last step and the first decode step, as on the live clock. So the move delays
    the second token, not the first.
    """
    rows = batches.rows
    head = each_ps(rows, costs.gpu.head_ps)
    layers = costs.shape.num_layers * (attention_ps(batches, costs) + costs.overhead_ps)
    total = layers + layer_factor(batches, costs) * outcome.moe_ps.sum(axis=2) + head
    total[:, 0] += outcome.migration_ps
    return np.where(rows > 0, total, np.nan)


def summarise(system: str, outcome: Outcome, batches: Batches, costs: Costs) -> Summary:
    steps = step_times(outcome, batches, costs)
    running = ~np.isnan(steps)
    decode_s = float(np.nansum(steps)) / PS_PER_S
    # A request's first token comes when its group's prompts before it, and its own, are done.
    first_token = np.cumsum(outcome.prefill_ps, axis=1)
    per_row = np.repeat(steps[running], batches.rows[running])  # every row of a step waits for the whole step
    tokens, seconds = batches.valid.sum(axis=(1, 2)), np.nansum(steps, axis=1) / PS_PER_S
    busy = layer_factor(batches, costs) * float(outcome.device_ps[running].sum()) / PS_PER_S
    row = Summary(
        system=system,
        policy=outcome.policy,
        batch=batches.shape[1],
        decode_tokens_per_s=float(batches.valid.sum()) / decode_s,
        decode_tokens_per_s_se=ratio_se(tokens, seconds),
        ttft_ms=float(first_token.mean()) / 1e9,
        tpot_p50_ms=float(np.percentile(per_row, 50)) / 1e9,
        tpot_p99_ms=float(np.percentile(per_row, 99)) / 1e9,
        moe_ms_per_layer=float(outcome.moe_ps[running].mean()) / 1e9,
        hit_mass=outcome.hot_pairs / (batches.num_decisions * batches.shape[4]),
        migrated_gb=outcome.migrated_bytes / 1e9,
        device_busy=busy / decode_s,
        avg_bits=outcome.cold.bits / outcome.cold.pairs if outcome.cold.pairs else float("nan"),
        loss=outcome.cold.loss,
    )
    return _with_energy(row, outcome, batches, costs)


def _with_energy(row: Summary, outcome: Outcome, batches: Batches, costs: Costs) -> Summary:
    """Per decode token and part. A copy is read from DRAM, crosses the link and is written to HBM."""
    hardware, factor, traffic = costs.hardware, layer_factor(batches, costs), outcome.traffic
    energy, copied = hardware.energy, outcome.migrated_bytes
    packets = copied / hardware.link.packet_payload_bytes
    wire = factor * traffic.link_bytes + copied + packets * hardware.link.packet_header_bytes
    dram_row = hardware.dram.lines_per_row * hardware.dram.line_bytes
    dram_fj_per_byte = energy.dram_line32_fj / 32 + energy.activate_fj / dram_row
    host_bytes = factor * traffic.host_bytes + copied
    shape, steps = costs.shape, int((batches.rows > 0).sum())
    beside = steps * (shape.beside_weights + shape.head_weights) * shape.dtype_bytes  # read in each step
    cached = float(batches.kv_tokens.sum()) * shape.kv_bytes
    hbm_bytes = factor * traffic.hbm_bytes + copied + (beside + cached)
    per_token = 1 / (1e12 * float(batches.valid.sum()))  # femtojoules of all decode to millijoules of a token
    idle_mw = energy.gpu_idle_mw + energy.host_idle_mw + energy.device_idle_mw * bool(outcome.device_ps.any())
    return replace(
        row,
        energy_link_mj=8 * wire * energy.link_bit_fj * per_token,
        energy_dram_mj=(host_bytes * dram_fj_per_byte + 1e3 * factor * traffic.device_dram_pj) * per_token,
        energy_arrays_mj=1e3 * factor * traffic.device_arrays_pj * per_token,
        energy_gpu_mj=8 * hbm_bytes * energy.hbm_bit_fj * per_token,
        energy_idle_mj=idle_mw / row.decode_tokens_per_s,
    )


def against(row: Summary, own: NDArray[np.float64], reference: NDArray[np.float64]) -> Summary:
    """The row with its decode time [G] set against that of the paper's system on the same groups."""
    return replace(row, over_paper=float(reference.sum() / own.sum()) - 1, over_paper_se=ratio_se(reference, own))


def ratio_se(numerator: NDArray[Any], denominator: NDArray[np.float64]) -> float:
    """Jackknife standard error of sum / sum over groups, one left out at a time."""
    groups = len(numerator)
    if groups < 2:
        return float("nan")
    left = (numerator.sum() - numerator) / (denominator.sum() - denominator)
    return float(np.sqrt((groups - 1) * np.mean((left - left.mean()) ** 2)))
