"""Layers weighed in a streamed pass, against the whole model in memory; and who weighs when."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from paths import MODEL

from ndp_device.calibration import calibrated, streamed, tuned, weighing
from ndp_device.calibration.build import build_calibrated, build_data_free, build_tuned, weigh
from ndp_device.calibration.text import CalibrationText
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import ReplicaFiles, write_manifest

pytestmark = [pytest.mark.slow, pytest.mark.calibration]
CPU = torch.device("cpu")
CALIBRATION = MODEL / "calibration.txt"
TEXT: dict[str, Any] = {"num_sequences": 16, "sequence_length": 64}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("replicas") / "base"
    build_data_free(MODEL, out, bits=(2, 3), show_progress=False)
    return out


def text() -> CalibrationText:
    return CalibrationText.draw(CALIBRATION, transformers.AutoTokenizer.from_pretrained(MODEL), seed=0, **TEXT)


def in_memory(directory: Path) -> tuned.Tuning:
    checkpoint, files = CheckpointExperts(MODEL), ReplicaFiles(directory)
    full = [[calibrated.FloatExpert(checkpoint.expert(n, e), CPU) for e in range(8)] for n in range(4)]
    replicas = [[{b: files.expert(n, e, b) for b in files.manifest.bits} for e in range(8)] for n in range(4)]
    return tuned.Tuning(streamed.load_without_experts(MODEL, CPU), full, replicas)


def nll(tuning: tuned.Tuning, tokens: torch.Tensor, bits: int) -> float:
    tuning._set([[bits] * 8] * 4)
    with torch.no_grad():
        answered = tuning.log_probabilities(tokens)[:, :-1]
    return -float(answered.gather(2, tokens[:, 1:, None]).mean())


def test_a_layer_weighs_what_its_losses_do_to_the_answer(base: Path, tmp_path: Path) -> None:
    """Divergence, that layer alone at 2 bits, over its mean loss there; all of them scaled by what the text loses with
    all layers at 2 bits. Nothing else of the replicas changes."""
    weighed = tmp_path / "weighed"
    shutil.copytree(base, weighed)
    before = ReplicaFiles(weighed)
    assert not before.manifest.is_weighed
    manifest = weigh(MODEL, weighed, text(), CPU)
    assert manifest.is_weighed
    after = ReplicaFiles(weighed)
    assert after.manifest == manifest
    assert after.manifest.digest == before.manifest.digest
    assert after.loss_digest != before.loss_digest

    tuning = in_memory(base)
    tokens = text().held_out_last[-2:]
    expected, alone = [], []
    for layer, inputs in enumerate(tuning.inputs(tokens)):
        widths = [[2 if one == layer else FULL_PRECISION_BITS] * 8 for one in range(4)]
        shares = np.bincount(inputs.expert_ids.numpy().ravel(), minlength=8)
        mean_loss = np.average(before.layer_losses(layer)[1][:, 1], weights=shares)
        alone.append(tuning.divergence(tokens, widths))
        expected.append(alone[-1] / mean_loss)
    together = nll(tuning, tokens, 2) - nll(tuning, tokens, FULL_PRECISION_BITS)
    assert abs(together / sum(alone) - 1) > 0.02, "else it would not matter"
    expected = [one * together / sum(alone) for one in expected]
    np.testing.assert_allclose(np.array(manifest.layer_weights) * manifest.nats_per_loss, expected, rtol=2e-3)
    assert np.mean(manifest.layer_weights) == pytest.approx(1, rel=1e-3)
    assert max(expected) > 2 * min(expected), "layers differ: else there would be nothing to weigh"
    assert build_data_free(MODEL, weighed, bits=(2, 3), show_progress=False) == manifest, "a finished job keeps it"


def test_a_calibration_weighs_by_itself_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"bits": (2, 3), "show_progress": False, **TEXT}
    made = build_calibrated(MODEL, tmp_path, CALIBRATION, **settings)
    assert made.is_weighed
    write_manifest(tmp_path, made.unweighed())  # as stopped before the last pass, or made by an older version
    assert build_calibrated(MODEL, tmp_path, CALIBRATION, **settings) == made


def test_tuned_replicas_are_weighed_anew(base: Path, tmp_path: Path) -> None:
    weighed = tmp_path / "weighed"
    shutil.copytree(base, weighed)
    before = weigh(MODEL, weighed, text(), CPU)
    made = build_tuned(MODEL, weighed, tmp_path / "tuned", CALIBRATION, steps=2, show_progress=False, **TEXT)
    assert made.is_weighed
    assert made.layer_weights != before.layer_weights


def test_branches_are_no_more_sequences_than_a_calibration_has() -> None:
    """128 sequences hold two passes of the 16 held out, and branches of 24 of 4 layers, 3 of 32 layers, 1 of 94."""
    assert [weighing.num_branching(128, layers, 16) for layers in (4, 32, 94, 200)] == [16, 3, 1, 1]
