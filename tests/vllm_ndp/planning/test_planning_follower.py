"""Whether a prompt repeats itself, and whether decode goes on as planned: judged without an oracle, and bounded.

Plans that follow decode: nothing while the subject stays, exchanges within a budget once it does not.
"""

from __future__ import annotations

import numpy as np
import pytest

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.follower import DriftRules, DriftWatch, FollowRules, exchanged
from vllm_ndp.planning.importance import ImportanceScore, importance, repeats
from vllm_ndp.planning.plan import Budget, Plan, top_experts
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlanChange, PlannerRules, Replanner
from vllm_ndp.planning.stats import RoutingStats

LAYERS, EXPERTS, K, HOT = 4, 16, 2, 5
EVEN = ImportanceScore.from_weights(np.ones((LAYERS, EXPERTS)))


def tokens(generator: np.random.Generator, count: int, popular: np.ndarray) -> np.ndarray:
    """[count, L, k]: drawn without replacement by these chances [L, E], as a router does."""
    noise = generator.gumbel(size=(count, LAYERS, EXPERTS))
    return np.argsort(-(np.log(popular) + noise), axis=2)[:, :, :K]


def taste(generator: np.random.Generator, signal: float) -> np.ndarray:
    return np.exp(signal * generator.standard_normal((LAYERS, EXPERTS)))


def stats_of(ids: np.ndarray) -> RoutingStats:
    return RoutingStats.from_choices(ids, np.full(ids.shape, 1 / K), EXPERTS)


def score_of(ids: np.ndarray) -> ImportanceScore:
    return importance(stats_of(ids))


def test_the_halves_of_a_prompt_are_counted_apart_and_add_up():
    ids = tokens(np.random.default_rng(0), 9, np.ones((LAYERS, EXPERTS)))
    stats = stats_of(ids)
    assert (stats.late_counts == stats_of(ids[4:]).counts).all()
    merged = stats.merge(stats)
    assert (merged.late_counts == 2 * stats.late_counts).all()
    with pytest.raises(ValueError, match="some of all choices"):
        RoutingStats(stats.counts, stats.scores, 9, K, stats.counts + 1)


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


def watched(seed: int, parts: list[float | None], each: int, prior: bool = True) -> tuple[DriftWatch, list[int]]:
    """A prompt of 64 tokens, then decode in parts: a signal for a new subject, None for the prompt's own. Where decode
    had come to when each change was noticed."""
    generator = np.random.default_rng(seed)
    own = taste(generator, 1.5)
    score = score_of(tokens(generator, 64, own))
    watch = DriftWatch(DriftRules(), top_experts(score.values, 6).hot, score, EVEN if prior else None)
    when = []
    for number, part in enumerate(parts):
        subject = own if part is None else taste(generator, part)
        for step, row in enumerate(tokens(generator, each, subject)):
            noticed = watch.noticed
            watch.see(row[None])
            when += [number * each + step] * (watch.noticed - noticed)
    return watch, when


def test_where_the_subject_stays_nothing_is_noticed():
    """At most one false alarm in 20 tokens is promised on average; 20 x 400 tokens give none or nearly."""
    assert sum(len(watched(seed, [None], 400)[1]) for seed in range(20)) <= 8000 / 20 / 100


@pytest.mark.parametrize("prior", [True, False])
def test_a_change_of_subject_is_noticed_within_some_dozen_tokens_and_the_new_subject_is_aimed_at(prior):
    for seed in range(5):
        watch, when = watched(seed, [None, 1.5], 120, prior)
        assert when
        assert 120 <= when[0] <= 190
        assert watch.wanted is not None


def test_after_a_second_change_the_third_subject_is_aimed_at():
    """The tokens of the last part choose what is aimed at far more often than 6 of 16 experts by chance."""
    for seed in range(5):
        generator = np.random.default_rng(seed)
        own = taste(generator, 1.5)
        score = score_of(tokens(generator, 64, own))
        watch = DriftWatch(DriftRules(), top_experts(score.values, 6).hot, score, EVEN)
        for _ in range(2):
            own = taste(generator, 1.5)
            for row in tokens(generator, 150, own):
                watch.see(row[None])
        assert watch.wanted is not None
        aim = top_experts(watch.wanted.values, 6).hot
        assert aim[np.arange(LAYERS)[:, None], tokens(generator, 200, own)].mean() > 0.6


def test_a_step_of_many_rows_counts_as_many_tokens():
    generator = np.random.default_rng(3)
    score = score_of(tokens(generator, 64, taste(generator, 1.5)))
    watch = DriftWatch(DriftRules(), top_experts(score.values, 6).hot, score)
    other = taste(generator, 1.5)
    steps = next(n for n in range(100) if watch.see(tokens(generator, 16, other)) and watch.noticed)
    assert steps < 10
    assert not watch.see(np.zeros((0, LAYERS, K), np.int64))


def test_rules_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="impossible rules"):
        DriftRules(once_in=1.0)


def planner(copies: float, num_warm: int = 0) -> Replanner:
    rules = PlannerRules(
        load_policy("prefill", PolicySettings()),
        Budget(HOT, 2.0, num_warm),
        LossTable.nominal(LAYERS, EXPERTS),
        follow=FollowRules(copies=lambda rows: copies),
    )
    return Replanner(rules, LAYERS, EXPERTS)


def decode(
    replanner: Replanner, plans: dict[str, Plan], ids: np.ndarray
) -> list[tuple[int, PlanChange[str] | None, int]]:
    """One row a step, as the plugin calls it: (step, what changed before it, what began to be copied)."""
    events = []
    for step, row in enumerate(ids):
        followed = replanner.follow(plans)
        if followed.change is not None:
            plans.update(followed.change.plans)
        if followed.change is not None or followed.begun:
            events.append((step, followed.change, followed.begun))
        replanner.see(row[None])
    return events


def planned(replanner: Replanner, generator: np.random.Generator) -> tuple[np.ndarray, dict[str, Plan]]:
    own = taste(generator, 1.5)
    return own, dict(replanner.replan({"a": score_of(tokens(generator, 64, own))}).plans)


def test_while_the_subject_stays_plans_do_not_change():
    for seed in range(6):
        generator, replanner = np.random.default_rng(seed), planner(1.0)
        own, plans = planned(replanner, generator)
        assert decode(replanner, plans, tokens(generator, 300, own)) == []
        assert replanner.epoch == 1


@pytest.mark.parametrize(("copies", "steps"), [(0.3, 4), (1.0, 1), (3.0, 1)])
def test_after_a_change_experts_are_exchanged_as_fast_as_they_can_be_copied(copies: float, steps: int):
    """A copy that takes 3.3 steps is in force 4 steps after it began; 3 that fit beside a step come together."""
    generator, replanner = np.random.default_rng(7), planner(copies)
    _, plans = planned(replanner, generator)
    new = taste(generator, 1.5)
    ids = tokens(generator, 400, new)
    before, start = replanner.placement.hot, plans["a"]
    events = decode(replanner, plans, ids)
    began = [(step, begun) for step, _, begun in events if begun]
    changes = [(step, change) for step, change, _ in events if change is not None]
    assert all(begun <= max(int(copies), 1) for _, begun in began)
    for (ordered, begun), (came, change) in zip(began, changes, strict=False):
        assert came - ordered == steps
        assert change.num_moved == begun
    here = np.arange(LAYERS)[:, None]
    assert replanner.placement.hot[here, ids].mean() > before[here, ids].mean() + 0.15
    last = plans["a"]
    assert last.epoch == 1 + len(changes) == replanner.epoch
    assert (np.sort(last.bits.bits, axis=1) == np.sort(start.bits.bits, axis=1)).all()  # each layer spends what it did
    assert last.placement.num_hot.tolist() == [HOT] * LAYERS


def test_who_leaves_for_a_warm_expert_is_warm_in_its_place():
    generator, replanner = np.random.default_rng(7), planner(3.0, num_warm=4)
    _, plans = planned(replanner, generator)
    before = replanner.placement
    events = decode(replanner, plans, tokens(generator, 400, taste(generator, 1.5)))
    after = plans["a"].placement  # which refuses bits that are not those of its tiers
    assert any(change is not None for _, change, _ in events)
    assert (after.hot & before.warm).any()
    assert (after.warm & before.hot).any()
    assert after.warm.sum(axis=1).tolist() == [4] * LAYERS


def test_moves_are_bounded_by_the_time_of_a_step_and_none_happen_without_a_request():
    generator, replanner = np.random.default_rng(3), planner(2.0)
    _, plans = planned(replanner, generator)
    events = decode(replanner, plans, tokens(generator, 120, taste(generator, 1.5)))
    assert 0 < max(begun for _, _, begun in events) <= 2
    assert replanner.follow({}).change is None
    assert not replanner.follows


def test_what_decode_has_shown_counts_when_the_next_prompt_ends_and_what_was_on_its_way_is_given_up():
    generator, replanner = np.random.default_rng(11), planner(0.01)
    own, plans = planned(replanner, generator)
    ids = tokens(generator, 80, taste(generator, 1.5))
    events = decode(replanner, plans, ids)
    assert [change for _, change, _ in events] == [None]  # one copy, which takes a hundred steps
    change = replanner.replan({"a": score_of(ids), "b": score_of(tokens(generator, 64, own))})
    assert decode(replanner, dict(change.plans), tokens(generator, 3, own)) == []


def test_those_that_leave_take_over_the_bits_of_those_that_come():
    bits = np.array([[0, 0, 4, 2, 1], [0, 3, 0, 2, 1]], np.uint8)
    before = bits == 0
    after = np.array([[1, 0, 0, 1, 0], [1, 0, 1, 0, 0]], bool)
    assert exchanged(bits, before, after).tolist() == [[0, 2, 4, 0, 1], [0, 3, 0, 2, 1]]


def test_a_step_of_ninety_four_layers_is_seen_in_little_time():
    """Counted in calls of Python's own code, which do not depend on the machine: no loop over experts."""
    import sys

    shape = (94, 128)
    rules = PlannerRules(
        load_policy("prefill", PolicySettings()),
        Budget(32, 3.0),
        LossTable.nominal(*shape),
        follow=FollowRules(),
    )
    replanner = Replanner(rules, *shape)
    generator = np.random.default_rng(0)
    replanner.replan({"a": ImportanceScore.from_weights(generator.random(shape))})
    ids = np.stack([np.stack([generator.permutation(128)[:8] for _ in range(94)]) for _ in range(8)])
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        replanner.see(ids)
    finally:
        sys.setprofile(None)
    assert calls < 500
