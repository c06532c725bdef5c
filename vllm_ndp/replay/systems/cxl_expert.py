"""CXL-Expert (seed 002) on a trace: hot experts on the GPU, warm ones on the CPU, cold ones behind a CXL expander.

Tiers by popularity: num_hot experts stay in GPU memory, half of the rest in CPU memory (fp16), the others in the
expander (4 bits, read at its rate). Activations of warm and cold experts cross the link at half size and are unpacked
by the host. Per layer the threshold adapts: the heaviest missing experts are loaded to the GPU as long as that shortens
the layer; `percentile` fixes it as published: experts above it are loaded. `near_data` on: the expander multiplies cold
experts itself, beside the CPU. The paper's own figures: `reproduce cxl-expert`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ndp_device.widths import FULL_PRECISION_BITS
from vllm_ndp.replay.systems.context_aware import gate_loss
from vllm_ndp.replay.systems.cpu import HostCpu
from vllm_ndp.replay.systems.prompts import each_ps, on_gpu_ps, prompts_ps
from vllm_ndp.replay.systems.system import Memory, ReplayOptions, System, popular_placement, slots_bytes
from vllm_ndp.replay.vectorised.batches import Batches
from vllm_ndp.replay.vectorised.execution import copied_in_order, without_device
from vllm_ndp.replay.vectorised.loads import add_up, sums_after, sums_before
from vllm_ndp.replay.vectorised.outcome import PS_PER_S, Outcome, Traffic
from vllm_ndp.simulation.costs import Costs

HOT, WARM, COLD = 0, 1, 2
COLD_BITS = 4
ACTIVATION_RATIO = 0.5  # source: seed 002, 8-bit activations
EXPANDER_FLOPS_PER_S = 2e12  # source: seed 002, "100x slower than GPU", where the device can multiply


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Warm experts in host memory, cold ones in the expander: at 4 bits, and in full precision to be loaded from."""
    shape, num_hot = costs.shape, min(options.budget.num_hot, costs.shape.num_experts)
    num_warm = (shape.num_experts - num_hot) // 2
    warm = shape.num_layers * num_warm * shape.expert_bytes
    cold = shape.num_layers * (shape.num_experts - num_hot - num_warm) * shape.expert_bytes
    return Memory(
        gpu=slots_bytes(costs.shape, num_hot), device=cold + cold * COLD_BITS // FULL_PRECISION_BITS, host=warm
    )


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    cpu = HostCpu.of(costs)
    g, b, d, layers, _ = batches.shape
    num_hot = options.budget.num_hot
    hot = popular_placement(options.prior, num_hot)
    near = popular_placement(options.prior, num_hot + (batches.num_experts - num_hot) // 2)
    tiers = np.where(hot, HOT, np.where(near, WARM, COLD)).astype(np.uint8)
    gpu = costs.gpu_experts_ps(b)
    apart = options.word("near_data", "off", ("off", "on")) == "on"
    fixed = "percentile" in options.own
    num_loaded = round(batches.num_experts * (1 - options.number("percentile", 75.0, 0.0, 100.0) / 100))
    # There and back: packed on the link, and read packed and written whole where they are unpacked.
    whole_bytes = 2 * costs.shape.hidden_size * costs.shape.dtype_bytes
    link_ps = whole_bytes * ACTIVATION_RATIO / costs.hardware.link.bulk_bytes_per_s * PS_PER_S
    unpack_ps = whole_bytes * (1 + ACTIVATION_RATIO) / cpu.memory_bytes_per_s * PS_PER_S
    cold_bytes = costs.shape.expert_bytes * COLD_BITS / FULL_PRECISION_BITS
    from_expander = replace(cpu, memory_bytes_per_s=int(cpu.cxl_bytes_per_s))
    expander = replace(from_expander, flops_per_s=int(EXPANDER_FLOPS_PER_S))

    def host_ps(missing: NDArray[np.int64], is_warm: NDArray[np.bool_]) -> NDArray[np.float64]:
        """[..., S + 1]: at h what the host takes for all but the first h; near data, with the expander."""
        hops = missing * (link_ps + unpack_ps)
        warm = np.where(is_warm, cpu.each_ps(costs, missing, costs.shape.expert_bytes) + hops, 0.0)
        cold = np.where(is_warm, 0.0, from_expander.each_ps(costs, missing, cold_bytes) + hops)
        alone: NDArray[np.float64] = sums_after(warm + cold)
        if not apart:
            return alone
        beside = np.where(is_warm, 0.0, expander.each_ps(costs, missing, cold_bytes) + hops)
        helped: NDArray[np.float64] = np.minimum(alone, np.maximum(sums_after(warm), sums_after(beside)))
        return helped

    moe, gpu_ps = np.zeros((2, g, d, layers))
    cold = np.zeros(batches.loads.rows.shape, np.bool_)  # slots that run at COLD_BITS
    loaded = gpu_pairs = warm_pairs = cold_pairs = warm_experts = cold_experts = 0
    for part in batches.loads.chunks():
        rows, tier = batches.loads.rows[:, part], batches.loads.look_up(tiers, part)
        is_hot = tier == HOT
        order = np.argsort(-np.where(is_hot, 0, rows), axis=3, kind="stable")  # heaviest missing first
        missing = np.take_along_axis(np.where(is_hot, 0, rows), order, axis=3)
        is_warm = np.take_along_axis(tier == WARM, order, axis=3)
        here = add_up(gpu[np.where(is_hot, rows, 0)])[..., None]
        total = np.maximum(copied_in_order(gpu[missing], here, costs), host_ps(missing, is_warm))
        chosen = total.argmin(axis=3)[..., None]
        if fixed:
            rank = np.argsort(np.argsort(-rows, axis=3, kind="stable"), axis=3)
            chosen = ((rank < num_loaded) & ~is_hot & (rows > 0)).sum(axis=3)[..., None]
        moe[:, part] = np.take_along_axis(total, chosen, 3)[..., 0]
        gpu_ps[:, part] = np.take_along_axis(here + sums_before(gpu[missing]), chosen, 3)[..., 0]
        on_host = np.arange(missing.shape[3]) >= chosen
        is_cold = on_host & ~is_warm & (missing > 0)
        np.put_along_axis(cold[:, part], order, is_cold, axis=3)
        loaded += int(chosen.sum())
        warm_experts += int((on_host & is_warm & (missing > 0)).sum())
        cold_experts += int(is_cold.sum())
        gpu_pairs += int(np.where(is_hot, rows, 0).sum() + missing[~on_host].sum())
        warm_pairs += int(missing[on_host & is_warm].sum())
        cold_pairs += int(missing[on_host & ~is_warm].sum())
    widths = np.where(cold.ravel()[batches.loads.places], COLD_BITS, 0).astype(np.uint8)
    on_gpu = int((batches.loads.rows > 0).sum()) - warm_experts - cold_experts

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The same threshold for the rows of a prompt."""
        away = np.where(hot, 0, counts)
        order = np.argsort(-away, axis=1, kind="stable")
        missing, warm = (np.take_along_axis(a, order, axis=1) for a in (away, tiers == WARM))
        here = on_gpu_ps(costs, np.where(hot, counts, 0), costs.shape.expert_bytes)[:, None]
        copied = copied_in_order(each_ps(missing, lambda rows: costs.resident_ps(1, rows)), here, costs)
        times: NDArray[np.float64] = np.maximum(copied, host_ps(missing, warm)).min(axis=1)
        return times

    return without_device(
        "cxl_expert",
        (f"above the {options.own['percentile']:g}th percentile" if fixed else "adaptive threshold")
        + (", near data" if apart else ""),
        batches,
        costs,
        moe_ps=moe,
        gpu_ps=gpu_ps,
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        fetched_experts=loaded,
        hot_pairs=gpu_pairs,
        cold_bits=float(COLD_BITS * cold_pairs + FULL_PRECISION_BITS * warm_pairs),
        cold_pairs=cold_pairs + warm_pairs,
        loss=gate_loss(batches, widths, options),
        traffic=Traffic(
            hbm_bytes=on_gpu * costs.shape.expert_bytes,
            host_bytes=(warm_experts + cold_experts * COLD_BITS / FULL_PRECISION_BITS) * costs.shape.expert_bytes,
        ),
    )


CXL_EXPERT = System(
    "cxl_expert",
    (
        "CPU: 20 TFLOP/s, expander 64 GB/s (seed 002), CPU memory 307 GB/s (8 x DDR5-4800)",
        "tiers by popularity: num_hot on the GPU, half of the rest warm, the others cold at 4 bits",
        "cold experts are computed by the CPU from the expander's memory; near_data=on: by the expander at 2 TFLOP/s",
        "activations at half size, as seed 002 says (not measured); packing on the GPU costs nothing",
    ),
    False,
    replay,
    memory,
)
