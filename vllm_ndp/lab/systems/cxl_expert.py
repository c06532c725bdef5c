"""CXL-Expert on a trace: hot experts on the GPU, warm ones on the CPU, cold ones behind a CXL expander.

Activations of warm and cold experts cross the link quantized and packed in bit planes; the host unpacks them. Per layer
the link loads the heaviest missing experts to the GPU while that shortens the layer. The paper's own figures:
`reproduce cxl-expert`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs, each_ps
from vllm_ndp.cost_model.memory import Memory, slots_bytes
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, Loads, add_up, sums_after
from vllm_ndp.lab.vectorised.execution import cold_at, copied_in_order, without_device
from vllm_ndp.lab.vectorised.outcome import PS_PER_S, Outcome, Traffic

HOT, WARM, COLD = 0, 1, 2
COLD_BITS = 4
RETIER_STEPS = 64
WARM_SHARE = 0.5  # [O] of the experts that are not hot

_MESSAGE_VALUES = (128, 2048, 32768)
_PACKED_SHARE = (0.7148, 0.5219, 0.4696)
"""Bytes of a message of so many values packed to 8 bits (source: CXL-Expert's description) over their 16-bit bytes,
mean of both ways. Below: the loss of an expert's result by packing both ways, in units of the loss of 1-bit weights.
Measured on 3072 decode rows of tiny-mixtral on 2026-11-22, by the codec at commit 9e4323f0."""
_PACKED_LOSS = 1.33e-4


def _num_warm(num_experts: int, options: ReplayOptions) -> int:
    return int((num_experts - min(options.budget.num_hot, num_experts)) * WARM_SHARE)


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Warm experts are in host memory. Cold ones are in the expander at 4 bits, and in full precision too, because
    warm experts are loaded from there."""
    shape, num_hot = costs.shape, min(options.budget.num_hot, costs.shape.num_experts)
    num_warm, layer = _num_warm(shape.num_experts, options), shape.num_layers * shape.expert_bytes
    cold = (shape.num_experts - num_hot - num_warm) * layer
    expander = cold + cold * COLD_BITS // FULL_PRECISION_BITS
    return Memory(gpu=slots_bytes(shape, num_hot), host=num_warm * layer, expander=expander)


# -- times of experts outside the GPU ---------------------------------------------------------------------------------


def _log2(values: NDArray[np.int64]) -> NDArray[np.float64]:
    """To 2 ** -30: below that processors differ."""
    return np.rint(np.log2(values) * 2.0**30) / 2.0**30


def _packed_share(values: NDArray[np.int64]) -> NDArray[np.float64]:
    """[...]: of the 16-bit bytes of so many values."""
    shares: NDArray[np.float64] = np.interp(_log2(values.clip(1)), _log2(np.array(_MESSAGE_VALUES)), _PACKED_SHARE)
    return shares


def _cold_bytes(costs: Costs) -> float:
    return costs.shape.expert_bytes * COLD_BITS / FULL_PRECISION_BITS


def _hops_ps(costs: Costs, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Activations of an expert's rows to the host and back, and their unpacking: read packed, written whole."""
    shape, link = costs.shape, costs.hardware.link
    whole = 2.0 * rows * shape.hidden_size * shape.dtype_bytes
    share = _packed_share(rows * shape.hidden_size)
    unpacking = whole * (1 + share) / costs.hardware.host.memory_bytes_per_s
    times: NDArray[np.float64] = (whole * share / link.bulk_bytes_per_s + unpacking) * PS_PER_S
    return times


def _warm_ps(costs: Costs, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    return costs.cpu_experts_ps(rows, costs.shape.expert_bytes) + _hops_ps(costs, rows)


def _cold_ps(costs: Costs, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """By the CPU from the expander's memory."""
    return costs.cpu_experts_ps(rows, _cold_bytes(costs), costs.hardware.host.cxl_bytes_per_s) + _hops_ps(costs, rows)


# -- tiers that follow use --------------------------------------------------------------------------------------------


def retiered(
    tiers: NDArray[np.uint8], uses: NDArray[np.float64], costs: Costs
) -> tuple[NDArray[np.uint8], int, int, NDArray[np.float64]]:
    """tiers and uses [G, L, E] -> tiers from now on, how many came to the GPU and to the CPU, and the time of the moves
    [G, L]. uses: steps since the last look that used each.

    "The system monitors execution time and may migrate an expert between categories if its usage changes" (its words),
    no rule given. Ours: two experts of a layer change places if the exchange would have saved more time since the last
    look than the copy takes. So tiers keep their sizes, and the two copies cross in opposite directions at once.
    """
    one, hot = np.ones((), np.int64), float(costs.gpu_expert_ps(1))
    copy_ps = costs.copy_opening_ps + costs.copy_ps
    warm, cold = (min(float(of(costs, one)), copy_ps + hot) for of in (_warm_ps, _cold_ps))
    from_expander_ps = costs.shape.expert_bytes / costs.hardware.host.cxl_bytes_per_s * PS_PER_S
    below, copies = [0.0, warm - hot, cold - hot], [np.inf, copy_ps, max(copy_ps, from_expander_ps)]
    after, first = _exchanged(tiers, uses, tiers == HOT, tiers != HOT, np.array(below), np.array(copies))
    below, copies = [0.0, 0.0, cold - warm], [np.inf, np.inf, from_expander_ps]
    after, second = _exchanged(after, uses, after == WARM, after == COLD, np.array(below), np.array(copies))
    # The expander's copies go to the CPU's memory or through it: one way, one after the other. The link is another.
    from_warm, from_cold = (((tiers == tier) & first).sum(axis=2) for tier in (WARM, COLD))
    to_cpu = second.sum(axis=2)
    link = from_warm * copy_ps + from_cold * max(copy_ps, from_expander_ps)
    expander = (from_cold + to_cpu) * from_expander_ps
    return after, int(first.sum()), int(to_cpu.sum()), np.maximum(link, expander)


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
    take = partial(np.take_along_axis, axis=2)
    value = np.where(outside, uses * saves_ps[tiers] - copy_ps[tiers], -np.inf)
    coming = np.argsort(-value, axis=2, kind="stable")
    leaving = np.argsort(np.where(inside, uses, np.inf), axis=2, kind="stable")
    pays = take(value, coming) > take(uses, leaving) * saves_ps[take(tiers, coming)]
    swaps = np.nonzero(pays & take(outside, coming) & take(inside, leaving))
    new, old = (*swaps[:2], coming[swaps]), (*swaps[:2], leaving[swaps])
    after, came = tiers.copy(), np.zeros(tiers.shape, np.bool_)
    after[new], after[old], came[new] = tiers[old], tiers[new], True
    return after, came


def _uses(loads: Loads, part: slice, num_experts: int) -> NDArray[np.float64]:
    """[G, L, E], in how many of these steps each expert was used."""
    used, experts = loads.rows[:, part] > 0, loads.experts[:, part]
    uses = np.zeros((len(used), used.shape[2], num_experts))
    np.add.at(uses, (np.arange(len(used))[:, None, None, None], np.arange(used.shape[2])[:, None], experts), used)
    return uses


# -- a layer, and the whole trace -------------------------------------------------------------------------------------


def _layers(
    rows: NDArray[np.int64], tier: NDArray[np.uint8], costs: Costs
) -> tuple[NDArray[np.float64], int, NDArray[np.bool_]]:
    """(time of the experts, how many were loaded, slots that the host computes).

    rows and tier [..., S]. The heaviest missing ones are loaded, as many as shorten the layer.
    """
    is_hot = tier == HOT
    away = np.where(is_hot, 0, rows)
    order = np.argsort(-away, axis=-1, kind="stable")  # heaviest missing first
    missing = np.take_along_axis(away, order, axis=-1)
    is_warm = np.take_along_axis(tier == WARM, order, axis=-1)
    here = add_up(each_ps(np.where(is_hot, rows, 0), costs.gpu_expert_ps))[..., None]
    copied = each_ps(missing, costs.gpu_expert_ps)
    host_ps = sums_after(np.where(is_warm, _warm_ps(costs, missing), _cold_ps(costs, missing)))
    total = np.maximum(copied_in_order(copied, here, costs), host_ps)
    chosen = total.argmin(axis=-1)[..., None]
    on_host = np.zeros(rows.shape, np.bool_)
    np.put_along_axis(on_host, order, (np.arange(rows.shape[-1]) >= chosen) & (missing > 0), axis=-1)
    return np.take_along_axis(total, chosen, -1)[..., 0], int(chosen.sum()), on_host


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    g, _, d, layers, _ = batches.shape
    loads, num_hot = batches.loads, options.budget.num_hot
    hot = options.popular(num_hot)
    near = options.popular(num_hot + _num_warm(batches.num_experts, options))
    start = np.where(hot, HOT, np.where(near, WARM, COLD)).astype(np.uint8)
    tiers, tier = np.broadcast_to(start, (g, *start.shape)), np.empty(loads.rows.shape, np.uint8)
    waits, to_gpu, to_cpu = np.zeros((g, d, layers)), 0, 0
    # The first look is at the end of the prompts, and expects as many steps that go like these.
    shares = [np.sum([s.counts / max(s.num_tokens, 1) for s in group], axis=0) for group in batches.prompts]
    uses = np.minimum(np.array(shares), 1.0) * RETIER_STEPS
    for first in range(0, d, RETIER_STEPS):
        if first:
            uses = _uses(loads, slice(first - RETIER_STEPS, first), batches.num_experts)
        running = (batches.rows[:, first] > 0)[:, None, None]
        tiers, came, went, waits[:, first] = retiered(tiers, np.where(running, uses, 0.0), costs)
        to_gpu, to_cpu = to_gpu + came, to_cpu + went
        part = slice(first, first + RETIER_STEPS)
        tier[:, part] = loads.look_up(tiers, part)
    moe, loaded, on_host = _layers(loads.rows, tier, costs)
    cold = on_host & (tier == COLD)
    host_experts, cold_experts = int(on_host.sum()), int(cold.sum())
    ran = cold_at(batches, loads.of_pairs(np.where(cold, COLD_BITS, on_host * FULL_PRECISION_BITS)), options.loss)
    gates = float((batches.weights * (batches.pairs & loads.of_pairs(on_host))).sum(dtype=np.float64))
    packing_loss = _PACKED_LOSS * gates / batches.num_decisions
    activations = 2.0 * ran.pairs * costs.shape.hidden_size * costs.shape.dtype_bytes
    return without_device(
        "adaptive threshold, tiers follow",
        batches,
        costs,
        options.loss,
        moe + waits,
        found=(loads.rows > 0) & ~on_host,
        prompts=lambda counts: _layers(counts, start, costs)[0],
        fetched=loaded + to_gpu,
        cold=replace(ran, loss=ran.loss + packing_loss),
        traffic=Traffic(
            hbm_bytes=(int((loads.rows > 0).sum()) - host_experts) * costs.shape.expert_bytes,
            host_bytes=(host_experts - cold_experts + to_cpu) * costs.shape.expert_bytes
            + cold_experts * _cold_bytes(costs),
            link_bytes=activations * float(_packed_share(np.array(costs.shape.hidden_size))),
        ),
    )


CXL_EXPERT = System(
    "cxl_expert",
    (
        "CPU, its memory and the CXL expander are the hardware's host.* values",
        "tiers begin by popularity: num_hot on the GPU, half of the rest warm, the others cold at 4 bits",
        "every 64 steps experts change places where the last 64 would have saved more than the copy; "
        "the step that begins with it waits; what becomes cold is quantized on the way",
        "cold experts are computed by the CPU from the expander's memory",
        "activations at 8 bits in bit planes, size and loss measured on tiny-mixtral; packing on the GPU costs nothing",
    ),
    replay,
    memory,
)
