"""8 bits: rounding is as near as levels allow, and stands beside the nested widths without changing them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndp_device.calibration import data_free
from ndp_device.calibration.build import build_data_free
from ndp_device.calibration.data_free import round_to_bytes
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.widths import REPLICA_WIDTHS, WIDTHS
from ndp_device.kernels import load_kernel
from ndp_device.kernels.reference import dequantize
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import ReplicaFiles, load_loss_table, read_manifest
from ndp_device.replicas.store import ExpertStore


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


def test_the_loss_at_8_bits_is_measured_and_a_hundredth_of_that_at_4(replicas_dir: Path, narrow: Path) -> None:
    loss, relative = load_loss_table(replicas_dir)
    assert loss.shape[2] == relative.shape[2] == 5
    assert (relative[..., 4] < relative[..., 3] / 50).all()
    assert (relative[..., 4] > 0).all()
    assert load_loss_table(narrow)[1].shape[2] == 4
    assert np.array_equal(load_loss_table(narrow)[1], relative[..., :4])


def test_replicas_without_8_bits_refuse_them_in_one_sentence(narrow: Path, model_dir: Path, tmp_path: Path) -> None:
    store = ExpertStore(model_dir, narrow, kernel=load_kernel("reference"))
    with pytest.raises(ReplicaError, match=r"cannot be had at 8 bits: .* at \[1, 2, 3, 4, 16\] bits"):
        store.get(0, 0, 8)
    with pytest.raises(ConfigError, match=r"with 8 beside them or not, got \[8\]"):
        build_data_free(model_dir, tmp_path / "alone", bits=(8,), show_progress=False)
    assert read_manifest(narrow).nested_bits == WIDTHS
