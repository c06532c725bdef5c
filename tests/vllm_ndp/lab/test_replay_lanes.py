"""Caches that depend on the step before, by pencil. Golden rows of the systems hold whole replays, to ten digits."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ndp.lab.vectorised.batches import Loads
from vllm_ndp.lab.vectorised.cache import LFU, LRU, RANDOM, Priority, visits

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
    found = np.zeros(expected.shape, np.int64)
    np.add.at(found, (*np.indices(loads.rows.shape)[:3], loads.experts), loads.rows)
    assert (found == expected).all()
    assert loads.rows.shape[3] <= min(batch * k + 1, num_experts)
    for cell in np.ndindex(loads.rows.shape[:3]):
        used = loads.experts[cell][loads.rows[cell] > 0].tolist()
        assert used == sorted(set(used))
    valid = np.ones(ids.shape, np.bool_)
    valid[:, -1, steps // 2 :] = False
    assert (loads.count(valid) == loads.rows).all()
    assert loads.total(np.full(ids.shape, 0.5, np.float32), valid) == pytest.approx(loads.rows / 2)


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


def test_what_is_in_use_comes_first_and_ties_of_frequency_go_to_what_was_used_last():
    """One place: 1 is in use, so 0 leaves, though it was used three times. Two places: 0 and 1 were used once each."""
    nothing = np.zeros((1, 5), np.bool_)
    assert visits(one_lane([[0], [0], [0], [1], [1]]), nothing, 1, LFU).hit[0, 4, 0, 0]
    found = [visits(one_lane([[0], [1], [2], [last]]), nothing, 2, LFU).hit[0, 3, 0, 0] for last in (0, 1)]
    assert found == [False, True]


def test_two_rows_that_share_an_expert_use_it_twice():
    """Three places: 0 by both rows, 1 and 2 by one each, 3 by both. 0 was used twice, so it stays, and 2 leaves."""
    ids = np.array([[0, 1, 3, 0], [0, 2, 3, 2]])[None, :, :, None, None]
    loads = Loads.of(ids, np.ones((1, 2, 4), np.bool_), 5)
    last = visits(loads, np.zeros((1, 5), np.bool_), 3, LFU).hit[0, 3, 0]
    assert last[:2].tolist() == [True, False]  # experts 0 and 2


def test_the_cache_guesses_before_it_looks():
    """Expected: 3 most, then 1. Nothing is held, so both of the first step's experts miss; only 3 was guessed."""
    expected = Priority("expected", np.array([[0.0, 2.0, 1.0, 9.0, 0.0]]))
    found = visits(one_lane([[2, 3]]), np.zeros((1, 5), np.bool_), 2, expected, predict=1)
    assert found.hit.tolist() == [[[[False, False]]]]
    assert found.predicted.tolist() == [[[[False, True]]]]
    alike = visits(one_lane([[1, 3]]), np.zeros((1, 5), np.bool_), 2, Priority("expected", np.ones((1, 5))), predict=2)
    assert alike.predicted.tolist() == [[[[True, False]]]]  # of equal ones the lower ids are guessed: 0 and 1


def test_an_unknown_priority_is_refused():
    with pytest.raises(ValueError, match="priority must be lru"):
        visits(one_lane([[0]]), np.zeros((1, 5), np.bool_), 2, Priority("fifo"))


def test_chance_repeats_and_keeps_as_many():
    _, loads = routing(40, 6, 1)
    start = np.arange(40) < np.full((LAYERS, 1), 20)
    first, second = (visits(loads, start, 20, RANDOM).hit for _ in range(2))
    assert (first == second).all()
    assert first.mean() == pytest.approx(visits(loads, start, 20, LRU).hit.mean(), abs=0.15)
    assert visits(loads, start, 40, RANDOM).hit.mean() > first.mean()
