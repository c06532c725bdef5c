"""The C++ fit of data-free replicas against the numpy one and on other processors; the loss probe of a large expert."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray
from paths import MODEL
from processors import settings as processors
from small_checkpoint import write_small_checkpoint

from ndp_device.calibration import build, data_free
from ndp_device.calibration.data_free import Fitted, fit_in_numpy, fit_natively
from ndp_device.calibration.loss_table import expert_losses
from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import FullExpert, QuantizedExpert, QuantizedMatrix, to_float32
from ndp_device.experts.packing import unpack
from ndp_device.kernels.reference import dequantize

ALL_WIDTHS = {1: 0.3, 2: 1.0, 3: 2.0, 4: 4.0}


def stored(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """As a checkpoint of that dtype holds them."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


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
    got = fit_natively(weights, "float32", group_size, costs, isa=isa)
    assert np.mean(unpack(got[0]) == unpack(wanted[0])) > 0.998
    for part, wanted_part in zip(got[1:], wanted[1:], strict=True):
        assert part.shape == wanted_part.shape
        assert np.mean(part == wanted_part) > 0.9
    errors = zip(*(squared_errors(fit, weights, widths, group_size) for fit in (got, wanted)), strict=True)
    for error, wanted_error in errors:
        assert error == pytest.approx(wanted_error, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_checkpoint_of_any_dtype_is_read_as_it_lies(dtype: str) -> None:
    weights = stored(random_weights(1, 32, 192), dtype)
    exact = to_float32(weights, dtype)
    got = fit_natively(weights, dtype, 64, ALL_WIDTHS)
    assert as_bytes(got) == as_bytes(fit_natively(exact, "float32", 64, ALL_WIDTHS))


def test_every_float16_is_read_exactly() -> None:
    """One value per group of 8: its offset is the value, at every width. Infinities and NaN are left out."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)]
    weights = np.repeat(values, 8).reshape(-1, 64)
    _, scale, offset = fit_natively(weights, "float16", 8, {4: 1.0})
    np.testing.assert_array_equal(offset.ravel(), values)
    assert not scale.any()


def test_scales_are_stored_as_numpy_rounds_them() -> None:
    """From too small for a normal float16 to nearly too large; with one bit scale and offset follow from two means."""
    rng = np.random.default_rng(2)
    size = np.float32(2.0) ** rng.uniform(-26, 15, (4000, 1)).astype(np.float32)
    weights = size * np.repeat([[-1, 1]], 4, axis=1).astype(np.float32)  # -a and a in turn
    _, scale, offset = fit_natively(weights, "float32", 8, {1: 1.0})
    collapsed = scale[0] == 0  # both codes the same after rounding
    np.testing.assert_array_equal(scale[0][~collapsed], (2 * size).astype(np.float16)[~collapsed])
    np.testing.assert_array_equal(offset[0][~collapsed], (-size).astype(np.float16)[~collapsed])
    assert size[collapsed].max(initial=0) < 2.0**-24


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_shows_in_the_scale_of_its_group(bad: float) -> None:
    weights = random_weights(3, 4, 64)
    weights[2, 40] = bad
    _, scale, offset = fit_natively(weights, "float32", 32, {1: 1.0, 4: 1.0})
    finite = np.isfinite(scale).all(axis=0) & np.isfinite(offset).all(axis=0)
    np.testing.assert_array_equal(finite, [[True, True], [True, True], [True, False], [True, True]])


def test_any_number_of_threads_and_any_instruction_set_gives_the_same_bytes() -> None:
    weights = random_weights(4, 300, 320)
    one = as_bytes(fit_natively(weights, "float32", 64, ALL_WIDTHS, threads=1))
    assert as_bytes(fit_natively(weights, "float32", 64, ALL_WIDTHS, threads=2)) == one
    assert as_bytes(fit_natively(weights, "float32", 64, ALL_WIDTHS, threads=7)) == one
    assert as_bytes(fit_natively(weights, "float32", 64, ALL_WIDTHS, isa="portable")) == one


@pytest.mark.parametrize("isa", ["auto", "portable"])
@pytest.mark.parametrize(("columns", "group_size"), [(256, 128), (200, 64), (72, 8), (104, 24)])
def test_the_probe_reads_every_width_as_the_reference_kernel_does(columns: int, group_size: int, isa: str) -> None:
    weights = random_weights(11, 24, columns)
    for matrix in data_free.quantize_nested(weights, group_size, ALL_WIDTHS).values():
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
        fit_natively(random_weights(5, 8, 64), **request)


@pytest.mark.parametrize("sizes", [{"hidden": 20}, {"intermediate": 90}])
def test_an_expert_whose_rows_fill_no_whole_bytes_is_refused_before_anything_is_written(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    model, out = write_small_checkpoint(tmp_path / "model", **sizes), tmp_path / "replicas"
    with pytest.raises(ConfigError, match="must be multiples of 8") as raised:
        build.build_data_free(model, out, show_progress=False)
    assert "\n" not in str(raised.value)
    assert not out.exists()


def test_without_the_module_numpy_serves_and_says_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The announcement comes before the work, which is interrupted here: 3.1 M weights at 1 M/s are 0.05 minutes."""
    monkeypatch.setattr(data_free, "native", None)
    monkeypatch.setattr(build, "run_job", lambda *_, **__: None)
    build.build_data_free(MODEL, tmp_path, show_progress=False)
    assert "weights in numpy take about 0.1 minutes" in capsys.readouterr().err
    weights = random_weights(6, 8, 64)
    matrices = data_free.quantize_nested(weights, 64, ALL_WIDTHS)
    planes, scale, _ = fit_in_numpy(weights, "float32", 64, ALL_WIDTHS)
    assert matrices[4].planes.tobytes() == planes.tobytes()
    assert matrices[2].scale.tobytes() == scale[1].tobytes()


def random_expert(seed: int, hidden: int, intermediate: int) -> tuple[FullExpert, dict[int, QuantizedExpert]]:
    w1, w3 = (random_weights(seed + n, intermediate, hidden) for n in (0, 1))
    w2 = random_weights(seed + 2, hidden, intermediate)
    w13s = data_free.quantize_nested(np.concatenate([w1, w3]), 64, ALL_WIDTHS)
    w2s = data_free.quantize_nested(w2, 64, ALL_WIDTHS)
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


def test_a_small_expert_is_probed_whole() -> None:
    full, replicas = random_expert(9, 64, data_free.PROBE_UNITS)
    inputs = np.random.default_rng(10).standard_normal((8, 64), dtype=np.float32)
    assert data_free.num_probe_units(data_free.PROBE_UNITS, 64) == data_free.PROBE_UNITS
    for part, whole in zip(
        data_free.probe_losses(inputs, full, replicas, 64), expert_losses(inputs, full, replicas), strict=True
    ):
        np.testing.assert_array_equal(part, whole)
