"""Klotski (arXiv 2502.06888): batches in turn through one layer's weights, hot experts first, so that copies hide.

All requests of a group pass a layer before any enters the next. While one layer computes, the link brings the hot
experts of the next (by popularity: as many as a token chooses). The others follow when their gates are known, and
compute last. Nothing stays on the GPU between steps except in the places of num_hot experts, which hold the hot ones.
"""

from __future__ import annotations

import numpy as np

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.systems.pipeline import pipelined_ps
from vllm_ndp.lab.systems.system import ReplayOptions, System, beside_host_memory
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import without_device
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    loads, k = batches.loads, batches.shape[4]
    places = min(options.budget.num_hot, batches.num_experts)
    resident = options.popular(places)
    ahead = options.popular(min(places + k, batches.num_experts)) & ~resident
    used = loads.rows > 0
    here, early = loads.look_up(resident) & used, loads.look_up(ahead) & used
    each, fetch = costs.gpu_experts_ps(batches.shape[1])[loads.rows], float(costs.fetch_ps())
    right, late = add_up(early), add_up(used & ~here & ~early)
    running = (batches.rows > 0)[:, :, None]
    wrong = np.where(running, ahead.sum(axis=1) - right, 0)
    ready = add_up(np.where(here, each, 0.0))
    return without_device(
        "hot experts ahead",
        batches,
        costs,
        moe_ps=pipelined_ps(
            batches,
            costs,
            early_ps=right * fetch,
            late_ps=late * fetch,
            wrong_ps=wrong * fetch,
            ready_ps=ready,
            waiting_ps=add_up(each) - ready,
        ),
        gpu_ps=add_up(each),
        resident=resident,
        fetched_experts=float((right + late + wrong).sum()),
        hot_pairs=int(loads.rows[here].sum()),
    )


KLOTSKI = System(
    "klotski",
    (
        "a group is the published n batches together; its planner's choice of n is the batch size you give",
        "hot experts by static popularity instead of the published correlation of layers",
        "what was ordered ahead and not chosen is dropped when the gate is known",
    ),
    False,
    replay,
    beside_host_memory,
)
