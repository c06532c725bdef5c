"""CXL-Expert (seed 002) on a trace: hot experts on the GPU, warm ones on the CPU, cold ones behind a CXL expander.

Tiers by popularity: num_hot experts stay in GPU memory, half of the rest in CPU memory (fp16), the others in the
expander (4 bits, read at its rate, activations at half size). Per layer the threshold adapts: the heaviest missing
experts are loaded to the GPU as long as that shortens the layer. The paper's own figures: `reproduce cxl-expert`.
"""

from __future__ import annotations

import numpy as np

from ndp_device.widths import FULL_PRECISION_BITS
from vllm_ndp.replay.systems.cpu import HostCpu
from vllm_ndp.replay.systems.system import Memory, ReplayOptions, System, popular_placement, slots_bytes
from vllm_ndp.replay.vectorised.batches import Batches
from vllm_ndp.replay.vectorised.execution import without_device
from vllm_ndp.replay.vectorised.loads import add_up, sums_after, sums_before
from vllm_ndp.replay.vectorised.outcome import PS_PER_S, Outcome
from vllm_ndp.simulation.costs import Costs

HOT, WARM, COLD = 0, 1, 2
COLD_BITS = 4
ACTIVATION_RATIO = 0.5  # source: seed 002, 8-bit activations


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
    gpu, fetch = costs.gpu_experts_ps(b), costs.fetch_ps()
    warm_ps = cpu.experts_ps(costs, b, costs.shape.expert_bytes, cpu.memory_bytes_per_s)
    activation_bytes = 2 * costs.shape.hidden_size * costs.shape.dtype_bytes * ACTIVATION_RATIO
    cold_ps = cpu.experts_ps(costs, b, costs.shape.expert_bytes * COLD_BITS / FULL_PRECISION_BITS, cpu.cxl_bytes_per_s)
    cold_ps += np.arange(b + 1) * activation_bytes / cpu.cxl_bytes_per_s * PS_PER_S
    moe, gpu_ps = np.zeros((2, g, d, layers))
    loaded = gpu_pairs = warm_pairs = cold_pairs = 0
    for part in batches.loads.chunks():
        rows, tier = batches.loads.rows[:, part], batches.loads.look_up(tiers, part)
        is_hot = tier == HOT
        order = np.argsort(-np.where(is_hot, 0, rows), axis=3, kind="stable")  # heaviest missing first
        missing = np.take_along_axis(np.where(is_hot, 0, rows), order, axis=3)
        is_warm = np.take_along_axis(tier == WARM, order, axis=3)
        host = np.where(is_warm, warm_ps[missing], cold_ps[missing])
        here = add_up(gpu[np.where(is_hot, rows, 0)])[..., None]
        copies = sums_before(np.where(missing > 0, fetch + gpu[missing], 0.0))
        rest = sums_after(host)
        total = np.maximum(here + copies, rest)
        chosen = total.argmin(axis=3)[..., None]
        moe[:, part] = np.take_along_axis(total, chosen, 3)[..., 0]
        gpu_ps[:, part] = (np.take_along_axis(here + copies, chosen, 3) - fetch * chosen)[..., 0]
        on_host = np.arange(missing.shape[3]) >= chosen
        loaded += int(chosen.sum())
        gpu_pairs += int(np.where(is_hot, rows, 0).sum() + missing[~on_host].sum())
        warm_pairs += int(missing[on_host & is_warm].sum())
        cold_pairs += int(missing[on_host & ~is_warm].sum())
    return without_device(
        "cxl_expert",
        "adaptive threshold",
        batches,
        costs,
        moe_ps=moe,
        gpu_ps=gpu_ps,
        resident=hot,
        fetched_experts=loaded,
        hot_pairs=gpu_pairs,
        cold_bits=float(COLD_BITS * cold_pairs + FULL_PRECISION_BITS * warm_pairs),
        cold_pairs=cold_pairs + warm_pairs,
        loss=float("nan"),
    )


CXL_EXPERT = System(
    "cxl_expert",
    (
        "CPU: 20 TFLOP/s, expander 64 GB/s (seed 002), CPU memory 307 GB/s (8 x DDR5-4800)",
        "tiers by popularity: num_hot on the GPU, half of the rest warm, the others cold at 4 bits",
        "cold experts are computed by the CPU from the expander's memory: a commodity expander does not compute",
    ),
    False,
    replay,
    memory,
)
