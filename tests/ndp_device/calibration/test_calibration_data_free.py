"""The C++ fit of data-free replicas against the numpy one and on other processors; the loss probe of a large expert."""

import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from processors import settings as processors
from reference_kernel import REFERENCE, dequantize, unpack
from small_checkpoint import as_stored, write_small_checkpoint

from ndp_device.calibration import build, data_free
from ndp_device.calibration.build import build_data_free
from ndp_device.calibration.data_free import Float32, expert_losses, round_to_bytes
from ndp_device.common.activation import GELU_TANH, GPT_OSS, SILU, Activation
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.widths import REPLICA_WIDTHS, WIDTHS
from ndp_device.experts.expert import Biases, FullExpert, QuantizedExpert, QuantizedMatrix, pack, to_float32
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import ReplicaFiles, load_losses, read_manifest
from ndp_device.replicas.store import ExpertStore

ALL_WIDTHS = {1: 0.3, 2: 1.0, 3: 2.0, 4: 4.0}
Fitted = tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]


def fit(weights: NDArray[Any], dtype: str, group_size: int, track_weights: dict[int, float], **how: Any) -> Fitted:
    """Planes, scale and offset."""
    made = data_free.quantize_nested(weights, group_size, track_weights, dtype, **how)
    return made.planes, made.scale, made.offset


def random_weights(seed: int, rows: int, columns: int) -> NDArray[np.float32]:
    """Heavy tails and a spread of its own in every row, as trained weights have."""
    rng = np.random.default_rng(seed)
    draws = rng.standard_t(5, (rows, columns)) * rng.uniform(0.002, 0.05, (rows, 1)) + rng.normal(0, 0.01, (rows, 1))
    return draws.astype(np.float32)


def squared_errors(fitted: Fitted, weights: NDArray[np.float32], widths: list[int], group_size: int) -> list[float]:
    planes, scale, offset = fitted
    matrices = [
        QuantizedMatrix(width, planes[:width], scale[track], offset[track], group_size)
        for track, width in enumerate(widths)
    ]
    return [float(np.mean((dequantize(matrix) - weights) ** 2)) for matrix in matrices]


CLIP = 0.9
"""Starting range as a part of the group's min..max. The best of four ranges per group: 3 % less error, 4x the time."""
ROUNDS = 6
"""12 rounds: 1 % less error."""


def fit_in_numpy(weights: NDArray[Any], dtype: str, group_size: int, track_weights: Mapping[int, float]) -> Fitted:
    """The fit in numpy: what defines it."""
    bits = tuple(sorted(track_weights))
    lam = np.array([track_weights[b] for b in bits], dtype=np.float32)
    values = to_float32(weights, dtype)
    starts = range(0, values.shape[1], group_size)
    groups = [_fit_group(values[:, start : start + group_size], bits, lam) for start in starts]
    codes, scale, offset = zip(*groups, strict=True)
    return pack(np.concatenate(codes, axis=1), bits[-1]), np.stack(scale, axis=2), np.stack(offset, axis=2)


def _fit_group(
    weights: Float32, bits: tuple[int, ...], lam: Float32
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """One group [N, g] -> codes [N, g], scale and offset [tracks, N]."""
    codes = _uniform_codes(weights, bits[-1])
    for _ in range(ROUNDS):
        codes = _assign(weights, codes, bits, lam)
    return codes, *_least_squares(weights, codes, bits)


def _uniform_codes(weights: Float32, bits: int) -> NDArray[np.uint8]:
    low, high = weights.min(axis=1, keepdims=True), weights.max(axis=1, keepdims=True)
    middle, span = (high + low) / 2, np.maximum(high - low, np.finfo(np.float32).tiny) * CLIP
    steps = (1 << bits) - 1
    codes: Float32 = np.clip(np.rint(((weights - middle) / span + 0.5) * steps), 0, steps)
    return codes.astype(np.uint8, copy=False)


def _least_squares(
    weights: Float32, codes: NDArray[np.uint8], bits: tuple[int, ...]
) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Least squares of the weights on each track's codes: scale, offset float16 [tracks, N]."""
    mean = weights.mean(axis=1)
    scales, offsets = [], []
    for width in bits:
        code = (codes >> (bits[-1] - width)).astype(np.float32)
        code_mean = code.mean(axis=1)
        centred = code - code_mean[:, None]
        variance = (centred**2).sum(axis=1)
        scale = (centred * weights).sum(axis=1) / np.where(variance > 0, variance, 1)
        scales.append(scale)
        offsets.append(mean - scale * code_mean)
    return np.stack(scales).astype(np.float16), np.stack(offsets).astype(np.float16)


def _assign(weights: Float32, codes: NDArray[np.uint8], bits: tuple[int, ...], lam: Float32) -> NDArray[np.uint8]:
    """The best code of each weight under the fits that suit the present codes.

    sum_k lam_k (w - v_k)**2 differs between codes only in -2 w sum_k lam_k v_k + sum_k lam_k v_k**2.
    """
    scale, offset = (fit.astype(np.float32) for fit in _least_squares(weights, codes, bits))
    best = np.full(weights.shape, np.inf, dtype=np.float32)
    chosen = np.zeros(weights.shape, dtype=np.uint8)
    for code in range(1 << bits[-1]):
        track_codes = np.array([code >> (bits[-1] - width) for width in bits], dtype=np.float32)
        values = scale * track_codes[:, None] + offset  # [tracks, N]
        cost = (lam @ values**2)[:, None] - (2 * (lam @ values))[:, None] * weights
        np.copyto(chosen, code, where=cost < best)
        np.minimum(best, cost, out=best)
    return chosen


def as_bytes(fitted: Fitted) -> list[bytes]:
    return [part.tobytes() for part in fitted]


@pytest.mark.parametrize("isa", ["auto", "portable"])
@pytest.mark.parametrize("widths", [[1, 2, 3, 4], [2, 3], [1], [4], [1, 3]])
@pytest.mark.parametrize(("columns", "group_size"), [(256, 128), (200, 64), (72, 8), (40, 128), (104, 24), (520, 512)])
def test_the_native_fit_chooses_the_codes_of_the_numpy_fit(
    widths: list[int], columns: int, group_size: int, isa: str
) -> None:
    """But for ties, and for scales one step of float16 apart because sums were added in another order."""
    weights = random_weights(columns, 48, columns)
    costs = {width: ALL_WIDTHS[width] for width in widths}
    wanted = fit_in_numpy(weights, "float32", group_size, costs)
    got = fit(weights, "float32", group_size, costs, isa=isa)
    assert np.mean(unpack(got[0]) == unpack(wanted[0])) > 0.998
    for part, wanted_part in zip(got[1:], wanted[1:], strict=True):
        assert part.shape == wanted_part.shape
        assert np.mean(part == wanted_part) > 0.9
    errors = zip(*(squared_errors(fit, weights, widths, group_size) for fit in (got, wanted)), strict=True)
    for error, wanted_error in errors:
        assert error == pytest.approx(wanted_error, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_checkpoint_of_any_dtype_is_read_as_it_lies(dtype: str) -> None:
    weights = as_stored(random_weights(1, 32, 192), dtype)
    exact = to_float32(weights, dtype)
    got = fit(weights, dtype, 64, ALL_WIDTHS)
    assert as_bytes(got) == as_bytes(fit(exact, "float32", 64, ALL_WIDTHS))


def test_every_float16_is_read_exactly() -> None:
    """One value per group of 8: its offset is the value, at every width. Infinities and NaN are left out."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)]
    weights = np.repeat(values, 8).reshape(-1, 64)
    _, scale, offset = fit(weights, "float16", 8, {4: 1.0})
    np.testing.assert_array_equal(offset.ravel(), values)
    assert not scale.any()


def test_scales_are_stored_as_numpy_rounds_them() -> None:
    """From too small for a normal float16 to nearly too large; with one bit scale and offset follow from two means."""
    rng = np.random.default_rng(2)
    size = np.float32(2.0) ** rng.uniform(-26, 15, (4000, 1)).astype(np.float32)
    weights = size * np.repeat([[-1, 1]], 4, axis=1).astype(np.float32)  # -a and a in turn
    _, scale, offset = fit(weights, "float32", 8, {1: 1.0})
    collapsed = scale[0] == 0  # both codes the same after rounding
    np.testing.assert_array_equal(scale[0][~collapsed], (2 * size).astype(np.float16)[~collapsed])
    np.testing.assert_array_equal(offset[0][~collapsed], (-size).astype(np.float16)[~collapsed])
    assert size[collapsed].max(initial=0) < 2.0**-24


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_shows_in_the_scale_of_its_group(bad: float) -> None:
    weights = random_weights(3, 4, 64)
    weights[2, 40] = bad
    _, scale, offset = fit(weights, "float32", 32, {1: 1.0, 4: 1.0})
    finite = np.isfinite(scale).all(axis=0) & np.isfinite(offset).all(axis=0)
    np.testing.assert_array_equal(finite, [[True, True], [True, True], [True, False], [True, True]])


def test_any_number_of_threads_and_any_instruction_set_gives_the_same_bytes() -> None:
    weights = random_weights(4, 300, 320)
    one = as_bytes(fit(weights, "float32", 64, ALL_WIDTHS, threads=1))
    assert as_bytes(fit(weights, "float32", 64, ALL_WIDTHS, threads=2)) == one
    assert as_bytes(fit(weights, "float32", 64, ALL_WIDTHS, threads=7)) == one
    assert as_bytes(fit(weights, "float32", 64, ALL_WIDTHS, isa="portable")) == one
    if platform.machine() == "x86_64":  # without AVX2 it says so
        assert as_bytes(fit(weights, "float32", 64, ALL_WIDTHS, isa="avx2")) == one


@pytest.mark.parametrize("isa", ["auto", "portable"])
@pytest.mark.parametrize(("columns", "group_size"), [(256, 128), (200, 64), (72, 8), (104, 24)])
def test_the_probe_reads_every_width_as_the_reference_kernel_does(columns: int, group_size: int, isa: str) -> None:
    weights = random_weights(11, 24, columns)
    for matrix in data_free.quantize_nested(weights, group_size, ALL_WIDTHS).by_width().values():
        assert data_free.dequantize(matrix, isa).tobytes() == dequantize(matrix).tobytes()


BUILD = """
import sys
from pathlib import Path
from ndp_device.calibration.build import build_data_free
build_data_free(Path(sys.argv[1]), Path(sys.argv[2]), show_progress=False)
"""


def test_another_processor_makes_the_same_codes_and_its_losses_differ_in_their_last_digits_at_most(
    tmp_path: Path,
) -> None:
    """Losses come of products that BLAS adds up in an order of its own, so a digest is of one kind of processor."""
    write_small_checkpoint(tmp_path / "model")
    made = []
    for name, environment in processors().items():
        out = tmp_path / name.replace(" ", "-")
        words = [sys.executable, "-c", BUILD, str(tmp_path / "model"), str(out)]
        subprocess.run(words, env=os.environ | environment, check=True, capture_output=True, timeout=600)
        made.append({path.name: safetensors.numpy.load_file(path) for path in sorted(out.glob("experts-*"))})
    first, *others = made
    for other, (file, tensors) in itertools.product(others, first.items()):
        for name, tensor in tensors.items():
            if name in ("loss", "relative_loss"):
                np.testing.assert_allclose(other[file][name], tensor, rtol=1e-5)
            else:
                assert other[file][name].tobytes() == tensor.tobytes(), (file, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "weights must be float32"),
        ({"dtype": "float16"}, "4 bytes a value"),
        ({"isa": "amx"}, "isa must be"),
        ({"track_weights": {5: 1.0}}, "widths must rise"),
    ],
)
def test_impossible_requests_are_refused(change: dict[str, Any], message: str) -> None:
    request = {"dtype": "float32", "group_size": 64, "track_weights": ALL_WIDTHS} | change
    with pytest.raises(ValueError, match=message):
        fit(random_weights(5, 8, 64), **request)


@pytest.mark.parametrize("sizes", [{"hidden": 20}, {"intermediate": 90}])
def test_an_expert_whose_rows_fill_no_whole_bytes_is_refused_before_anything_is_written(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    model, out = write_small_checkpoint(tmp_path / "model", **sizes), tmp_path / "replicas"
    with pytest.raises(ConfigError, match="must be multiples of 8") as raised:
        build.build_data_free(model, out, show_progress=False)
    assert "\n" not in str(raised.value)
    assert not out.exists()


def random_expert(seed: int, hidden: int, intermediate: int) -> tuple[FullExpert, dict[int, QuantizedExpert]]:
    w1, w3 = (random_weights(seed + n, intermediate, hidden) for n in (0, 1))
    w2 = random_weights(seed + 2, hidden, intermediate)
    w13s = data_free.quantize_nested(np.concatenate([w1, w3]), 64, ALL_WIDTHS).by_width()
    w2s = data_free.quantize_nested(w2, 64, ALL_WIDTHS).by_width()
    return FullExpert("float32", w1, w3, w2), {b: QuantizedExpert(b, w13s[b], w2s[b]) for b in ALL_WIDTHS}


def test_part_of_a_large_expert_tells_the_loss_of_all_of_it() -> None:
    """256 of 2080 units (the last group of 64 is short) and 64 rows."""
    full, replicas = random_expert(7, 128, 2080)
    inputs = np.random.default_rng(8).standard_normal((64, 128), dtype=np.float32)
    for part, whole in zip(
        data_free.probe_losses(inputs, full, replicas, 64), expert_losses(inputs, full, replicas), strict=True
    ):
        np.testing.assert_allclose(part, whole, rtol=0.25)
        assert not np.array_equal(part, whole)


def biased(
    groups: int, hidden: int, activation: Activation, down: float = 1.0
) -> tuple[FullExpert, dict[int, QuantizedExpert]]:
    """An expert of so many groups of 64 units, all alike, at 2 and 8 bits."""
    rng = np.random.default_rng(12)
    w1, w3, gate, up = (np.concatenate([part] * groups) for part in rng.standard_normal((4, 64, hidden), np.float32))
    w2 = np.tile(rng.standard_normal((hidden, 64), np.float32), groups)
    biases = Biases(gate[:, 0], up[:, 0], down * rng.standard_normal(hidden, np.float32))
    w13s, w2s = (
        data_free.quantize_nested(weights, 64, {2: 1.0}).by_width() | {8: round_to_bytes(weights, 64)}
        for weights in (np.concatenate([w1, w3]), w2)
    )
    replicas = {bits: QuantizedExpert(bits, w13s[bits], w2s[bits], biases, activation) for bits in (2, 8)}
    return FullExpert("float32", w1, w3, w2, biases=biases, activation=activation), replicas


@pytest.mark.parametrize("activation", [SILU, GPT_OSS, GELU_TANH, Activation(limit=1.0)], ids=str)
def test_losses_are_those_of_the_outputs_of_another_kernel(
    activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases, a column order, and rows that are taken seven at a time."""
    full, replicas = biased(1, 72, activation)
    order = np.random.default_rng(1).permutation(72)
    ordered = round_to_bytes(np.concatenate([full.w1, full.w3])[:, order], 64)
    replicas[8] = replace(replicas[8], w13=replace(ordered, perm=order.astype(np.int32)))
    monkeypatch.setattr(data_free, "ROWS_BYTES", 7 * 128 * 4)
    inputs = np.random.default_rng(2).standard_normal((40, 72), np.float32) * np.float32(0.15)
    loss, relative = expert_losses(inputs, full, replicas)
    rows = np.arange(40, dtype=np.int32)
    wanted, at_2, at_8 = (
        REFERENCE.execute(inputs, [REFERENCE.prepare(one)], rows, rows * 0, np.ones(40, np.float32))
        for one in (full, replicas[2], replicas[8])
    )
    for column, got in ((1, at_2), (4, at_8)):
        assert loss[column] == pytest.approx(((got - wanted) ** 2).mean(), rel=1e-3)
        assert relative[column] == pytest.approx(loss[column] / (wanted**2).mean(), rel=1e-3)


def test_the_probed_part_of_a_large_expert_has_its_own_biases_and_activation() -> None:
    """Eight groups of units, all alike: four of them lose the same share of their output as all."""
    full, replicas = biased(8, 64, GPT_OSS, down=0.0)
    inputs = np.random.default_rng(3).standard_normal((16, 64), np.float32)
    part, whole = data_free.probe_losses(inputs, full, replicas, 64)[1], expert_losses(inputs, full, replicas)[1]
    np.testing.assert_allclose(part, whole, rtol=1e-4)


def test_a_small_expert_is_probed_whole() -> None:
    full, replicas = random_expert(9, 64, data_free.PROBE_UNITS)
    inputs = np.random.default_rng(10).standard_normal((8, 64), dtype=np.float32)
    assert data_free.num_probe_units(data_free.PROBE_UNITS, 64) == data_free.PROBE_UNITS
    for part, whole in zip(
        data_free.probe_losses(inputs, full, replicas, 64), expert_losses(inputs, full, replicas), strict=True
    ):
        np.testing.assert_array_equal(part, whole)


def test_whole_groups_of_a_large_expert_are_probed_and_a_lone_group_is_never_short() -> None:
    sizes = [(256, 64), (2080, 64), (400, 512), (1100, 512), (1100, 96)]
    assert [data_free.num_probe_units(*size) for size in sizes] == [256, 256, 400, 512, 192]


def test_the_levels_of_a_short_group_reach_from_its_least_weight_to_its_largest() -> None:
    weights = np.linspace(10, 11, 72, dtype=np.float32)[None]
    matrix = round_to_bytes(weights, 64)
    assert matrix.offset[0].tolist() == pytest.approx([10, weights[0, 64]], rel=1e-3)
    assert matrix.scale[0, 1] == pytest.approx((weights[0, 71] - matrix.offset[0, 1]) / 255, rel=1e-3)


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 9),
    eights=st.integers(1, 40),
    group=st.sampled_from([8, 24, 64, 128]),
    size=st.sampled_from([1e-4, 1e-2, 1.0, 50.0]),
)
def test_no_weight_is_further_than_half_a_step_and_what_float16_rounds(
    seed: int, rows: int, eights: int, group: int, size: float
) -> None:
    rng = np.random.default_rng(seed)
    weights = (size * (rng.standard_t(4, (rows, 8 * eights)) + rng.normal())).astype(np.float32)
    matrix = round_to_bytes(weights, group)
    groups = np.arange(8 * eights) // group
    step = matrix.scale.astype(np.float32)[:, groups]
    largest = np.abs(weights).max()
    assert (np.abs(dequantize(matrix) - weights) <= 0.5 * step + 2.0**-9 * largest + 2.0**-16).all()


def test_equal_weights_and_rows_taken_in_blocks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (dequantize(round_to_bytes(np.full((3, 16), 0.25, np.float32), 8)) == 0.25).all()
    weights = np.random.default_rng(0).standard_normal((37, 64), np.float32)
    at_once = round_to_bytes(weights, 32)
    monkeypatch.setattr(data_free, "_AT_ONCE", 5 * 64)
    assert np.array_equal(round_to_bytes(weights, 32).planes, at_once.planes)


@pytest.fixture(scope="module")
def narrow(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("narrow") / "r"
    build_data_free(model_dir, out, show_progress=False)
    return out


def test_8_bits_stand_beside_nested_widths_that_stay_what_they_were(
    model_dir: Path, replicas_dir: Path, narrow: Path
) -> None:
    files, without = ReplicaFiles(replicas_dir), ReplicaFiles(narrow)
    assert files.manifest.bits == REPLICA_WIDTHS
    assert without.manifest.bits == WIDTHS
    for bits in WIDTHS:
        one, other = files.expert(1, 2, bits).w13, without.expert(1, 2, bits).w13
        assert one.planes.tobytes() == other.planes.tobytes()
        assert one.scale.tobytes() == other.scale.tobytes()
    at_8 = files.expert(1, 2, 8)
    assert at_8.w13.nested is None
    full = CheckpointExperts(model_dir).expert(1, 2)
    assert np.array_equal(at_8.w2.planes, round_to_bytes(np.asarray(full.w2, np.float32), 64).planes)


def test_losses_are_of_inputs_as_large_as_the_norm_before_the_experts_makes_them(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm of zero leaves nothing to lose. One of 4 makes gate and up four times as large, and their product more."""
    norm_weight, lost = CheckpointExperts.norm_weight, {}
    for size in (0.0, 1.0, 4.0):
        monkeypatch.setattr(
            CheckpointExperts,
            "norm_weight",
            lambda self, layer, size=size: np.full_like(norm_weight(self, layer), size),
        )
        build_data_free(model_dir, tmp_path / str(size), bits=(2,), show_progress=False)
        lost[size] = load_losses(tmp_path / str(size), "absolute")[0][..., 1]
    assert (lost[0.0] == 0).all()
    assert (lost[4.0] > 16 * lost[1.0]).all()


def test_the_loss_at_8_bits_is_measured_and_a_hundredth_of_that_at_4(replicas_dir: Path, narrow: Path) -> None:
    loss, relative = (load_losses(replicas_dir, kind)[0] for kind in ("absolute", "relative"))
    assert loss.shape[2] == relative.shape[2] == 5
    assert (relative[..., 4] < relative[..., 3] / 50).all()
    assert (relative[..., 4] > 0).all()
    assert np.array_equal(load_losses(narrow, "relative")[0], relative[..., :4])


def test_replicas_without_8_bits_refuse_them_in_one_sentence(narrow: Path, model_dir: Path, tmp_path: Path) -> None:
    store = ExpertStore(model_dir, narrow, kernel=REFERENCE)
    with pytest.raises(ReplicaError, match=r"cannot be had at 8 bits: .* at \[1, 2, 3, 4, 16\] bits"):
        store.get(0, 0, 8)
    with pytest.raises(ConfigError, match=r"with 8 beside them or not, got \[8\]"):
        build_data_free(model_dir, tmp_path / "alone", bits=(8,), show_progress=False)
    assert read_manifest(narrow).nested_bits == WIDTHS
