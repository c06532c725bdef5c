"""GPU only: experts live in host memory and come over the link when they are chosen, with or without a cache.

`cache` is none, lru, lfu or lcp; a cache holds num_hot experts per layer, so that every system has the same GPU memory.
"""

from __future__ import annotations

import numpy as np

from ndp_device.errors import ConfigError
from vllm_ndp.replay.batches import Batches
from vllm_ndp.replay.costs import Costs
from vllm_ndp.replay.execution import run_prompts
from vllm_ndp.replay.outcome import Outcome, layer_factor
from vllm_ndp.replay.systems.cache import CACHE_PRIORITIES, LRU, visits
from vllm_ndp.replay.systems.system import Placing, System, popular_placement


def replay(batches: Batches, costs: Costs, placing: Placing) -> Outcome:
    kind = str(placing.options.get("cache", "none"))
    if kind != "none" and kind not in CACHE_PRIORITIES:
        raise ConfigError(f"cache must be one of none, {', '.join(CACHE_PRIORITIES)}, got {kind!r}")
    g, b, d, layers, _ = batches.shape
    capacity = 0 if kind == "none" else placing.budget.num_hot
    start = np.broadcast_to(popular_placement(placing.prior, capacity), (g, layers, batches.num_experts))
    rows = batches.loads.rows
    hit = visits(batches.loads, start, capacity, CACHE_PRIORITIES.get(kind, LRU)).hit
    missing = (rows > 0) & ~hit
    compute = costs.gpu_experts_ps(b)[rows]
    on_gpu = compute.sum(axis=3)
    # Copies come one after the other while earlier experts compute; the last one computes after its copy.
    waiting = missing.sum(axis=3) * costs.fetch_ps() + np.where(missing, compute, 0.0).max(axis=3)
    moved = int(missing.sum()) * layer_factor(batches, costs)
    return Outcome(
        system="gpu_on_demand",
        policy="no cache" if kind == "none" else kind,
        moe_ps=np.maximum(on_gpu, waiting),
        device_ps=np.zeros((g, d, layers)),
        gpu_ps=on_gpu,
        prefill_ps=run_prompts(batches, start, costs),
        migration_ps=np.zeros(g),
        migrated_bytes=moved * costs.dims.expert_bytes,
        hot_pairs=int(rows[hit].sum()),
        total_pairs=int(np.broadcast_to(batches.pairs, batches.ids.shape).sum()),
        cold_bits=0.0,
        cold_pairs=0,
        loss=0.0,
    )


GPU_ON_DEMAND = System(
    "gpu_on_demand",
    (
        "host memory keeps up with the link; copies are pipelined with GPU compute",
        "a cache starts every group with the most popular experts",
    ),
    False,
    replay,
)
