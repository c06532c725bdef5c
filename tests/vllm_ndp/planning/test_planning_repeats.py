"""Whether a prompt repeats itself, judged without an oracle."""

from __future__ import annotations

import numpy as np
import pytest

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.importance import ImportanceScore, importance, repeats
from vllm_ndp.planning.policies import PolicySettings, load_policy
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
