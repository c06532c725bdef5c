"""Policies by name: what each one scores, what they refuse, and that all of them end in plans that fit."""

import numpy as np
import pytest
from paths import MODEL

from ndp_device.common.errors import ConfigError
from vllm_ndp.config import NdpSettings
from vllm_ndp.lab.compare import Workload
from vllm_ndp.planning.bitwidths import BY_BITS_READ, LossTable
from vllm_ndp.planning.importance import ImportanceScore, calibrated, importance, repeats
from vllm_ndp.planning.plan import Budget, Plan
from vllm_ndp.planning.policies import (
    BIT_RULES,
    POLICIES,
    PolicySettings,
    load_policy,
    policies_with,
    policy_with,
    read_prior,
)
from vllm_ndp.planning.replanner import PlannerRules, Replanner
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.synthetic import read_routing, synthetic_trace

PRIOR = ImportanceScore.from_weights(np.arange(1, 17, dtype=float).reshape(2, 8))


def prompt(seed: int, tokens: int = 20) -> RoutingStats:
    generator = np.random.default_rng(seed)
    ids = generator.random((tokens, 2, 8)).argsort(axis=2)[:, :, :2]
    return RoutingStats.from_choices(ids, generator.random((tokens, 2, 2)), 8)


@pytest.mark.parametrize("bits", BIT_RULES)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_makes_the_same_plan_twice_and_it_fits(name, bits):
    policy = load_policy(name, PolicySettings(prior=PRIOR, bit_rule=bits))
    budget, loss = Budget(3, 1.5), LossTable.nominal(2, 8)

    scores = [policy.score(prompt(seed)) for seed in range(3)]

    def plans() -> list[Plan]:
        placement = policy.place(scores, None, budget)
        return [Plan(0, placement, policy.assign(score, placement, loss, budget)) for score in scores]

    first, second = plans(), plans()
    for score, one, other in zip(scores, first, second, strict=True):
        assert (one.placement.hot.sum(axis=1) == 3).all()
        cold = one.bits.bits[one.placement.cold]
        spent = one.bits_read(score.values, score.weights) if bits in BY_BITS_READ else cold.mean()
        assert spent <= 1.5 + 1e-8
        assert one.bits.bits.tobytes() == other.bits.bits.tobytes()
        assert (one.bits.from_weight is not None) == (bits == "pairs")
        assert np.array_equal(one.bits.from_weight, other.bits.from_weight)


def test_prefill_scores_the_prompt_and_static_ignores_it():
    settings = PolicySettings(prior=PRIOR)
    assert (load_policy("prefill").score(prompt(0)).values == importance(prompt(0)).values).all()
    assert load_policy("static", settings).score(prompt(0)) is PRIOR


def test_a_short_prompt_stays_near_the_prior_and_a_long_one_leaves_it():
    policy = load_policy("prefill_prior", PolicySettings(prior=PRIOR, prior_tokens=16))
    distance = [np.abs(policy.score(prompt(0, tokens)).values - PRIOR.values).sum() for tokens in (1, 200)]
    pure = [np.abs(importance(prompt(0, tokens)).values - PRIOR.values).sum() for tokens in (1, 200)]
    assert distance[0] == pytest.approx(pure[0] / 17)
    assert distance[1] == pytest.approx(pure[1] * 200 / 216)


def test_experts_that_a_prompt_hardly_used_come_as_often_as_a_calibrated_score_says():
    """Routing as sticky as Qwen3-30B's: the tenth of the experts with the least scores come 2 to 3 times as often as a
    straight line to the prior says, and plans give them the fewest bits."""
    known = read_routing("auto", "qwen3-30b-a3b").settings(
        "qwen3-30b-a3b", num_layers=8, num_requests=12, prompt_len=256, decode_len=64
    )
    workload = Workload(synthetic_trace(known, "qwen3-30b-a3b"))
    batches = workload.batches(1)
    settings = PolicySettings(prior=workload.prior)
    came = np.stack([importance(decoded).values for (decoded,) in batches.decodes])
    ratios = {}
    for calibrate in (False, True):
        policy = load_policy("prefill_shrunk", settings, {"calibrate": calibrate})
        scores = np.stack([policy.score(prompt).values for (prompt,) in batches.prompts])
        rare = np.argsort(scores, axis=None, kind="stable")[: scores.size // 10]
        ratios[calibrate] = came.ravel()[rare].sum() / scores.ravel()[rare].sum()
    assert ratios[False] > 1.8
    assert 0.6 < ratios[True] < 1.25


def test_a_prompt_whose_order_is_not_known_is_not_calibrated():
    stats = RoutingStats(np.array([[3, 1]]), np.array([[2.0, 1.0]]), 4, 1)
    prior = ImportanceScore(np.array([[0.5, 0.5]]))
    score = importance(stats)
    assert calibrated(score, stats, prior, 0.5) is score


def test_random_depends_on_seed_and_prompt_only():
    scores = [
        load_policy("random", PolicySettings(seed=seed)).score(prompt(which)).values.tobytes()
        for seed, which in ((0, 0), (0, 0), (1, 0), (0, 1))
    ]
    assert scores[0] == scores[1]
    assert len(set(scores)) == 3


def test_an_unknown_name_is_answered_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match="did you mean 'prefill_prior'"):
        load_policy("prefil_prior")
    with pytest.raises(ConfigError, match="did you mean 'importance'"):
        PolicySettings(bit_rule="importence")
    with pytest.raises(ConfigError, match="did you mean 'relative'"):
        PolicySettings(losses="relativ")


@pytest.mark.parametrize("name", ["static", "prefill_prior"])
def test_a_policy_that_needs_a_prior_says_so(name):
    with pytest.raises(ConfigError, match="needs a popularity prior"):
        load_policy(name)


def test_a_prior_of_another_model_is_refused():
    policy = load_policy("prefill_prior", PolicySettings(prior=ImportanceScore(np.full((3, 8), 0.125))))
    with pytest.raises(ConfigError, match="recorded on this model"):
        policy.score(prompt(0))


def test_a_prior_is_read_from_counts_and_a_broken_file_is_refused_by_name(tmp_path):
    np.save(tmp_path / "prior.npy", np.array([[3, 1], [0, 0]]))
    assert read_prior(tmp_path / "prior.npy").values.tolist() == [[0.75, 0.25], [0.5, 0.5]]
    (tmp_path / "broken.npy").write_bytes(b"not an array")
    with pytest.raises(ConfigError, match=r"broken\.npy"):
        read_prior(tmp_path / "broken.npy")
    with pytest.raises(ConfigError, match=r"missing\.npy"):
        read_prior(tmp_path / "missing.npy")


@pytest.fixture
def theirs(tmp_path, monkeypatch) -> str:
    """A policy of another package, installed: it places the prompt's experts, rotated by an option of its own."""
    (tmp_path / "their_policies.py").write_text(
        "import numpy as np\n"
        "from vllm_ndp.planning.importance import ImportanceScore\n"
        "from vllm_ndp.planning.policies import prefill\n"
        "class Rotated:\n"
        "    name = 'theirs'\n"
        "    def __init__(self, settings, *, turn: int = 0):\n"
        "        self.ours, self.turn = prefill(settings), turn + 0\n"
        "        self.assign = self.ours.assign\n"
        "    def score(self, stats):\n"
        "        return self.ours.score(stats)\n"
        "    def place(self, scores, current, budget):\n"
        "        turned = [ImportanceScore(np.roll(s.values, self.turn, axis=1)) for s in scores]\n"
        "        return self.ours.place(turned, current, budget)\n"
    )
    metadata = tmp_path / "their_policies-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm_ndp.policies]\ntheirs = their_policies:Rotated\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "theirs"


def test_a_policy_of_another_package_has_options_of_its_own_beside_the_common_ones(theirs):
    plain, _ = policy_with(theirs, {})
    turned, told = policy_with(theirs, {"turn": 3, "alpha": 1.0})
    assert told.alpha == 1.0
    score = [importance(prompt(0), 1.0)]
    ours = plain.place(score, None, Budget(3, 2.0)).hot
    assert (turned.place(score, None, Budget(3, 2.0)).hot == np.roll(ours, 3, axis=1)).all()
    assert NdpSettings(policy=theirs, policy_options={"turn": 3}).policy == theirs, "it is not refused"


def test_an_option_that_a_foreign_policy_does_not_have_is_refused_with_those_it_has(theirs):
    with pytest.raises(ConfigError, match=r"policy 'theirs' has no option 'trun': known are alpha, .*turn"):
        policy_with(theirs, {"trun": 3})
    with pytest.raises(ConfigError, match="policy 'theirs' cannot be made with the options"):
        policy_with(theirs, {"turn": "x"})


def test_of_several_policies_each_gets_the_options_that_it_knows(theirs):
    made = policies_with(("prefill", theirs), {"turn": 1, "alpha": 1.0})
    assert made["theirs"].turn == 1  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="policy 'prefill' has no option 'turn'"):
        policies_with(("prefill",), {"turn": 1})


@pytest.mark.parametrize("name", ["prefill", "prefill_prior", "static", "theirs"])
def test_one_layer_is_scored_and_placed_as_in_the_whole_model(name, theirs):
    """What the planner predicts while a prompt runs is what it decides at its end, for foreign policies too."""
    policy, _ = policy_with(name, {"prior": PRIOR} | ({"turn": 2} if name == theirs else {}))
    stats = prompt(1)
    whole = policy.place([policy.score(stats)], None, Budget(3, 2.0)).hot
    for layer in range(2):
        counts, scores = stats.counts[layer : layer + 1], stats.scores[layer : layer + 1]
        one = RoutingStats(counts, scores, stats.num_tokens, stats.top_k).of_layer(layer)
        assert (policy.place([policy.score(one)], None, Budget(3, 2.0)).hot == whole[layer]).all()


def test_the_shipped_prior_is_the_popularity_of_the_calibration_routing():
    with np.load(MODEL / "traces" / "calib.npz") as file:
        ids = file["idx"].reshape(-1, 4, 2)
    counts = np.stack([np.bincount(ids[:, layer].ravel(), minlength=8) for layer in range(4)])
    prior = read_prior(MODEL / "prior.npy")
    assert np.allclose(prior.values, counts / counts.sum(axis=1, keepdims=True))
    assert load_policy("prefill_prior", PolicySettings(prior=prior)).name == "prefill_prior"


# -- Bits that requests have in common ---------------------------------------------------------------------------------


BY_IMPORTANCE = load_policy("prefill", PolicySettings(bit_rule="importance"))
"""Its bits differ from prompt to prompt, whatever the losses."""


def test_four_requests_get_common_bits_and_half_a_bit_more_and_three_their_own() -> None:
    generator = np.random.default_rng(5)
    loss = LossTable.nominal(2, 16)
    rules = PlannerRules(BY_IMPORTANCE, Budget(4, 2.0), loss, bits_for="auto")
    scores = {str(r): ImportanceScore.from_weights(generator.random((2, 16))) for r in range(4)}

    def plans(names: str) -> list[np.ndarray]:
        change = Replanner(rules, 2, 16).replan({name: scores[name] for name in names})
        return [plan.bits.bits for plan in change.plans.values()]

    three, four = plans("012"), plans("0123")
    assert any((bits != three[0]).any() for bits in three)
    assert all((bits == four[0]).all() for bits in four)
    assert (three[0].sum(), four[0].sum()) == (2 * 12 * 2.0, 2 * 12 * 2.5)


def test_what_a_prefill_streamed_stays_until_its_request_is_gone_and_is_no_move() -> None:
    """Experts 0 and 1 are hot, the prompt wants 2 and 3, and 3 passed through: into the slot of 0."""
    loss = LossTable(np.array([[[0.4, 0.2, 0.1, 0.05]] * 6]), nats=1.0)
    planner = Replanner(PlannerRules(BY_IMPORTANCE, Budget(2, 3.0), loss), 1, 6)
    prompt, streamed = ImportanceScore.from_weights(np.array([[0, 0, 1, 2, 0, 0]])), np.arange(6)[None] == 3
    planner.keep([prompt], streamed)
    assert [planner.restore().nonzero()[1].tolist() for _ in range(2)] == [[0], []]
    planner.keep([prompt], streamed)
    change = planner.replan({"a": prompt})
    assert (change.moved.nonzero()[1].tolist(), change.num_kept) == ([2], 1)
    lost = [planner.predicted_nats(bits, prompt, change.plans["a"]) for bits in (16, 4)]
    assert lost == pytest.approx([0, 0.05])


# -- Whether a prompt repeats itself, judged without an oracle ---------------------------------------------------------


LAYERS, EXPERTS, K = 4, 16, 2
EVEN = ImportanceScore.from_weights(np.ones((LAYERS, EXPERTS)))


def tokens(generator: np.random.Generator, count: int, popular: np.ndarray) -> np.ndarray:
    """[count, L, k]: drawn without replacement by these chances [L, E], as a router does."""
    noise = generator.gumbel(size=(count, LAYERS, EXPERTS))
    return np.argsort(-(np.log(popular) + noise), axis=2)[:, :, :K]


def taste(generator: np.random.Generator, signal: float) -> np.ndarray:
    return np.exp(signal * generator.standard_normal((LAYERS, EXPERTS)))


def stats_of(ids: np.ndarray) -> RoutingStats:
    return RoutingStats.from_choices(ids, np.full(ids.shape, 1 / K), EXPERTS)


def test_the_halves_of_a_prompt_are_counted_apart_and_add_up():
    ids = tokens(np.random.default_rng(0), 9, np.ones((LAYERS, EXPERTS)))
    stats = stats_of(ids)
    assert (stats.late_counts == stats_of(ids[4:]).counts).all()


def test_a_prompt_with_a_subject_repeats_itself_and_one_without_does_not():
    generator = np.random.default_rng(1)
    subject = stats_of(tokens(generator, 256, taste(generator, 1.5)))
    chance = stats_of(tokens(generator, 256, np.ones((LAYERS, EXPERTS))))
    turned = stats_of(
        np.concatenate([tokens(generator, 128, taste(generator, 1.5)), tokens(generator, 128, taste(generator, 1.5))])
    )
    assert repeats(subject, EVEN) > 0.9
    assert repeats(chance, EVEN) < 0.4
    assert repeats(turned, EVEN) < 0.5
    assert repeats(stats_of(tokens(generator, 1, taste(generator, 1.5))), EVEN) is None


def test_prefill_shrunk_is_the_prompt_where_it_repeats_itself_and_the_prior_where_it_does_not():
    generator = np.random.default_rng(2)
    prior = ImportanceScore.from_weights(taste(generator, 0.5))
    policy = load_policy("prefill_shrunk", PolicySettings(prior=prior))
    subject = stats_of(tokens(generator, 512, taste(generator, 2.0)))
    assert abs(policy.score(subject).values - importance(subject).values).max() < 0.01
    chance = stats_of(tokens(generator, 512, prior.values))
    assert abs(policy.score(chance).values - prior.values).max() < 0.01
    one = stats_of(tokens(generator, 1, prior.values))
    assert (policy.score(one).values == importance(one).shrunk_to(prior, 16).values).all()
    with pytest.raises(ConfigError, match="needs a popularity prior"):
        load_policy("prefill_shrunk")
