"""MoE-Infinity (arXiv 2401.14361): a GPU cache that follows the running sequence's activations and prefetches by them.

Priority and prediction of an expert = how often this sequence chose it so far, on top of what earlier ones did. The
experts predicted for a layer are fetched while the layer before runs.
"""

from __future__ import annotations

import numpy as np

from vllm_ndp.replay.batches import Batches
from vllm_ndp.replay.costs import Costs
from vllm_ndp.replay.execution import run_prompts
from vllm_ndp.replay.outcome import Outcome, layer_factor, time_before
from vllm_ndp.replay.systems.cache import Priority, visits
from vllm_ndp.replay.systems.system import Placing, System, popular_placement

PRIOR_TOKENS = 16.0  # [O] how many tokens the earlier sequences are worth


def replay(batches: Batches, costs: Costs, placing: Placing) -> Outcome:
    g, b, d, layers, k = batches.shape
    shape = (g, layers, batches.num_experts)
    expected = Priority("expected", PRIOR_TOKENS * k * placing.prior.values)
    start = np.broadcast_to(popular_placement(placing.prior, placing.budget.num_hot), shape)
    # The prompt belongs to the sequence.
    prompts = np.array([np.sum([s.counts for s in stats], axis=0) for stats in batches.prompts], np.float64)
    hit, predicted, _ = visits(batches.loads, start, placing.budget.num_hot, expected, frequency=prompts, predict=k * b)
    rows = batches.loads.rows
    compute = costs.gpu_experts_ps(b)[rows].sum(axis=3)
    misses, early = ((rows > 0) & ~hit).sum(axis=3), predicted.sum(axis=3)
    waiting = np.maximum(early * costs.fetch_ps() - time_before(compute, batches, costs), 0)
    fetched = int(misses.sum())
    return Outcome(
        system="moe_infinity",
        policy="activation-aware",
        moe_ps=waiting + (misses - early) * costs.fetch_ps() + compute,
        device_ps=np.zeros((g, d, layers)),
        gpu_ps=compute,
        prefill_ps=run_prompts(batches, start, costs),
        migration_ps=np.zeros(g),
        migrated_bytes=fetched * layer_factor(batches, costs) * costs.dims.expert_bytes,
        hot_pairs=int(rows[hit].sum()),
        total_pairs=int(np.broadcast_to(batches.pairs, batches.ids.shape).sum()),
        cold_bits=0.0,
        cold_pairs=0,
        loss=0.0,
        notes={"misses_predicted": int(early.sum()) / max(fetched, 1)},
    )


MOE_INFINITY = System(
    "moe_infinity",
    (
        "the sequence's own activation counts plus a prior worth 16 tokens decide eviction and prefetch",
        "a predicted copy hides behind the layer before; copies do not disturb compute",
    ),
    False,
    replay,
)
