"""Caches and hot sets that depend on the step before: the compiled loops against numpy, to the bit, and by pencil."""

from __future__ import annotations

import lane_reference as reference
import numpy as np
import pytest

from vllm_ndp.lab import _lanes
from vllm_ndp.lab.systems.hobbit import NO_GUESS
from vllm_ndp.lab.systems.hobbit import visits as hobbit_visits
from vllm_ndp.lab.vectorised.batches import Loads
from vllm_ndp.lab.vectorised.cache import LFU, LRU, RANDOM, Priority, lcp, visits

GROUPS, LAYERS = 3, 4


def routing(num_experts: int, k: int, batch: int, steps: int = 60, seed: int = 0) -> tuple[np.ndarray, Loads]:
    """ids [G, B, D, L, k] of skewed popularity; the last request of each group ends early."""
    generator = np.random.default_rng(seed)
    popularity = generator.exponential(size=(GROUPS, 1, 1, LAYERS, num_experts))
    keys = np.log(popularity) + generator.gumbel(size=(GROUPS, batch, steps, LAYERS, num_experts))
    ids = np.argsort(-keys, axis=4)[..., :k].astype(np.int64)
    valid = np.ones((GROUPS, batch, steps), np.bool_)
    valid[:, -1, steps // 2 :] = False
    ids[~valid] = 0
    return ids, Loads.of(ids, valid, num_experts)


@pytest.mark.parametrize(("num_experts", "k", "batch"), [(8, 2, 1), (8, 2, 3), (40, 6, 1), (40, 6, 4), (40, 6, 9)])
def test_loads_are_the_rows_of_each_expert(num_experts, k, batch):
    ids, loads = routing(num_experts, k, batch)
    expected = np.zeros((*loads.rows.shape[:3], num_experts), np.int64)
    steps = ids.shape[2]
    for g, b, d, layer in np.ndindex(ids.shape[:4]):
        if b < batch - 1 or d < steps // 2:
            expected[g, d, layer, ids[g, b, d, layer]] += 1
    assert (reference.dense(loads, num_experts) == expected).all()
    assert loads.rows.shape[3] <= min(batch * k + 1, num_experts)
    for cell in np.ndindex(loads.rows.shape[:3]):
        used = loads.experts[cell][loads.rows[cell] > 0].tolist()
        assert used == sorted(set(used))
    valid = np.ones(ids.shape, np.bool_)
    valid[:, -1, steps // 2 :] = False
    assert (loads.count(valid) == loads.rows).all()
    assert loads.total(np.full(ids.shape, 0.5, np.float32), valid) == pytest.approx(loads.rows / 2)


@pytest.mark.parametrize("kind", reference.PRIORITIES)
@pytest.mark.parametrize(("num_experts", "k", "batch"), [(8, 2, 1), (8, 2, 3), (40, 6, 1), (40, 6, 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_compiled_cache_is_the_numpy_one(kind, num_experts, k, batch, seed):
    """Places from none over fewer than a step needs to all of them, side by side as layers."""
    generator = np.random.default_rng(seed)
    _, loads = routing(num_experts, k, batch, seed=seed)
    parameters = {
        "faded": lcp(omega=4.0).parameters,
        "expected": generator.integers(0, 3, (LAYERS, num_experts)).astype(np.float64),
    }.get(kind, np.zeros(0))
    places = np.array([0, 1, num_experts // 2, num_experts])
    start = np.arange(num_experts) < np.broadcast_to(places[:, None], (GROUPS, LAYERS, num_experts))
    frequency = generator.integers(0, 5, start.shape).astype(np.float64)
    found = visits(loads, start, places, Priority(kind, parameters), frequency=frequency, predict=k)
    tokens = reference.dense(loads, num_experts)
    expected = reference.visits(tokens, start, places, kind, parameters, frequency, k)
    for name, ours, wanted in zip(found._fields, found, expected, strict=True):
        at_slots = np.take_along_axis(wanted, loads.experts, axis=3)
        assert (ours == (at_slots & (loads.rows != 0))).all(), name
    assert 0 < found.hit.sum() < (loads.rows != 0).sum()


def one_lane(steps: list[list[int]]) -> Loads:
    ids = np.array(steps, np.int64)[None, None, :, None, :]
    return Loads.of(ids, np.ones((1, 1, len(steps)), np.bool_), 5)


@pytest.mark.parametrize(
    ("priority", "stays"),
    [(LRU, [True, False, True, True]), (LFU, [False, True, False, True])],
)
def test_recency_and_frequency_throw_out_different_experts(priority, stays):
    """Two places. 0 is used twice, then 1, then 2: lru throws 0 out, lfu 1. Then 1, 0, 2, 0 are asked for."""
    start = np.zeros((1, 5), np.bool_)
    hits = [
        bool(visits(one_lane([[0], [0], [1], [2], [last]]), start, 2, priority).hit[0, 4, 0, 0])
        for last in (1, 0, 3, 2)
    ]
    assert hits == [stays[0], stays[1], False, True]


def test_the_cache_guesses_before_it_looks():
    """Expected: 3 most, then 1. Nothing is held, so both of the first step's experts miss; only 3 was guessed."""
    expected = Priority("expected", np.array([[0.0, 2.0, 1.0, 9.0, 0.0]]))
    found = visits(one_lane([[2, 3]]), np.zeros((1, 5), np.bool_), 2, expected, predict=1)
    assert found.hit.tolist() == [[[[False, False]]]]
    assert found.predicted.tolist() == [[[[False, True]]]]


def test_chance_repeats_and_keeps_as_many():
    _, loads = routing(40, 6, 1)
    start = np.arange(40) < np.full((LAYERS, 1), 20)
    first, second = (visits(loads, start, 20, RANDOM).hit for _ in range(2))
    assert (first == second).all()
    assert first.mean() == pytest.approx(visits(loads, start, 20, LRU).hit.mean(), abs=0.15)
    assert visits(loads, start, 40, RANDOM).hit.mean() > first.mean()


@pytest.mark.parametrize(
    ("num_experts", "k", "batch", "hot"), [(8, 2, 1, 4), (8, 2, 3, 4), (40, 6, 2, 10), (8, 2, 1, 0)]
)
@pytest.mark.parametrize("memory", [1.0, 2.0, 128.0, 1e12])
def test_the_compiled_hot_set_follows_decode_as_the_numpy_one(num_experts, k, batch, hot, memory):
    generator = np.random.default_rng(hot)
    ids, loads = routing(num_experts, k, batch)
    state = np.arange(num_experts) < np.full((GROUPS, LAYERS, 1), hot)
    bits = np.where(state[:, None], 0, generator.integers(1, 5, (GROUPS, batch, LAYERS, num_experts))).astype(np.uint8)
    heat = generator.integers(0, 20, state.shape).astype(np.float64)
    copies = np.array([0.3, 1.0, 7.0])
    tokens = reference.dense(loads, num_experts)
    copied, *expected = reference.follow(ids, tokens, copies, memory, 0.1, heat, state, bits)
    widths, ours_hot, ours_bits = np.zeros(ids.shape, np.uint8), state.copy(), bits.copy()
    done = _lanes.follow(ids, loads.experts, loads.rows, copies, memory, 0.1, heat.copy(), ours_hot, ours_bits, widths)
    assert done == copied
    assert (copied > 0) == (hot > 0)
    for ours, wanted in zip((widths, ours_hot, ours_bits), expected, strict=True):
        assert (ours == wanted).all()


@pytest.mark.parametrize(("num_experts", "k", "batch"), [(8, 2, 1), (8, 2, 3), (40, 6, 1), (40, 6, 4)])
@pytest.mark.parametrize(("high_places", "low_places"), [(0, 0), (1, 1), (7, 3), (16, 9), (1000, 1000)])
@pytest.mark.parametrize("weights", [(0.3, 0.25, 0.25, 0.2), (0.0, 0.0, 0.0, 1.0), (1.0, 0.0, 0.0, 0.0)])
def test_hobbits_compiled_caches_are_the_sets_of_experts_in_python(
    num_experts, k, batch, high_places, low_places, weights
):
    generator = np.random.default_rng(high_places)
    _, loads = routing(num_experts, k, batch, steps=30)
    _, guessed = routing(num_experts, k, 1, steps=30, seed=1)
    need = np.where(loads.rows > 0, generator.integers(0, 3, loads.rows.shape), 0).astype(np.uint8)
    kind = np.where(guessed.rows > 0, generator.integers(0, 3, guessed.rows.shape), 0).astype(np.uint8)
    some = np.arange(LAYERS * num_experts).reshape(LAYERS, num_experts)
    first = some < high_places, min(high_places, some.size)
    second = some[::-1] < low_places, min(low_places, some.size)
    found = hobbit_visits(loads.experts, need, guessed.experts, kind, first, second, np.array(weights))
    flags, ordered = reference.two_caches(loads.experts, need, guessed.experts, kind, first, second, np.array(weights))
    for name, bit in (("hit", 1), ("early", 2), ("late", 4), ("low", 8)):
        assert (getattr(found, name) == ((flags & bit) > 0)).all(), name
    assert (found.ordered == ordered).all()
    assert ((found.guess != NO_GUESS) == found.early).all()
    at = np.take_along_axis(guessed.experts, np.where(found.early, found.guess, 0).astype(np.int64), axis=3)
    assert (at == loads.experts)[found.early].all()
    assert (found.hit | found.early | found.late == (need > 0)).all()


def test_the_layer_term_throws_out_what_is_used_last():
    """Three layers, three places in all, each layer's expert 0 held. A token uses 0, 1 and 0. At layer 1's miss layer 0
    is two layers ahead (1/3), layer 2 is next (2/3), layer 1 itself is now (1): by layers layer 0's expert leaves and
    layer 2 hits. By recency layer 0's was just used; of the others, never used, the last leaves, and layer 2 misses."""
    experts = np.array([0, 1, 0], np.int64).reshape(1, 1, 3, 1)
    need, nothing = np.ones(experts.shape, np.uint8), np.zeros((1, 1, 3, 0), np.int64)
    start, empty = (np.array([[True, False]] * 3), 3), (np.zeros((3, 2), np.bool_), 0)

    def hits(*weights: float) -> list[bool]:
        found = hobbit_visits(experts, need, nothing, nothing.astype(np.uint8), start, empty, np.array(weights))
        return found.hit.ravel().tolist()

    assert hits(0.0, 0.0, 0.0, 1.0) == [True, False, True]
    assert hits(1.0, 0.0, 0.0, 0.0) == [True, False, False]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"need": np.zeros((1, 2, 1, 2), np.uint8)}, "must be"),
        ({"weights": np.zeros(3)}, r"weights \[4\]"),
        ({"guessed": np.full((1, 2, 1, 1), 9)}, r"0\.\.E-1"),
        ({"low_places": -1}, "places"),
    ],
)
def test_hobbits_compiled_caches_refuse_what_they_cannot_index(change, says):
    cells = np.zeros((1, 2, 1, 1), np.uint8)
    arguments = {
        "experts": cells.astype(np.int64), "need": cells, "guessed": cells.astype(np.int64), "as_": cells,
        "high": np.zeros((1, 5), np.bool_), "low": np.zeros((1, 5), np.bool_), "high_places": 1, "low_places": 1,
        "weights": np.zeros(4), "flags": cells.copy(), "order": cells.copy(), "ordered": cells.copy(),
    }  # fmt: skip
    _lanes.two_caches(**arguments)
    with pytest.raises(ValueError, match=says):
        _lanes.two_caches(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"experts": np.full((1, 2, 1, 1), 5)}, r"0\.\.E-1"),
        ({"rows": np.full((1, 2, 1, 1), -1)}, "rows must be at least 0"),
        ({"places": np.array([-1])}, "places"),
        ({"rows": np.ones((1, 3, 1, 1), np.int64)}, "must be"),
        ({"priority": "fifo"}, "priority must be lru"),
        ({"priority": "faded"}, "faded needs"),
        ({"priority": "expected"}, "expected needs"),
    ],
)
def test_the_compiled_cache_refuses_what_it_cannot_index(change, says):
    arguments = {
        "experts": np.zeros((1, 2, 1, 1), np.int64),
        "rows": np.ones((1, 2, 1, 1), np.int64),
        "start": np.zeros((1, 1, 5), np.bool_),
        "frequency": np.zeros((1, 1, 5)),
        "places": np.array([2]),
        "priority": "lru",
        "parameters": np.zeros(0),
        "predict": 0,
        "flags": np.zeros((1, 2, 1, 1), np.uint8),
    }
    _lanes.visit(**arguments)
    with pytest.raises(ValueError, match=says):
        _lanes.visit(**{**arguments, **change})
