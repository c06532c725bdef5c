"""Bit planes: nothing is lost, and a prefix of the planes is the narrower code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ndp_device.experts.expert import pack, unpack


@st.composite
def codes_and_bits(draw: st.DrawFn) -> tuple[NDArray[np.uint8], int]:
    bits = draw(st.integers(1, 8))
    rows, bytes_per_row = draw(st.integers(0, 5)), draw(st.integers(1, 9))
    seed = draw(st.integers(0, 2**32 - 1))
    return np.random.default_rng(seed).integers(0, 1 << bits, (rows, bytes_per_row * 8), dtype=np.uint8), bits


@given(codes_and_bits())
def test_unpack_returns_what_pack_was_given(case: tuple[NDArray[np.uint8], int]) -> None:
    codes, bits = case
    planes = pack(codes, bits)
    assert planes.shape == (bits, codes.shape[0], codes.shape[1] // 8)
    np.testing.assert_array_equal(unpack(planes), codes)


@given(codes_and_bits(), st.integers(1, 8))
def test_the_first_k_planes_are_the_code_shifted_down_to_k_bits(case: tuple[NDArray[np.uint8], int], k: int) -> None:
    codes, bits = case
    k = min(k, bits)
    np.testing.assert_array_equal(unpack(pack(codes, bits)[:k]), codes >> (bits - k))


def test_a_plane_keeps_column_c_in_bit_c_mod_8_of_byte_c_div_8() -> None:
    """Codes 2, 0 .. 0, 3 in columns 0 .. 15: the top bit is set in columns 0 and 15, the low bit in 15 only."""
    codes = np.zeros((1, 16), dtype=np.uint8)
    codes[0, 0], codes[0, 15] = 2, 3
    assert pack(codes, 2).tolist() == [[[0b00000001, 0b10000000]], [[0b00000000, 0b10000000]]]


@pytest.mark.parametrize(
    ("codes", "bits"),
    [
        (np.full((1, 8), 4, dtype=np.uint8), 2),
        (np.zeros((1, 12), dtype=np.uint8), 2),
        (np.zeros((1, 8), dtype=np.int64), 2),
        (np.zeros(8, dtype=np.uint8), 2),
        (np.zeros((1, 8), dtype=np.uint8), 9),
    ],
)
def test_codes_that_do_not_fit_are_refused(codes: NDArray[np.uint8], bits: int) -> None:
    with pytest.raises(ValueError, match="codes"):
        pack(codes, bits)
