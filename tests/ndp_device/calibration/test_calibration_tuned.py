"""Levels trained through the whole model: what changes, what stays, and that it helps where nothing was trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from paths import MODEL

from ndp_device.calibration import calibrated, memory, tuned
from ndp_device.calibration.build import build_data_free, build_tuned
from ndp_device.calibration.data_free import expert_losses
from ndp_device.calibration.streamed import load_without_experts
from ndp_device.calibration.text import CalibrationText
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.experts.expert import QuantizedMatrix
from ndp_device.kernels.reference import dequantize
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import ReplicaFiles

pytestmark = [pytest.mark.slow, pytest.mark.calibration]
CPU = torch.device("cpu")
STEPS = 12
CALIBRATION = MODEL / "calibration.txt"
TEXT: dict[str, Any] = {"num_sequences": 64, "sequence_length": 64, "show_progress": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("replicas") / "base"
    build_data_free(MODEL, out, bits=(2, 3), show_progress=False)
    return out


@pytest.fixture(scope="module")
def improved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("replicas") / "tuned"
    build_tuned(MODEL, base, out, CALIBRATION, steps=STEPS, **TEXT)
    return out


def sequences() -> CalibrationText:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    return CalibrationText.draw(CALIBRATION, tokenizer, num_sequences=64, sequence_length=64, seed=0)


def tuning_of(directory: Path) -> tuned.Tuning:
    checkpoint, files = CheckpointExperts(MODEL), ReplicaFiles(directory)
    full = [[calibrated.FloatExpert(checkpoint.expert(n, e), CPU) for e in range(8)] for n in range(4)]
    replicas = [[{b: files.expert(n, e, b) for b in files.manifest.bits} for e in range(8)] for n in range(4)]
    return tuned.Tuning(load_without_experts(MODEL, CPU), full, replicas)


def test_codes_stay_and_levels_do_not(base: Path, improved: Path) -> None:
    before, after = ReplicaFiles(base), ReplicaFiles(improved)
    assert after.num_bytes == before.num_bytes
    for bits in (2, 3):
        old, new = before.expert(1, 3, bits), after.expert(1, 3, bits)
        for name in ("w13", "w2"):
            one, other = getattr(old, name), getattr(new, name)
            np.testing.assert_array_equal(one.planes, other.planes)
            assert (one.scale != other.scale).any()
            assert (one.offset != other.offset).any()


def test_what_the_model_says_on_held_out_text_comes_nearer_to_full_precision(base: Path, improved: Path) -> None:
    held_out = sequences().held_out_last[-8:]
    before, after = tuning_of(base), tuning_of(improved)
    for bits in (2, 3):
        assert after.divergence_at(bits, held_out) < before.divergence_at(bits, held_out)


def test_the_stored_loss_is_what_the_stored_replicas_lose(improved: Path) -> None:
    files, checkpoint = ReplicaFiles(improved), CheckpointExperts(MODEL)
    inputs = tuning_of(improved).inputs(sequences().held_out_last[-8:])[2]
    rows = calibrated.test_rows(inputs, 5).numpy()
    loss, relative = expert_losses(rows, checkpoint.expert(2, 5), {b: files.expert(2, 5, b) for b in (2, 3)})
    np.testing.assert_allclose(files.layer_losses(2)[0][5], loss, rtol=1e-5)
    np.testing.assert_allclose(files.layer_losses(2)[1][5], relative, rtol=1e-5)


def test_in_full_precision_the_model_is_transformers_own(base: Path) -> None:
    ids = sequences().token_ids[0]
    tuning = tuning_of(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        wanted = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)
        np.testing.assert_allclose(tuning.log_probabilities(ids[None])[0], wanted, atol=1e-4)


def test_a_width_that_gained_nothing_keeps_its_levels(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if 2 bits diverged by 1 nat before and after training, and 3 bits by 2 and then 1."""
    answers = {2: iter((1.0, 1.0)), 3: iter((2.0, 1.0))}
    monkeypatch.setattr(tuned.Tuning, "divergence_at", lambda self, bits, ids: next(answers[bits]))
    tuning, files = tuning_of(base), ReplicaFiles(base)
    tokens = sequences().held_out_last
    told = list(tuning.improve(tokens[:-8], tokens[-8:], 2))
    assert sum("not better" in line for line in told) == 1
    trained = tuning.stored(0)[0]
    np.testing.assert_array_equal(trained[2].w13.scale, files.expert(0, 0, 2).w13.scale)
    assert (trained[3].w13.scale != files.expert(0, 0, 3).w13.scale).any()


def test_the_same_job_gives_the_same_bytes_and_a_finished_one_is_left_alone(
    base: Path, improved: Path, tmp_path: Path
) -> None:
    again = build_tuned(MODEL, base, tmp_path / "again", CALIBRATION, steps=STEPS, **TEXT)
    assert again == ReplicaFiles(improved).manifest
    assert build_tuned(MODEL, base, improved, CALIBRATION, steps=STEPS, **TEXT) == again


def test_a_matrix_multiplies_what_the_reference_kernel_does_whatever_its_order_and_last_group() -> None:
    """Columns in an order of their own, as independent codes have, and a last group of 8 of 24."""
    draw = np.random.default_rng(0)
    planes = draw.integers(0, 256, (3, 16, 7), np.uint8)
    scale, offset = (draw.normal(size=(16, 3)).astype(np.float16) for _ in range(2))
    matrix = QuantizedMatrix(3, planes, scale, offset, 24, draw.permutation(56).astype(np.int32))
    rows = draw.normal(size=(5, 56)).astype(np.float32)
    with torch.no_grad():
        products = tuned.TrainedMatrix(matrix, CPU)(torch.from_numpy(rows))
    np.testing.assert_allclose(products, rows @ dequantize(matrix).T, rtol=1e-4, atol=1e-4)


def test_replicas_of_another_model_are_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for file in MODEL.glob("*.json"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    contents = bytearray((MODEL / "model.safetensors").read_bytes())
    contents[-1] ^= 1
    (tmp_path / "model" / "model.safetensors").write_bytes(contents)
    with pytest.raises(ReplicaError, match="not of the model being served"):
        build_tuned(tmp_path / "model", base, tmp_path / "out", CALIBRATION, steps=1, **TEXT)


def test_without_steps_there_is_nothing_to_do(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps must be 1 or more, got 0"):
        build_tuned(MODEL, base, tmp_path / "out", CALIBRATION, steps=0, **TEXT)


def test_a_model_that_does_not_fit_is_refused_with_both_sizes(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 145 728 weights at 2 widths: 4 + 2 + 12 bytes each, and 20 for each of 2 * 2 / 64 levels."""
    wanted = 3_145_728 * (4 + 2 + 12) + 3_145_728 * 2 * 2 // 64 * 20
    assert memory.tuning_bytes(CheckpointExperts(MODEL).shape, group_size=64, num_widths=2) == wanted
    monkeypatch.setattr("ndp_device.common.machine_memory.usable_bytes", lambda: wanted - 1)
    with pytest.raises(
        ConfigError, match=r"in memory, 0\.1 GB with their gradients, of which this process may have 0\.1 GB"
    ):
        build_tuned(MODEL, base, tmp_path / "out", CALIBRATION, steps=1, **TEXT)
    assert not (tmp_path / "out").exists()
