"""Fiddler (arXiv 2402.07033): popular experts on the GPU, a missing one on the CPU or copied, the faster of both.

Activations cross the link, weights do so only when many rows share them. The placement is static popularity.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs, HostCpu
from vllm_ndp.cost_model.memory import Memory, all_experts_bytes, slots_bytes
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import each_ps, prompts_ps, with_copies, without_device
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome, Traffic


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Popular experts never leave the GPU: host memory holds the others."""
    shape = costs.shape
    popular = shape.num_layers * min(options.budget.num_hot, shape.num_experts) * shape.expert_bytes
    return Memory(gpu=slots_bytes(costs.shape, options.budget.num_hot), host=all_experts_bytes(costs.shape) - popular)


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    cpu = HostCpu.of(costs)
    g, b, d, layers, _ = batches.shape
    resident = options.popular(options.budget.num_hot)
    gpu = costs.gpu_experts_ps(b)
    on_cpu = cpu.experts_ps(costs, b, costs.shape.expert_bytes, cpu.memory_bytes_per_s)
    activations = 2 * costs.shape.hidden_size * costs.shape.dtype_bytes * np.arange(b + 1)
    hop = cpu.hops_ps(costs, b)
    fetch = costs.fetch_ps()
    moe, gpu_ps = np.zeros((2, g, d, layers))
    fetched = hit_pairs = cpu_pairs = cpu_experts = gpu_experts = 0
    link_bytes = 0.0
    for part in batches.loads.chunks():
        rows = batches.loads.rows[:, part]
        here = batches.loads.look_up(resident, part)
        hits, misses = np.where(here, rows, 0), np.where(here, 0, rows)
        on_host = (misses > 0) & (on_cpu[misses] + hop[misses] <= fetch + gpu[misses])
        copied = (misses > 0) & ~on_host
        gpu_ps[:, part] = add_up(gpu[hits]) + add_up(np.where(copied, gpu[misses], 0.0))
        cpu_ps = add_up(np.where(on_host, on_cpu[misses] + hop[misses], 0.0))
        on_gpu = np.where(on_host, 0.0, gpu[rows])
        moe[:, part] = np.maximum(with_copies(on_gpu, copied, costs), cpu_ps)
        cpu_experts += int(on_host.sum())
        gpu_experts += int((rows > 0).sum() - on_host.sum())
        link_bytes += float(activations[misses[on_host]].sum())
        fetched += int(copied.sum())
        hit_pairs += int(hits.sum())
        cpu_pairs += int(misses[on_host].sum())

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The same choice for the rows of a prompt."""
        here = each_ps(counts, lambda rows: costs.resident_ps(1, rows))
        host = each_ps(counts, costs.hop_ps)
        host += cpu.each_ps(costs, counts, costs.shape.expert_bytes)
        away = (counts > 0) & ~resident
        on_host = away & (host <= fetch + here)
        on_gpu = with_copies(np.where(on_host, 0.0, here), away & ~on_host, costs)
        times: NDArray[np.float64] = np.maximum(on_gpu, np.where(on_host, host, 0.0).sum(axis=1))
        return times

    return without_device(
        "static",
        batches,
        costs,
        moe_ps=moe,
        gpu_ps=gpu_ps,
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        fetched_experts=fetched,
        hot_pairs=hit_pairs,
        cold_bits=float(FULL_PRECISION_BITS * cpu_pairs),
        cold_pairs=cpu_pairs,
        traffic=Traffic(
            hbm_bytes=gpu_experts * costs.shape.expert_bytes,
            host_bytes=cpu_experts * costs.shape.expert_bytes,
            link_bytes=link_bytes,
        ),
    )


FIDDLER = System(
    "fiddler",
    (
        "CPU: 20 TFLOP/s (seed 002), 307 GB/s (8 x DDR5-4800); fp16 weights on both sides",
        "CPU and GPU run side by side, in prompts too: each expert where its rows are done sooner",
    ),
    False,
    replay,
    memory,
)
