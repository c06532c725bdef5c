"""8 bits for every cold expert: what a budget of 8 gives, what it refuses, and how its loss is told."""

import numpy as np
import pytest

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget, Plan, top_experts
from vllm_ndp.planning.policies import BIT_RULES, PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlannerRules, Replanner

LAYERS, EXPERTS = 3, 8
MEASURED = np.array([0.5, 0.1, 0.02, 0.005, 2e-5]) * np.ones((LAYERS, EXPERTS, 1))
LOSS = LossTable.from_measured(MEASURED, nats=1.0)
SCORE = ImportanceScore.from_weights(np.random.default_rng(0).dirichlet([0.5] * EXPERTS, LAYERS), 64)


@pytest.mark.parametrize("rule", BIT_RULES)
def test_a_budget_of_8_bits_gives_every_cold_expert_8_by_any_rule(rule: str) -> None:
    policy, budget = load_policy("prefill", PolicySettings(bit_rule=rule)), Budget(2, 8.0)
    placement = top_experts(SCORE.values, 2)
    bits = policy.assign(SCORE, placement, LOSS, budget)
    assert (bits.bits == np.where(placement.hot, 0, 8)).all()
    assert Plan(1, placement, bits).bits_read(SCORE.values) == pytest.approx(8)
    assert (bits.width_mask() == np.where(placement.hot, 0, 32)).all()


def test_a_batch_gets_no_more_than_8_and_warm_experts_stay_in_full_precision() -> None:
    assert Budget(2, 8.0).with_more_bits(0.5) == Budget(2, 8.0)
    planner = Replanner(PlannerRules(load_policy("prefill"), Budget(2, 8.0, 1), LOSS, bits_for="auto"), LAYERS, EXPERTS)
    plans = planner.replan(dict.fromkeys(range(5), SCORE)).plans
    bits, placement = plans[4].bits.bits, plans[4].placement
    assert placement.warm.sum() == LAYERS
    assert (bits[placement.warm] == 16).all()
    assert (bits[placement.cold] == 8).all()


def test_replicas_without_8_bits_are_refused_in_one_sentence_that_says_how_to_make_them() -> None:
    narrow = LossTable.from_measured(MEASURED[:, :, :4])
    with pytest.raises(ConfigError, match=r"8 bits on average need replicas of 8 bits.*--bits 1,2,3,4,8"):
        load_policy("prefill").assign(SCORE, top_experts(SCORE.values, 2), narrow, Budget(2, 8.0))


def test_the_loss_at_8_bits_is_the_measured_one() -> None:
    everywhere = np.full((LAYERS, EXPERTS), 8, np.uint8)
    assert LOSS.predicted_nats(SCORE, everywhere) == pytest.approx(LAYERS * 2e-5)
    assert LOSS.of_layers(slice(1, 2)).predicted_nats(SCORE.layer(1), everywhere[:1]) == pytest.approx(2e-5)
    assert LossTable.from_measured(MEASURED[:, :, :4], nats=1.0).predicted_nats(SCORE, everywhere) == 0
    noisy = MEASURED.copy()
    noisy[0, 0, 4] = 0.3
    assert LossTable.from_measured(noisy).by_width[0, 0, 8] == 0.005
