"""How long a prompt takes in a system whose experts have a prefill of their own; the paper's is `run_prompts`.

A system says what the experts of one layer cost for given counts. Attention, the head and the layers that the trace
leaves out are added here, alike for all. Does not know where experts live.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.outcome import layer_factor


def prompts_ps(
    batches: Batches, costs: Costs, layers_ps: Callable[[NDArray[np.int64]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """[G, B] of the whole model; layers_ps: counts [L, E] of a prompt -> what the experts of each layer take, [L]."""
    g, b, _, _, _ = batches.shape
    out = np.zeros((g, b))
    for group in range(g):
        for request, stats in enumerate(batches.prompts[group]):
            rows = stats.num_tokens
            before = costs.gpu.before_experts_ps(rows, rows, rows * (rows + 1) // 2, [(0, rows)])
            beside = sum(before) + costs.shape.num_layers * (costs.overhead_ps + costs.shared_ps(rows))
            experts = layer_factor(batches, costs) * float(layers_ps(stats.counts).sum())
            out[group, request] = experts + beside + costs.gpu.head_ps(1)
    return out


def each_ps(counts: NDArray[np.int64], one_ps: Callable[[int], float]) -> NDArray[np.float64]:
    """one_ps of every count, asked once for each that occurs; 0 for 0."""
    distinct, place = np.unique(counts, return_inverse=True)
    times = np.array([one_ps(int(rows)) if rows else 0.0 for rows in distinct], np.float64)
    return times[place].reshape(counts.shape)


def on_gpu_ps(costs: Costs, counts: NDArray[np.int64], expert_bytes: int) -> NDArray[np.float64]:
    """[...], the experts of counts [..., E] in GPU memory, each used one read once at that size."""
    touched, pairs = (counts > 0).sum(axis=-1), counts.sum(axis=-1)
    flops = 2 * costs.shape.weights_per_expert
    times = [
        costs.gpu.roofline_ps(n * expert_bytes, flops * p)
        for n, p in zip(touched.ravel().tolist(), pairs.ravel().tolist(), strict=True)
    ]
    return np.array(times, np.float64).reshape(touched.shape)
