"""GPU only: experts live in host memory and come over the link when they are chosen, with or without a cache.

`cache` is none, lru, lfu or lcp; a cache holds num_hot experts per layer, so that every system has the same GPU memory.
"""

from __future__ import annotations

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory, all_experts_bytes, slots_bytes
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.cache import CACHE_PRIORITIES, LRU, visits
from vllm_ndp.lab.vectorised.execution import with_copies, without_device
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome


def _cache(options: ReplayOptions) -> tuple[str, int]:
    """(kind, experts per layer that it holds)."""
    kind = options.choice("cache", ("none", *CACHE_PRIORITIES))
    return kind, 0 if kind == "none" else options.budget.num_hot


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    return Memory(gpu=slots_bytes(costs.shape, _cache(options)[1]), host=all_experts_bytes(costs.shape))


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    kind, capacity = _cache(options)
    start = options.popular(capacity)
    rows = batches.loads.rows
    hit = visits(batches.loads, start, capacity, CACHE_PRIORITIES.get(kind, LRU)).hit
    missing = (rows > 0) & ~hit
    compute = costs.gpu_experts_ps(batches.shape[1])[rows]
    on_gpu = add_up(compute)
    return without_device(
        "no cache" if kind == "none" else kind,
        batches,
        costs,
        moe_ps=with_copies(compute, missing, costs),
        gpu_ps=on_gpu,
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
    False,
    replay,
    memory,
    is_bounded=True,
    options=("cache",),
)
