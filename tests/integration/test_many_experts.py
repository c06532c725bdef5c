"""Planning over thousands of experts is done by arrays: as many steps of Python for 512 experts a layer as for 32.

Nothing is timed: function calls and lines are counted, and only experts that really move or are listed may cost some.
"""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ndp_device.protocol.session import listed
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget, union_of_widths
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlannerRules, Replanner
from vllm_ndp.planning.stats import RoutingStats

LAYERS, TOP_K, TOKENS = 3, 8, 200


def steps_of(work: Callable[[], object]) -> int:
    """Lines of Python that run, a comprehension's turns among them, and calls into C."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection runs callbacks of other tests' libraries, and their lines would be counted
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.settrace(None)
        sys.setprofile(None)
        gc.enable()
    return count


def choices(num_experts: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    ids = random.random((TOKENS, LAYERS, num_experts)).argpartition(TOP_K, axis=2)[:, :, :TOP_K]
    return ids, random.random((TOKENS, LAYERS, TOP_K), dtype=np.float32)


def score(num_experts: int, seed: int) -> ImportanceScore:
    return ImportanceScore.from_weights(np.random.default_rng(seed).random((LAYERS, num_experts)), TOKENS)


def planner(num_experts: int, bit_rule: str) -> Replanner:
    policy = load_policy("prefill", PolicySettings(bit_rule=bit_rule))
    rules = PlannerRules(policy, Budget(num_experts // 2, 3.0), LossTable.nominal(LAYERS, num_experts))
    return Replanner(rules, LAYERS, num_experts)


def planning_steps(num_experts: int, bit_rule: str) -> int:
    """Statistics, score, placement, bits, what moves, what the device is told, what slots keep."""
    ours, routed = planner(num_experts, bit_rule), choices(num_experts, 1)
    ours.replan({"before": score(num_experts, 0)})  # what is computed once

    def plan() -> None:
        stats = RoutingStats.from_choices(*routed, num_experts)
        scored = ours.score(stats)
        ours.keep([scored], stats.counts > 0)
        change = ours.replan({"a": scored})
        union_of_widths((plan.bits for plan in change.plans.values()), change.placement.hot.shape)

    return steps_of(plan)


def test_a_prompt_is_planned_in_as_many_steps_for_512_experts_as_for_32() -> None:
    few, many = (planning_steps(experts, "uniform") for experts in (32, 512))
    assert many == few


@pytest.mark.parametrize("bit_rule", ["importance", "mse"])
def test_the_selector_s_steps_are_bounded_by_how_many_experts_can_have_4_bits(bit_rule: str) -> None:
    """One turn per n4, for all layers together: of 256 cold experts with 2 bits to spend each at most 171 have 4."""
    few, many = (planning_steps(experts, bit_rule) for experts in (32, 512))
    assert many - few < 20 * (171 - 11)


def test_only_experts_that_are_listed_are_looked_at_one_by_one() -> None:
    flags = np.zeros((48, 512), np.uint8)
    assert steps_of(lambda: listed(flags)) == steps_of(lambda: listed(flags[:2, :2]))
    flags[3, 500], flags[1, 7] = 0b10001, 0b100
    assert listed(flags) == [(1, 7, 3), (3, 500, 1), (3, 500, 16)]
