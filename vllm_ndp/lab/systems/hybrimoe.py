"""HybriMoE (arXiv 2504.05897): a GPU cache per layer, and each layer's misses divided among CPU and link.

The rule of expert_cache.py in full precision with a cache of num_hot experts per layer. Cached experts compute on the
GPU. The link copies the heaviest missing ones, the CPU computes the others: as many of each as make the layer shortest.
The published greedy schedule approximates that. Experts that the CPU computed enter the cache when an idle link brings
them. The published cache lets the lowest recent score leave (MRS); here the least recently used does.
"""

from __future__ import annotations

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.systems.expert_cache import CacheRule, replay_cache
from vllm_ndp.lab.systems.system import ReplayOptions, System, beside_host_memory
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.outcome import Outcome


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    rule = CacheRule(FULL_PRECISION_BITS, "either", "layer", fills=True)
    return replay_cache("hybrimoe", "CPU, link and cache", rule, batches, costs, options)


HYBRIMOE = System(
    "hybrimoe",
    (
        "the best prefix of misses by load is copied; the published greedy schedule comes near it",
        "copies that fill the cache occupy the link; the least recently used expert leaves",
        "no prefetch of later layers",
    ),
    False,
    replay,
    beside_host_memory,
)
