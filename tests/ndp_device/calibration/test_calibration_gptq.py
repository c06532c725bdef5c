"""The solver against its definitions: exhaustive codes, plain rounding, the same weights at one width alone."""

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from reference_kernel import dequantize, unpack
from torch import Tensor

from ndp_device.calibration import _fits, data_free, gptq
from ndp_device.calibration.gptq import blend, own_weight, second_moment, unit_factor
from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import pack

NESTED = {1: 0.3, 2: 1.0, 3: 2.0, 4: 4.0}
ABLE = torch.cpu.get_capabilities()
BUILDS = [
    "portable",
    *(["avx2"] if ABLE.get("avx2") and ABLE.get("fma3") else []),
    *(["avx512"] if ABLE.get("avx512_f") and ABLE.get("avx512_vl") and ABLE.get("avx512_dq") else []),
]
"""Of the column loop, those that this processor runs."""


def correlated_problem(seed: int, rows: int, columns: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Weights [N, C] and the second moment of inputs with a falling spectrum and a few loud channels."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(columns, columns)) / np.arange(1, columns + 1) ** 0.5
    inputs = rng.normal(size=(tokens, columns)) @ mixing.T
    inputs[:, ::7] *= 3
    weights = rng.standard_t(4, size=(rows, columns))
    hessian = second_moment([torch.tensor(inputs, dtype=torch.float32)], columns).double()
    return torch.tensor(weights, dtype=torch.float32), hessian


def relative_loss(weights: Tensor, hessian: Tensor, quantized: NDArray[np.float32]) -> float:
    error = (torch.from_numpy(quantized) - weights).double()
    return float(((error @ hessian) * error).sum() / ((weights.double() @ hessian) * weights).sum())


def rounded(weights: Tensor, bits: int, group_size: int) -> NDArray[np.float32]:
    """Round to nearest on each group's min..max."""
    groups = weights.split(group_size, dim=1)
    steps = (1 << bits) - 1
    done = []
    for group in groups:
        low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        done.append(((group - low) / (high - low) * steps).round() / steps * (high - low) + low)
    return torch.cat(done, 1).numpy()


def test_the_second_moment_is_the_mean_outer_product() -> None:
    inputs = torch.randn(5000, 6, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(
        second_moment(inputs.split(4096), 6), (inputs.double().T @ inputs.double()) / 5000, rtol=1e-5, atol=1e-6
    )
    assert (second_moment([], 6) == 0).all()
    rounded = inputs.bfloat16()
    np.testing.assert_allclose(second_moment([rounded], 6), (rounded.double().T @ rounded.double()) / 5000, atol=3e-3)


def test_squares_of_more_columns_than_a_strip_are_whole() -> None:
    """1101 columns are three strips of 512, and the middle row has no partner to be exchanged with."""
    inputs = torch.randn(1500, 1101, generator=torch.Generator().manual_seed(0))
    moment = second_moment(inputs.split(700), 1101)
    np.testing.assert_allclose(moment, inputs.T @ inputs / 1500, atol=1e-4)
    mixing, importance = unit_factor(moment.clone, 0.01)
    damped = moment + 0.01 * moment.diagonal().mean() * torch.eye(1101)
    np.testing.assert_allclose((mixing * importance) @ mixing.T, damped, atol=1e-4)
    assert (mixing == mixing.triu()).all()


def test_rows_of_a_tall_matrix_are_solved_as_they_are_alone() -> None:
    weights = torch.randn(1024 + 40, 16, generator=torch.Generator().manual_seed(0))
    settings = {"group_size": 8, "track_weights": {2: 1.0, 4: 4.0}, "damp": 0.01}
    whole, last = (gptq.quantize(some, torch.eye(16), **settings)[4] for some in (weights, weights[1024:]))  # type: ignore[arg-type]
    for one, other in ((whole.scale[1024:], last.scale), (whole.planes[:, 1024:], last.planes)):
        np.testing.assert_array_equal(one, other)


def test_an_expert_without_tokens_takes_its_layers_moment_and_many_tokens_its_own() -> None:
    """At 512 tokens both count the same, the layer's scaled to the expert's trace: (2 + 2) / 2 on the diagonal."""
    own, layer = 2 * torch.eye(3), 7 * torch.eye(3)
    assert own_weight(0) == 0
    assert (blend(own * 0, layer.clone(), own_weight(0)) == layer).all()
    assert (blend(own * 0, layer.clone(), 0.5) == layer).all(), "rows of zeros tell nothing either"
    assert own_weight(512) == 0.5
    np.testing.assert_allclose(blend(own.clone(), layer, 0.5), own)
    assert own_weight(10**6) > 0.999


def test_the_factor_is_of_the_damped_hessian_even_where_the_hessian_is_singular() -> None:
    _, hessian = correlated_problem(0, 1, 12, 100)
    mixing, importance = unit_factor(hessian.clone, 0.01)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(12)
    np.testing.assert_allclose((mixing * importance) @ mixing.T, damped, rtol=1e-4, atol=1e-4 * float(damped.max()))
    assert (mixing == mixing.triu()).all()
    assert (mixing.diagonal() == 1).all()
    assert all(part.isfinite().all() for part in unit_factor(lambda: torch.zeros(4, 4), 0.01))


def test_a_hessian_that_is_definite_only_in_float64_or_with_more_damping_has_a_factor() -> None:
    loud = torch.ones(64, 1)
    for hessian in (1e9 * (loud @ loud.T) + torch.eye(64), loud @ loud.T - 0.5 * torch.eye(64)):
        assert all(part.isfinite().all() for part in unit_factor(hessian.clone, 1e-9))
    # what the other columns leave of one is the damping, 1e-9 of 1e9, of which float64 needs no more
    assert float(unit_factor((1e9 * (loud @ loud.T)).clone, 1e-9)[1].min()) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_are_refused(bad: float) -> None:
    hessian = torch.eye(8)
    hessian[3, 3] = bad
    with pytest.raises(ConfigError, match="the Hessian is not finite"):
        gptq.quantize(torch.ones(2, 8), hessian, group_size=8, track_weights={2: 1.0}, damp=0.01)


def test_one_bit_codes_of_a_short_row_are_nearly_the_best_of_all_256() -> None:
    """8 columns in one group: every code with its own best scale and offset is tried."""
    ratios = []
    for seed in range(12):
        weights, hessian = correlated_problem(seed, 1, 8, 64)
        best = np.inf
        for code in itertools.product((0.0, 1.0), repeat=8):
            design = torch.tensor([code, (1.0,) * 8], dtype=torch.float64)
            normal = design @ hessian @ design.T + 1e-9 * torch.eye(2)
            fit = torch.linalg.solve(normal, design @ hessian @ weights[0].double())
            best = min(best, relative_loss(weights, hessian, (fit @ design)[None].float().numpy()))
        ours = gptq.quantize(weights, hessian, group_size=8, track_weights={1: 1.0}, damp=0.01, sweeps=3)[1]
        ratios.append(relative_loss(weights, hessian, dequantize(ours)) / best)
    assert min(ratios) > 0.999  # nothing beats exhaustive search
    assert np.mean(ratios) < 1.7
    assert np.median(ratios) < 1.25


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_error_feedback_loses_far_less_than_rounding(bits: int) -> None:
    weights, hessian = correlated_problem(1, 32, 64, 2000)
    ours = gptq.quantize(weights, hessian, group_size=32, track_weights={bits: 1.0}, damp=0.01)[bits]
    assert relative_loss(weights, hessian, dequantize(ours)) < 0.6 * relative_loss(
        weights, hessian, rounded(weights, bits, 32)
    )


def test_nested_widths_are_prefixes_and_lose_at_most_twice_what_codes_of_their_own_do() -> None:
    """Three times at 4 bits, where everything is small and the tracks weigh least."""
    weights, hessian = correlated_problem(2, 48, 96, 3000)
    nested = gptq.quantize(weights, hessian, group_size=32, track_weights=NESTED, damp=0.01)
    losses = {bits: relative_loss(weights, hessian, dequantize(matrix)) for bits, matrix in nested.items()}
    assert losses[4] < losses[3] < losses[2] < losses[1]
    for bits, matrix in nested.items():
        np.testing.assert_array_equal(unpack(matrix.planes), unpack(nested[4].planes) >> (4 - bits))
        alone = gptq.quantize(weights, hessian, group_size=32, track_weights={bits: 1.0}, damp=0.01)[bits]
        assert losses[bits] < (3 if bits == 4 else 2) * relative_loss(weights, hessian, dequantize(alone))


def test_columns_are_reordered_only_where_that_lowers_the_loss() -> None:
    weights, hessian = correlated_problem(4, 64, 32, 1000)
    loud_last = torch.logspace(-1, 1, 32, dtype=torch.float64)
    hessian = loud_last[:, None] * hessian * loud_last
    matrix = gptq.quantize(weights, hessian, group_size=8, track_weights={2: 1.0}, damp=0.01)[2]
    assert matrix.perm is not None
    assert sorted(matrix.perm.tolist()) == list(range(32))
    uncorrelated = torch.eye(32, dtype=torch.float64)
    assert gptq.quantize(weights, uncorrelated, group_size=8, track_weights={2: 1.0}, damp=0.01)[2].perm is None


@pytest.mark.parametrize("columns", [64, 72])
def test_few_loud_columns_have_a_group_each_and_lose_less_than_side_by_side(columns: int) -> None:
    """Four loud inputs and groups of 16: side by side they would share one group's 4 levels."""
    weights, hessian = correlated_problem(9, 64, columns, 4000)
    loud = torch.ones(columns, dtype=torch.float64)
    loud[:4] = 100
    matrix = gptq.quantize(weights, loud[:, None] * hessian * loud, group_size=16, track_weights={2: 1.0}, damp=0.01)[2]
    assert matrix.perm is not None
    assert sorted(matrix.perm.tolist()) == list(range(columns))
    assert sorted(int(at) // 16 for at in np.flatnonzero(matrix.perm < 4)) == [0, 1, 2, 3]


def test_each_effort_loses_less_than_the_one_before_at_every_width() -> None:
    weights, hessian = correlated_problem(11, 64, 128, 3000)
    losses = [
        [
            relative_loss(weights, hessian, dequantize(matrix))
            for matrix in gptq.quantize(
                weights, hessian, group_size=32, track_weights=NESTED, damp=0.01, sweeps=sweeps
            ).values()
        ]
        for sweeps in (gptq.SWEEPS["fast"], gptq.SWEEPS["default"], gptq.SWEEPS["best"])
    ]
    assert (np.diff(losses, axis=0) < 0).all()


def test_products_in_bfloat16_lose_what_those_in_float32_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the processor only imitates them."""
    weights, hessian = correlated_problem(11, 64, 128, 3000)
    losses = []
    for products in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(gptq, "products_on", lambda _, products=products: products)
        made = gptq.quantize(weights, hessian, group_size=32, track_weights=NESTED, damp=0.01)
        losses.append([relative_loss(weights, hessian, dequantize(matrix)) for matrix in made.values()])
    np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)


@pytest.mark.parametrize("widths", [(1,), (2,), (3,), (4,), (1, 3), (2, 4), (1, 2, 3, 4)])
def test_every_build_of_the_column_loop_loses_the_same(widths: tuple[int, ...]) -> None:
    """And gives back the errors of the codes and levels that it wrote."""
    rows, columns = 27, 16
    rng = np.random.default_rng(12)
    weights = rng.normal(size=(rows, columns)).astype(np.float32)
    importance = rng.uniform(1, 2, columns).astype(np.float32)
    feedback = np.triu(rng.normal(size=(columns, columns)), 1).T.astype(np.float32) * 0.1 + np.eye(
        columns, dtype=np.float32
    )
    square = np.ascontiguousarray((feedback.T * importance) @ feedback)
    lost = {}
    for isa in BUILDS:
        product = np.zeros((len(widths), rows, columns), np.float32)
        codes = np.empty((rows, columns), np.uint8)
        scale, offset = np.empty((2, len(widths), rows), np.float32)
        costs = [1 / len(widths)] * len(widths)
        _fits.solve_group(
            widths, costs, weights, product, square, feedback, importance, codes, scale, offset, 1, 2, isa
        )
        for k, bits in enumerate(widths):
            level = scale[k, :, None] * (codes >> (widths[-1] - bits)) + offset[k, :, None]
            np.testing.assert_allclose(product[k], weights - level, atol=1e-5)
        assert codes.max() < 1 << widths[-1]
        lost[isa] = (product**2).sum((1, 2))
    for isa in BUILDS:
        np.testing.assert_allclose(lost[isa], lost["portable"], rtol=0.05)


@pytest.mark.parametrize("columns", [8, 40, 72])
def test_a_last_group_may_be_short(columns: int) -> None:
    weights, hessian = correlated_problem(5, 8, columns, 400)
    matrices = gptq.quantize(weights, hessian, group_size=32, track_weights=NESTED, damp=0.01)
    assert matrices[4].scale.shape == (8, -(-columns // 32))
    assert relative_loss(weights, hessian, dequantize(matrices[4])) < 0.01


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_matrix_that_few_tokens_reached_is_no_worse_than_rounding_on_what_its_layer_sees(tokens: int) -> None:
    weights, layer = correlated_problem(6, 16, 32, 1000)
    own = second_moment([torch.randn(tokens, 32, generator=torch.Generator().manual_seed(1))], 32).double()
    hessian = blend(own, layer, own_weight(tokens))
    for bits, matrix in gptq.quantize(weights, hessian, group_size=16, track_weights=NESTED, damp=0.1).items():
        assert np.isfinite(dequantize(matrix)).all()
        assert relative_loss(weights, layer, dequantize(matrix)) < relative_loss(
            weights, layer, rounded(weights, bits, 16)
        )


def test_constant_weights_and_silent_inputs_stay_finite() -> None:
    weights = torch.zeros(4, 16)
    weights[1] = 1.5
    weights[2, 3] = 100.0
    matrices = gptq.quantize(
        weights, torch.zeros(16, 16, dtype=torch.float64), group_size=8, track_weights=NESTED, damp=0.1
    )
    for matrix in matrices.values():
        np.testing.assert_allclose(dequantize(matrix), weights, rtol=1e-3, atol=0.01)


def test_without_data_the_nested_fit_is_close_to_the_best_uniform_grid_of_each_width() -> None:
    weights = np.random.default_rng(8).normal(size=(64, 128)).astype(np.float32)
    matrices = data_free.quantize_nested(weights, 64, NESTED).by_width()
    # quantization of a unit normal: optimal (Lloyd-Max) distortion at 1, 2, 3, 4 bits
    for bits, best in {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}.items():
        error = np.mean((dequantize(matrices[bits]) - weights) ** 2)
        assert error < 1.35 * best
        np.testing.assert_array_equal(unpack(matrices[bits].planes), unpack(matrices[4].planes) >> (4 - bits))
    assert pack(unpack(matrices[4].planes), 4).tobytes() == matrices[4].planes.tobytes()


torch = pytest.importorskip("torch")
