"""How many experts can be copied to GPU memory beside one decode step: the budget of plans that follow decode.

Guesses the time of a step from sizes alone, with attention over no context. Counts the distinct experts that so many
rows choose by chance, the cold ones on the device beside the hot ones on the GPU. Where a copy takes longer than the
steps it was given, the step clock waits for it. A guess that is too bold costs time and hides none. Messages are too
small to count against the link. Knows costs. Does not know clocks, plans or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.same_everywhere import power


def copies_beside_decode(costs: Costs, budget: Budget) -> Callable[[int], float]:
    """Rows of a decode step -> experts that can be copied beside it."""
    return lru_cache(256)(lambda rows: _step_ps(costs, budget, rows) / costs.fetch_ps(costs.slot_bytes))


def _step_ps(costs: Costs, budget: Budget, rows: int) -> float:
    shape = costs.shape
    used = shape.num_experts * (1 - power(1 - shape.top_k / shape.num_experts, rows))
    on_gpu = used * budget.num_hot / shape.num_experts
    each = max(round(rows * shape.top_k / used), 1)  # rows of an expert
    device = (used - on_gpu) * costs.device_expert_ps(round(budget.avg_bits), each) + costs.link_ps(rows, rows)
    gpu = on_gpu * costs.resident_ps(1, each) + costs.shared_ps(rows)
    attention = float(costs.attention_ps(rows, np.zeros(1, np.int64))[0])
    return shape.num_layers * (attention + max(device, gpu) + costs.overhead_ps)
