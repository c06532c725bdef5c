"""The reference kernel against the formula in float64, and the promises every kernel makes."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from drawn_experts import random_matrix
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference_kernel import REFERENCE, dequantize
from small_checkpoint import as_stored

from ndp_device.common.activation import GELU_TANH, GPT_OSS, SILU, Activation, activation_named
from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import FullExpert, QuantizedMatrix, to_float32
from ndp_device.kernels import _native
from ndp_device.kernels.native import NativeKernel


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from([8, 16, 24]), st.integers(0, 2**32 - 1))
def test_dequantized_weights_are_scale_times_code_plus_offset(
    bits: int, rows: int, bytes_per_row: int, group: int, seed: int
) -> None:
    """W[n, perm[c]] = scale[n, c // g] * code[n, c] + offset[n, c // g], weight by weight."""
    rng = np.random.default_rng(seed)
    columns = bytes_per_row * 8
    matrix = random_matrix(rng, rows, columns, bits, group, perm=True)
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


def test_bfloat16_values_come_back_exactly() -> None:
    values = np.array([1.0, -2.5, 3.0e38, -0.0, np.inf], dtype=np.float32)
    np.testing.assert_array_equal(
        to_float32(as_stored(values, "bfloat16"), "bfloat16"),
        (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
    )


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


# -- Each activation on every instruction-set path against float64, and the names that stand for its numbers -----------


WIDTH = 40  # no multiple of a block of 16

Float64 = NDArray[np.float64]


@pytest.fixture(scope="module", params=["reference", *_native.supported_isas()])
def kernel(request: pytest.FixtureRequest) -> Any:
    return REFERENCE if request.param == "reference" else NativeKernel(isa=request.param, threads=1)


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


def between(kernel: Any, activation: Activation, gate: NDArray[np.float32], up: NDArray[np.float32]) -> Float64:
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
def test_every_familys_activation_matches_its_own_formula_in_fp64(kernel: Any, family: str) -> None:
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
    kernel: Any, activation: Activation, gate: list[float], up: list[float]
) -> None:
    g, u = np.array([gate], np.float32), np.array([up], np.float32)
    g64 = np.minimum(g.astype(np.float64), activation.largest)
    u64 = np.clip(u.astype(np.float64), -activation.largest, activation.largest)
    wanted = (u64 + activation.up_bias) * g64 * sigmoid(activation.linear * g64 + activation.cubic * g64**3)
    assert_close(between(kernel, activation, g, u), wanted, g, u, activation)


@pytest.mark.parametrize("family", FAMILIES)
def test_huge_gates_stay_finite_and_a_nan_stays_one(kernel: Any, family: str) -> None:
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


@pytest.mark.parametrize("limit", [-1, math.inf, math.nan])
def test_a_limit_that_is_none_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match="a limit above 0"):
        activation_named("silu", limit=limit)
