"""Calibration without the model in memory: what it computes, reads and needs, against transformers' whole model."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_family_models
import numpy as np
import pytest
import torch
import transformers
from in_memory import captured_in_memory
from paths import MODEL, ROOT

from ndp_device.calibration import calibrated
from ndp_device.calibration.build import TRACK_WEIGHTS, build_calibrated, build_data_free
from ndp_device.calibration.job import run_job
from ndp_device.calibration.memory import PeakMemory, side_by_side
from ndp_device.calibration.streamed import StreamedForward, auto_class, bytes_between_layers, load_without_experts
from ndp_device.calibration.text import CalibrationText, load_config
from ndp_device.common.errors import ConfigError, NdpError
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import LayerReplicas, ReplicaFiles, read_manifest

pytestmark = [pytest.mark.slow, pytest.mark.calibration]
CPU = torch.device("cpu")
CALIBRATION = MODEL / "calibration.txt"
REFUSED = {
    "llama4": "0 layers of experts we can hook, wanted 2: leave out --calibration",
    "llama4_vl": "0 layers of experts we can hook, wanted 2: leave out --calibration",
    "nemotron_h": "no gate projection",
    "dbrx": "no experts were found",
    "diffusion_gemma": "two sets of experts",
    "step3p5": r"cannot read the model of .*: leave out --calibration",
}
"""Llama-4's experts take other arguments; transformers has no model for Step's text. The others have no replicas."""


FAMILIES = make_family_models.FAMILIES
STREAMED = [name for name, family in FAMILIES.items() if not (family.tensors or name in REFUSED)]


def text_of(model_dir: Path, num_sequences: int, length: int) -> CalibrationText:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    return CalibrationText.draw(CALIBRATION, tokenizer, num_sequences=num_sequences, sequence_length=length, seed=0)


def test_the_bundled_model_loses_what_a_calibration_in_memory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32. A streamed job against replicas solved from what a hook saw in the whole model.

    The first layer's bytes are the same. Rows of all sequences are multiplied together there, so that the last bits of
    an answer differ, and with them some codes of the layers behind.
    """
    settings: dict[str, Any] = {"num_sequences": 16, "sequence_length": 128, "show_progress": False}
    monkeypatch.setattr("ndp_device.calibration.gptq.products_on", lambda _: torch.float32)
    build_calibrated(MODEL, tmp_path / "streamed", CALIBRATION, bits=(2,), **settings)
    checkpoint, captured = CheckpointExperts(MODEL), captured_in_memory(MODEL, text_of(MODEL, 16, 128), range(4))
    solve = calibrated.load_solver("nested", 64, {2: TRACK_WEIGHTS[2]})

    def in_memory(layer: int, advance: Any) -> LayerReplicas:
        experts = [calibrated.FloatExpert(checkpoint.expert(layer, expert), CPU) for expert in range(8)]
        made = (calibrated.quantize_expert(expert, n, *captured[layer], solve) for n, expert in enumerate(experts))
        return LayerReplicas.of([one for one, _ in made])

    manifest = read_manifest(tmp_path / "streamed")
    run_job(tmp_path / "whole", type(manifest)(**{**_fields(manifest), "layers": {}}), in_memory, show_progress=False)
    first = "experts-00000.safetensors"
    assert (tmp_path / "whole" / first).read_bytes() == (tmp_path / "streamed" / first).read_bytes()
    streamed, whole = ReplicaFiles(tmp_path / "streamed"), ReplicaFiles(tmp_path / "whole")
    for layer in range(4):
        assert streamed.calibration_tokens(layer).tolist() == whole.calibration_tokens(layer).tolist()
        lost, wanted = (files.layer_losses(layer)[1][:, 1] for files in (streamed, whole))
        np.testing.assert_allclose(lost, wanted, rtol=0.01)


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


@pytest.mark.parametrize("family", STREAMED)
def test_what_reaches_the_experts_of_a_family_is_what_reaches_them_in_memory(tmp_path: Path, family: str) -> None:
    """The sums over a row's experts are made in another order than transformers', which shows in the last bits."""
    directory = make_family_models.make(family, tmp_path)
    text, checkpoint = text_of(directory, 8, 32), CheckpointExperts(directory)
    shape = checkpoint.shape
    wanted = captured_in_memory(directory, text, range(shape.num_layers))
    forward = StreamedForward(load_without_experts(directory, CPU), text.held_out_last, shape)
    for layer, batch in enumerate(forward.layers()):
        for solver_or_held_out, got in zip(
            wanted[layer], (batch.inputs(slice(None, 7)), batch.inputs(slice(7, None))), strict=True
        ):
            torch.testing.assert_close(got.hidden, solver_or_held_out.hidden, rtol=1e-4, atol=1e-4)
            assert (got.expert_ids == solver_or_held_out.expert_ids).float().mean() > 0.999
        for expert in range(shape.num_experts):
            full = calibrated.FloatExpert(checkpoint.expert(layer, expert), CPU)
            batch.add(expert, full.answers(batch.inputs(slice(None)), expert))
    assert layer == shape.num_layers - 1


@pytest.mark.parametrize("family", ["deepseek_v4", "glm_moe_dsa", "longcat_flash", "qwen3_vl_moe"])
def test_what_a_family_says_is_what_it_says_in_memory(tmp_path: Path, family: str) -> None:
    """With residuals in streams, layers that hand more to the next, experts that give their input back, and a tower."""
    directory = make_family_models.make(family, tmp_path)
    text, checkpoint = text_of(directory, 8, 32).token_ids[:2], CheckpointExperts(directory)
    carried = {"deepseek_v4": 4 * 4 * 128 + 8 * 32, "glm_moe_dsa": 4 * 128 + 8 * 16}.get(family, 4 * 128)
    assert bytes_between_layers(load_config(directory), 128, 32) == carried
    forward = StreamedForward(load_without_experts(directory, CPU), text, checkpoint.shape)
    for layer, batch in enumerate(forward.layers(1)):
        for expert in range(checkpoint.shape.num_experts):
            full = calibrated.FloatExpert(checkpoint.expert(layer, expert), CPU)
            batch.add(expert, full.answers(batch.inputs(slice(None)), expert))
            batch.add_to_branch(expert, full.answers(batch.inputs(batch.branching), expert))
    whole = auto_class(load_config(directory)).from_pretrained(directory, dtype=torch.float32).eval()
    for sequence in range(2 + checkpoint.shape.num_layers):  # the branches of the first lie behind the two
        with torch.no_grad():
            logits = whole(input_ids=text[[sequence % 2 if sequence < 2 else 0]], use_cache=False).logits[0]
        wanted = torch.log_softmax(logits.float(), -1)
        torch.testing.assert_close(forward.log_probabilities(sequence), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("family", "why"), REFUSED.items())
def test_a_family_that_is_not_calibrated_is_refused(tmp_path: Path, family: str, why: str) -> None:
    directory = make_family_models.make(family, tmp_path)
    with pytest.raises(NdpError, match=why):
        build_calibrated(directory, tmp_path / "out", CALIBRATION, show_progress=False)


def test_a_model_that_transformers_cannot_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Sixteen experts are not three groups, which transformers sees in the router only."""
    directory = make_family_models.make("deepseek_v3", tmp_path)
    config = json.loads((directory / "config.json").read_text()) | {"n_group": 3, "topk_group": 1}
    (directory / "config.json").write_text(json.dumps(config))
    wanted = r"^\w+ does not run through decoder layer \d+ \(RuntimeError: [^\n]+\): leave out --calibration, [^\n]+$"
    with pytest.raises(ConfigError, match=wanted):
        build_calibrated(directory, tmp_path / "out", CALIBRATION, show_progress=False)
    made = build_data_free(directory, tmp_path / "out", show_progress=False)  # to the same place, as the sentence says
    assert len(made.layers) == made.model.num_layers


def test_every_expert_is_read_once_in_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two: one solves, one measures what a loss in each layer does to the answer."""
    reads: Counter[tuple[int, int]] = Counter()
    read = CheckpointExperts.expert

    def counted(self: CheckpointExperts, layer: int, expert: int) -> Any:
        reads[layer, expert] += 1
        return read(self, layer, expert)

    opened = CheckpointExperts(MODEL)  # opening looks at expert 0 to see whether files are whole
    monkeypatch.setattr(CheckpointExperts, "__init__", lambda self, _: self.__dict__.update(opened.__dict__))
    monkeypatch.setattr(CheckpointExperts, "expert", counted)
    build_calibrated(MODEL, tmp_path, CALIBRATION, bits=(2,), num_sequences=8, sequence_length=64, show_progress=False)
    assert reads == {(layer, expert): 2 for layer in range(4) for expert in range(8)}


def test_the_peak_memory_that_is_printed_first_is_kept(tmp_path: Path) -> None:
    """A layer of two experts of 512 x 1024 in a process of its own, text of 8192 tokens."""
    program = ROOT / "benchmarks" / "calibration_memory.py"
    sizes = ["--hidden", "512", "--intermediate", "1024", "--layers", "1", "--experts", "2", "--memory", "1.2"]
    done = subprocess.run(
        [sys.executable, program, *sizes, "--samples", "16", "--keep-in", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    said = re.search(r"needs ([\d.]+) GB at most", done.stderr)
    assert said is not None
    assert float(said[1]) == pytest.approx(figures["said_gb"], abs=0.006)
    assert figures["peak_private_gb"] < figures["said_gb"]
    assert figures["said_gb"] < 1.5 * figures["peak_private_gb"], "a bound that says nothing"


def test_as_many_experts_side_by_side_as_the_stated_memory_holds() -> None:
    one = PeakMemory(programs=6, beside_experts=1, sequences=20, expert=3, solver=30)
    assert [side_by_side(one, 8, stated=size).experts for size in (60, 92, 93, 126, 10**6)] == [1, 1, 2, 3, 8]
    assert side_by_side(one, 8, stated=93).total == 93
    last_pass = replace(one, weighing=80)
    assert side_by_side(last_pass, 8, stated=92).total == 80, "the last pass holds no solver"
    with pytest.raises(ConfigError, match=r"--memory gives 0\.00 GB, and calibration takes 0\.00 GB at most"):
        side_by_side(one, 8, stated=59)
