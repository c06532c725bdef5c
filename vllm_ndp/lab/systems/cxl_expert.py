"""CXL-Expert on a trace: hot experts on the GPU, warm ones on the CPU, cold ones behind a CXL expander.

Tiers begin by popularity: num_hot experts in GPU memory, half of the rest in CPU memory (fp16), the others in the
expander. The expander holds 4 bits and reads at its own rate. Experts change tiers as their use does (`retiered`).
Activations of warm and cold experts cross the link quantized and packed in bit planes;
the host unpacks them.
Per layer the threshold adapts: the link loads the heaviest missing experts to the GPU while that shortens the layer.
`percentile` fixes the threshold as published: the link loads experts above it. `near_data` on: the expander multiplies
cold experts itself, beside the CPU. CPU and expander are the hardware's. The paper's own figures:
`reproduce cxl-expert`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs, HostCpu
from vllm_ndp.cost_model.memory import Memory, slots_bytes
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, Loads, add_up, sums_after, sums_before
from vllm_ndp.lab.vectorised.execution import (
    cold_at,
    copied_in_order,
    each_ps,
    launched,
    prompts_ps,
    without_device,
)
from vllm_ndp.lab.vectorised.outcome import PS_PER_S, Outcome, Traffic

HOT, WARM, COLD = 0, 1, 2


@dataclass(frozen=True)
class TierCosts:
    """Times in ps: use_ps of one use in each tier, the others of one move of an expert to a higher tier."""

    use_ps: tuple[float, float, float]
    warm_to_hot_ps: float
    cold_to_hot_ps: float
    cold_to_warm_ps: float


@dataclass(frozen=True)
class Moves:
    """Experts that one look moved, and the time of the moves; [G, L] each."""

    to_gpu: NDArray[np.int64]
    to_cpu: NDArray[np.int64]
    took_ps: NDArray[np.float64]


def retiered(tiers: NDArray[np.uint8], uses: NDArray[np.float64], costs: TierCosts) -> tuple[NDArray[np.uint8], Moves]:
    """tiers and uses [G, L, E] -> (tiers from now on, what moved). uses: steps since the last look that used each.

    "The system monitors execution time and may migrate an expert between categories if its usage changes" (its words),
    no rule given. Ours: every so many steps of a group two experts of a layer change places if the saving exceeds the
    copy. The saving is the time that the exchange would have saved since the last look. The first look is at the end of
    the prompts, by their counts. So tiers keep their sizes, and the two copies cross in opposite directions at once.
    """
    hot, warm, cold = costs.use_ps
    below = np.array([0.0, warm - hot, cold - hot])
    copies = np.array([np.inf, costs.warm_to_hot_ps, costs.cold_to_hot_ps])
    after, first = _exchanged(tiers, uses, tiers == HOT, tiers != HOT, below, copies)
    up = np.array([0.0, 0.0, cold - warm])
    copies = np.array([np.inf, np.inf, costs.cold_to_warm_ps])
    after, second = _exchanged(after, uses, after == WARM, after == COLD, up, copies)
    # The expander's copies go to the CPU's memory or through it: one way, one after the other. The link is another.
    from_warm, from_cold = (((tiers == tier) & first).sum(axis=2) for tier in (WARM, COLD))
    to_cpu = second.sum(axis=2)
    link = from_warm * costs.warm_to_hot_ps + from_cold * costs.cold_to_hot_ps
    expander = (from_cold + to_cpu) * costs.cold_to_warm_ps
    return after, Moves(from_warm + from_cold, to_cpu, np.maximum(link, expander))


def _exchanged(
    tiers: NDArray[np.uint8],
    uses: NDArray[np.float64],
    inside: NDArray[np.bool_],
    outside: NDArray[np.bool_],
    saves_ps: NDArray[np.float64],
    copy_ps: NDArray[np.float64],
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Exchange the most valuable expert outside for the least used one inside, while that is worth the copy.

    Returns (tiers, experts that came in). By tier: saves_ps is the extra time of a use there over a use inside, and
    copy_ps the time to bring an expert in.
    """
    pairs = int(min(inside.sum(axis=2).max(), outside.sum(axis=2).max()))
    came = np.zeros(tiers.shape, np.bool_)
    if pairs == 0:
        return tiers, came
    value = np.where(outside, uses * saves_ps[tiers] - np.where(outside, copy_ps[tiers], 0.0), -np.inf)
    coming = np.argsort(-value, axis=2, kind="stable")[..., :pairs]
    leaving = np.argsort(np.where(inside, uses, np.inf), axis=2, kind="stable")[..., :pairs]
    both = np.take_along_axis(outside, coming, 2) & np.take_along_axis(inside, leaving, 2)
    from_tier = np.take_along_axis(tiers, coming, 2)
    costs_ps = np.where(both, np.take_along_axis(uses, leaving, 2), 0.0) * saves_ps[from_tier]
    swaps = both & (np.take_along_axis(value, coming, 2) > costs_ps)
    to_tier = np.take_along_axis(tiers, leaving, 2)
    after = tiers.copy()
    np.put_along_axis(after, coming, np.where(swaps, to_tier, from_tier), 2)
    np.put_along_axis(after, leaving, np.where(swaps, from_tier, to_tier), 2)
    np.put_along_axis(came, coming, swaps, 2)
    return after, came


COLD_BITS = 4
RETIER_STEPS = 64
WARM_SHARE = 0.5  # [O] of the experts that are not hot

_MESSAGE_VALUES = (128, 2048, 32768)
_PACKED_SHARE = (0.7148, 0.5219, 0.4696)
"""Bytes of a message of so many values packed to 8 bits (source: CXL-Expert's description) over their 16-bit bytes,
mean of both ways. Below: the loss of an expert's result by packing both ways, in units of the loss of 1-bit weights.
Measured on 3072 decode rows of tiny-mixtral on 2026-11-22, by the codec at commit 9e4323f0."""
_PACKED_LOSS = 1.33e-4


def _log2(values: NDArray[np.int64]) -> NDArray[np.float64]:
    """To 2 ** -30: below that processors differ."""
    return np.rint(np.log2(values) * 2.0**30) / 2.0**30


def packed_share(values: NDArray[np.int64]) -> NDArray[np.float64]:
    """[...]: of the 16-bit bytes of so many values."""
    shares: NDArray[np.float64] = np.interp(_log2(values.clip(1)), _log2(np.array(_MESSAGE_VALUES)), _PACKED_SHARE)
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
    return int(left * WARM_SHARE)


@dataclass(frozen=True)
class _Machine:
    """Times of experts and activations outside the GPU."""

    costs: Costs
    near_data: bool

    def hops_ps(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Activations of an expert's rows to the host and back, and their unpacking: read packed, written whole."""
        shape, link = self.costs.shape, self.costs.hardware.link
        whole = 2.0 * rows * shape.hidden_size * shape.dtype_bytes
        share = packed_share(rows * shape.hidden_size)
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
        gpu = float(costs.gpu_expert_ps(1))
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


def _layers(
    rows: NDArray[np.int64], tier: NDArray[np.uint8], machine: _Machine, num_loaded: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64], int, NDArray[np.bool_]]:
    """(time of the experts, of those on the GPU, how many were loaded, slots that the host computes).

    rows and tier [..., S]. num_loaded: the heaviest so many are loaded; None: as many as shorten the layer.
    """
    is_hot, one_ps = tier == HOT, machine.costs.gpu_expert_ps
    away = np.where(is_hot, 0, rows)
    order = np.argsort(-away, axis=-1, kind="stable")  # heaviest missing first
    missing = np.take_along_axis(away, order, axis=-1)
    is_warm = np.take_along_axis(tier == WARM, order, axis=-1)
    here, copied = add_up(each_ps(np.where(is_hot, rows, 0), one_ps))[..., None], each_ps(missing, one_ps)
    total = np.maximum(copied_in_order(copied, here, machine.costs), machine.host_ps(missing, is_warm))
    chosen = total.argmin(axis=-1)[..., None]
    if num_loaded is not None:
        rank = np.argsort(np.argsort(-rows, axis=-1, kind="stable"), axis=-1)
        chosen = ((rank < num_loaded) & ~is_hot & (rows > 0)).sum(axis=-1)[..., None]
    on_host = np.zeros(rows.shape, np.bool_)
    np.put_along_axis(on_host, order, (np.arange(rows.shape[-1]) >= chosen) & (missing > 0), axis=-1)
    moe, on_gpu = (np.take_along_axis(of, chosen, -1)[..., 0] for of in (total, here + sums_before(copied)))
    return moe, launched(on_gpu, machine.costs), int(chosen.sum()), on_host


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
    g, _, d, layers, _ = batches.shape
    loads, num_hot = batches.loads, options.budget.num_hot
    hot = options.popular(num_hot)
    near = options.popular(num_hot + _num_warm(batches.num_experts, options))
    start = np.where(hot, HOT, np.where(near, WARM, COLD)).astype(np.uint8)
    machine = _Machine(costs, options.choice("near_data", ("off", "on")) == "on")
    fixed = "percentile" in options.own
    percentile = options.number("percentile", 75.0, 0.0, 100.0)
    num_loaded = round(batches.num_experts * (1 - percentile / 100)) if fixed else None

    tiers, tier, waits = (
        np.broadcast_to(start, (g, *start.shape)),
        np.empty(loads.rows.shape, np.uint8),
        np.zeros((g, d, layers)),
    )
    uses, to_gpu, to_cpu = _expected_uses(batches, RETIER_STEPS), 0, 0
    for first in range(0, d, RETIER_STEPS):
        if first:
            uses = _uses(loads, slice(first - RETIER_STEPS, first), batches.num_experts)
        running = (batches.rows[:, first] > 0)[:, None, None]
        tiers, moved = retiered(tiers, np.where(running, uses, 0.0), machine.tiers)
        to_gpu, to_cpu = to_gpu + int(moved.to_gpu.sum()), to_cpu + int(moved.to_cpu.sum())
        waits[:, first] = moved.took_ps
        part = slice(first, first + RETIER_STEPS)
        tier[:, part] = loads.look_up(tiers, part)
    moe, gpu_ps, loaded, on_host = _layers(loads.rows, tier, machine, num_loaded)
    cold = on_host & (tier == COLD)
    used = loads.rows > 0
    host_experts, cold_experts = int(on_host.sum()), int(cold.sum())
    widths = np.where(cold, COLD_BITS, np.where(on_host, FULL_PRECISION_BITS, 0))
    ran = cold_at(batches, widths.ravel()[loads.places], options.loss)

    gates = float(loads.total(batches.weights, batches.pairs & on_host.ravel()[loads.places]).sum())
    packing_loss = _PACKED_LOSS * gates / batches.num_decisions
    activations = 2.0 * ran.pairs * costs.shape.hidden_size * costs.shape.dtype_bytes
    share = float(packed_share(np.array(costs.shape.hidden_size)))
    return without_device(
        (f"above the {percentile:g}th percentile" if fixed else "adaptive threshold")
        + ", tiers follow"
        + (", near data" if machine.near_data else ""),
        batches,
        costs,
        moe_ps=moe + waits,
        gpu_ps=gpu_ps,
        prefill_ps=prompts_ps(batches, costs, lambda counts: _layers(counts, start, machine)[0]),
        fetched_experts=loaded + to_gpu,
        hot_pairs=int(loads.rows.sum()) - ran.pairs,
        cold=replace(ran, loss=ran.loss + packing_loss),
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
        "tiers begin by popularity: num_hot on the GPU, half of the rest warm, the others cold at 4 bits",
        "every 64 steps experts change places where the last 64 would have saved more than the copy; "
        "the step that begins with it waits; what becomes cold is quantized on the way",
        "cold experts are computed by the CPU from the expander's memory; near_data=on: by the expander itself",
        "activations at 8 bits in bit planes, size and loss measured on tiny-mixtral; packing on the GPU costs nothing",
    ),
    replay,
    memory,
    options=("percentile", "near_data"),
)
