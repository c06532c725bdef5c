"""Pre-gated MoE (arXiv 2308.12066, ISCA 2024): each layer's gate chooses the experts of the next layer.

So copies are ordered a layer ahead and are always right; what the layer before does not hide waits. The price is a
model fine-tuned to gates of that kind. Its routing would differ from the trace's, and its loss does not count: replay
takes the trace as it is. The published system keeps no expert; here the places of num_hot hold the ones used last.
"""

from __future__ import annotations

import numpy as np

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.systems.pipeline import pipelined_ps
from vllm_ndp.lab.systems.system import ReplayOptions, System, beside_host_memory
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.cache import LRU, visits
from vllm_ndp.lab.vectorised.execution import without_device
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    rows, places = batches.loads.rows, options.budget.num_hot
    start = options.popular(places)
    hit = visits(batches.loads, start, places, LRU).hit
    each = costs.gpu_experts_ps(batches.shape[1])[rows]
    copies = add_up((rows > 0) & ~hit)
    ready = add_up(np.where(hit, each, 0.0))
    nothing = np.zeros(copies.shape)
    return without_device(
        "gates a layer ahead",
        batches,
        costs,
        moe_ps=pipelined_ps(
            batches,
            costs,
            early_ps=copies * float(costs.fetch_ps()),
            late_ps=nothing,
            wrong_ps=nothing,
            ready_ps=ready,
            waiting_ps=add_up(each) - ready,
        ),
        gpu_ps=add_up(each),
        resident=start,
        fetched_experts=int(copies.sum()),
        hot_pairs=int(rows[hit].sum()),
    )


PREGATED = System(
    "pregated",
    (
        "needs a model fine-tuned to choose a layer ahead: the trace's routing stands in, its loss is not counted",
        "places of num_hot experts hold the ones used last (the published system frees them after use)",
        "the first layer of a step has no gate before it: its copies wait",
    ),
    False,
    replay,
    beside_host_memory,
)
