"""Layers weighed in a streamed pass, against the whole model in memory; and who weighs when."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from in_memory import captured_in_memory
from paths import MODEL

from ndp_device.calibration import streamed, weighing
from ndp_device.calibration.build import build_calibrated, build_data_free, weigh
from ndp_device.calibration.text import CalibrationText
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


class InMemory:
    """transformers' whole model, with replicas of 2 bits in place of some layers' experts."""

    def __init__(self, directory: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        self._modules = streamed.expert_modules(self._model)
        self._full = [(module.gate_up_proj.data, module.down_proj.data) for module in self._modules]
        files = ReplicaFiles(directory)
        floats = [[weighing.in_float(files.expert(layer, e, 2)) for e in range(8)] for layer in range(4)]
        self._replicas = [
            (
                torch.from_numpy(np.stack([np.concatenate([one.w1, one.w3]) for one in each])),
                torch.from_numpy(np.stack([one.w2 for one in each])),
            )
            for each in floats
        ]

    def log_probabilities(self, tokens: torch.Tensor, layers: range = range(0)) -> torch.Tensor:
        for layer, module in enumerate(self._modules):
            weights = (self._replicas if layer in layers else self._full)[layer]
            module.gate_up_proj.data, module.down_proj.data = weights
        with torch.no_grad():
            return torch.log_softmax(self._model(input_ids=tokens, use_cache=False).logits, -1)


def nll(answered: torch.Tensor, tokens: torch.Tensor) -> float:
    return -float(answered[:, :-1].gather(2, tokens[:, 1:, None]).mean())


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

    model, tokens = InMemory(base), text().held_out_last[-2:]
    routed = captured_in_memory(MODEL, text(), range(4))
    wanted = model.log_probabilities(tokens)
    expected, alone = [], []
    for layer in range(4):
        shares = np.bincount(routed[layer][1].expert_ids.numpy().ravel(), minlength=8)
        mean_loss = np.average(before.layer_losses(layer)[1][:, 1], weights=shares)
        answered = model.log_probabilities(tokens, range(layer, layer + 1))
        alone.append(float((wanted.exp() * (wanted - answered)).sum(-1).mean()))
        expected.append(alone[-1] / mean_loss)
    together = nll(model.log_probabilities(tokens, range(4)), tokens) - nll(wanted, tokens)
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


def test_branches_are_no_more_sequences_than_a_calibration_has() -> None:
    """128 sequences hold two passes of the 16 held out, and branches of 24 of 4 layers, 3 of 32 layers, 1 of 94."""
    assert [weighing.num_branching(128, layers, 16) for layers in (4, 32, 94, 200)] == [16, 3, 1, 1]
