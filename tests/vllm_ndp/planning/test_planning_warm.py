"""Warm experts: the most important ones after the hot ones, in full precision, outside of the budget of bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.bitwidths import LossTable, uniform_bitwidths
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement, Plan
from vllm_ndp.planning.policies import PolicySettings, ScoredPolicy, load_policy
from vllm_ndp.planning.replanner import PlannerRules, Replanner
from vllm_ndp.planning.stats import RoutingStats

LAYERS, EXPERTS = 3, 16
LOSS = LossTable.nominal(LAYERS, EXPERTS)


def replanner(budget: Budget, **rules: object) -> Replanner:
    return Replanner(PlannerRules(load_policy("prefill"), budget, LOSS, **rules), LAYERS, EXPERTS)  # type: ignore[arg-type]


def score(seed: int) -> ImportanceScore:
    return ImportanceScore.from_weights(np.random.default_rng(seed).random((LAYERS, EXPERTS)), 64)


@given(st.integers(0, 10**6), st.integers(0, EXPERTS), st.integers(0, EXPERTS), st.integers(1, 3))
def test_after_the_hot_experts_the_next_most_important_ones_are_warm(seed: int, hot: int, warm: int, requests: int):
    warm = min(warm, EXPERTS - hot)
    scores = {r: score(seed + r) for r in range(requests)}
    change = replanner(Budget(hot, 2.5, warm)).replan(scores)
    order = np.argsort(-np.sum([s.values for s in scores.values()], axis=0), axis=1, kind="stable")
    for layer in range(LAYERS):
        assert set(np.flatnonzero(change.placement.hot[layer])) == set(order[layer, :hot])
        assert set(np.flatnonzero(change.placement.warm[layer])) == set(order[layer, hot : hot + warm])
    for r, plan in change.plans.items():
        assert (plan.bits.bits[change.placement.warm] == 16).all()
        assert plan.bits.bits[change.placement.cold].max(initial=1) <= 4
        if change.placement.cold.any():
            largest = change.placement.cold_shares(scores[r].values).max()
            assert 2.5 - largest <= plan.bits_read(scores[r].values) <= 2.5 + 1e-8


def test_a_policy_that_knows_nothing_of_tiers_gets_full_precision_for_warm_experts():
    class Careless(ScoredPolicy):
        def assign(self, score, placement, loss, budget):  # type: ignore[no-untyped-def]
            return BitwidthPlan(np.where(placement.hot, 0, 2))

    ours = load_policy("prefill")
    assert isinstance(ours, ScoredPolicy)
    careless = Careless(ours.name, ours.scorer, ours.settings)
    change = Replanner(PlannerRules(careless, Budget(4, 2.0, 3), LOSS), LAYERS, EXPERTS).replan({"a": score(1)})
    bits = change.plans["a"].bits.bits
    assert (bits[change.placement.warm] == 16).all()
    assert (bits[change.placement.cold] == 2).all()


def test_cold_pairs_beside_warm_experts_have_widths_of_their_own():
    random = np.random.default_rng(3)
    ids = np.argsort(random.random((64, LAYERS, EXPERTS)), axis=2)[:, :, :4]
    stats = RoutingStats.from_choices(ids, random.random(ids.shape), EXPERTS)
    policy, budget = load_policy("prefill", PolicySettings(bit_rule="pairs")), Budget(4, 2.5, 3)
    score = policy.score(stats)
    plan = Replanner(PlannerRules(policy, budget, LOSS), LAYERS, EXPERTS).replan({"a": score}).plans["a"]
    widths = plan.bits.of_pairs(score.weights)
    assert (widths[plan.placement.warm] == 16).all()
    assert len(np.unique(widths[plan.placement.cold])) > 1
    assert 2.4 < plan.bits_read(score.values, score.weights) <= 2.5 + 1e-8


def test_before_the_first_prompt_the_ids_after_the_hot_ones_are_warm():
    placement = replanner(Budget(2, 3.0, 3)).placement
    assert placement.tiers.tolist() == [[1, 1, 2, 2, 2] + [0] * 11] * LAYERS


def test_impossible_placements_and_plans_are_refused():
    hot = np.array([[True, False, False]])
    with pytest.raises(ValueError, match="hot, warm or cold"):
        Placement(hot, hot)
    with pytest.raises(ValueError, match="hot, warm or cold"):
        Placement(hot, np.zeros((1, 4), np.bool_))
    warm = Placement(hot, np.array([[False, True, False]]))
    with pytest.raises(ValueError, match="bits must be 16 where an expert is warm"):
        Plan(0, warm, BitwidthPlan(np.array([[0, 3, 3]])))
    assert uniform_bitwidths(warm, Budget(1, 3.0, 1)).bits.tolist() == [[0, 0, 3]]
    with pytest.raises(ConfigError, match="at least 0"):
        Budget(1, 3.0, -1)
