"""Repeats and hits by the slow way, one cache after the other, and by hand."""

import json

import numpy as np
import pytest
from by_hand import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import DATA

from ndp_device.common.errors import TraceError
from vllm_ndp.lab.compare import beside_fastest, compare, paired
from vllm_ndp.lab.locality import RULES, Interval, default_places, locality
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.lab.vectorised.cache import found_ahead
from vllm_ndp.traces.trace import Trace


def trace_of(requests: list[list[list[int]]], num_experts: int, prompt: int = 0) -> Trace:
    """One layer; each request a list of tokens, each token its experts."""
    ids = [np.array(tokens)[:, None, :] for tokens in requests]
    return requests_of([(one[:prompt], one[prompt:]) for one in ids], num_experts)


def slow_hits(requests: list[list[list[int]]], size: int, rule: str) -> int:
    """Choices found in one cache of that size, set by set."""
    found = 0
    for tokens in requests:
        cache: list[int] = []
        count = dict.fromkeys(range(100), 0)
        last = dict.fromkeys(range(100), -1)
        for now, chosen in enumerate(tokens):
            found += sum(expert in cache for expert in chosen)
            for slot, expert in enumerate(chosen):
                count[expert] += 1
                last[expert] = now + slot / 10

            def next_use(expert: int, now: int = now, tokens: list[list[int]] = tokens) -> int:
                return next((t for t in range(now + 1, len(tokens)) if expert in tokens[t]), 10**9)

            others = [expert for expert in cache if expert not in chosen]
            if rule == "oracle":
                cache = sorted({*cache, *chosen}, key=next_use)[:size]
                continue
            worth = {e: (last[e],) if rule == "lru" else (count[e], last[e]) for e in others}
            cache = [*chosen, *sorted(others, key=worth.__getitem__, reverse=True)][:size]
    return found


TOKENS = st.lists(st.permutations(range(6)).map(lambda order: list(order[:2])), min_size=1, max_size=12)


@given(st.lists(TOKENS, min_size=1, max_size=3), st.integers(2, 6))
@settings(max_examples=150, deadline=None)
def test_a_stack_hits_what_a_cache_of_each_size_hits(requests, size):
    """Sizes from one token's experts on: below, the order within a token would decide. Experts of equal frequency that
    one token used last may leave in either order, so lfu is held less closely."""
    found = locality(trace_of(requests, 6))
    choices = 2 * sum(map(len, requests))
    assert round(found.hits["oracle"][0, size] * choices) == slow_hits(requests, size, "oracle")
    assert round(found.hits["lru"][0, size] * choices) == slow_hits(requests, size, "lru")
    assert abs(round(found.hits["lfu"][0, size] * choices) - slow_hits(requests, size, "lfu")) <= choices // 8
    for rule in RULES:
        curve = found.hits[rule][0]
        assert (np.diff(curve) >= 0).all()
        assert curve[0] == 0
        assert (curve <= found.hits["oracle"][0] + 1e-12).all()


def test_random_replacement_hits_as_a_drawn_cache_does():
    """Uniform choices of 8 experts, one a token: any rule that does not look ahead finds C / 8 in the long run."""
    generator = np.random.default_rng(0)
    found = locality(trace_of([generator.integers(0, 8, (20_000, 1)).tolist()], 8))
    assert found.hits["random"][0, 1:8] == pytest.approx(np.arange(1, 8) / 8, abs=0.012)


def test_the_prompts_own_set_is_what_they_used_most():
    """Of three prompt tokens two are 0, one is 1."""
    found = locality(trace_of([[[0], [0], [1], [2], [0], [1]]], 4, prompt=3))
    assert (found.num_tokens, found.hits["lru"][0, 2]) == (3, 0)
    assert found.hits["prompt"][0, 1:3].tolist() == [1 / 3, 2 / 3]


def test_coverage_is_the_share_of_choices_by_hand():
    """The prompts used 0 and 1 most. Decode chose 0 in one of two, and 1 in both tokens."""
    trace = trace_of([[[0], [2], [0]], [[1], [1], [1]]], 3, prompt=1)
    found = locality(trace, 1).coverage
    assert (found["prompt"].mean, found["static"].mean, found["oracle"].mean) == (0.75, 0.0, 0.75)
    assert (found["prompt"].low, found["prompt"].high) == (0.5, 1.0)
    assert found["prompt - static"].mean == 0.75


def test_misses_of_a_requests_first_64_tokens_and_of_its_later_ones_are_told_apart():
    """0 and 1 in turn for 64 tokens, then 2 ten times. A cache of one expert misses all of the first and one of the
    others, one of two 0 and 1 once each. 32, 32 and 10 of 74 choices fall on the most used."""
    found = locality(trace_of([[[0], [1]] * 32 + [[2]] * 10], 4))
    assert found.early_misses[0] == pytest.approx([1, 1, 1 / 32, 1 / 32, 1 / 32])
    assert found.later_misses[0] == pytest.approx([1, 0.1, 0.1, 0.1, 0.1])
    assert found.concentration[0] == pytest.approx([0, 32 / 74, 64 / 74, 1, 1])
    told = found.as_dict((1, 2))
    assert told["early_misses"] == pytest.approx({"1": 1, "2": 1 / 32})
    assert told["concentration"] == pytest.approx({"1": 32 / 74, "2": 64 / 74})
    assert (default_places(32), default_places(8)) == ((2, 4, 8, 16, 32), (1, 2, 4, 8))
    one = locality(trace_of([[[0]]], 2)).as_dict((1,))
    assert (one["repeats"], one["shuffled"], one["later_misses"]) == (None, None, {"1": None})
    assert "static" not in one["hits"]


def test_a_requests_first_token_repeats_nothing_and_requests_without_tokens_concentrate_nothing():
    """0 again, then 1; in another request 1 again: 2 of 3. Counts 2 and 1 of three, 2 of two, and none of none."""
    found = locality(trace_of([[[3], [0], [0], [1]], [[3], [1], [1]], [[3]]], 4, prompt=1))
    assert found.repeats[0] == pytest.approx(2 / 3)
    assert found.concentration[0] == pytest.approx([0, (2 / 3 + 1) / 2, 1, 1, 1])
    both = locality(trace_of([[[0, 1], [1, 0]]], 4))
    assert (both.repeats[0], both.as_dict((1,))["chance"]) == (1, 0.5)


def test_an_interval_is_two_standard_errors_of_the_mean_on_either_side():
    """Of 100 values with a deviation of 28.9: 1.96 of their mean's, 2.89, on either side."""
    found = Interval.of(np.arange(100.0))
    assert (found.mean, found.low, found.high) == pytest.approx((49.5, 49.5 - 5.66, 49.5 + 5.66), abs=0.4)
    alone = locality(trace_of([[[0], [1]]], 2, prompt=1), 1).coverage
    assert alone == {"prompt": Interval(0.0, None, None), "oracle": Interval(1.0, None, None)}


def test_what_cannot_be_looked_at_is_refused():
    trace = trace_of([[[0], [1]]], 2, prompt=2)
    with pytest.raises(TraceError, match="no decode tokens"):
        locality(trace)
    assert found_ahead(trace) == {}


def test_what_is_found_ahead_is_learned_from_every_other_request_and_told_of_the_others():
    """The first request knows 1 to follow 0. In the second one 2 does at first, and then 1: three of four are right."""
    none = np.zeros((0, 2, 1), np.int64)
    known, other = np.array([[[0], [1]]] * 4), np.array([[[0], [2]], [[0], [1]]])
    assert found_ahead(requests_of([(none, known), (none, other)], 4)) == {"next_layer": 0.75, "chance": 0.25}


def test_the_checked_in_trace_repeats_as_was_measured_by_others():
    """48.8 % of a step's choices, 46.1 shuffled: an independent reading of the same trace."""
    trace = Trace.load(DATA / "tiny-mixtral-trace")
    found = locality(trace)
    assert (found.repeats.mean(), found.shuffled.mean()) == pytest.approx((0.488, 0.461), abs=0.004)
    assert found_ahead(trace)["next_layer"] > found_ahead(trace)["chance"] + 0.1
    assert json.dumps(found.as_dict((2, 4)))


# -- Paired differences and TOST: by hand, and on samples that are equal or not by construction ------------------------


BUNDLED = Trace.load(DATA / "tiny-mixtral-trace")


def test_a_pair_is_judged_by_the_difference_of_each_request():
    """Requests differ by a factor of 100, each by 1 % of the mean: equal within 5 %."""
    other = np.geomspace(1, 100, 40)
    own = other + 0.01 * other.mean()
    one = paired(own, other)
    assert (one.mean, one.low, one.high) == pytest.approx((0.01, 0.01, 0.01))
    assert one.equal
    assert [paired(other + share * other.mean(), other).equal for share in (0.049, 0.051, -0.049, -0.051)] == [
        True,
        False,
    ] * 2


def test_two_are_equal_by_the_90_percent_interval():
    """A mean that deviates by 2.75 %: 90 % of it lie within 4.5 %, 95 % within 5.4."""
    noise = np.random.default_rng(0).normal(size=400)
    noise = (noise - noise.mean()) / noise.std() * 0.0275 * np.sqrt(400)
    one = paired(1 + noise, np.ones(400))
    assert (one.low, one.high) == pytest.approx((-0.054, 0.054), abs=0.003)
    assert one.equal


def test_few_noisy_requests_are_not_shown_equal():
    """Absence of evidence: the interval holds 0, and TOST says no."""
    noise = np.random.default_rng(0).normal(size=(2, 6))
    one = paired(*(100 + 20 * noise))
    assert one.low < 0 < one.high
    assert not one.equal


def test_every_row_of_a_comparison_stands_beside_the_fastest_of_its_batch():
    found = compare(BUNDLED, CompareSettings(systems=("context_aware", "fiddler"), policies=("prefill",)))
    beside = beside_fastest(found.replayed)
    times = [done.decode_ps.mean() for done in found.replayed]
    fastest = int(np.argmin(times))
    assert [one.mean for one in beside] == pytest.approx([each / min(times) - 1 for each in times])
    assert (beside[fastest].mean, beside[fastest].equal) == (0, True)
    assert not beside[1 - fastest].equal
