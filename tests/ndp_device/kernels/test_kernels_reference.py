"""The reference kernel against the formula in float64, and the promises every kernel makes."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_checkpoint import EXPERTS, HIDDEN, INTERMEDIATE, as_stored, write_small_checkpoint

from ndp_device.common.activation import GELU_TANH, GPT_OSS, NAMED, SILU, Activation, activation_named
from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import FullExpert, QuantizedExpert, QuantizedMatrix, pack, to_float32
from ndp_device.kernels import Kernel, _native, load_kernel
from ndp_device.kernels.native import NativeKernel
from ndp_device.kernels.reference import ReferenceKernel, dequantize
from ndp_device.replicas.checkpoint import CheckpointExperts

KERNEL = ReferenceKernel()


def random_matrix(rng: np.random.Generator, bits: int, rows: int, columns: int, group: int) -> QuantizedMatrix:
    groups = -(-columns // group)
    return QuantizedMatrix(
        bits,
        pack(rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint8), bits),
        rng.normal(size=(rows, groups)).astype(np.float16),
        rng.normal(size=(rows, groups)).astype(np.float16),
        group,
        rng.permutation(columns).astype(np.int32),
    )


def float64_expert(expert: QuantizedExpert | FullExpert, x: NDArray[np.float32]) -> NDArray[np.float64]:
    if isinstance(expert, FullExpert):
        w1, w3, w2 = (to_float32(w, expert.dtype).astype(np.float64) for w in (expert.w1, expert.w3, expert.w2))
    else:
        w1, w3 = np.split(dequantize(expert.w13).astype(np.float64), 2)
        w2 = dequantize(expert.w2).astype(np.float64)
    gate = w1 @ x
    return w2 @ (gate / (1 + np.exp(-gate)) * (w3 @ x))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from([8, 16, 24]), st.integers(0, 2**32 - 1))
def test_dequantized_weights_are_scale_times_code_plus_offset(
    bits: int, rows: int, bytes_per_row: int, group: int, seed: int
) -> None:
    """W[n, perm[c]] = scale[n, c // g] * code[n, c] + offset[n, c // g], weight by weight."""
    rng = np.random.default_rng(seed)
    columns = bytes_per_row * 8
    matrix = random_matrix(rng, bits, rows, columns, group)
    weights = dequantize(matrix)
    assert matrix.perm is not None
    for row, column in itertools.product(range(rows), range(columns)):
        code = 0
        for plane in range(bits):
            code = code * 2 + (int(matrix.planes[plane, row, column // 8]) >> column % 8 & 1)
        expected = np.float32(matrix.scale[row, column // group]) * code + np.float32(
            matrix.offset[row, column // group]
        )
        assert weights[row, matrix.perm[column]] == np.float32(expected)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_pairs_of_a_row_add_up_weighted_by_their_gates(bits: int) -> None:
    rng = np.random.default_rng(bits)
    experts = [
        QuantizedExpert(bits, random_matrix(rng, bits, 48, 16, 8), random_matrix(rng, bits, 16, 24, 8))
        for _ in range(3)
    ]
    x = rng.normal(size=(4, 16)).astype(np.float32)
    pair_rows, pair_experts = np.array([0, 0, 2, 3, 3], np.int32), np.array([1, 2, 0, 2, 2], np.int32)
    gates = rng.uniform(size=5).astype(np.float32)
    y = KERNEL.execute(x, [KERNEL.prepare(expert) for expert in experts], pair_rows, pair_experts, gates)
    expected = np.zeros((4, 16))
    for row, expert, gate in zip(pair_rows, pair_experts, gates, strict=True):
        expected[row] += gate * float64_expert(experts[expert], x[row])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert (y[1] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_checkpoint_expert_computes_with_the_values_the_file_holds(tmp_path: Path, dtype: str) -> None:
    expert = CheckpointExperts(write_small_checkpoint(tmp_path / "m", dtype=dtype)).expert(1, EXPERTS - 1)
    assert (expert.dtype, expert.w2.shape) == (dtype, (HIDDEN, INTERMEDIATE))
    x = np.random.default_rng(0).normal(size=(1, HIDDEN)).astype(np.float32)
    zero, one = np.zeros(1, np.int32), np.ones(1, np.float32)
    y = KERNEL.execute(x, [KERNEL.prepare(expert)], zero, zero, one)
    np.testing.assert_allclose(y[0], float64_expert(expert, x[0]), rtol=1e-4, atol=1e-4)


def test_a_row_gets_the_same_bits_whatever_shares_its_batch(tmp_path: Path) -> None:
    checkpoint = CheckpointExperts(write_small_checkpoint(tmp_path / "m"))
    prepared = [KERNEL.prepare(checkpoint.expert(0, expert)) for expert in range(EXPERTS)]
    x = np.random.default_rng(0).normal(size=(9, HIDDEN)).astype(np.float32)
    rows = np.repeat(np.arange(9, dtype=np.int32), 2)
    experts = np.random.default_rng(1).integers(0, EXPERTS, 18).astype(np.int32)
    gates = np.random.default_rng(2).uniform(size=18).astype(np.float32)
    together = KERNEL.execute(x, prepared, rows, experts, gates)
    for row in range(9):
        own = rows == row
        alone = KERNEL.execute(x[row : row + 1], prepared, np.zeros(2, np.int32), experts[own], gates[own])
        np.testing.assert_array_equal(alone[0], together[row])


def test_no_rows_and_no_pairs_give_zeros() -> None:
    none = np.zeros(0, np.int32)
    assert KERNEL.execute(np.zeros((0, 8), np.float32), [], none, none, np.zeros(0, np.float32)).shape == (0, 8)
    assert (KERNEL.execute(np.ones((2, 8), np.float32), [], none, none, np.zeros(0, np.float32)) == 0).all()


def test_bfloat16_values_come_back_exactly() -> None:
    values = np.array([1.0, -2.5, 3.0e38, -0.0, np.inf], dtype=np.float32)
    np.testing.assert_array_equal(
        to_float32(as_stored(values, "bfloat16"), "bfloat16"),
        (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
    )


@pytest.mark.filterwarnings("error")
def test_a_gate_far_below_zero_is_silent_and_gives_zero() -> None:
    weights = np.full((8, 8), -100, dtype=np.float32)
    expert = KERNEL.prepare(FullExpert("float32", weights, weights, weights))
    zero = np.zeros(1, np.int32)
    y = KERNEL.execute(np.full((1, 8), 10, np.float32), [expert], zero, zero, np.ones(1, np.float32))
    assert (y == 0).all()


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 5},
        {"bits": 2},
        {"scale": np.zeros((4, 3), np.float16)},
        {"offset": np.zeros((4, 2), np.float32)},
        {"perm": np.zeros(16, np.int32)},
        {"perm": np.arange(8, dtype=np.int32)},
    ],
)
def test_a_matrix_whose_parts_do_not_fit_together_cannot_be_made(change: dict[str, object]) -> None:
    parts = {
        "bits": 3,
        "planes": np.zeros((3, 4, 2), np.uint8),
        "scale": np.zeros((4, 2), np.float16),
        "offset": np.zeros((4, 2), np.float16),
        "group_size": 8,
    }
    QuantizedMatrix(**parts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be"):
        QuantizedMatrix(**parts | change)  # type: ignore[arg-type]


def test_an_unknown_kernel_is_refused_with_the_names_we_know() -> None:
    assert load_kernel("reference").name == "reference"
    with pytest.raises(ConfigError, match="auto, reference, native"):
        load_kernel("cuda")


# -- Each activation on every instruction-set path against float64, and the names that stand for its numbers -----------


WIDTH = 40  # no multiple of a block of 16

Float64 = NDArray[np.float64]


@pytest.fixture(scope="module", params=["reference", *_native.supported_isas()])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return ReferenceKernel() if request.param == "reference" else NativeKernel(isa=request.param, threads=1)


def sigmoid(z: Float64) -> Float64:
    return np.exp(np.minimum(z, 0)) / (1 + np.exp(-np.abs(z)))


def clamped(limit: float) -> Callable[[Float64, Float64], Float64]:
    """As DeepSeek-V4, GLM-5-next, HY-V4, EXAONE and Bailing v3 have it: vLLM's SiluAndMulWithClamp."""

    def formula(gate: Float64, up: Float64) -> Float64:
        gate = np.minimum(gate, limit)
        return gate * sigmoid(gate) * np.clip(up, -limit, limit)

    return formula


def gpt_oss(gate: Float64, up: Float64) -> Float64:
    """transformers' GptOssExperts and MiniMax-M3's."""
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return (up + 1) * gate * sigmoid(1.702 * gate)


def gelu_tanh(gate: Float64, up: Float64) -> Float64:
    """Gemma-4, as torch defines it."""
    return gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


FAMILIES: dict[str, tuple[Activation, Callable[[Float64, Float64], Float64]]] = {
    "silu": (SILU, lambda gate, up: gate * sigmoid(gate) * up),
    "gpt-oss, MiniMax-M3": (GPT_OSS, gpt_oss),
    "clamped at 10": (activation_named("silu", limit=10), clamped(10)),
    "clamped at 7": (activation_named("silu", limit=7), clamped(7)),
    "Gemma-4": (activation_named("gelu_pytorch_tanh"), gelu_tanh),
}


def between(kernel: Kernel, activation: Activation, gate: NDArray[np.float32], up: NDArray[np.float32]) -> Float64:
    """What down multiplies, of rows [T, WIDTH]: an expert whose matrices only pick gate and up out of its row."""
    one, none = np.eye(WIDTH, dtype=np.float32), np.zeros((WIDTH, WIDTH), np.float32)
    w1, w3 = np.hstack([one, none]), np.hstack([none, one])
    expert = FullExpert("float32", w1, w3, np.ascontiguousarray(w1.T), activation=activation)
    rows = np.arange(len(gate), dtype=np.int32)
    pairs = rows, np.zeros_like(rows), np.ones(len(rows), np.float32)
    return kernel.execute(np.hstack([gate, up]), [kernel.prepare(expert)], *pairs)[:, :WIDTH].astype(np.float64)


def assert_close(got: Float64, wanted: Float64, gate: Float64, up: Float64, activation: Activation) -> None:
    """To float32's rounding of the sigmoid's argument, which grows with it, and of the product."""
    magnitude = np.abs(np.minimum(gate, activation.largest)) * (np.abs(up) + abs(activation.up_bias))
    assert np.all(np.abs(got - wanted) <= 2e-6 * magnitude + 1e-30), np.abs((got - wanted) / magnitude).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_activation_matches_its_own_formula_in_fp64(kernel: Kernel, family: str) -> None:
    activation, formula = FAMILIES[family]
    rng = np.random.default_rng(1)
    scales = np.array([1e-3, 1, 4, 30])[:, None].repeat(WIDTH, 1)
    gate, up = (np.concatenate([rng.normal(0, scales), rng.normal(0, scales)]).astype(np.float32) for _ in range(2))
    wanted = formula(gate.astype(np.float64), up.astype(np.float64))
    assert_close(between(kernel, activation, gate, up), wanted, gate, up, activation)
    unlike = formula(gate.astype(np.float64), up.astype(np.float64)) - FAMILIES["silu"][1](gate, up)
    assert family == "silu" or np.abs(unlike).max() > 0.01, "the activations must differ here"


numbers = st.floats(0.25, 3, width=32)
activations = st.builds(
    Activation,
    linear=numbers,
    cubic=st.just(0.0) | st.floats(0, 0.5, width=32),
    up_bias=st.floats(-2, 2, width=32),
    limit=st.none() | st.floats(0.5, 50, width=32),
)
values = st.lists(st.floats(-100, 100, width=32), min_size=WIDTH, max_size=WIDTH)


@given(activation=activations, gate=values, up=values)
def test_any_four_numbers_give_the_formula_in_fp64(
    kernel: Kernel, activation: Activation, gate: list[float], up: list[float]
) -> None:
    g, u = np.array([gate], np.float32), np.array([up], np.float32)
    g64 = np.minimum(g.astype(np.float64), activation.largest)
    u64 = np.clip(u.astype(np.float64), -activation.largest, activation.largest)
    wanted = (u64 + activation.up_bias) * g64 * sigmoid(activation.linear * g64 + activation.cubic * g64**3)
    assert_close(between(kernel, activation, g, u), wanted, g, u, activation)


@pytest.mark.parametrize("family", FAMILIES)
def test_huge_gates_stay_finite_and_a_nan_stays_one(kernel: Kernel, family: str) -> None:
    """A gate whose square float32 cannot hold; a NaN is never clamped into a number."""
    gate, up = np.zeros((2, WIDTH), np.float32), np.ones((2, WIDTH), np.float32)
    gate[0, :2], gate[1, 0], up[1, 1] = (3e20, -3e20), np.nan, np.nan
    gate[1, 1] = 1
    expert_sums = between(kernel, FAMILIES[family][0], gate[:1], up[:1])[0]
    largest = FAMILIES[family][0].largest
    assert expert_sums[0] == pytest.approx(min(3e20, largest) * (1 + FAMILIES[family][0].up_bias), rel=1e-3)
    assert abs(expert_sums[1]) < 1e-15
    assert np.isnan(between(kernel, FAMILIES[family][0], gate[1:], up[1:])).any()


def test_a_name_with_numbers_gives_those_numbers() -> None:
    assert activation_named("swigluoai", linear=1.5, limit=9) == Activation(linear=1.5, up_bias=1.0, limit=9.0)
    assert activation_named("silu", linear=1.702, limit=7) == GPT_OSS  # MiniMax-M3 as transformers writes it
    assert activation_named("gelu_pytorch_tanh") == GELU_TANH
    assert activation_named("swish", limit=10) == Activation(limit=10.0)
    assert [str(one) for one in (SILU, Activation(limit=10.0), GELU_TANH)] == [
        "silu",
        "silu, clamped at 10",
        "gelu_tanh",
    ]
    assert set(NAMED) >= {"silu", "swigluoai"}, "old manifests have these"


@pytest.mark.parametrize(
    ("name", "why"),
    [("situ", "through a tanh"), ("swiglustep", "after its SiLU"), ("gelu", "error function"), ("xielu", "not known")],
)
def test_what_the_formula_does_not_cover_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        activation_named(name)


@pytest.mark.parametrize("limit", [-1, math.inf, math.nan])
def test_a_limit_that_is_none_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match="a limit above 0"):
        activation_named("silu", limit=limit)
