"""Ours: the paper's system, and a hot set that follows decode with what the link has left over.

The hot set starts as the policy's prefill placement. Every decode token decays the prompt's counts and adds its own. An
idle link copies one expert at a time per group: the exchange that gains most over all layers. The newcomer's count must
exceed the leaver's by the hysteresis. Decode never waits: until a copy is complete the expert runs on the device as
before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab._lanes import follow
from vllm_ndp.lab.systems.context_aware import finish, memory, plan_groups
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import run_pairs
from vllm_ndp.lab.vectorised.outcome import Outcome, layer_factor

MEMORY_TOKENS = {"decayed": 128.0, "lfu": 1e12, "lru": 2.0}
"""Counts fade with this time constant: never (least frequently used leaves), at once (least recently), or between."""


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    frequency = options.word("frequency", "decayed", tuple(MEMORY_TOKENS))
    memory = options.number("memory_tokens", MEMORY_TOKENS[frequency], 1.0, 1e15)
    g = batches.shape[0]
    hot, before, bits = plan_groups(batches, options)
    # A newcomer takes the leaver's place; the leaver takes the newcomer's bits, so the bit budget is kept.
    current, bits = hot.copy(), bits.copy()
    heat = np.stack([_prompt_heat(batches, group, memory) for group in range(g)])
    widths = np.empty(batches.ids.shape, np.uint8)
    each_step = copies_per_step(batches, costs, bits)
    loads = batches.loads
    copied = follow(
        batches.ids, loads.experts, loads.rows, each_step, memory, options.hysteresis, heat, current, bits, widths
    )
    outcome = finish("adaptive", batches, costs, options, widths, hot, before, copied * layer_factor(batches, costs))
    outcome.policy += f" then {frequency}"
    outcome.notes["copies"] = copied
    return outcome


def _prompt_heat(batches: Batches, group: int, memory: float) -> NDArray[np.float64]:
    """Counts of the prompts as if their last `memory` tokens were alike: what a decayed count would be by now."""
    heat = np.zeros(batches.prompts[group][0].counts.shape)
    for stats in batches.prompts[group]:
        heat += stats.counts * (min(memory, stats.num_tokens) / max(stats.num_tokens, 1))
    return heat


def copies_per_step(batches: Batches, costs: Costs, bits: NDArray[np.uint8]) -> NDArray[np.float64]:
    """[G], how much of one expert's copy (all layers the trace's layer stands for) fits beside one decode step."""
    first = batches.first_steps(1)
    widths = np.take_along_axis(bits[:, :, None], first.ids, axis=4)
    step_ps = run_pairs(first, widths, costs).moe_ps[:, 0].sum(axis=1) * layer_factor(batches, costs)
    copies: NDArray[np.float64] = step_ps / (costs.fetch_ps() * max(layer_factor(batches, costs), 1.0))
    return copies


ADAPTIVE = System(
    "adaptive",
    (
        "the link's idle time is worth one step's expert time per step; activations are too small to count against it",
        "one exchange at a time per group; a trace with fewer layers than the model moves all layers it stands for",
    ),
    True,
    replay,
    memory,
    is_bounded=True,
)
