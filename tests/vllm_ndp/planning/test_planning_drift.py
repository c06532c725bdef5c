"""Whether a prompt repeats itself, and whether decode goes on as planned: judged without an oracle, and bounded."""

from __future__ import annotations

import numpy as np
import pytest

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.follower import DriftRules, DriftWatch
from vllm_ndp.planning.importance import ImportanceScore, importance, repeats
from vllm_ndp.planning.plan import top_experts
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.stats import RoutingStats

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
    score = importance(stats_of(tokens(generator, 64, own)))
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
        score = importance(stats_of(tokens(generator, 64, own)))
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
    score = importance(stats_of(tokens(generator, 64, taste(generator, 1.5))))
    watch = DriftWatch(DriftRules(), top_experts(score.values, 6).hot, score)
    other = taste(generator, 1.5)
    steps = next(n for n in range(100) if watch.see(tokens(generator, 16, other)) and watch.noticed)
    assert steps < 10
    assert not watch.see(np.zeros((0, LAYERS, K), np.int64))


def test_rules_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="impossible rules"):
        DriftRules(once_in=1.0)
