"""Every path of the native kernel against fp64 over the same quantized weights: shapes, groups, order, batches."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drawn_experts import (
    LIMIT,
    SHAPES,
    TWO,
    exact,
    full_expert,
    random_biases,
    random_expert,
    random_matrix,
    random_pairs,
    relative_error,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference_kernel import REFERENCE, from_bytes, from_fp4, weights_of

from ndp_device.common.activation import GPT_OSS, SILU
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.widths import LIMBS, REPLICA_WIDTHS
from ndp_device.experts.expert import (
    ByteExpert,
    ByteMatrix,
    Expert,
    Fp4Expert,
    Fp4Matrix,
    FullExpert,
    QuantizedExpert,
    QuantizedMatrix,
)
from ndp_device.kernels import _native
from ndp_device.kernels.native import NativeKernel

ISAS = _native.supported_isas()


NVFP4 = (0, 40)
"""First odd scales of _drawn_fp4 that ask for NVFP4."""


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("limbs", [2, 1])
@pytest.mark.parametrize("bits", REPLICA_WIDTHS)
@pytest.mark.parametrize(("hidden", "intermediate", "group", "perm"), SHAPES)
def test_every_path_matches_fp64(
    isa: str, limbs: int, bits: int, hidden: int, intermediate: int, group: int, perm: bool
) -> None:
    rng = np.random.default_rng([bits, hidden, intermediate, group])
    experts = [random_expert(rng, hidden, intermediate, bits, group, perm=perm) for _ in range(3)]
    kernel = NativeKernel(dict.fromkeys(LIMBS, limbs), isa=isa, threads=2)
    prepared = [kernel.prepare(expert) for expert in experts]
    for tokens in (1, 2, 3, 4, 17):
        x = rng.standard_normal((tokens, hidden)).astype(np.float32)
        pairs = random_pairs(rng, tokens, 3, 2)
        assert relative_error(kernel.execute(x, prepared, *pairs), exact(x, experts, pairs)) < LIMIT[limbs]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 7, 8, 16, 33, 128, 512])
def test_any_number_of_rows_of_mixed_widths(isa: str, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    experts: list[Expert] = [random_expert(rng, 192, 160, bits, 64, perm=bits % 2 == 0) for bits in REPLICA_WIDTHS]
    experts += [full_expert(rng, 192, 160, dtype) for dtype in ("float32", "float16", "bfloat16")]
    kernel = NativeKernel(TWO, isa=isa, threads=2)
    x = rng.standard_normal((tokens, 192)).astype(np.float32)
    pairs = random_pairs(rng, tokens, len(experts), 4)
    y = kernel.execute(x, [kernel.prepare(expert) for expert in experts], *pairs)
    assert relative_error(y, exact(x, experts, pairs)) < LIMIT[2]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("limbs", [2, 1])
@pytest.mark.parametrize("odd", [(0, 1, 121), (0, 1, 117), (0, 1, 60, 125), NVFP4, (*NVFP4, 1, 7), (*NVFP4, 1, 126)])
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 32), (96, 160), (544, 352)])
def test_fp4_matches_fp64_and_a_row_gets_the_same_bits_in_any_batch(
    isa: str, limbs: int, hidden: int, intermediate: int, odd: tuple[int, ...]
) -> None:
    """Exponents of 128 columns near each other, apart, and so far apart that each 32 are a group of their own, as a
    column that nothing reads has them, or each 16 of NVFP4; biases and gpt-oss's activation."""
    rng = np.random.default_rng([limbs, hidden])
    biases = random_biases(rng, hidden, intermediate)
    drawn = [
        Fp4Expert(_drawn_fp4(rng, 2 * intermediate, hidden, odd), _drawn_fp4(rng, hidden, intermediate, odd), *more)
        for more in ((), (biases, GPT_OSS), ())
    ]
    experts: list[Expert] = [
        FullExpert("float32", both[:intermediate], both[intermediate:], from_fp4(e.w2), 16, e.biases, e.activation)
        for e in drawn
        for both in (from_fp4(e.w13),)
    ]
    kernel = NativeKernel(dict.fromkeys(LIMBS, limbs), isa=isa, threads=2)
    check_rows(kernel, drawn, experts, rng.standard_normal((33, hidden)), 2, LIMIT[limbs])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("is_e4m3", [False, True])
def test_the_largest_codes_of_fp4_and_the_largest_activations_do_not_overflow(isa: str, is_e4m3: bool) -> None:
    """Sums of 16 bits hold four steps of them, where those of 15 as the largest factor hold eight."""

    def filled(byte: int, rows: int, columns: int) -> Fp4Matrix:
        codes = np.full((rows, columns // 2), byte, np.uint8)
        if not is_e4m3:
            return Fp4Matrix(codes, np.full((rows, columns // 32), 127, np.uint8))
        scales = np.full(
            (rows, columns // 16), 127 - 8, np.uint8
        )  # factors of 15, all but one shifted as far as may be
        scales[:, 0] = 127 - 8 * 10
        return Fp4Matrix(codes, scales, np.full(rows, 2.0**-7, np.float32))

    expert = Fp4Expert(filled(0x77, 256, 96), filled(0xFF, 96, 128))
    gate, up = np.split(from_fp4(expert.w13), 2)
    full = FullExpert("float32", gate, up, from_fp4(expert.w2))
    kernel = NativeKernel(isa=isa, threads=1)
    for tokens in (1, 2, 5, 16):
        x, pairs = np.ones((tokens, 96), np.float32), random_pairs(np.random.default_rng(0), tokens, 1, 1)
        y = kernel.execute(x, [kernel.prepare(expert)], *pairs)
        assert relative_error(y, exact(x, [full], pairs)) < LIMIT[2]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("numbers", ["float8", "int8"])
@pytest.mark.parametrize("block", [(32, 32), (1, 1100), (2 * 1100, 1100), (128, 128), (1, 32)])
@pytest.mark.parametrize(("hidden", "intermediate"), [(72, 40), (1088, 160)])
def test_8_bits_as_stored_match_fp64_and_a_row_gets_the_same_bits_in_any_batch(
    isa: str, numbers: str, block: tuple[int, int], hidden: int, intermediate: int
) -> None:
    """In blocks, per row, per tensor, sizes that end within a block; subnormals, blocks of zeros, gpt-oss's biases."""
    rng = np.random.default_rng([hidden, *block])
    biases = random_biases(rng, hidden, intermediate)
    drawn = [
        ByteExpert(*(_drawn_bytes(rng, numbers, *shape, block) for shape in shapes), *more)
        for more in ((), (biases, GPT_OSS))
        for shapes in [((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))]
    ]
    experts: list[Expert] = [
        FullExpert("float32", from_bytes(e.w1), from_bytes(e.w3), from_bytes(e.w2), 16, e.biases, e.activation)
        for e in drawn
    ]
    kernel = NativeKernel(isa=isa, threads=2)
    split = isa.startswith("amx")  # activations as two bfloat16
    limit = LIMIT[2] if numbers == "int8" else 8e-6 if split else 2e-6
    check_rows(kernel, drawn, experts, rng.standard_normal((40, hidden)), 1, limit)


def check_rows(
    kernel: NativeKernel, drawn: Sequence[Any], same: Sequence[Expert], drawn_x: NDArray, top_k: int, limit: float
) -> None:
    """Against fp64 in batches of several sizes, and each row alone, on one thread, has the same bits."""
    prepared, rng = [kernel.prepare(expert) for expert in drawn], np.random.default_rng(len(drawn_x))
    one = NativeKernel(kernel.limbs, isa=kernel.isa, threads=1)
    by_one = [one.prepare(expert) for expert in drawn]
    for tokens in (1, 2, 3, 4, 5, 8, 17, len(drawn_x)):
        x = drawn_x[:tokens].astype(np.float32)
        rows, chosen, gates = random_pairs(rng, tokens, len(drawn), top_k)
        y = kernel.execute(x, prepared, rows, chosen, gates)
        assert relative_error(y, exact(x, same, (rows, chosen, gates))) < limit
        for row in range(tokens):
            own = rows == row
            alone = one.execute(x[row : row + 1], by_one, np.zeros_like(rows[own]), chosen[own], gates[own])
            np.testing.assert_array_equal(alone[0], y[row])


def test_every_number_of_8_bits_is_torchs_and_blocks_that_do_not_fit_each_other_are_refused() -> None:
    codes = np.arange(256, dtype=np.uint8)[:, None]
    one = np.ones((1, 1), np.float32)
    for numbers, dtype in (("float8", torch.float8_e4m3fn), ("int8", torch.int8)):
        wanted = torch.from_numpy(codes).view(dtype).float().numpy()
        wanted[np.isnan(wanted)] = np.copysign(480, 1 - (codes[np.isnan(wanted)] >> 6).astype(np.float32))
        np.testing.assert_array_equal(from_bytes(ByteMatrix(numbers, codes, one, (256, 1))), wanted)
    apart = [
        ByteMatrix("int8", np.zeros((9, 9), np.uint8), np.ones((-(-9 // of), 1), np.float32), (of, 9)) for of in (2, 3)
    ]
    with pytest.raises(ReplicaError, match="blocks of 3 and 2 under one scale"):
        NativeKernel(threads=1).prepare(ByteExpert(apart[0], apart[1], apart[0]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("stored", ["mxfp4", "float8"])
def test_what_is_no_number_among_activations_is_seen_in_the_result(isa: str, bad: float, stored: str) -> None:
    rng = np.random.default_rng(1)
    shapes = ((32, 64), (32, 64), (64, 32))
    expert: Expert = Fp4Expert(_drawn_fp4(rng, 64, 64), _drawn_fp4(rng, 64, 32))
    if stored == "float8":
        expert = ByteExpert(*(_drawn_bytes(rng, "float8", *shape, (16, 16)) for shape in shapes))
    kernel, x = NativeKernel(isa=isa, threads=1), np.ones((3, 64), np.float32)
    x[1, 40] = bad
    pairs = np.arange(3, dtype=np.int32), np.zeros(3, np.int32), np.ones(3, np.float32)
    y = kernel.execute(x, [kernel.prepare(expert)], *pairs)
    assert np.isnan(y[1]).all() if stored == "mxfp4" else not np.isfinite(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()


def _drawn_bytes(rng: np.random.Generator, numbers: str, rows: int, columns: int, block: tuple[int, int]) -> ByteMatrix:
    codes = rng.integers(0, 256, (rows, columns), np.uint8)
    if numbers == "float8":
        codes[codes & 127 == 127] = 1
    scale = (0.001 + 0.002 * rng.random((-(-rows // block[0]), -(-columns // block[1])))).astype(np.float32)
    if scale.size > 4:
        scale[0, 0] = 0
    return ByteMatrix(numbers, codes, scale, block)


def test_mxfp4_takes_as_much_memory_as_in_the_checkpoint() -> None:
    rng = np.random.default_rng(0)
    expert = Fp4Expert(_drawn_fp4(rng, 704, 544, (0, 121)), _drawn_fp4(rng, 544, 352, (0, 121)))
    assert 0.99 < NativeKernel(threads=1).prepare(expert).nbytes / expert.nbytes < 1.02


def _drawn_fp4(rng: np.random.Generator, rows: int, columns: int, odd: tuple[int, ...] = (0, 1, 60, 125)) -> Fp4Matrix:
    codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    if odd[:2] == NVFP4:
        scales = rng.integers(90, 120, (rows, columns // 16), dtype=np.uint8)
        scales[::5, 0], scales[1::5, 1] = rng.choice(odd, len(scales[::5])), rng.choice(odd, len(scales[1::5]))
        return Fp4Matrix(codes, scales, rng.uniform(1e-5, 1e-4, rows).astype(np.float32))
    exponents = rng.integers(120, 124, (rows, columns // 32), dtype=np.uint8)
    exponents[::5, 0] = rng.choice(odd, len(exponents[::5]))
    return Fp4Matrix(codes, exponents)


@pytest.mark.parametrize("isa", ISAS)
def test_experts_with_one_limb_and_with_two_give_in_one_call_what_they_give_alone(isa: str) -> None:
    """And the widths that the library gives one limb are those that have the error of one."""
    rng = np.random.default_rng(12)
    experts = [random_expert(rng, 192, 160, bits, 64) for bits in LIMBS]
    kernel = NativeKernel(isa=isa, threads=2)
    prepared = [kernel.prepare(expert) for expert in experts]
    x, row, gate = rng.standard_normal((1, 192)).astype(np.float32), np.zeros(1, np.int32), np.ones(1, np.float32)
    alone = [kernel.execute(x, [one], row, row, gate) for one in prepared]
    for bits, expert, y in zip(LIMBS, experts, alone, strict=True):
        error = relative_error(y, exact(x, [expert], (row, row, gate)))
        assert LIMIT[2] < error < LIMIT[1] if LIMBS[bits] == 1 else error < LIMIT[2]
    order = np.arange(len(experts), dtype=np.int32)
    together = kernel.execute(x, prepared, np.zeros_like(order), order, np.ones(len(order), np.float32))
    np.testing.assert_array_equal(together, sum(alone[1:], alone[0]))
    with pytest.raises(ValueError, match="limbs must be 1 or 2, got 3"):
        NativeKernel({4: 3}).prepare(experts[3])


FEW = [(64, 96), (41, 23), (7, 130)]
MANY = [(1100, 520, 40), (520, 1100, 97), (72, 56, 530), *((72, 5000, tokens) for tokens in (1, 7, 8, 9, 31, 100))]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("dtype", "hidden", "intermediate", "tokens"),
    [
        *(
            (dtype, *sizes, tokens)
            for dtype in ("float32", "float16", "bfloat16")
            for sizes in FEW
            for tokens in (1, 6)
        ),
        *(("bfloat16", *sizes) for sizes in MANY),
    ],
)
def test_full_precision_experts_are_exact_to_float32(
    isa: str, dtype: str, hidden: int, intermediate: int, tokens: int
) -> None:
    """On avx512bf16 and AMX rows that meet bfloat16 weights keep 16 bits of mantissa, of which the weights have 8. 5000
    columns: five ranges, the last one uneven; 100 rows of 20 KB: more than one pass, cut unevenly."""
    rng = np.random.default_rng([hidden, tokens])
    limit = 1e-5 if isa in ("avx512bf16", "amx") and dtype == "bfloat16" else 2e-6
    expert = full_expert(rng, hidden, intermediate, dtype)
    kernel = NativeKernel(isa=isa, threads=2)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    pairs = random_pairs(rng, tokens, 1, 1)
    assert relative_error(kernel.execute(x, [kernel.prepare(expert)], *pairs), exact(x, [expert], pairs)) < limit


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("hidden", "intermediate", "group"), [(64, 96, 32), (41, 23, 64), (136, 344, 128)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, "float32"])
def test_biases_and_a_clamped_activation_match_fp64(
    isa: str, hidden: int, intermediate: int, group: int, bits: int | str
) -> None:
    """Rows scaled so that gate and up pass the clamp at 7 on both sides."""
    rng = np.random.default_rng([hidden, intermediate])
    experts: list[Expert] = []
    for _ in range(2):
        if isinstance(bits, int):
            rounded = -(-intermediate // 8) * 8, -(-hidden // 8) * 8  # planes are cut in bytes
            plain: Expert = random_expert(rng, rounded[1], rounded[0], bits, group)
        else:
            plain = full_expert(rng, hidden, intermediate, bits)
        inner, outer = plain.w1.shape if isinstance(plain, FullExpert) else plain.w2.shape[::-1]
        experts.append(replace(plain, biases=random_biases(rng, outer, inner), activation=GPT_OSS))
    kernel = NativeKernel(TWO, isa=isa, threads=2)
    x = 8 * rng.standard_normal((9, outer)).astype(np.float32)
    pairs = random_pairs(rng, 9, 2, 2)
    y = kernel.execute(x, [kernel.prepare(expert) for expert in experts], *pairs)
    wanted = exact(x, experts, pairs)
    assert relative_error(y, wanted) < (2e-6 if bits == "float32" else LIMIT[2])
    reference = REFERENCE
    assert relative_error(reference.execute(x, [reference.prepare(e) for e in experts], *pairs), wanted) < 2e-6
    unlike = [replace(expert, activation=SILU) for expert in experts]
    assert relative_error(exact(x, unlike, pairs), wanted) > 0.1, "the clamp must matter here"


def test_a_full_expert_that_does_not_lie_row_by_row_is_copied_and_counted() -> None:
    """Transposed and interleaved, as gpt-oss stores it: the same result, and its bytes are the kernel's."""
    rng = np.random.default_rng(8)
    rows = full_expert(rng, 64, 96, "float32")
    fused = np.ascontiguousarray(np.stack([rows.w1, rows.w3], 1).reshape(192, 64).T)
    strided = FullExpert("float32", fused.T[0::2], fused.T[1::2], np.asfortranarray(rows.w2))
    kernel = NativeKernel(threads=1)
    x, pairs = rng.standard_normal((3, 64)).astype(np.float32), random_pairs(rng, 3, 1, 1)
    prepared = [kernel.prepare(expert) for expert in (rows, strided)]
    assert np.array_equal(*(kernel.execute(x, [expert], *pairs) for expert in prepared))
    assert [sum(size for _, size in kernel.parts(expert)) for expert in prepared] == [0, rows.nbytes]


@pytest.mark.parametrize("isa", [*ISAS, "reference"])
def test_no_rows_no_pairs_and_rows_without_pairs_give_zeros(isa: str) -> None:
    rng = np.random.default_rng(0)
    kernel = REFERENCE if isa == "reference" else NativeKernel(isa=isa, threads=2)
    prepared = [kernel.prepare(random_expert(rng, 64, 32, 2, 32))]
    none = np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32)
    assert kernel.execute(np.empty((0, 64), np.float32), prepared, *none).shape == (0, 64)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    assert not kernel.execute(x, prepared, *none).any()
    y = kernel.execute(x, prepared, np.array([1], np.int32), np.array([0], np.int32), np.ones(1, np.float32))
    assert y[1].any()
    assert not y[[0, 2]].any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [1, 2, 3, 4, 8, "bfloat16"])
def test_a_row_gets_the_same_bits_in_any_batch_on_any_threads(isa: str, kind: int | str) -> None:
    """A few rows have a way of their own, up to four."""
    rng = np.random.default_rng(5)
    if isinstance(kind, int):
        experts: list[Expert] = [random_expert(rng, 320, 544, kind, 64 if kind == 1 else 128) for _ in range(2)]
    else:
        experts = [full_expert(rng, 320, 544, kind) for _ in range(2)]
    limit = LIMIT[LIMBS[kind]] if isinstance(kind, int) else 1e-5
    check_rows(NativeKernel(isa=isa, threads=3), experts, experts, rng.standard_normal((19, 320)), 2, limit)


@pytest.mark.skipif("avx512bf16" not in ISAS, reason="this processor multiplies no bfloat16")
def test_hidden_units_of_bfloat16_rows_are_rounded_to_bfloat16_as_vllm_does_and_those_of_others_are_not() -> None:
    """The same row with and without its lower bits beside it: each as it is alone."""
    rng = np.random.default_rng(3)
    expert = full_expert(rng, 256, 320, "bfloat16")
    kernel = NativeKernel(isa="avx512bf16", threads=2)
    prepared, one = [kernel.prepare(expert)], np.zeros(1, np.int32)
    x = rng.standard_normal((2, 256)).astype(np.float32)
    x[0] = (x[0].view(np.uint32) & 0xFFFF0000).view(np.float32)
    both = kernel.execute(x, prepared, np.arange(2, dtype=np.int32), np.zeros(2, np.int32), np.ones(2, np.float32))
    errors = []
    for row, y in zip(x, both, strict=True):
        pairs = one, one, np.ones(1, np.float32)
        np.testing.assert_array_equal(kernel.execute(row[None], prepared, *pairs)[0], y)
        errors.append(relative_error(y[None], exact(row[None], [expert], pairs)))
    assert 2e-4 < errors[0] < 4e-3
    assert errors[1] < 1e-5


@pytest.mark.parametrize("isa", ISAS)
def test_codes_and_activations_at_their_largest_do_not_overflow(isa: str) -> None:
    """Codes of 255 and activations at both ends of their range: products of pairs pass 16 bits."""
    rng = np.random.default_rng(13)
    drawn = random_expert(rng, 4096, 64, 8, 4096)
    expert = replace(drawn, w13=replace(drawn.w13, planes=np.full_like(drawn.w13.planes, 255)))
    kernel = NativeKernel(TWO, isa=isa, threads=1)
    for tokens in (1, 2, 9):
        x = np.full((tokens, 4096), 3.0, np.float32)
        x[1:] *= -1
        pairs = random_pairs(rng, tokens, 1, 1)
        y = kernel.execute(x, [kernel.prepare(expert)], *pairs)
        assert relative_error(y, exact(x, [expert], pairs)) < LIMIT[2]


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_activations_stay_accurate_or_become_visible(isa: str) -> None:
    rng = np.random.default_rng(6)
    expert = random_expert(rng, 256, 64, 4, 64)
    kernel = NativeKernel(TWO, isa=isa, threads=1)
    prepared = [kernel.prepare(expert)]
    one = np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, np.float32)
    for factor in (1e-10, 1e-3, 10.0):
        x = (factor * rng.standard_normal((1, 256))).astype(np.float32)
        x[0, :3] = factor * 100  # outlier channels
        assert relative_error(kernel.execute(x, prepared, *one), exact(x, [expert], one)) < 3e-4
    assert not kernel.execute(np.zeros((1, 256), np.float32), prepared, *one).any()
    for poison in (np.nan, np.inf):
        x = np.ones((1, 256), np.float32)
        x[0, 100] = poison
        assert not np.isfinite(kernel.execute(x, prepared, *one)).any()


@pytest.mark.parametrize("bits", REPLICA_WIDTHS)
def test_read_only_and_unaligned_replicas_are_taken(bits: int) -> None:
    """As they come out of a mapped file: not writable, scales at an odd address."""
    rng = np.random.default_rng(8)
    expert = random_expert(rng, 64, 32, bits, 32, perm=True)

    def mapped(values: NDArray) -> NDArray:
        buffer = bytes(1) + values.tobytes()
        return np.frombuffer(memoryview(buffer)[1:], values.dtype).reshape(values.shape)

    def move(m: QuantizedMatrix) -> QuantizedMatrix:
        perm = None if m.perm is None else mapped(m.perm)
        return QuantizedMatrix(m.bits, mapped(m.planes), mapped(m.scale), mapped(m.offset), m.group_size, perm)

    moved = QuantizedExpert(bits, move(expert.w13), move(expert.w2))
    assert not moved.w13.scale.flags.aligned
    kernel = NativeKernel(threads=1)
    x = rng.standard_normal((2, 64)).astype(np.float32)
    pairs = random_pairs(rng, 2, 1, 1)
    np.testing.assert_array_equal(
        kernel.execute(x, [kernel.prepare(moved)], *pairs), kernel.execute(x, [kernel.prepare(expert)], *pairs)
    )


def test_what_cannot_be_streamed_or_does_not_fit_together_is_refused_by_name() -> None:
    rng = np.random.default_rng(9)
    kernel = NativeKernel(threads=1)
    wide = random_expert(rng, 8200, 8, 1, 5000)
    with pytest.raises(ReplicaError, match="groups of 5000 columns are too wide"):
        kernel.prepare(wide)
    with pytest.raises(ReplicaError, match="got 'float32' as"):
        kernel.prepare(FullExpert("float32", *(np.zeros((8, 8)) for _ in range(3))))
    good = random_expert(rng, 64, 32, 2, 32)
    prepared = [kernel.prepare(good)]
    x = np.ones((2, 64), np.float32)
    one = np.ones(1, np.int32)
    with pytest.raises(ValueError, match="names row 2 of 2"):
        kernel.execute(x, prepared, one * 2, one * 0, np.ones(1, np.float32))
    with pytest.raises(ValueError, match="names expert 1 of 1"):
        kernel.execute(x, prepared, one, one, np.ones(1, np.float32))
    with pytest.raises(ValueError, match="63 columns but an expert takes 64"):
        kernel.execute(x[:, :63], prepared, one * 0, one * 0, np.ones(1, np.float32))


def test_settings_come_from_the_environment_and_wrong_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NDP_ISA", "portable")
    monkeypatch.setenv("NDP_THREADS", "3")
    kernel = NativeKernel()
    assert (kernel.isa, kernel.threads) == ("portable", 3)
    monkeypatch.setenv("NDP_THREADS", "many")
    with pytest.raises(ConfigError, match="NDP_THREADS must be a whole number"):
        NativeKernel()
    monkeypatch.setenv("NDP_THREADS", "0")
    with pytest.raises(ConfigError, match="at least 1 thread"):
        NativeKernel()
    monkeypatch.setenv("NDP_ISA", "mmx")
    with pytest.raises(ConfigError, match="NDP_ISA must be one of"):
        NativeKernel()


def test_threads_default_to_the_cores_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NDP_THREADS", raising=False)
    assert NativeKernel().threads == len(os.sched_getaffinity(0))


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    script = """
import os, sys
import numpy as np
from ndp_device.kernels.native import NativeKernel
from ndp_device.experts.expert import FullExpert
rng = np.random.default_rng(0)
w = [rng.standard_normal(s).astype(np.float32) for s in ((512, 512), (512, 512), (512, 512))]
kernel = NativeKernel(threads=3)
prepared = [kernel.prepare(FullExpert("float32", *w))]
x = rng.standard_normal((8, 512)).astype(np.float32)
args = (np.arange(8, dtype=np.int32), np.zeros(8, np.int32), np.ones(8, np.float32))
before = kernel.execute(x, prepared, *args)
pid = os.fork()
same = np.array_equal(kernel.execute(x, prepared, *args), before)
if pid == 0:
    os._exit(0 if same else 1)
sys.exit(0 if same and os.waitpid(pid, 0)[1] == 0 else 1)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_a_linear_layer_refuses_rows_that_do_not_fit() -> None:
    kernel = NativeKernel(threads=1)
    prepared = kernel.prepare_matrix(random_matrix(np.random.default_rng(0), 32, 64, 4, 32))
    with pytest.raises(ValueError, match="the columns of the matrix"):
        kernel.multiply(np.ones((1, 96), np.float32), prepared)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", REPLICA_WIDTHS)
@settings(max_examples=20)
@given(st.integers(1, 140), st.integers(1, 150), st.integers(1, 40), st.integers(0, 2**32 - 1))
@example(1, 33, 33, 1396005)
@example(256, 16, 16, 0)
@example(320, 48, 128, 0)
def test_a_linear_layer_of_any_shape_and_groups_is_within_fp64_and_no_row_depends_on_the_others(
    isa: str, bits: int, rows: int, cols: int, group: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for limbs, tokens in ((LIMBS, 19), (TWO, 3)):
        matrix = random_matrix(rng, rows, 8 * cols, bits, 8 * group)
        check_linear(NativeKernel(limbs, isa=isa, threads=2), rng, matrix, tokens)


@pytest.mark.parametrize("isa", ISAS)
def test_what_takes_more_than_4_mb_has_memory_of_its_own_and_tasks_of_many_units(isa: str) -> None:
    rng = np.random.default_rng(0)
    check_linear(NativeKernel(TWO, isa=isa, threads=3), rng, random_matrix(rng, 2304, 2048, 8, 128))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("numbers", ["float8", "int8"])
@settings(max_examples=20)
@given(*(st.integers(1, 300) for _ in range(4)), st.integers(0, 2**32 - 1))
@example(64, 128, 64, 128, 0)
@example(33, 1, 33, 1, 0)
def test_a_linear_layer_of_8_bits_as_stored_is_within_fp64_and_no_row_depends_on_the_others(
    isa: str, numbers: str, rows: int, columns: int, of_rows: int, of_columns: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    matrix = _drawn_bytes(rng, numbers, rows, columns, (of_rows, of_columns))
    for limbs, tokens in ((LIMBS, 19), (TWO, 3)):
        check_linear(
            NativeKernel(limbs, isa=isa, threads=2), rng, matrix, tokens, LIMIT[2 if numbers == "float8" else 1]
        )


def check_linear(
    kernel: NativeKernel,
    rng: np.random.Generator,
    matrix: QuantizedMatrix | ByteMatrix,
    tokens: int = 3,
    limit: float = LIMIT[1],
) -> None:
    x, prepared = rng.standard_normal((tokens, matrix.shape[1])).astype(np.float32), kernel.prepare_matrix(matrix)
    y = kernel.multiply(x, prepared)
    np.testing.assert_array_equal(y, [kernel.multiply(x[row : row + 1], prepared)[0] for row in range(tokens)])
    weights = weights_of(matrix).astype(np.float64)
    # Over the size that a product of these operands has on average: the products of one row can cancel to nearly zero.
    size = np.linalg.norm(x) * np.linalg.norm(weights) / np.sqrt(weights.shape[1])
    assert np.linalg.norm(y - x.astype(np.float64) @ weights.T) <= limit * size
