"""Every path of the native kernel against fp64 over the same quantized weights: shapes, groups, order, batches."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from ndp_device.activation import GPT_OSS, SILU
from ndp_device.errors import ConfigError, ReplicaError
from ndp_device.experts.expert import (
    Biases,
    Expert,
    FullExpert,
    NestedMatrix,
    QuantizedExpert,
    QuantizedMatrix,
    to_float32,
)
from ndp_device.experts.packing import pack
from ndp_device.kernels.reference import ReferenceKernel, dequantize
from ndp_device.widths import LIMBS

_native = pytest.importorskip("ndp_device.kernels._native", reason="the kernels are not built")
from ndp_device.kernels.native import NativeKernel  # noqa: E402

ISAS = _native.supported_isas()
# Relative L2 error against fp64: two limbs carry 15 bits per group, one carries 8.
LIMIT = {2: 2e-4, 1: 4e-2}
TWO = dict.fromkeys(LIMBS, 2)
SHAPES = [  # hidden, intermediate, group, perm
    (128, 256, 128, False),
    (256, 128, 64, True),
    (40, 24, 32, True),  # nothing is a multiple of anything: padded rows, padded last group
    (136, 344, 128, False),
    (72, 56, 16, False),  # groups narrower than a chunk of 32 columns
    (96, 80, 40, True),  # groups that are not a multiple of 32
    (384, 320, 1024, False),  # one group per row
    (512, 256, 256, True),  # one scale, two kernel groups
    (8, 8, 8, False),
]


def random_matrix(
    rng: np.random.Generator, rows: int, cols: int, bits: int, group: int, *, perm: bool = False
) -> QuantizedMatrix:
    groups = -(-cols // group)
    scale = rng.uniform(0.5, 1.5, (rows, groups)) / (2**bits * np.sqrt(cols))
    offset = -scale * (2**bits - 1) * rng.uniform(0.3, 0.7, scale.shape)
    return QuantizedMatrix(
        bits=bits,
        planes=pack(rng.integers(0, 2**bits, (rows, cols), dtype=np.uint8), bits),
        scale=scale.astype(np.float16),
        offset=offset.astype(np.float16),
        group_size=group,
        perm=rng.permutation(cols).astype(np.int32) if perm else None,
    )


def random_expert(
    rng: np.random.Generator, hidden: int, intermediate: int, bits: int, group: int, *, perm: bool = False
) -> QuantizedExpert:
    w13 = random_matrix(rng, 2 * intermediate, hidden, bits, group, perm=perm)
    return QuantizedExpert(bits, w13, random_matrix(rng, hidden, intermediate, bits, group))


def full_expert(rng: np.random.Generator, hidden: int, intermediate: int, dtype: str) -> FullExpert:
    def weights(rows: int, cols: int) -> NDArray[np.generic]:
        w = (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
        if dtype == "bfloat16":
            return (w.view(np.uint32) >> 16).astype(np.uint16)
        return w.astype(dtype)

    return FullExpert(
        dtype, weights(intermediate, hidden), weights(intermediate, hidden), weights(hidden, intermediate)
    )


def exact(x: NDArray[np.float32], experts: Sequence[Expert], pairs: tuple[NDArray, NDArray, NDArray]) -> NDArray:
    """The same sum in float64."""
    y = np.zeros(x.shape)
    rows, indices, gates = pairs
    for index, expert in enumerate(experts):
        if isinstance(expert, FullExpert):
            w1, w3, w2 = (to_float32(w, expert.dtype).astype(np.float64) for w in (expert.w1, expert.w3, expert.w2))
        else:
            w1, w3 = np.split(dequantize(expert.w13).astype(np.float64), 2)
            w2 = dequantize(expert.w2).astype(np.float64)
        mine = indices == index
        v = x[rows[mine]].astype(np.float64)
        gate, up, down = v @ w1.T, v @ w3.T, 0.0
        if expert.biases is not None:
            gate, up, down = gate + expert.biases.gate, up + expert.biases.up, expert.biases.down
        act = expert.activation
        gate, up = np.minimum(gate, act.largest), np.clip(up, -act.largest, act.largest)
        between = (up + act.up_bias) * gate / (1 + np.exp(-act.linear * gate - act.cubic * gate**3))
        np.add.at(y, rows[mine], gates[mine, None] * (between @ w2.T + down))
    return y


def random_pairs(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> tuple[NDArray, NDArray, NDArray]:
    rows = np.repeat(np.arange(tokens), top_k).astype(np.int32)
    chosen = [rng.permutation(experts)[:top_k] for _ in range(tokens)]
    indices = np.concatenate(chosen).astype(np.int32) if tokens else np.empty(0, np.int32)
    order = rng.permutation(rows.size)
    return rows[order], indices[order], rng.uniform(0.1, 1, rows.size).astype(np.float32)


def relative_error(got: NDArray, wanted: NDArray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("limbs", [2, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
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
    experts: list[Expert] = [random_expert(rng, 192, 160, bits, 64, perm=bits % 2 == 0) for bits in (1, 2, 3, 4)]
    experts += [full_expert(rng, 192, 160, dtype) for dtype in ("float32", "float16", "bfloat16")]
    kernel = NativeKernel(TWO, isa=isa, threads=2)
    x = rng.standard_normal((tokens, 192)).astype(np.float32)
    pairs = random_pairs(rng, tokens, len(experts), 4)
    y = kernel.execute(x, [kernel.prepare(expert) for expert in experts], *pairs)
    assert relative_error(y, exact(x, experts, pairs)) < LIMIT[2]


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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 96), (41, 23), (7, 130)])
def test_full_precision_experts_are_exact_to_float32(isa: str, dtype: str, hidden: int, intermediate: int) -> None:
    """On avx512bf16 rows that meet bfloat16 weights keep 16 bits of mantissa, of which the weights have 8."""
    rng = np.random.default_rng(hidden)
    limit = 1e-5 if (isa, dtype) == ("avx512bf16", "bfloat16") else 2e-6
    expert = full_expert(rng, hidden, intermediate, dtype)
    kernel = NativeKernel(isa=isa, threads=2)
    for tokens in (1, 6):
        x = rng.standard_normal((tokens, hidden)).astype(np.float32)
        pairs = random_pairs(rng, tokens, 1, 1)
        assert relative_error(kernel.execute(x, [kernel.prepare(expert)], *pairs), exact(x, [expert], pairs)) < limit


def random_biases(rng: np.random.Generator, hidden: int, intermediate: int) -> Biases:
    return Biases(*(rng.standard_normal(n).astype(np.float32) for n in (intermediate, intermediate, hidden)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("hidden", "intermediate", "group"), [(64, 96, 32), (41, 23, 64), (136, 344, 128)])
@pytest.mark.parametrize("bits", [2, 3, 4, "float32"])
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
    reference = ReferenceKernel()
    assert relative_error(reference.execute(x, [reference.prepare(e) for e in experts], *pairs), wanted) < 2e-6
    unlike = [replace(expert, activation=SILU) for expert in experts]
    assert relative_error(exact(x, unlike, pairs), wanted) > 0.1, "the clamp must matter here"


@pytest.mark.parametrize("isa", ISAS)
def test_a_masked_width_keeps_its_biases_and_activation(isa: str) -> None:
    rng = np.random.default_rng(7)
    wide = replace(random_expert(rng, 64, 96, 4, 32), biases=random_biases(rng, 64, 96), activation=GPT_OSS)
    w13, w2 = (
        NestedMatrix((3, 4), m.planes, np.stack([m.scale] * 2), np.stack([m.offset] * 2), m.group_size, m.perm)
        for m in (wide.w13, wide.w2)
    )
    wide = replace(wide, w13=w13.at(4), w2=w2.at(4))
    narrow = replace(
        wide,
        bits=3,
        w13=w13.at(3),
        w2=w2.at(3),
    )
    kernel = NativeKernel(isa=isa, threads=1)
    own, masked = kernel.prepare(narrow), kernel.masked(kernel.prepare(narrow), kernel.prepare(wide))
    assert masked is not None
    x, pairs = rng.standard_normal((3, 64)).astype(np.float32), random_pairs(rng, 3, 1, 1)
    assert np.array_equal(kernel.execute(x, [own], *pairs), kernel.execute(x, [masked], *pairs))


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


@pytest.mark.parametrize("isa", ISAS)
def test_no_rows_no_pairs_and_rows_without_pairs_give_zeros(isa: str) -> None:
    rng = np.random.default_rng(0)
    kernel = NativeKernel(isa=isa, threads=2)
    prepared = [kernel.prepare(random_expert(rng, 64, 32, 2, 32))]
    none = np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32)
    assert kernel.execute(np.empty((0, 64), np.float32), prepared, *none).shape == (0, 64)
    x = rng.standard_normal((3, 64)).astype(np.float32)
    assert not kernel.execute(x, prepared, *none).any()
    y = kernel.execute(x, prepared, np.array([1], np.int32), np.array([0], np.int32), np.ones(1, np.float32))
    assert y[1].any()
    assert not y[[0, 2]].any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [1, 2, 3, 4, "bfloat16"])
def test_a_row_gets_the_same_bits_in_any_batch_on_any_threads(isa: str, kind: int | str) -> None:
    rng = np.random.default_rng(5)
    if isinstance(kind, int):
        experts: list[Expert] = [random_expert(rng, 320, 544, kind, 64 if kind == 1 else 128) for _ in range(2)]
    else:
        experts = [full_expert(rng, 320, 544, kind) for _ in range(2)]
    one, three = NativeKernel(isa=isa, threads=1), NativeKernel(isa=isa, threads=3)
    x = rng.standard_normal((19, 320)).astype(np.float32)
    rows, indices, gates = random_pairs(rng, 19, 2, 2)
    order = np.argsort(indices, kind="stable")
    rows, indices, gates = rows[order], indices[order], gates[order]
    together = three.execute(x, [three.prepare(expert) for expert in experts], rows, indices, gates)
    alone = [one.prepare(expert) for expert in experts]
    for row in range(19):
        mine = rows == row
        zeros = np.zeros(int(mine.sum()), np.int32)
        np.testing.assert_array_equal(
            one.execute(x[row : row + 1], alone, zeros, indices[mine], gates[mine])[0], together[row]
        )
    for size in (2, 3, 4, 5):  # a few rows have a way of their own, up to four
        mine = rows < size
        few = one.execute(x[:size], alone, rows[mine], indices[mine], gates[mine])
        np.testing.assert_array_equal(few, together[:size])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 7, 31, 100])
def test_wide_bfloat16_experts_meet_rows_in_several_passes_and_ranges(isa: str, tokens: int) -> None:
    """5000 columns: five ranges, the last one uneven; 100 rows of 20 KB: more than one pass, cut unevenly."""
    rng = np.random.default_rng(tokens)
    expert = full_expert(rng, 72, 5000, "bfloat16")
    kernel = NativeKernel(isa=isa, threads=2)
    x, pairs = rng.standard_normal((tokens, 72)).astype(np.float32), random_pairs(rng, tokens, 1, 1)
    assert relative_error(kernel.execute(x, [kernel.prepare(expert)], *pairs), exact(x, [expert], pairs)) < 1e-5


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
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_row_that_is_not_finite_becomes_visible_and_spoils_no_other(isa: str, poison: float) -> None:
    rng = np.random.default_rng(6)
    expert = full_expert(rng, 96, 64, "bfloat16")
    kernel = NativeKernel(isa=isa, threads=1)
    x, pairs = np.ones((2, 96), np.float32), random_pairs(rng, 2, 1, 1)
    x[1, 40] = poison
    y = kernel.execute(x, [kernel.prepare(expert)], *pairs)
    assert np.isfinite(y[0]).all()
    assert not np.isfinite(y[1]).any()


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


def nested_replicas(
    rng: np.random.Generator, hidden: int, intermediate: int, group: int = 32, *, perm: bool = False
) -> dict[int, QuantizedExpert]:
    """All widths of one container: planes and order are shared, scales and offsets are each width's own."""
    whole = random_expert(rng, hidden, intermediate, 4, group, perm=perm)

    def nested(m: QuantizedMatrix) -> NestedMatrix:
        own = [np.float16(1 + bits / 8) for bits in (1, 2, 3, 4)]
        scale, offset = (np.stack([values * one for one in own]) for values in (m.scale, m.offset))
        return NestedMatrix((1, 2, 3, 4), m.planes, scale, offset, m.group_size, m.perm)

    w13, w2 = nested(whole.w13), nested(whole.w2)
    return {bits: QuantizedExpert(bits, w13.at(bits), w2.at(bits)) for bits in (1, 2, 3, 4)}


def test_replicas_of_one_container_share_their_top_planes_until_the_last_is_gone() -> None:
    replicas = nested_replicas(np.random.default_rng(7), 64, 96)
    kernel = NativeKernel(threads=1)
    prepared = {bits: kernel.prepare(replica) for bits, replica in replicas.items()}
    assert prepared[2].components[0] is prepared[3].components[0] is prepared[4].components[0]
    assert len(kernel._shared) == 2 * 4  # per matrix: {1}, {2} and what 3 and 4 bits add to it
    weights = 3 * 64 * 96
    assert [prepared[bits].nbytes - prepared[bits].scale_bytes for bits in (1, 2, 3, 4)] == [
        weights * bits // 8 for bits in (1, 2, 3, 4)
    ]
    prepared.clear()
    gc.collect()
    assert len(kernel._shared) == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("limbs", [2, 1])
@pytest.mark.parametrize(("narrow", "wide"), [(3, 4), (1, 2), (1, 3), (1, 4)])
@pytest.mark.parametrize(("hidden", "intermediate", "group", "perm"), SHAPES)
def test_a_masked_expert_computes_the_same_bits(
    isa: str, limbs: int, narrow: int, wide: int, hidden: int, intermediate: int, group: int, perm: bool
) -> None:
    """A result must not depend on how full the memory was."""
    rng = np.random.default_rng([narrow, wide, hidden, intermediate, group])
    replicas = nested_replicas(rng, hidden, intermediate, group, perm=perm)
    kernel = NativeKernel(dict.fromkeys(LIMBS, limbs), isa=isa, threads=2)
    own = kernel.prepare(replicas[narrow])
    masked = kernel.masked(own, kernel.prepare(replicas[wide]))
    assert masked is not None
    for tokens in (1, 2, 3, 4, 5, 9, 17, 40):
        for size in (1.0, 1e-37):  # scales of activations that are no normal numbers
            x = (size * rng.standard_normal((tokens, hidden))).astype(np.float32)
            pairs = random_pairs(rng, tokens, 1, 1)
            np.testing.assert_array_equal(kernel.execute(x, [masked], *pairs), kernel.execute(x, [own], *pairs))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("narrow", "wide"), [(3, 4), (1, 2)])
def test_a_masked_expert_computes_the_same_bits_with_scales_that_are_no_normal_numbers(
    isa: str, narrow: int, wide: int
) -> None:
    """fp16 below 6e-5 is subnormal: halving there would lose the last bit."""
    rng = np.random.default_rng(narrow)
    replicas = nested_replicas(rng, 256, 128, 128)
    for matrix in (replicas[narrow].w13, replicas[narrow].w2):
        matrix.scale[...] = rng.integers(1, 64, matrix.scale.shape, dtype=np.uint16).view(np.float16)
        matrix.offset[...] = -rng.integers(1, 64, matrix.scale.shape, dtype=np.uint16).view(np.float16)
    kernel = NativeKernel(isa=isa, threads=1)
    own = kernel.prepare(replicas[narrow])
    masked = kernel.masked(own, kernel.prepare(replicas[wide]))
    for tokens in (1, 3, 17):
        x = (1e4 * rng.standard_normal((tokens, 256))).astype(np.float32)
        pairs = random_pairs(rng, tokens, 1, 1)
        expected = kernel.execute(x, [own], *pairs)
        assert expected.any()
        np.testing.assert_array_equal(kernel.execute(x, [masked], *pairs), expected)


def test_masked_replicas_of_every_width_take_what_the_widest_and_the_scales_take() -> None:
    replicas = nested_replicas(np.random.default_rng(10), 64, 96)
    kernel = NativeKernel(threads=1)
    prepared = {bits: kernel.prepare(replica) for bits, replica in replicas.items()}
    for narrow, wide in ((3, 4), (1, 2)):
        masked = kernel.masked(prepared[narrow], prepared[wide])
        assert masked is not None
        prepared[narrow] = masked
    gc.collect()
    assert len(kernel._shared) == 2 * 2
    parts = dict(part for expert in prepared.values() for part in kernel.parts(expert))
    assert sum(parts.values()) == prepared[4].nbytes + sum(prepared[bits].scale_bytes for bits in (1, 2, 3))


def test_only_what_one_bit_more_of_the_same_planes_holds_can_be_masked() -> None:
    rng = np.random.default_rng(11)
    kernel = NativeKernel(threads=1)
    prepared = {bits: kernel.prepare(replica) for bits, replica in nested_replicas(rng, 64, 96).items()}
    others = {bits: kernel.prepare(replica) for bits, replica in nested_replicas(rng, 64, 96).items()}
    full = kernel.prepare(full_expert(rng, 64, 96, "float32"))
    possible = {(n, w) for n in prepared for w in prepared if kernel.masked(prepared[n], prepared[w]) is not None}
    assert possible == {(1, 2), (1, 3), (1, 4), (3, 4)}
    assert kernel.masked(prepared[3], others[4]) is None
    assert kernel.masked(prepared[3], full) is None
    assert kernel.masked(full, prepared[4]) is None
    with pytest.raises(ValueError, match="no kernel streams these components without their 1 lowest bits"):
        prepared[1].native.masked(*[[part.native] for part in prepared[1].components])
    with pytest.raises(ValueError, match="another matrix's size"):
        prepared[1].native.masked(*[[part.native] for part in reversed(prepared[2].components)])


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
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


def test_a_changed_copy_of_a_view_shares_no_component_with_the_matrix_it_came_from() -> None:
    """A part of an expert has other planes: it must not be taken for the whole one's."""
    replicas = nested_replicas(np.random.default_rng(9), 64, 96)
    whole, kernel = replicas[4], NativeKernel(threads=1)
    assert whole.w13.nested is replicas[1].w13.nested is not None
    turned = replace(whole, w13=replace(whole.w13, planes=np.ascontiguousarray(whole.w13.planes[:, ::-1])))
    assert turned.w13.nested is None
    first, other = kernel.prepare(whole), kernel.prepare(turned)
    assert not set(map(id, first.components[:2])) & set(map(id, other.components))
    assert first.components[2] is other.components[2]  # of w2, which is the same view


def test_widths_that_are_views_of_one_matrix_need_no_proof_and_others_are_proven_to_nest() -> None:
    replicas = nested_replicas(np.random.default_rng(10), 64, 96)
    matrices = [replicas[bits].w13 for bits in (1, 2, 3, 4)]
    assert NestedMatrix.of(matrices) is matrices[0].nested
    copies = [replace(matrix, planes=matrix.planes.copy()) for matrix in matrices]
    again = NestedMatrix.of(copies)
    assert all((again.at(bits).scale == one.scale).all() for bits, one in zip((1, 2, 3, 4), matrices, strict=True))
    copies[1] = replace(copies[1], planes=~copies[1].planes)
    with pytest.raises(ValueError, match="2 bits are not a prefix of 4"):
        NestedMatrix.of(copies)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "cols", "group"), [(256, 128, 128), (40, 24, 32), (33, 136, 64), (320, 384, 1024)])
@pytest.mark.parametrize("count", [1, 2], ids=["4 bits", "8 bits"])
def test_a_linear_layer_is_the_sum_of_its_matrices_within_fp64(isa: str, rows: int, cols: int, group: int, count: int):
    rng = np.random.default_rng(rows)
    matrices = [random_matrix(rng, rows, cols, 4, group) for _ in range(count)]
    kernel = NativeKernel(isa=isa, threads=2)
    prepared = kernel.prepare_matrices(matrices)
    x = rng.standard_normal((19, cols)).astype(np.float32)
    wanted = x.astype(np.float64) @ sum(dequantize(matrix).astype(np.float64) for matrix in matrices).T
    y = kernel.multiply(x, prepared)
    assert np.linalg.norm(y - wanted) <= LIMIT[1] * np.linalg.norm(wanted)
    alone = [kernel.multiply(x[row : row + 1], prepared)[0] for row in range(len(x))]
    np.testing.assert_array_equal(y, alone)
    reference = ReferenceKernel()
    by_reference = reference.multiply(x, reference.prepare_matrices(matrices))
    assert np.linalg.norm(by_reference - wanted) <= 1e-5 * np.linalg.norm(wanted)


def test_a_linear_layer_refuses_matrices_and_rows_that_do_not_fit_together():
    rng, kernel = np.random.default_rng(0), NativeKernel(threads=1)
    one, other = (random_matrix(rng, 32, 64, 4, group) for group in (32, 64))
    with pytest.raises(ValueError, match="one shape"):
        kernel.multiply(np.ones((1, 64), np.float32), kernel.prepare_matrices([one, other]))
    with pytest.raises(ValueError, match="the columns of the matrices"):
        kernel.multiply(np.ones((1, 96), np.float32), kernel.prepare_matrices([one]))
