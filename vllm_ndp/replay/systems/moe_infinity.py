"""MoE-Infinity (arXiv 2401.14361): a GPU cache that follows the running sequence's activations and prefetches by them.

Priority and prediction of an expert = how often this sequence chose it so far, on top of what earlier ones did. The
experts predicted for a layer are fetched while the layer before runs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.replay.batches import Batches
from vllm_ndp.replay.costs import Costs
from vllm_ndp.replay.execution import run_prompts
from vllm_ndp.replay.outcome import Outcome, layer_factor
from vllm_ndp.replay.systems.cache import LaneCache
from vllm_ndp.replay.systems.system import Placing, System, popular_placement

PRIOR_TOKENS = 16.0  # [O] how many tokens the earlier sequences are worth


def replay(batches: Batches, costs: Costs, placing: Placing) -> Outcome:
    g, b, d, layers, k = batches.shape
    shape = (g, layers, batches.num_experts)
    expected = PRIOR_TOKENS * k * placing.prior.values
    start = np.broadcast_to(popular_placement(placing.prior, placing.budget.num_hot), shape)

    def by_activation(cache: LaneCache) -> NDArray[np.float64]:
        value: NDArray[np.float64] = cache.frequency + expected
        return value

    cache = LaneCache(start, placing.budget.num_hot, by_activation)
    for group, stats in enumerate(batches.prompts):  # the prompt belongs to the sequence
        cache.frequency[group] += np.sum([s.counts for s in stats], axis=0)
    gpu, fetch = costs.gpu_experts_ps(b), costs.fetch_ps()
    attention = float(costs.attention_ps(1, np.array([batches.kv_tokens.max()]))[0])
    moe, on_gpu = np.zeros((2, g, d, layers))
    fetched = hit_pairs = predicted_misses = all_misses = 0
    for step, tokens in batches.tokens_per_expert():
        used = tokens > 0
        wanted = np.argsort(-(cache.frequency + expected), axis=2, kind="stable")[:, :, : k * b]
        predicted = np.zeros(shape, np.bool_)
        np.put_along_axis(predicted, wanted, True, axis=2)
        missing = used & ~cache.cached
        hits = cache.touch(tokens, used)
        compute = gpu[tokens].sum(axis=2)
        early = (missing & predicted).sum(axis=2) * fetch
        late = (missing & ~predicted).sum(axis=2) * fetch
        before = np.concatenate([np.full((g, 1), attention), compute[:, :-1] + attention], axis=1)
        moe[:, step] = np.maximum(early - before, 0) + late + compute
        on_gpu[:, step] = compute
        fetched += int(missing.sum())
        hit_pairs += int(tokens[hits].sum())
        predicted_misses += int((missing & predicted).sum())
        all_misses += int(missing.sum())
    return Outcome(
        system="moe_infinity",
        policy="activation-aware",
        moe_ps=moe,
        device_ps=np.zeros((g, d, layers)),
        gpu_ps=on_gpu,
        prefill_ps=run_prompts(batches, start, costs),
        migration_ps=np.zeros(g),
        migrated_bytes=fetched * layer_factor(batches, costs) * costs.dims.expert_bytes,
        hot_pairs=hit_pairs,
        total_pairs=int(np.broadcast_to(batches.pairs, batches.ids.shape).sum()),
        cold_bits=0.0,
        cold_pairs=0,
        loss=0.0,
        notes={"misses_predicted": predicted_misses / max(all_misses, 1)},
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
