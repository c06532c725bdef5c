"""Widths of single pairs by their own router weight: the best of all plans that read as much, within the budget."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.bitwidths import LossTable, bits_of_pairs, bits_over_layers
from vllm_ndp.planning.importance import ImportanceScore, importance, scores_for_bits
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement, Plan, keep_streamed, top_experts, union_of_widths
from vllm_ndp.planning.policies import BIT_RULES, PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlannerRules, Replanner
from vllm_ndp.planning.stats import WEIGHT_SAMPLES, RoutingStats

WIDER = np.array([[[0.2, 0.4, np.inf], [0.1, 0.1, 0.3], [0.0, 0.0, 0.0]]], np.float32)


def small_model(seed: int, layers: int, experts: int, samples: int) -> tuple[ImportanceScore, LossTable]:
    random = np.random.default_rng(seed)
    score = ImportanceScore.from_weights(random.random((layers, experts)))
    weights = np.sort(random.random((layers, experts, samples)), axis=2)
    mse = np.sort(random.exponential(size=(layers, experts, 4)), axis=2)[:, :, ::-1]
    return replace(score, weights=weights), LossTable(mse, random.random(layers) + 0.1, nats=1.0)


def read_and_lost(score: ImportanceScore, loss: LossTable, placement: Placement, widths: np.ndarray) -> tuple:
    """By a cold pair on average, and by them all; widths [L, E, Q]."""
    assert score.weights is not None
    shares = np.zeros(placement.cold.shape)
    shares[placement.cold] = placement.cold_shares(score.values)
    square = score.weights.astype(float) ** 2
    mean = (square.mean(axis=2) * score.values).sum(axis=1)
    lost = 0.0
    for layer, expert, sample in np.argwhere(np.broadcast_to(placement.cold[:, :, None], widths.shape)):
        one = square[layer, expert, sample] / mean[layer] * loss.mse[layer, expert, widths[layer, expert, sample] - 1]
        lost += one * loss.layer_weights[layer] * score.values[layer, expert] / widths.shape[2]
    return float((widths.mean(axis=2) * shares).sum()), lost


@pytest.mark.parametrize(
    ("layers", "experts", "samples", "hot"), [(1, 1, 5, 0), (1, 2, 2, 0), (2, 2, 1, 0), (2, 2, 2, 1)]
)
@pytest.mark.parametrize("seed", range(8))
def test_no_widths_of_single_pairs_that_read_as_much_lose_less(seed, layers, experts, samples, hot):
    score, loss = small_model(seed, layers, experts, samples)
    placement = top_experts(score.values, hot)
    cold = np.broadcast_to(placement.cold[:, :, None], (layers, experts, samples))
    every = []
    for chosen in itertools.product((1, 2, 3, 4), repeat=int(cold.sum())):
        widths = np.zeros(cold.shape, np.uint8)
        widths[cold] = chosen
        every.append(read_and_lost(score, loss, placement, widths))
    for avg_bits in (1.0, 1.3, 2.0, 2.7, 3.5, 4.0):
        plan = bits_of_pairs(score, placement, loss, Budget(hot, avg_bits))
        read, lost = read_and_lost(score, loss, placement, plan.of_pairs(score.weights))
        assert read <= avg_bits + 1e-8
        assert Plan(1, placement, plan).bits_read(score.values, score.weights) == pytest.approx(read)
        assert lost <= min(other for bits, other in every if bits <= read + 1e-9) + 1e-9
        assert loss.predicted_nats(score, plan.of_pairs(score.weights)) == pytest.approx(lost)
        wider = [bits for bits, other in every if other < lost - 1e-9]
        assert not wider or avg_bits < read + 3 / samples, "what is left does not pay for three bits of a pair"


def test_a_budget_of_nats_is_met_by_single_pairs_with_fewer_bits_than_by_experts():
    score, loss = small_model(3, 2, 6, WEIGHT_SAMPLES)
    placement = Placement(np.zeros((2, 6), bool))
    lost = [loss.predicted_nats(score, np.full((2, 6, WEIGHT_SAMPLES), bits)) for bits in (1, 4)]
    budget = Budget(0, 4.0, max_loss=sum(lost) / 2)
    pairs = bits_of_pairs(score, placement, loss, budget)
    assert lost[1] < loss.predicted_nats(score, pairs.of_pairs(score.weights)) <= budget.max_loss * 1.02
    experts = Plan(1, placement, bits_over_layers(score, placement, loss, budget))
    assert Plan(1, placement, pairs).bits_read(score.values, score.weights) < experts.bits_read(score.values)


def test_among_thousands_of_pairs_every_bit_that_is_read_gains_more_than_every_other_one():
    """Their gains are of very different sizes."""
    score, loss = small_model(5, 8, 64, WEIGHT_SAMPLES)
    errors = loss.mse[:, :, :1] * 10.0 ** np.linspace(-12, 12, 8)[:, None, None]
    loss, placement = LossTable(errors / 4.4 ** np.arange(4)), top_experts(score.values, 16)
    gains = (loss.mse[:, :, :-1] - loss.mse[:, :, 1:])[placement.cold][:, None] * score.pair_strength[
        placement.cold, :, None
    ]
    for avg_bits in (1.05, 2.0, 3.3, 3.95):
        plan = bits_of_pairs(score, placement, loss, Budget(16, avg_bits))
        is_read = plan.of_pairs(score.weights)[placement.cold][:, :, None] > np.arange(1, 4)
        assert gains[is_read].min() > gains[~is_read].max() * (1 - 1e-6)
        assert avg_bits - 0.01 < Plan(1, placement, plan).bits_read(score.values, score.weights) <= avg_bits + 1e-8


def test_while_a_prompt_still_runs_no_single_weights_are_gathered_for_who_will_be_hot():
    ids, weights = np.array([[[0]]] * 8), np.random.default_rng(0).random((8, 1, 1))
    policy, stats = load_policy("prefill", PolicySettings(bit_rule="pairs")), RoutingStats.from_choices(ids, weights, 2)
    assert policy.score(stats).weights is not None
    assert policy.score(stats.of_layer(3)).weights is None


def test_pairs_that_gain_the_same_are_all_wider_or_none_is():
    score = replace(ImportanceScore.from_weights(np.ones((1, 4))), weights=np.full((1, 4, WEIGHT_SAMPLES), 0.5))
    placement = Placement(np.zeros((1, 4), bool))
    for avg_bits, widths in ((1.5, 1), (2.0, 2), (2.9, 2), (4.0, 4)):
        plan = bits_of_pairs(score, placement, LossTable.nominal(1, 4), Budget(0, avg_bits))
        assert (plan.of_pairs(score.weights) == widths).all()


def test_where_single_weights_are_not_known_pairs_are_as_wide_as_their_experts():
    score, loss = small_model(1, 2, 5, 4)
    unknown, placement = replace(score, weights=None), top_experts(score.values, 2)
    plan = bits_of_pairs(unknown, placement, loss, Budget(2, 2.5))
    assert plan.from_weight is None
    assert (plan.bits == bits_over_layers(unknown, placement, loss, Budget(2, 2.5)).bits).all()


def test_a_plan_of_pairs_names_no_width_that_no_router_weight_asks_for():
    """The device prepares what a plan names: with the widest average, one width of each expert."""
    score, loss = small_model(1, 2, 5, 4)
    placement = top_experts(score.values, 2)
    widest = bits_of_pairs(score, placement, loss, Budget(2, 4.0))
    assert (widest.width_mask() == np.where(placement.hot, 0, 0b1000)).all()
    between = BitwidthPlan(np.array([[2]]), np.array([[[0.2, 0.2, np.inf]]], np.float32))
    assert between.width_mask().tolist() == [[0b101 | 0b10]]  # the usual weight's own width counts, whatever it is


def test_a_plan_of_pairs_names_the_widths_between_its_weights_and_leaves_hot_and_warm_experts_alone():
    plan = BitwidthPlan(np.array([[2, 0, 16]]), WIDER)
    assert plan.width_mask().tolist() == [[0b111, 0, 0b10000]]
    weights = np.array([[[0.1, 0.2, 0.5]] * 3], np.float32)
    assert plan.of_pairs(weights).tolist() == [[[1, 2, 3], [0, 0, 0], [16, 16, 16]]]
    assert plan.of_pairs(None).tolist() == [[[2], [0], [16]]]


def test_weights_that_fall_with_bits_or_are_of_another_model_are_refused():
    for wrong in (WIDER[:, :, ::-1], WIDER[:, :2], np.full_like(WIDER, np.nan)):
        with pytest.raises(ValueError, match="weights"):
            BitwidthPlan(np.array([[2, 3, 4]]), wrong)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 200), st.integers(1, 6), st.floats(0.01, 3.0))
def test_samples_stand_for_the_router_weights_of_an_expert_s_choices(seed, tokens, experts, largest):
    random = np.random.default_rng(seed)
    top_k = int(random.integers(1, experts + 1))
    ids = np.argsort(random.random((tokens, 2, experts)), axis=2)[:, :, :top_k]
    weights = (random.uniform(0.01, 1.0, ids.shape) * largest).astype(np.float32)
    samples = RoutingStats.from_choices(ids, weights, experts).weights
    assert samples is not None
    for layer in range(2):
        for expert in range(experts):
            own = np.sort(weights[:, layer][ids[:, layer] == expert])
            own = own if len(own) else np.sort(weights[:, layer].ravel())
            ranks = (2 * np.arange(WEIGHT_SAMPLES) + 1) * len(own) // (2 * WEIGHT_SAMPLES)
            assert samples[layer, expert] == pytest.approx(np.clip(own[ranks], 2**-8, 4), rel=0.07)


def test_samples_are_the_same_of_ids_in_the_narrow_numbers_that_a_trace_holds():
    random = np.random.default_rng(2)
    ids, weights = random.integers(0, 200, (300, 3, 1)), random.random((300, 3, 1)).astype(np.float32)
    samples = [RoutingStats.from_choices(ids.astype(kind), weights, 200).weights for kind in ("i8", "i2", "u1")]
    assert np.array_equal(samples[0], samples[1])
    assert np.array_equal(samples[0], samples[2])


def test_weights_below_and_above_all_classes_are_of_the_outermost_ones():
    ids, weights = np.zeros((2, 1, 1), int), np.array([0.0, 100.0], np.float32).reshape(2, 1, 1)
    samples = RoutingStats.from_choices(ids, weights, 1).weights
    assert samples is not None
    assert samples.min() < 2**-7
    assert samples.max() > 3.5


def test_requests_in_common_read_an_expert_at_one_width():
    """From four running requests on, as the default says: rows that want two widths of one expert read it twice."""
    ids, random = np.array([[[0, 1]]] * 8), np.random.default_rng(0)
    placement, policy = Placement(np.zeros((1, 2), bool)), load_policy("prefill", PolicySettings(bit_rule="pairs"))
    scores = [policy.score(RoutingStats.from_choices(ids, random.random((8, 1, 2)), 2)) for _ in range(4)]
    for running, has_pairs in ((3, True), (4, False)):
        for score in scores_for_bits(scores[:running], "auto"):
            plan = policy.assign(score, placement, LossTable.nominal(1, 2), Budget(0, 2.0))
            assert (plan.from_weight is not None) == has_pairs


# -- Statistics, scores and plans: what they accept, what they refuse, and the paper's formula by hand -----------------


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


def test_importance_is_the_papers_formula():
    """counts 3,1,0 and scores 1.5,0.9,0.0: at alpha .5, (.75 + .625) / 2 = .6875 and (.25 + .375) / 2 = .3125."""
    stats = RoutingStats(np.array([[3, 1, 0]]), np.array([[1.5, 0.9, 0.0]]), num_tokens=4, top_k=1)
    assert importance(stats).values[0] == pytest.approx([0.6875, 0.3125, 0.0])
    assert importance(stats, alpha=1.0).values[0] == pytest.approx([0.75, 0.25, 0.0])
    assert importance(stats, alpha=0.0).values[0] == pytest.approx([0.625, 0.375, 0.0])


def test_a_prompt_without_tokens_knows_nothing_so_every_expert_is_equal():
    empty = RoutingStats(np.zeros((2, 4)), np.zeros((2, 4)), num_tokens=0, top_k=2)
    assert (importance(empty).values == 0.25).all()


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


# -- 8 bits for every cold expert: what a budget of 8 gives, what it refuses, and how its loss is told -----------------


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
