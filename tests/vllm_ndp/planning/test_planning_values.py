"""Statistics, scores and plans: what they accept, what they refuse, and the paper's formula by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.importance import ImportanceScore, importance, scores_for_bits
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement, Plan, keep_streamed, union_of_widths
from vllm_ndp.planning.stats import RoutingStats


def random_choices(seed: int, tokens: int, layers: int = 3, experts: int = 6, top_k: int = 2):
    generator = np.random.default_rng(seed)
    ids = generator.random((tokens, layers, experts)).argsort(axis=2)[:, :, :top_k].astype(np.uint8)
    return ids, generator.random((tokens, layers, top_k), dtype=np.float32)


def test_counts_and_scores_are_what_a_loop_over_the_choices_adds_up():
    ids, weights = random_choices(0, 40)
    stats = RoutingStats.from_choices(ids, weights, 6)
    counts, scores = np.zeros((3, 6), int), np.zeros((3, 6))
    for token in range(40):
        for layer in range(3):
            for choice in range(2):
                counts[layer, ids[token, layer, choice]] += 1
                scores[layer, ids[token, layer, choice]] += weights[token, layer, choice]
    assert (stats.counts == counts).all()
    assert np.allclose(stats.scores, scores, rtol=1e-12)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 10**6))
def test_merged_chunks_give_the_counts_of_one_uncached_pass(first: int, second: int, seed: int):
    ids, weights = random_choices(seed, first + second)
    whole = RoutingStats.from_choices(ids, weights, 6)
    chunks = RoutingStats.from_choices(ids[:first], weights[:first], 6).merge(
        RoutingStats.from_choices(ids[first:], weights[first:], 6)
    )
    assert (chunks.counts == whole.counts).all()
    assert np.allclose(chunks.scores, whole.scores)
    assert (whole.counts.sum(axis=1) == whole.num_tokens * whole.top_k).all()


def test_importance_is_the_papers_formula():
    """counts 3,1,0 and scores 1.5,0.9,0.0: at alpha .5, (.75 + .625) / 2 = .6875 and (.25 + .375) / 2 = .3125."""
    stats = RoutingStats(np.array([[3, 1, 0]]), np.array([[1.5, 0.9, 0.0]]), num_tokens=4, top_k=1)
    assert importance(stats).values[0] == pytest.approx([0.6875, 0.3125, 0.0])
    assert importance(stats, alpha=1.0).values[0] == pytest.approx([0.75, 0.25, 0.0])
    assert importance(stats, alpha=0.0).values[0] == pytest.approx([0.625, 0.375, 0.0])


def test_a_prompt_without_tokens_knows_nothing_so_every_expert_is_equal():
    empty = RoutingStats(np.zeros((2, 4)), np.zeros((2, 4)), num_tokens=0, top_k=2)
    assert (importance(empty).values == 0.25).all()


def test_shrinking_weighs_prompt_and_prior_by_their_tokens():
    """30 tokens against a prior worth 10: three quarters prompt."""
    prompt, prior = ImportanceScore(np.array([[1.0, 0.0]]), 30), ImportanceScore(np.array([[0.2, 0.8]]))
    assert prompt.shrunk_to(prior, 10).values[0] == pytest.approx([0.8, 0.2])
    assert (prompt.shrunk_to(prior, 0).values == prompt.values).all()


def test_an_expert_id_outside_the_model_is_refused():
    with pytest.raises(ValueError, match=r"0\.\.5, got 0\.\.6"):
        RoutingStats.from_choices(np.array([[[0, 6]]]), np.ones((1, 1, 2)), 6)


def test_values_cannot_be_changed_from_outside():
    source = np.array([[True, False]])
    placement = Placement(source)
    source[0, 0] = False
    assert placement.hot[0, 0]
    with pytest.raises(ValueError, match="read-only"):
        placement.hot[0, 0] = False


@pytest.mark.parametrize("bits", [0.99, 4.01, 7.0, 8.5, 16.0, float("nan")])
def test_an_impossible_budget_is_refused(bits):
    with pytest.raises(ConfigError, match="num_hot and num_warm must be at least 0"):
        Budget(-1, 2.0)
    with pytest.raises(ConfigError, match=r"avg_bits must lie in 1\.\.4 or be 8"):
        Budget(4, bits)


@given(st.lists(st.integers(0, 512), min_size=1, max_size=64), st.floats(1.0, 4.0))
def test_increments_meet_the_models_average_from_below_and_fit_every_layer(cold: list[int], average: float):
    num_cold = np.array(cold)
    increments = Budget(0, average).increments(num_cold)
    wanted = (average - 1) * num_cold.sum()
    assert wanted - 1 < increments.sum() <= wanted + 1e-6
    assert ((increments >= 0) & (increments <= 3 * num_cold)).all()
    assert (np.abs(increments - (average - 1) * num_cold) < 1 + 1e-6).all()


def test_half_a_bit_alternates_between_layers():
    """3 cold experts at 1.5 bits are 1.5 increments a layer: 1, 2, 1, 2."""
    assert Budget(1, 1.5).increments(np.array([3, 3, 3, 3])).tolist() == [1, 2, 1, 2]


def test_bits_are_read_as_often_as_a_prompt_chooses_their_experts():
    plan = Plan(0, Placement(np.array([[True, False, False]])), BitwidthPlan(np.array([[0, 2, 4]])))
    assert plan.bits_read(np.array([[0.6, 0.3, 0.1]])) == pytest.approx(2.5)
    assert plan.bits_read(np.array([[1.0, 0.0, 0.0]])) == 3.0, "nothing is known of either"
    everything_hot = Plan(0, Placement(np.ones((1, 2), bool)), BitwidthPlan(np.zeros((1, 2))))
    assert np.isnan(everything_hot.bits_read(np.array([[0.5, 0.5]])))


def test_a_plan_has_bits_exactly_where_it_is_cold():
    placement = Placement(np.array([[True, False]]))
    for bits in ([[2, 0]], [[0, 0]], [[1, 1]]):
        with pytest.raises(ValueError, match="exactly where"):
            Plan(0, placement, BitwidthPlan(np.array(bits)))
    with pytest.raises(ValueError, match="one of"):
        BitwidthPlan(np.array([[5, 1]]))


def test_the_width_mask_names_every_width_that_any_request_uses():
    plans = [BitwidthPlan(np.array([[0, 1, 4]])), BitwidthPlan(np.array([[0, 3, 16]]))]
    assert union_of_widths(plans, (1, 3)).tolist() == [[0, 0b101, 0b11000]]


def test_a_prefill_keeps_what_it_streamed_in_free_slots_then_in_those_of_the_lowest_leaving_experts():
    held = np.array([[1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]], np.bool_)
    wanted = Placement(np.array([[0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]], np.bool_))
    streamed = np.array([[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]], np.bool_)
    after = keep_streamed(held, wanted, streamed, num_slots=3)
    assert after.astype(int).tolist() == [
        [0, 1, 1, 0, 1, 0],  # 4 is wanted and came by: it takes 0's slot, 1 stays until 3 moves
        [0, 0, 1, 1, 1, 0],  # 3 takes the free slot, 4 that of 0
        [1, 1, 1, 0, 0, 0],  # nothing else is wanted
    ]


@given(st.integers(0, 2**32 - 1))
def test_kept_experts_are_wanted_streamed_and_never_too_many(seed: int):
    rng = np.random.default_rng(seed)
    slots = int(rng.integers(1, 6))
    held, wanted = (np.argsort(np.argsort(rng.random((3, 8)))) < slots for _ in range(2))
    streamed = rng.random((3, 8)) < 0.6
    after = keep_streamed(held, Placement(wanted), streamed, slots)
    assert (after.sum(axis=1) <= slots).all()
    assert ((after & ~held) == (wanted & ~held & streamed)).all()
    assert (after[held & wanted]).all()


def test_a_batch_can_share_the_score_its_bits_come_from():
    one, two = (ImportanceScore.from_weights(np.array([row])) for row in ([1.0, 3.0], [3.0, 1.0]))
    assert scores_for_bits([one, two], "request") == [one, two]
    first, second = scores_for_bits([one, two], "batch")
    assert first.values.tolist() == second.values.tolist() == [[0.5, 0.5]]
    strong = [np.array([[4.0, 1.0]]), np.array([[1.0, 2.0]])]
    weighed = [replace(score, strength=strength) for score, strength in zip((one, two), strong, strict=True)]
    together, _ = scores_for_bits(weighed, "batch")  # of the choices of an expert, who makes most has most of its say
    assert together.strength.tolist() == [[(0.25 * 4 + 0.75 * 1) / 1, (0.75 * 1 + 0.25 * 2) / 1]]
    assert scores_for_bits([], "batch") == []
    with pytest.raises(ConfigError, match="bits_for must be one of request, batch"):
        scores_for_bits([one], "all")
