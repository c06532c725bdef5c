"""HybriMoE (arXiv 2504.05897): a GPU cache, and for each layer the best division of its misses among CPU and link.

Cached experts compute on the GPU. Of the missing ones the heaviest are copied to the GPU, the others computed by the
CPU, as many as make the layer shortest, which the published greedy schedule approximates. Copied experts enter the
cache, where the lowest recent score leaves (MRS; here a frequency that halves every 64 tokens, no router scores).
"""

from __future__ import annotations

import numpy as np

from ndp_device.widths import FULL_PRECISION_BITS
from vllm_ndp.lab.systems.system import ReplayOptions, System, beside_host_memory, popular_placement
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.cache import lcp, visits
from vllm_ndp.lab.vectorised.execution import copied_in_order, without_device
from vllm_ndp.lab.vectorised.loads import add_up, sums_after, sums_before
from vllm_ndp.lab.vectorised.outcome import Outcome, Traffic
from vllm_ndp.simulation.costs import Costs
from vllm_ndp.simulation.host_cpu import HostCpu

HALF_LIFE_TOKENS = 64.0  # [O] the paper's decay of its score is not in what we could read


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    b, rows = batches.shape[1], batches.loads.rows
    start = popular_placement(options.prior, options.budget.num_hot)
    hit = visits(batches.loads, start, options.budget.num_hot, lcp(0.5, HALF_LIFE_TOKENS / b)).hit
    cpu, gpu = HostCpu.of(costs), costs.gpu_experts_ps(b)
    on_cpu = cpu.experts_ps(costs, b, costs.shape.expert_bytes, cpu.memory_bytes_per_s)
    missing = -np.sort(-np.where(hit, 0, rows), axis=3)  # heaviest first
    here = add_up(gpu[np.where(hit, rows, 0)])[..., None]
    hop = cpu.hops_ps(costs, b)[batches.rows][:, :, None, None]
    rest = sums_after(on_cpu[missing])
    total = np.maximum(copied_in_order(gpu[missing], here, costs), np.where(rest > 0, rest + hop, 0.0))
    chosen = total.argmin(axis=3)[..., None]
    copied = (np.arange(missing.shape[3]) < chosen) & (missing > 0)
    computed = (missing > 0) & ~copied
    cpu_pairs = int(missing[computed].sum())
    return without_device(
        "hybrimoe",
        "CPU, link and cache",
        batches,
        costs,
        moe_ps=np.take_along_axis(total, chosen, 3)[..., 0],
        gpu_ps=np.take_along_axis(here + sums_before(gpu[missing]), chosen, 3)[..., 0],
        resident=start,
        fetched_experts=int(copied.sum()),
        hot_pairs=int(rows[hit].sum()),
        cold_bits=float(FULL_PRECISION_BITS * cpu_pairs),
        cold_pairs=cpu_pairs,
        traffic=Traffic(
            hbm_bytes=float((rows > 0).sum() - computed.sum()) * costs.shape.expert_bytes,
            host_bytes=float(computed.sum()) * costs.shape.expert_bytes,
        ),
    )


HYBRIMOE = System(
    "hybrimoe",
    (
        "the best prefix of misses by load is copied; the published greedy schedule comes near it",
        "a missing expert enters the cache whichever side computed it: copies that fill the cache are not waited for",
        "score = frequency that halves every 64 tokens (ours); no prefetch of later layers",
        "prompts stream what is not cached to the GPU",
    ),
    False,
    replay,
    beside_host_memory,
)
