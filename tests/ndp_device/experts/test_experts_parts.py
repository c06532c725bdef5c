"""Parts of an expert: they add up to the whole at every width, take equal bytes, and never lie across a scale."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from paths import MODEL, ROOT
from reference_kernel import REFERENCE, unpack, weights_of

from ndp_device.calibration.data_free import round_to_bytes
from ndp_device.common.activation import GPT_OSS
from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import PLAN_BITS
from ndp_device.experts.expert import (
    WHOLE,
    Biases,
    ByteExpert,
    ByteMatrix,
    Expert,
    Fp4Expert,
    Fp4Matrix,
    FullExpert,
    Part,
    QuantizedExpert,
    QuantizedMatrix,
    pack,
    to_float32,
)
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.store import ExpertStore

REPLICAS = ROOT / "models" / "tiny-mixtral-replicas"
STORE = ExpertStore(MODEL, REPLICAS, kernel=REFERENCE)
X = np.random.default_rng(5).standard_normal((3, STORE.shape.hidden_size), np.float32)


def computed(expert: Expert, kernel: Any) -> NDArray[np.float32]:
    """The expert on every row of X, with gate 1."""
    rows, x = np.arange(len(X), dtype=np.int32), np.ascontiguousarray(X[:, : expert.w2.shape[0]])
    return kernel.execute(x, [kernel.prepare(expert)], rows, np.zeros_like(rows), np.ones(len(X), np.float32))


def at_8_bits(full: Expert) -> QuantizedExpert:
    """As `quantize` would make it: the bundled replicas have no 8 bits."""
    assert isinstance(full, FullExpert)
    w1, w3, w2 = (to_float32(weights, full.dtype) for weights in (full.w1, full.w3, full.w2))
    return QuantizedExpert(8, round_to_bytes(np.concatenate([w1, w3]), 64), round_to_bytes(w2, 64))


@pytest.mark.parametrize("kernel", [REFERENCE, NativeKernel()], ids=["reference", "native"])
@pytest.mark.parametrize("bits", PLAN_BITS)
@pytest.mark.parametrize("count", [2, 4])
def test_the_parts_of_one_expert_add_up_to_it(kernel: Any, bits: int, count: int) -> None:
    """Expert 0 of layer 1, whose replica has its units in another order than the checkpoint. The native kernel rounds
    each group of what comes between the products by its largest value, and no group lies in two parts."""
    expert = STORE.expert(1, 0, bits) if bits in STORE.widths else at_8_bits(STORE.expert(1, 0, 16))
    parts = [Part(index, count).of(expert) for index in range(count)]
    assert sum(part.nbytes for part in parts) == expert.nbytes
    assert len({part.nbytes for part in parts}) == 1
    whole = computed(expert, kernel)
    added = np.sum([computed(part, kernel) for part in parts], axis=0)
    np.testing.assert_allclose(added, whole, rtol=0, atol=2e-6 * np.abs(whole).max())


@pytest.mark.parametrize("form", ["full", "replica", "bytes"])
def test_what_an_expert_adds_at_its_end_is_added_once(form: str) -> None:
    rng = np.random.default_rng(1)
    plain: Any = byte_expert(64, 64) if form == "bytes" else STORE.expert(0, 0, 16 if form == "full" else 4)
    hidden, units = plain.w2.shape
    biases = Biases(*(rng.standard_normal(size, np.float32) for size in (units, units, hidden)))
    expert = replace(plain, biases=biases, activation=GPT_OSS)
    assert expert.nbytes == plain.nbytes + 4 * (2 * units + hidden)
    added = np.sum([computed(Part(index, 2).of(expert), REFERENCE) for index in range(2)], axis=0)
    np.testing.assert_allclose(added, computed(expert, REFERENCE), rtol=1e-5, atol=1e-5)


def test_a_whole_expert_is_its_only_part() -> None:
    expert = STORE.expert(0, 0, 3)
    assert WHOLE.of(expert) is expert
    WHOLE.check(7, 64)


@pytest.mark.parametrize(("units", "group", "count"), [(256, 64, 3), (256, 64, 8), (256, 1, 64), (24, 8, 2)])
def test_a_border_within_a_scale_or_a_byte_is_refused(units: int, group: int, count: int) -> None:
    with pytest.raises(
        ConfigError, match=f"experts of {units} units with {group} to a scale cannot be cut into {count}"
    ):
        Part(0, count).check(units, group)


def byte_expert(rows: int, columns: int) -> ByteExpert:
    """256 units of 64 inputs; rows of w1 and w3, and columns of w2, under one scale."""

    def matrix(shape: tuple[int, int], block: tuple[int, int]) -> ByteMatrix:
        scales = np.ones((-(-shape[0] // block[0]), -(-shape[1] // block[1])), np.float32)
        return ByteMatrix("int8", np.ones(shape, np.uint8), scales, block)

    into = matrix((256, 64), (rows, 64))
    return ByteExpert(into, into, matrix((64, 256), (64, columns)))


def test_an_expert_reads_the_bytes_of_its_codes_and_of_every_scale() -> None:
    """32 units of 64 inputs in FP4, two codes a byte: scales of 32 columns, or of 16 and of each row in float32."""
    for group, of_row in ((32, 0), (16, 4)):
        w13, w2 = (
            Fp4Matrix(
                np.zeros((rows, columns // 2), np.uint8),
                np.zeros((rows, columns // group), np.uint8),
                np.ones(rows, np.float32) if of_row else None,
            )
            for rows, columns in ((64, 64), (64, 32))
        )
        weights = 3 * 32 * 64
        assert Fp4Expert(w13, w2).nbytes == weights // 2 + weights // group + of_row * (64 + 64)
    assert byte_expert(64, 128).nbytes == 3 * 256 * 64 + 4 * (4 + 4 + 2)


def test_matrices_of_codes_in_smaller_groups_are_the_same_and_lie_above_others_of_such_groups_only() -> None:
    rng = np.random.default_rng(2)
    scale, offset = (rng.standard_normal((3, 2)).astype(np.float16) for _ in range(2))
    wide = QuantizedMatrix(4, rng.integers(0, 256, (4, 3, 8), np.uint8), scale, offset, 32)
    narrow = wide.in_groups_of(8)
    assert narrow.group_size == 8
    np.testing.assert_array_equal(weights_of(narrow), weights_of(wide))
    assert wide.above(narrow) is None
    both = wide.above(wide.at_rows(slice(1, 2)))
    assert both is not None
    np.testing.assert_array_equal(weights_of(both), weights_of(wide)[[0, 1, 2, 1]])


@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (64, 128)])
def test_a_border_within_a_block_is_refused_by_the_parts_on_both_its_sides(rows: int, columns: int) -> None:
    expert = byte_expert(rows, columns)
    assert Part(1, 2).of(expert).w2.shape == (64, 128)
    for index in (1, 3) if rows == 128 else range(4):
        with pytest.raises(ConfigError, match="cannot be cut into parts within a block"):
            Part(index, 4).of(expert)


def test_an_expert_with_an_order_of_columns_of_its_own_is_refused() -> None:
    expert = STORE.expert(0, 0, 4)
    assert isinstance(expert, QuantizedExpert)
    order = np.arange(expert.w2.shape[1], dtype=np.int32)[::-1].copy()
    with pytest.raises(ConfigError, match="an order of columns of its own cannot be cut"):
        Part(0, 2).of(replace(expert, w2=replace(expert.w2, perm=order)))


@pytest.mark.parametrize(("index", "count"), [(2, 2), (0, 0), (-1, 2)])
def test_a_part_that_is_none_of_them_is_refused(index: int, count: int) -> None:
    with pytest.raises(ConfigError, match=rf"must be \[i, n\] with 0 <= i < n, got \[{index}, {count}\]"):
        Part(index, count)


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
