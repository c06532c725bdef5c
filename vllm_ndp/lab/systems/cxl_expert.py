"""CXL-Expert (seed 002) on a trace: hot experts on the GPU, warm ones on the CPU, cold ones behind a CXL expander.

Tiers begin by popularity: num_hot experts in GPU memory, half of the rest in CPU memory (fp16), the others in the
expander. The expander holds 4 bits and reads at its own rate. Experts change tiers as their use does (cxl_tiers.py).
Activations of warm and cold experts cross the link quantized and packed in bit planes;
the host unpacks them.
Per layer the threshold adapts: the link loads the heaviest missing experts to the GPU while that shortens the layer.
`percentile` fixes the threshold as published: the link loads experts above it. `near_data` on: the expander multiplies
cold experts itself, beside the CPU. CPU and expander are the hardware's. The paper's own figures:
`reproduce cxl-expert`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs, HostCpu
from vllm_ndp.cost_model.memory import Memory, slots_bytes
from vllm_ndp.lab.systems.cxl_tiers import COLD, HOT, WARM, Moves, TierCosts, retiered
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import copied_in_order, each_ps, gate_loss, on_gpu_ps, prompts_ps, without_device
from vllm_ndp.lab.vectorised.loads import Loads, add_up, distinct_cells, sums_after, sums_before
from vllm_ndp.lab.vectorised.outcome import PS_PER_S, Outcome, Traffic

COLD_BITS = 4
RETIER_STEPS = 64
WARM_SHARE = 0.5  # [O] of the experts that are not hot

_MESSAGE_VALUES = (128, 2048, 32768)
_PACKED_SHARE = {
    8: (0.7148, 0.5219, 0.4696),  # source: seed 002
    6: (0.5508, 0.3945, 0.3447),
    5: (0.4688, 0.3308, 0.2826),
    4: (0.3867, 0.2671, 0.2211),
    3: (0.3047, 0.2034, 0.1592),
}
"""Bytes of a packed message of so many values over their 16-bit bytes, mean of both ways. Below: the loss of an
expert's result by packing both ways, in units of the loss of 1-bit weights. Measured on 3072 decode rows of
tiny-mixtral on 2026-11-22, by the codec at commit 9e4323f0, whose benchmarks/activation_codec.py is gone."""
_PACKED_LOSS = {8: 1.33e-4, 6: 2.28e-3, 5: 9.90e-3, 4: 4.45e-2, 3: 2.75e-1}


def _log2(values: NDArray[np.int64]) -> NDArray[np.float64]:
    """To 2 ** -30: below that processors differ."""
    return np.rint(np.log2(values) * 2.0**30) / 2.0**30


def packed_share(bits: int, values: NDArray[np.int64]) -> NDArray[np.float64]:
    """[...]: of the 16-bit bytes of so many values; 1 for 16 bits, which are not packed."""
    if bits == FULL_PRECISION_BITS:
        return np.ones(values.shape)
    shares: NDArray[np.float64] = np.interp(
        _log2(values.clip(1)), _log2(np.array(_MESSAGE_VALUES)), _PACKED_SHARE[bits]
    )
    return shares


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Bytes by place. Warm experts are in host memory. Cold ones are in the expander at 4 bits, and in full precision
    too, because warm experts are loaded from there."""
    shape, num_hot = costs.shape, min(options.budget.num_hot, costs.shape.num_experts)
    num_warm = _num_warm(shape.num_experts, options)
    warm = shape.num_layers * num_warm * shape.expert_bytes
    cold = shape.num_layers * (shape.num_experts - num_hot - num_warm) * shape.expert_bytes
    return Memory(
        gpu=slots_bytes(costs.shape, num_hot), host=warm, expander=cold + cold * COLD_BITS // FULL_PRECISION_BITS
    )


def _num_warm(num_experts: int, options: ReplayOptions) -> int:
    left = num_experts - min(options.budget.num_hot, num_experts)
    return int(left * options.number("warm_share", WARM_SHARE, 0.0, 1.0))


@dataclass(frozen=True)
class _Machine:
    """Times of experts and activations outside the GPU."""

    costs: Costs
    activation_bits: int
    near_data: bool

    def hops_ps(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Activations of an expert's rows to the host and back, and their unpacking: read packed, written whole."""
        shape, link = self.costs.shape, self.costs.hardware.link
        whole = 2.0 * rows * shape.hidden_size * shape.dtype_bytes
        if self.activation_bits == FULL_PRECISION_BITS:
            return whole / link.bulk_bytes_per_s * PS_PER_S
        share = packed_share(self.activation_bits, rows * shape.hidden_size)
        unpacking = whole * (1 + share) / self.costs.hardware.host.memory_bytes_per_s
        times: NDArray[np.float64] = (whole * share / link.bulk_bytes_per_s + unpacking) * PS_PER_S
        return times

    def warm_ps(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        cpu = HostCpu.of(self.costs)
        return cpu.each_ps(self.costs, rows, self.costs.shape.expert_bytes) + self.hops_ps(rows)

    def cold_ps(self, rows: NDArray[np.int64], *, near: bool = False) -> NDArray[np.float64]:
        """By the CPU from the expander's memory, or by the expander itself."""
        processor = HostCpu.expander(self.costs) if near else HostCpu.on_expander(self.costs)
        return processor.each_ps(self.costs, rows, cold_bytes(self.costs)) + self.hops_ps(rows)

    def host_ps(self, missing: NDArray[np.int64], is_warm: NDArray[np.bool_]) -> NDArray[np.float64]:
        """[..., S + 1]: at h what the host takes for all but the first h; near data, with the expander."""
        warm = np.where(is_warm, self.warm_ps(missing), 0.0)
        alone: NDArray[np.float64] = sums_after(warm + np.where(is_warm, 0.0, self.cold_ps(missing)))
        if not self.near_data:
            return alone
        beside = np.where(is_warm, 0.0, self.cold_ps(missing, near=True))
        helped: NDArray[np.float64] = np.minimum(alone, np.maximum(sums_after(warm), sums_after(beside)))
        return helped

    @property
    def tiers(self) -> TierCosts:
        one, costs = np.ones((), np.int64), self.costs
        gpu = float(costs.resident_ps(1, 1))
        copied = costs.copy_opening_ps + costs.copy_ps
        cold = float(np.minimum(self.cold_ps(one), self.cold_ps(one, near=True) if self.near_data else np.inf))
        from_expander = costs.shape.expert_bytes / costs.hardware.host.cxl_bytes_per_s * PS_PER_S
        return TierCosts(
            use_ps=(gpu, min(float(self.warm_ps(one)), copied + gpu), min(cold, copied + gpu)),
            warm_to_hot_ps=copied,
            cold_to_hot_ps=max(copied, from_expander),
            cold_to_warm_ps=from_expander,
        )


def cold_bytes(costs: Costs) -> float:
    return costs.shape.expert_bytes * COLD_BITS / FULL_PRECISION_BITS


@dataclass(frozen=True)
class _Cells:
    """Results of the layers of some steps, by slot or by layer."""

    moe_ps: NDArray[np.float64]
    gpu_ps: NDArray[np.float64]
    chosen: NDArray[np.int64]
    """How many were loaded."""
    on_host: NDArray[np.bool_]  # [N, S]


def _cells(
    rows: NDArray[np.int64],
    tier: NDArray[np.uint8],
    gpu: NDArray[np.float64],
    machine: _Machine,
    num_loaded: int | None,
) -> _Cells:
    """rows and tier [N, S]. num_loaded: the heaviest so many are loaded; None: as many as shorten the layer."""
    is_hot = tier == HOT
    away = np.where(is_hot, 0, rows)
    order = np.argsort(-away, axis=1, kind="stable")  # heaviest missing first
    missing = np.take_along_axis(away, order, axis=1)
    is_warm = np.take_along_axis(tier == WARM, order, axis=1)
    here = add_up(gpu[np.where(is_hot, rows, 0)])[:, None]
    total = np.maximum(copied_in_order(gpu[missing], here, machine.costs), machine.host_ps(missing, is_warm))
    chosen = total.argmin(axis=1)[:, None]
    if num_loaded is not None:
        rank = np.argsort(np.argsort(-rows, axis=1, kind="stable"), axis=1)
        chosen = ((rank < num_loaded) & ~is_hot & (rows > 0)).sum(axis=1)[:, None]
    on_host = np.zeros(rows.shape, np.bool_)
    np.put_along_axis(on_host, order, (np.arange(rows.shape[1]) >= chosen) & (missing > 0), axis=1)
    return _Cells(
        np.take_along_axis(total, chosen, 1)[:, 0],
        np.take_along_axis(here + sums_before(gpu[missing]), chosen, 1)[:, 0],
        chosen[:, 0],
        on_host,
    )


def _parts(loads: Loads, every: int) -> Iterator[tuple[slice, bool]]:
    """(steps, whether tiers are looked at before them)."""
    steps = loads.rows.shape[1]
    length = loads.chunk_steps
    for look in range(0, steps, every):
        for start in range(look, min(look + every, steps), length):
            yield slice(start, min(start + length, look + every, steps)), start == look


def _uses(loads: Loads, part: slice, num_experts: int) -> NDArray[np.float64]:
    """[G, L, E], in how many of these steps each expert was used."""
    used = loads.rows[:, part] > 0
    g, _, layers, _ = used.shape
    cell = np.arange(g)[:, None, None, None] * layers + np.arange(layers)[:, None]
    where = np.broadcast_to(cell, used.shape)[used] * num_experts + loads.experts[:, part][used]
    return np.bincount(where, minlength=g * layers * num_experts).reshape(g, layers, num_experts).astype(np.float64)


def _expected_uses(batches: Batches, steps: int) -> NDArray[np.float64]:
    """[G, L, E]: the same of as many steps, if they went like the prompts."""
    shares = [np.sum([s.counts / max(s.num_tokens, 1) for s in group], axis=0) for group in batches.prompts]
    expected: NDArray[np.float64] = np.minimum(np.array(shares), 1.0) * steps
    return expected


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    g, b, d, layers, _ = batches.shape
    loads, num_hot = batches.loads, options.budget.num_hot
    hot = options.popular(num_hot)
    near = options.popular(num_hot + _num_warm(batches.num_experts, options))
    start = np.where(hot, HOT, np.where(near, WARM, COLD)).astype(np.uint8)
    gpu = costs.gpu_experts_ps(b)
    follows = options.choice("tiers", ("following", "fixed")) == "following"
    every = options.whole("retier_steps", RETIER_STEPS, 1, 1 << 20) if follows else d
    bits = options.choice("activation_bits", (*_PACKED_SHARE, FULL_PRECISION_BITS))
    machine = _Machine(costs, bits, options.choice("near_data", ("off", "on")) == "on")
    fixed = "percentile" in options.own
    percentile = options.number("percentile", 75.0, 0.0, 100.0)
    num_loaded = round(batches.num_experts * (1 - percentile / 100)) if fixed else None

    moe, gpu_ps = np.zeros((2, g, d, layers))
    cold, on_host = np.zeros((2, *loads.rows.shape), np.bool_)
    tiers, moved = np.broadcast_to(start, (g, *start.shape)), Moves.none(g, layers)
    uses = _expected_uses(batches, every) if follows else np.zeros(0)
    prices = machine.tiers
    loaded = to_gpu = to_cpu = 0
    for part, looks in _parts(loads, every):
        if looks and follows:
            if part.start:
                uses = _uses(loads, slice(part.start - every, part.start), batches.num_experts)
            running = (batches.rows[:, part.start] > 0)[:, None, None]
            tiers, moved = retiered(tiers, np.where(running, uses, 0.0), prices)
            to_gpu, to_cpu = to_gpu + int(moved.to_gpu.sum()), to_cpu + int(moved.to_cpu.sum())
        rows = loads.rows[:, part]
        tier = loads.look_up(tiers, part)
        flat_rows, flat_tier = rows.reshape(-1, rows.shape[3]), tier.reshape(-1, rows.shape[3])
        which, back = distinct_cells(flat_rows, flat_tier)
        cells = _cells(flat_rows[which], flat_tier[which], gpu, machine, num_loaded)
        shape = rows.shape[:3]
        moe[:, part] = cells.moe_ps[back].reshape(shape)
        gpu_ps[:, part] = cells.gpu_ps[back].reshape(shape)
        if looks and follows:
            moe[:, part.start] += moved.took_ps
        on_host[:, part] = cells.on_host[back].reshape(rows.shape)
        cold[:, part] = on_host[:, part] & (tier == COLD)
        loaded += int(cells.chosen[back].sum())
    used = loads.rows > 0
    host_rows, cold_rows = (int(np.where(where, loads.rows, 0).sum()) for where in (on_host, cold))
    host_experts, cold_experts = int(on_host.sum()), int(cold.sum())
    widths = np.where(cold.ravel()[loads.places], COLD_BITS, 0).astype(np.uint8)

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The same threshold for the rows of a prompt."""
        away = np.where(hot, 0, counts)
        order = np.argsort(-away, axis=1, kind="stable")
        missing, warm = (np.take_along_axis(a, order, axis=1) for a in (away, start == WARM))
        here = on_gpu_ps(costs, np.where(hot, counts, 0), costs.shape.expert_bytes)[:, None]
        copied = copied_in_order(each_ps(missing, lambda rows: costs.resident_ps(1, rows)), here, costs)
        times: NDArray[np.float64] = np.maximum(copied, machine.host_ps(missing, warm)).min(axis=1)
        return times

    gates = float(loads.total(batches.weights, batches.pairs & on_host.ravel()[loads.places]).sum())
    packing_loss = _PACKED_LOSS.get(bits, 0.0) * gates / batches.num_decisions
    activations = 2.0 * host_rows * costs.shape.hidden_size * costs.shape.dtype_bytes
    share = float(packed_share(bits, np.array(costs.shape.hidden_size)))
    return without_device(
        (f"above the {percentile:g}th percentile" if fixed else "adaptive threshold")
        + (", tiers follow" if follows else ", tiers fixed")
        + (", near data" if machine.near_data else ""),
        batches,
        costs,
        moe_ps=moe,
        gpu_ps=gpu_ps,
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        fetched_experts=loaded + to_gpu,
        hot_pairs=int(loads.rows.sum()) - host_rows,
        cold_bits=float(COLD_BITS * cold_rows + FULL_PRECISION_BITS * (host_rows - cold_rows)),
        cold_pairs=host_rows,
        loss=gate_loss(batches, widths, options.loss) + packing_loss,
        traffic=Traffic(
            hbm_bytes=(int(used.sum()) - host_experts) * costs.shape.expert_bytes,
            host_bytes=(host_experts - cold_experts + to_cpu) * costs.shape.expert_bytes
            + cold_experts * cold_bytes(costs),
            link_bytes=activations * share,
        ),
        notes={"moved_to_gpu": to_gpu, "moved_to_cpu": to_cpu, "activation_share": share, "packing_loss": packing_loss},
    )


CXL_EXPERT = System(
    "cxl_expert",
    (
        "CPU, its memory and the CXL expander are the hardware's host.* values",
        "tiers begin by popularity: num_hot on the GPU, half of the rest (warm_share) warm, the others cold at 4 bits",
        "tiers following: every 64 steps experts change places where the last 64 would have saved more than the copy; "
        "the step that begins with it waits; what becomes cold is quantized on the way",
        "cold experts are computed by the CPU from the expander's memory; near_data=on: by the expander itself",
        "activations at 8 bits in bit planes, size and loss measured on tiny-mixtral; packing on the GPU costs nothing",
    ),
    False,
    replay,
    memory,
    options=("percentile", "near_data", "tiers", "retier_steps", "activation_bits", "warm_share"),
)
