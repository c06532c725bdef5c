"""MoE-Infinity (arXiv 2401.14361): a GPU cache that follows the running sequence's activations and prefetches by them.

Priority and prediction of an expert = how often this sequence chose it so far, on top of what earlier ones did. The
experts predicted for a layer are fetched while the layer before runs.
"""

from __future__ import annotations

import numpy as np

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.systems.system import ReplayOptions, System, beside_host_memory
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.cache import Priority, visits
from vllm_ndp.lab.vectorised.execution import with_copies, without_device
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome, time_before

PRIOR_TOKENS = 16.0  # [O] how many tokens the earlier sequences are worth


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    _, b, _, _, k = batches.shape
    expected = Priority("expected", PRIOR_TOKENS * k * options.prior.values)
    start = options.popular(options.budget.num_hot)
    # The prompt belongs to the sequence.
    hit, predicted = visits(
        batches.loads, start, options.budget.num_hot, expected, frequency=batches.prompt_counts, predict=k * b
    )
    rows = batches.loads.rows
    compute = costs.gpu_experts_ps(b)[rows]
    lightest = np.where(predicted, compute, np.inf).min(axis=3)
    misses, early = add_up((rows > 0) & ~hit), add_up(predicted)
    # The link begins with what was predicted while the layer before runs, and goes on with what was not.
    ahead = np.where(early > 0, costs.copy_opening_ps + early * costs.copy_ps, 0.0)
    late = np.maximum(ahead - time_before(add_up(compute), batches, costs), 0)
    missing = (rows > 0) & ~hit & ~predicted
    layer = np.maximum(with_copies(compute, missing, costs, before_ps=late), late + np.where(early > 0, lightest, 0.0))
    fetched = int(misses.sum())
    return without_device(
        "activation-aware",
        batches,
        costs,
        moe_ps=layer,
        gpu_ps=add_up(compute),
        resident=start,
        fetched_experts=fetched,
        hot_pairs=int(rows[hit].sum()),
        notes={"misses_predicted": int(early.sum()) / max(fetched, 1)},
    )


MOE_INFINITY = System(
    "moe_infinity",
    (
        "the sequence's own activation counts plus a prior worth 16 tokens decide eviction and prefetch",
        "a predicted copy begins with the layer before; copies do not disturb compute",
    ),
    False,
    replay,
    beside_host_memory,
)
