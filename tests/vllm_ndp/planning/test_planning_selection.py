"""Hot sets and bits: the selector against exhaustive search, and what every plan must conserve."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import WIDTHS
from vllm_ndp.planning.bitwidths import (
    GAINS,
    LossTable,
    bits_over_layers,
    full_precision,
    select_bitwidths,
    uniform_bitwidths,
    verdict_on,
    verdict_on_loss,
)
from vllm_ndp.planning.importance import ImportanceScore, importance
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement, Plan, top_experts
from vllm_ndp.planning.policies import PolicySettings, ScoredPolicy, load_policy
from vllm_ndp.planning.stats import RoutingStats


def random_model(seed: int, layers: int, experts: int) -> tuple[ImportanceScore, LossTable]:
    generator = np.random.default_rng(seed)
    loss = np.sort(generator.exponential(size=(layers, experts, 4)), axis=2)[:, :, ::-1]
    return ImportanceScore.from_weights(generator.random((layers, experts)), 64), LossTable(loss)


SUBSETS = [subset for count in range(1, 5) for subset in combinations(WIDTHS, count)]


def only(loss: LossTable, widths: Sequence[int]) -> LossTable:
    """The same replicas without the other widths."""
    measured = np.where(np.isin(WIDTHS, widths), loss.mse, np.nan)
    return LossTable.from_measured(measured, loss.layer_weights, loss.nats)


@pytest.mark.parametrize("widths", SUBSETS)
@pytest.mark.parametrize("rule", [*GAINS, "uniform", "layers", "pairs"])
def test_plans_use_the_widths_that_the_replicas_have(widths: tuple[int, ...], rule: str) -> None:
    """Within the budget, as far as it reaches; all at the widest where it reaches further."""
    score, loss = random_model(11, 3, 7)
    score = replace(score, weights=np.random.default_rng(3).random((3, 7, 5), np.float32) if rule == "pairs" else None)
    loss = only(loss, widths)
    assert loss.widths == widths
    for average in (1.0, 1.5, 2.0, 2.75, 3.0, 4.0):
        if average < widths[0]:
            continue
        budget = Budget(2, average)
        placement = top_experts(score.values, 2)
        policy = ScoredPolicy("prefill", lambda stats, told: score, PolicySettings(bit_rule=rule))
        plan = policy.assign(score, placement, loss, budget)
        assert set(plan.bits[placement.cold].tolist()) <= set(widths)
        if plan.from_weight is not None:
            told = plan.of_pairs(score.weights)
            assert set(told[placement.cold].ravel().tolist()) <= set(widths)
        read = placement.cold_shares(score.values) if rule in ("layers", "pairs") else 1 / 15
        if rule == "pairs":
            assert (plan.of_pairs(score.weights)[placement.cold].mean(axis=1) * read).sum() <= average + 1e-6
        else:
            assert (plan.bits[placement.cold] * read).sum() <= average + 1e-6
        if average >= widths[-1]:
            assert (plan.bits[placement.cold] == widths[-1]).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rule", [*GAINS, "uniform", "layers", "pairs"])
def test_a_checkpoints_own_codes_are_the_one_width_of_every_plan_and_lose_nothing(bits: int, rule: str) -> None:
    score, _ = random_model(11, 3, 7)
    score = replace(score, weights=np.random.default_rng(3).random((3, 7, 5), np.float32) if rule == "pairs" else None)
    loss, placement = LossTable.of_codes(3, 7, bits), top_experts(score.values, 2)
    policy = ScoredPolicy("prefill", lambda stats, told: score, PolicySettings(bit_rule=rule))
    plan = policy.assign(score, placement, loss, Budget(2, float(bits)))
    assert (plan.bits[placement.cold] == bits).all()
    assert loss.nats == loss.mse.sum() == 0
    assert not {1, 2, 3} & set(loss.widths)


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("cold", range(1, 7))
@pytest.mark.parametrize("widths", [one for one in SUBSETS if len(one) > 1])
def test_the_selector_equals_exhaustive_search_for_every_budget(widths: tuple[int, ...], cold: int, gain: str) -> None:
    """Against every plan of so many bits whose widths fall with importance, of all widths and of some."""
    everyone = Placement(np.zeros((1, cold), bool))
    falling = [np.array(one[::-1]) for one in combinations_with_replacement(widths, cold)]
    for total in range(cold * widths[0], cold * widths[-1] + 1):
        score, whole = random_model(13 + total, 1, cold)
        loss = only(whole, widths)
        order = np.argsort(-score.values[0], kind="stable")
        counts = score.values[0, order] if gain == "importance" else np.ones(cold)
        chosen = select_bitwidths(score, everyone, loss, Budget(0, total / cold), gain).bits[0, order]
        spent = int(chosen.sum())
        assert spent == max(int(one.sum()) for one in falling if one.sum() <= total)
        lost = [counts @ loss.by_width[0, order, one] for one in falling if one.sum() == spent]
        assert counts @ loss.by_width[0, order, chosen] == pytest.approx(min(lost), rel=1e-12)


def test_uniform_bits_give_what_is_left_over_to_the_lower_ids():
    placement = Placement(np.array([[False, True, False, False, False]]))
    assert uniform_bitwidths(placement, Budget(1, 2.5)).bits.tolist() == [[3, 0, 3, 2, 2]]
    assert full_precision(placement).bits.tolist() == [[16, 0, 16, 16, 16]]


def test_equal_importance_goes_to_the_lower_id():
    assert top_experts(np.full((1, 4), 0.25), 2).hot.tolist() == [[True, True, False, False]]


def test_the_hot_set_of_a_batch_has_the_largest_sums():
    """Two requests agree mildly on expert 0 (.4 + .4); sums .8, .6, .7, .9. With one request it is its own top K."""
    scores = [ImportanceScore(np.array([row])) for row in ([0.4, 0.6, 0, 0], [0.4, 0, 0, 0.6], [0, 0, 0.7, 0.3])]
    place, budget = load_policy("prefill").place, Budget(2, 3.0)
    assert np.flatnonzero(place(scores, None, budget).hot[0]).tolist() == [0, 3]
    assert np.flatnonzero(place(scores[:1], None, budget).hot[0]).tolist() == [0, 1]


@pytest.mark.parametrize("num_hot", [-1, 9])
def test_more_hot_experts_than_the_model_has_are_refused(num_hot):
    score, _ = random_model(0, 2, 8)
    with pytest.raises(ConfigError, match=r"0\.\.8"):
        top_experts(score.values, num_hot)


def test_a_measured_loss_that_rises_with_bits_counts_as_that_of_the_narrower_width():
    rising = np.ones((1, 2, 4))
    rising[0, 1, 2] = 1.5
    assert LossTable.from_measured(rising).mse[0, 1].tolist() == [1, 1, 1, 1]


def test_scores_of_another_model_are_refused():
    score, loss = random_model(0, 2, 8)
    with pytest.raises(ConfigError, match="one model"):
        select_bitwidths(score, Placement(np.zeros((2, 7), bool)), loss, Budget(0, 2))


def test_averages_below_2_bits_are_judged_and_others_are_not():
    assert verdict_on(2.0) == verdict_on(4.0) == ""
    assert verdict_on(-1.0) == verdict_on(0.0) == verdict_on(float("nan")) == ""  # refused by whoever asks
    assert verdict_on(1.5).startswith("1.5 bits on average are too few for useful answers")


def expected_loss(score: ImportanceScore, loss: LossTable, bits: np.ndarray) -> float:
    each = np.take_along_axis(loss.mse, bits[:, :, None].astype(int) - 1, axis=2)[:, :, 0]
    return float((each * score.values * loss.layer_weights[:, None]).sum())


def falling_gains(seed: int) -> LossTable:
    """Two layers of two experts; each further bit gains less than the one before."""
    generator = np.random.default_rng(seed)
    gains = np.sort(generator.random((2, 2, 3)), axis=2)[:, :, ::-1]
    mse = np.concatenate([np.zeros((2, 2, 1)), -np.cumsum(gains, axis=2)], axis=2) + 3
    weights = generator.random(2)
    return LossTable(mse, weights / weights.mean())


EVERY_PLAN = [np.array(bits).reshape(2, 2) for bits in itertools.product((1, 2, 3, 4), repeat=4)]
ALL_COLD = Placement(np.zeros((2, 2), bool))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.floats(1.0, 4.0))
def test_no_other_assignment_reads_as_few_bits_and_loses_less(seed: int, avg_bits: float):
    """Against every assignment. What the budget leaves over is less than the next bit would read."""
    loss, generator = falling_gains(seed), np.random.default_rng(seed)
    score = ImportanceScore.from_weights(generator.random((2, 2)))
    found = bits_over_layers(score, ALL_COLD, loss, Budget(0, avg_bits)).bits
    read = [float((score.values * bits).sum() / 2) for bits in EVERY_PLAN]
    ours, lost = float((score.values * found).sum() / 2), expected_loss(score, loss, found)
    assert ours <= avg_bits + 1e-8
    assert (found == 4).all() or ours > avg_bits - score.values.max() / 2 - 1e-8
    others = [expected_loss(score, loss, bits) for bits, bought in zip(EVERY_PLAN, read, strict=True) if bought <= ours]
    assert lost <= min(others) + 1e-12


def test_of_two_experts_the_one_with_the_stronger_choices_gets_the_wider_replica_and_loses_the_more():
    """Both are chosen twice; a router weight of .8 against .2 counts 16 times, and a bit is worth 4.4."""
    ids, weights = np.tile([[[0, 1]]], (2, 1, 1)), np.tile([[[0.8, 0.2]]], (2, 1, 1))
    score = importance(RoutingStats.from_choices(ids, weights, 2), alpha=1.0)
    assert score.strength[0] == pytest.approx([0.64 / 0.34, 0.04 / 0.34])
    loss = LossTable(LossTable.nominal(1, 2).mse, nats=1.0)
    bits = bits_over_layers(score, Placement(np.zeros((1, 2), bool)), loss, Budget(0, 2.0)).bits
    assert bits.tolist() == [[3, 1]]
    lost = [loss.predicted_nats(score, np.array([widths], np.uint8)) for widths in ([3, 1], [1, 3])]
    assert lost[0] < lost[1]
    unknown = ImportanceScore(score.values)
    assert bits_over_layers(unknown, Placement(np.zeros((1, 2), bool)), loss, Budget(0, 2.0)).bits.tolist() == [[2, 2]]


def test_a_bit_that_pays_only_with_the_next_one_is_bought_with_it():
    """From 1 to 2 bits nothing, from 2 to 3 everything: the mean of both is what the first of them is worth."""
    mse = np.array([[[1.0, 1.0, 0.1, 0.1], [1.0, 0.7, 0.6, 0.6]]])
    score, placement = ImportanceScore(np.array([[0.5, 0.5]])), Placement(np.zeros((1, 2), bool))
    assert bits_over_layers(score, placement, LossTable(mse), Budget(0, 2.0)).bits.tolist() == [[3, 1]]


def test_experts_that_a_prompt_did_not_use_are_as_wide_as_the_others():
    cold = Placement(np.zeros((1, 5), bool))
    for used in ([1.0, 0.0, 0.0, 0.0, 0.0], [0.2] * 5):
        score = ImportanceScore(np.array([used]))
        assert (bits_over_layers(score, cold, LossTable.nominal(1, 5), Budget(0, 2.0)).bits == 2).all()
    nobody = Placement(np.array([[True, False, False, False, False]]))
    only_hot = ImportanceScore(np.array([[1.0, 0.0, 0.0, 0.0, 0.0]]))
    assert bits_over_layers(only_hot, nobody, LossTable.nominal(1, 5), Budget(1, 3.0)).bits.tolist() == [
        [0, 3, 3, 3, 3]
    ]


def weighed_model(seed: int) -> tuple[ImportanceScore, LossTable]:
    score, loss = random_model(seed, 3, 8)
    return score, LossTable(loss.mse, np.array([2.0, 0.5, 0.5]), nats=0.4)


def test_a_loss_is_predicted_from_the_experts_that_a_prompt_uses_and_what_their_layers_weigh():
    """Layer 0: .75 * .2, a hot expert loses nothing; layer 1: .5 * .2 + .5 * .1. Weights 1.5 and .5, 2 nats."""
    mse = np.array([[[0.4, 0.2, 0.1, 0.0]] * 2] * 2)
    score = ImportanceScore(np.array([[0.25, 0.75], [0.5, 0.5]]))
    widths = np.array([[0, 2], [2, 3]], np.uint8)
    table = LossTable(mse, np.array([1.5, 0.5]), nats=2.0)
    assert table.predicted_nats(score, widths) == pytest.approx(2 * (1.5 * 0.15 + 0.5 * 0.15))
    assert table.predicted_nats(score, np.full((2, 2), 16, np.uint8)) == 0
    assert LossTable(mse).predicted_nats(score, widths) is None
    of_pairs = replace(score, weights=np.ones((2, 2, 1), np.float32), strength=np.array([[1.0, 3.0], [1.0, 1.0]]))
    assert table.predicted_nats(of_pairs, widths) == pytest.approx(2 * (1.5 * 0.45 + 0.5 * 0.15))  # strengths, as told
    only_wide = LossTable.from_measured(np.array([[[np.nan, np.nan, 0.2, 0.1]]]))
    assert [only_wide.up_to(widest).dealt for widest in (2, 3)] == [(3,)] * 2


@pytest.mark.parametrize("num_hot", [0, 4])
def test_a_budget_of_nats_is_met_with_the_fewest_bits_that_meet_it(num_hot: int):
    for seed in range(10):
        score, loss = weighed_model(seed)
        placement = top_experts(score.values, num_hot)
        losses = [loss.predicted_nats(score, placement.cold * np.uint8(bits)) for bits in (1, 4)]
        wanted = 0.1 * losses[0] + 0.9 * losses[1]
        bits = bits_over_layers(score, placement, loss, Budget(num_hot, 4.0, max_loss=wanted)).bits
        assert loss.predicted_nats(score, bits) <= wanted + 1e-9
        fewer = Budget(num_hot, Plan(1, placement, BitwidthPlan(bits)).bits_read(score.values) - 1e-6)
        assert loss.predicted_nats(score, bits_over_layers(score, placement, loss, fewer).bits) > wanted


def test_a_budget_of_nats_that_no_width_meets_takes_the_widest_and_a_generous_one_the_narrowest():
    score, loss = weighed_model(0)
    placement = top_experts(score.values, 0)
    assert (bits_over_layers(score, placement, loss, Budget(0, 4.0, max_loss=1e-12)).bits == 4).all()
    assert (bits_over_layers(score, placement, loss, Budget(0, 4.0, max_loss=1e3)).bits == 1).all()


def test_a_budget_of_nats_needs_replicas_that_know_nats():
    score, loss = random_model(0, 2, 8)
    with pytest.raises(ConfigError, match="a budget of max_loss needs replicas that say"):
        bits_over_layers(score, top_experts(score.values, 0), loss, Budget(0, 4.0, max_loss=0.1))
    with pytest.raises(ConfigError, match="max_loss must be a number of nats above 0"):
        Budget(0, 4.0, max_loss=0.0)


def test_a_prediction_says_where_it_is_not_to_be_trusted():
    assert verdict_on_loss(0.05) == "0.05 nats a token where a prompt uses all experts alike"
    assert "lose more than predicted" in verdict_on_loss(0.5)
    assert verdict_on_loss(None).startswith("unknown")
