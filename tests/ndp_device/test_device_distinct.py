"""Pairs grouped by expert: as a few lines of Python group them; a pair that points nowhere is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndp_device.common.widths import ALL_FLAGS, FLAG_OF_BITS, PLAN_BITS
from ndp_device.protocol.session import DistinctPairs, distinct

EXPERTS, ROWS = 6, 4
EVERYTHING = np.full(EXPERTS, ALL_FLAGS, np.uint8)
pair = st.tuples(st.integers(0, ROWS - 1), st.integers(0, EXPERTS - 1), st.sampled_from(PLAN_BITS))
any_pair = st.tuples(st.integers(-2, ROWS + 1), st.integers(-2, EXPERTS + 1), st.integers(0, 255))


def columns(pairs: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, experts, bits = (np.array([p[i] for p in pairs]) for i in range(3))
    return rows.astype(np.int32), experts.astype(np.int32), bits.astype(np.uint8)


def python(pairs: list[tuple[int, int, int]], flags: np.ndarray) -> DistinctPairs | None:
    if any(not 0 <= row < ROWS for row, _, _ in pairs):
        return None
    place: dict[tuple[int, int], int] = {}
    index = np.array([place.setdefault((expert, bits), len(place)) for _, expert, bits in pairs], np.int32)
    if any(not 0 <= expert < len(flags) or not flags[expert] & FLAG_OF_BITS[bits] for expert, bits in place):
        return None
    counts = np.bincount(index, minlength=len(place)).tolist()
    distinct_experts, distinct_bits = ([key[part] for key in place] for part in (0, 1))
    return DistinctPairs(columns(pairs)[0], index, distinct_experts, distinct_bits, counts)


def test_each_expert_and_width_comes_once_in_order_of_first_appearance() -> None:
    pairs = [(0, 3, 2), (1, 3, 2), (1, 3, 16), (2, 0, 2), (3, 3, 2)]
    found = distinct(*columns(pairs), EVERYTHING, ROWS)
    assert found is not None
    assert (found.experts, found.bits, found.counts) == ([3, 3, 0], [2, 16, 2], [3, 1, 1])
    assert found.places.tolist() == [0, 0, 1, 2, 0]
    assert found.rows.tolist() == [0, 1, 1, 2, 3]
    assert (found.rows.dtype, found.places.dtype) == (np.int32, np.int32)


@settings(max_examples=500)
@given(
    pairs=st.one_of(st.lists(pair, max_size=40), st.lists(any_pair, max_size=4)),
    flags=st.lists(st.integers(0, 255), min_size=EXPERTS, max_size=EXPERTS),
)
def test_native_and_python_agree(pairs: list[tuple[int, int, int]], flags: list[int]) -> None:
    for allowed in (EVERYTHING, np.array(flags, np.uint8)):
        ours, theirs = distinct(*columns(pairs), allowed, ROWS), python(pairs, allowed)
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours[2:] == theirs[2:]
            np.testing.assert_array_equal(ours.rows, theirs.rows)
            np.testing.assert_array_equal(ours.places, theirs.places)


@pytest.mark.parametrize("wrong", [(-1, 0, 4), (ROWS, 0, 4), (0, -1, 4), (0, EXPERTS, 4), (0, 0, 0), (0, 0, 5)])
def test_a_pair_that_points_nowhere_is_none(wrong: tuple[int, int, int]) -> None:
    assert distinct(*columns([(0, 0, 4), wrong]), EVERYTHING, ROWS) is None


def test_a_width_that_the_plan_does_not_name_is_none() -> None:
    flags = EVERYTHING.copy()
    flags[2] = FLAG_OF_BITS[3]
    assert distinct(*columns([(0, 2, 3)]), flags, ROWS) is not None
    assert distinct(*columns([(0, 2, 4)]), flags, ROWS) is None


def test_the_rows_are_a_copy_that_a_later_write_does_not_reach() -> None:
    rows, experts, bits = columns([(0, 0, 4), (1, 1, 4)])
    found = distinct(rows, experts, bits, EVERYTHING, ROWS)
    rows[:] = 99
    assert found is not None
    assert found.rows.tolist() == [0, 1]
