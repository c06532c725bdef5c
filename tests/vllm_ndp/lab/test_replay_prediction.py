"""The predictor by pencil, its accuracy, and what wrong guesses cost the system that prefetches by them."""

import numpy as np
import pytest
from by_hand import C, F, chosen, machine, requests_of, run, trace
from paths import DATA

from ndp_device.common.errors import ConfigError
from vllm_ndp.lab.compare import Workload, compare
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.lab.vectorised.cache import NextLayer
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.traces.trace import Trace

TRACE = Trace.load(DATA / "tiny-mixtral-trace")


def learned(tokens: np.ndarray, num_experts: int = 4) -> NextLayer:
    """From tokens [T, L, k]."""
    return NextLayer.learned(requests_of([(tokens, tokens[:0])], num_experts))


def test_chances_are_counts_of_what_followed_and_one_token_of_popularity():
    """Three tokens: 0 then 1, 0 then 1, 0 then 2. Layer 1: popularity 2/3 and 1/3, so after 0 the chances are
    (2 + 2/3) / 4 and (1 + 1/3) / 4; after 3, which nobody chose, they are the popularity."""
    tokens = np.array([[[0], [1]], [[0], [1]], [[0], [2]]])
    chances = learned(tokens).chances
    assert chances[1, 0] == pytest.approx([0, 2 / 3, 1 / 3, 0])
    assert chances[1, 3] == pytest.approx([0, 2 / 3, 1 / 3, 0])
    assert chances[0] == pytest.approx(np.tile([1, 0, 0, 0], (4, 1)))
    mixed = learned(np.array([[[0], [1]], [[3], [2]]])).chances
    assert mixed[1, 0] == pytest.approx([0, (1 + 0.5) / 2, 0.5 / 2, 0])


def test_a_guess_follows_the_choices_of_the_layer_before_and_the_first_layer_popularity():
    """0 is always followed by 1, 3 by 2; 0 is the more popular. Decode: 0 then 1 (both guessed), 3 then 2 (the second
    guessed, the first not), 0 then 2 (the first guessed): 4 of 6."""
    predictor = learned(np.array([[[0], [1]]] * 3 + [[[3], [2]]] * 2))
    batches = trace(chosen([[0], [1]]), chosen([[0], [1]], [[3], [2]], [[0], [2]]), num_experts=4)
    assert predictor.accuracy(batches) == pytest.approx(4 / 6)


def test_the_predictor_of_a_comparison_knows_no_request_that_is_replayed_and_beats_popularity():
    workload = Workload(TRACE)
    assert workload._known is not None
    assert not set(workload._known.request_ids) & set(workload.trace.request_ids)
    batches, chances = workload.batches(1), workload.predictor.chances
    popular = NextLayer(np.broadcast_to(chances.mean(axis=1, keepdims=True), chances.shape))
    accuracy = workload.predictor.accuracy(batches)
    assert 0.25 < popular.accuracy(batches) < accuracy < 1  # 2 of 8 by chance
    given = Workload(TRACE, prior=ImportanceScore.from_weights(np.ones((4, 8))))
    assert 0.25 < given.predictor.accuracy(given.batches(1)) < 1


def test_hobbit_hides_what_a_right_guess_begins_and_pays_for_a_wrong_one():
    """No places. 0 is followed by 2 in all requests, here in 20 of 21 steps: with layer 0's own 41 of 42 guesses are
    right. Layer 0 has attention alone before it: F + C. Layer 1: F + C, less C that layer 0 hides of a right copy, and
    F - C that a wrong one goes on: each as often as it comes. Guesses of which half are right do not pay."""
    batches, costs = trace(chosen([[0], [0]]), chosen(*[[[0], [2]]] * 20, [[0], [1]])), machine(2, top_k=1)
    often = run("hobbit", batches, costs, 0, predictor=learned(np.array([[[0], [2]]] * 4)))
    right = 41 / 42
    assert often.moe_ps[0, :, 1] == pytest.approx(np.full(21, F + C - right * C + (1 - right) * (F - C)), abs=2e4)
    assert often.moe_ps[0, :, 0] == pytest.approx(np.full(21, F + C + (1 - right) * F), abs=2e4)
    seldom = run("hobbit", batches, costs, 0, predictor=learned(np.array([[[0], [3]]] * 4)))
    assert seldom.moe_ps == pytest.approx(np.full(seldom.moe_ps.shape, F + C), abs=2e4)
    assert "measured, on" in often.policy
    assert "measured, off" in seldom.policy


def test_the_published_constants_stay_available():
    def rows(prefetch: str) -> dict[str, float]:
        settings = CompareSettings(systems=("hobbit", "moepic"), prefetch=prefetch, overrides={"dram.kind": "ideal"})
        return {row.system: row.decode_tokens_per_s for row in compare(TRACE, settings).rows}

    measured, published = rows("measured"), rows("published")
    assert measured["hobbit"] < published["hobbit"]
    assert measured["moepic"] <= published["moepic"]  # no worse a guess fetches less that is wrong
    with pytest.raises(ConfigError, match="prefetch must be one of measured, published, got 'guessed'"):
        CompareSettings(prefetch="guessed")


def test_nothing_can_be_learned_from_no_token():
    with pytest.raises(ConfigError, match="needs tokens to learn from"):
        NextLayer.learned(TRACE, np.zeros(len(TRACE.request), bool))
