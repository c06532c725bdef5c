"""GPU only: experts live in host memory and come over the link when they are chosen, some of them a layer ahead."""

from __future__ import annotations

import numpy as np

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory, all_experts_bytes, slots_bytes
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, add_up
from vllm_ndp.lab.vectorised.cache import CACHE_PRIORITIES, LRU, Priority, visits
from vllm_ndp.lab.vectorised.execution import launched, with_copies, without_device
from vllm_ndp.lab.vectorised.outcome import Outcome, time_before


def _cache(options: ReplayOptions) -> tuple[str, int]:
    """(kind, experts per layer that it holds)."""
    kind = options.choice("cache", ("none", *CACHE_PRIORITIES))
    return kind, 0 if kind == "none" else options.budget.num_hot


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    return Memory(gpu=slots_bytes(costs.shape, _cache(options)[1]), host=all_experts_bytes(costs.shape))


def gpu_on_demand(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """GPU only: experts live in host memory and come over the link when they are chosen, with or without a cache.

    A cache holds num_hot experts per layer, so that every system has the same GPU memory.
    """
    kind, capacity = _cache(options)
    start = options.popular(capacity)
    rows = batches.loads.rows
    hit = visits(batches.loads, start, capacity, CACHE_PRIORITIES.get(kind, LRU)).hit
    missing = (rows > 0) & ~hit
    compute = costs.gpu_experts_ps(batches.shape[1])[rows]
    return without_device(
        "no cache" if kind == "none" else kind,
        batches,
        costs,
        moe_ps=with_copies(compute, missing, costs),
        gpu_ps=launched(add_up(compute), costs),
        resident=start,
        fetched_experts=int(missing.sum()),
        hot_pairs=int(rows[hit].sum()),
    )


GPU_ON_DEMAND = System(
    "gpu_on_demand",
    (
        "host memory keeps up with the link; copies are pipelined with GPU compute",
        "a cache starts every group with the most popular experts",
    ),
    gpu_on_demand,
    memory,
    options=("cache",),
)


PRIOR_TOKENS = 16.0  # [O] how many tokens the earlier sequences are worth


def moe_infinity(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """MoE-Infinity (arXiv 2401.14361): a GPU cache that follows the running sequence's activations and prefetches by
    them.

    Priority and prediction of an expert: how often this sequence chose it so far, on top of what earlier ones did.
    """
    _, b, _, _, k = batches.shape
    expected = Priority("expected", PRIOR_TOKENS * k * options.prior.values)
    start = options.popular(options.budget.num_hot)
    # The prompt belongs to the sequence.
    hit, predicted = visits(
        batches.loads, start, options.budget.num_hot, expected, frequency=batches.prompt_counts, predict=k * b
    )
    rows = batches.loads.rows
    compute = costs.gpu_experts_ps(b)[rows]
    on_gpu = launched(add_up(compute), costs)
    lightest = np.where(predicted, compute, np.inf).min(axis=3)
    misses, early = add_up((rows > 0) & ~hit), add_up(predicted)
    # The link begins with what was predicted while the layer before runs, and goes on with what was not.
    ahead = np.where(early > 0, costs.copy_opening_ps + early * costs.copy_ps, 0.0)
    late = np.maximum(ahead - time_before(on_gpu, batches, costs), 0)
    missing = (rows > 0) & ~hit & ~predicted
    layer = np.maximum(with_copies(compute, missing, costs, before_ps=late), late + np.where(early > 0, lightest, 0.0))
    fetched = int(misses.sum())
    return without_device(
        "activation-aware",
        batches,
        costs,
        moe_ps=layer,
        gpu_ps=on_gpu,
        resident=start,
        fetched_experts=fetched,
        hot_pairs=int(rows[hit].sum()),
    )


MOE_INFINITY = System(
    "moe_infinity",
    (
        "the sequence's own activation counts plus a prior worth 16 tokens decide eviction and prefetch",
        "a predicted copy begins with the layer before; copies do not disturb compute",
    ),
    moe_infinity,
)
