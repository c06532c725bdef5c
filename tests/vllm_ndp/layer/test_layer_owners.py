"""Whole hot experts shared out over GPUs: nobody moves for nothing, and nobody holds more than its slots."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_ndp.layer.tiers import NOBODY, Owners, slots_per_gpu


def hot(num_experts: int, *experts: int) -> np.ndarray:
    row = np.zeros(num_experts, np.bool_)
    row[list(experts)] = True
    return row


def test_newcomers_go_where_fewest_are_and_the_others_stay():
    owners = Owners(2, 1, 6)
    assert owners.place(0, hot(6, 0, 1, 2)).tolist() == [0, 1, 0, NOBODY, NOBODY, NOBODY]
    assert owners.place(0, hot(6, 0, 2, 5)).tolist() == [0, NOBODY, 0, NOBODY, NOBODY, 1]
    assert owners.place(0, hot(6, 3, 4, 5)).tolist() == [NOBODY, NOBODY, NOBODY, 0, 0, 1]


def test_an_expert_passes_through_where_it_is_to_stay_and_else_in_turn():
    owners = Owners(2, 1, 6)
    owners.place(0, hot(6, 1, 3))
    assert owners.streaming(0).tolist() == [0, 0, 0, 1, 0, 1]


@given(st.integers(1, 5), st.integers(0, 12), st.lists(st.randoms(use_true_random=False), max_size=8))
def test_every_hot_expert_has_one_gpu_and_no_gpu_more_than_its_slots(num_gpus: int, num_hot: int, draws: list):
    owners, before = Owners(num_gpus, 1, 12), np.full(12, NOBODY)
    for draw in draws:
        row = hot(12, *draw.sample(range(12), num_hot))
        now = owners.place(0, row)
        assert np.array_equal(now != NOBODY, row)
        assert np.bincount(now[row], minlength=num_gpus).max(initial=0) <= slots_per_gpu(num_hot, num_gpus)
        stays = row & (before != NOBODY)
        assert np.array_equal(now[stays], before[stays])
        before = now.copy()
