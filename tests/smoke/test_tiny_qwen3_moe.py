"""The second bundled model is the trained one, its recorded routing its own, and prompts tell of it what they should.

Knows transformers, not vLLM. Made by models/training/train.py; its texts and tokenizer are the first model's.
"""

import importlib
import json
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import quality
from paths import MODEL as FIRST
from paths import ROOT

from ndp_device.calibration.build import build_data_free
from ndp_device.checkpoint.files import model_digest
from ndp_device.checkpoint.opening import open_checkpoint
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.store import ExpertStore
from vllm_ndp.lab.locality import locality
from vllm_ndp.traces.importers import ImportSettings, import_trace

pytestmark = [pytest.mark.slow, pytest.mark.quality]  # together: a forward pass over held-out texts

MODEL = ROOT / "models" / "tiny-qwen3-moe"
TRACE = MODEL / "traces" / "sampled.npz"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "models" / "training"))
    return importlib.import_module("record_routing")


def test_the_checkpoint_is_the_one_that_was_measured() -> None:
    assert model_digest(MODEL) == "044cbdb29d2d21b8f5666b89fb98b5dc"
    shape = open_checkpoint(MODEL).shape
    assert (shape.num_layers, shape.num_experts, shape.top_k) == (4, 32, 4)
    assert (shape.hidden_size, shape.intermediate_size, shape.dtype) == (128, 64, "bfloat16")


def test_the_checkpoint_predicts_held_out_text_as_its_log_says(recorder: ModuleType) -> None:
    """Whole texts as evaluate.py takes them; a random guess scores 4096."""
    import torch

    evaluate = importlib.import_module("evaluate")
    said = json.loads((MODEL / "train_log.json").read_text())["perplexity"]
    held_out = evaluate.held_out_tokens(FIRST / "eval", recorder.tokenizer())
    model = recorder.load(MODEL)
    torch.set_num_threads(1)
    for domain in ("xml", "german"):
        assert evaluate.perplexity(model, held_out[domain]) == pytest.approx(said[domain], rel=0.01)
    assert math.prod(said.values()) ** (1 / len(said)) < 100


def test_the_recorded_routing_is_the_models_own(recorder: ModuleType) -> None:
    """Two sequences through the shipped weights; a tie may be broken in another way on another machine."""
    import torch

    recorded = np.load(TRACE)
    tokens = torch.from_numpy(recorded["tokens"][[0, -1]].astype(np.int64))
    ids, weights = recorder.routing_of(recorder.load(MODEL), tokens)
    assert (ids == recorded["experts"][[0, -1]]).mean() > 0.999
    assert abs(weights.astype(np.float32) - recorded["weights"][[0, -1]]).max() < 0.02


def test_on_a_second_router_too_a_prompt_tells_more_of_its_decode_than_popularity() -> None:
    """The ends of the intervals do not touch, with half of the experts hot and with a quarter."""
    trace = import_trace(TRACE, "npz", ImportSettings(num_experts=32))
    for num_hot in (16, 8):
        covered = locality(trace, num_hot).coverage
        assert num_hot / 32 < covered["static"].low
        assert covered["static"].high < covered["prompt"].low
        assert covered["prompt"].mean < covered["oracle"].mean


# -- The quality benchmark's forward is the model's own: full precision is transformers, and sequences do not mix ------


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replicas")
    build_data_free(FIRST, directory, show_progress=False)
    return directory


@pytest.fixture(scope="module")
def model(replicas: Path):
    return quality.MixedModel(FIRST, ExpertStore(FIRST, replicas, kernel=NativeKernel()))


@pytest.fixture(scope="module")
def tokens():
    import torch

    sequences = quality.held_out_sequences(FIRST, 1)
    return torch.cat([sequences[domain] for domain in ("c", "german", "prose")])


def test_full_precision_is_the_plain_model(model, tokens) -> None:
    """Decode rows predict tokens prompt + 1 .. end: the first generated token belongs to the prefill."""
    import torch
    from transformers import MixtralForCausalLM

    model.prefill(tokens)
    everything_cold = np.full((3, 4, 8), 16, np.uint8)
    everything_hot = np.zeros((3, 4, 8), np.uint8)
    mixed, hot, cold = model.decode(None), model.decode(everything_hot), model.decode(everything_cold)
    plain = MixtralForCausalLM.from_pretrained(FIRST, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = plain(tokens).logits[:, quality.PROMPT_TOKENS : -1]
        targets = tokens[:, quality.PROMPT_TOKENS + 1 :]
        wanted = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1)
    np.testing.assert_allclose(mixed, wanted.numpy(), atol=1e-4)
    np.testing.assert_array_equal(hot, mixed)
    np.testing.assert_array_equal(cold, mixed)


def test_each_sequence_runs_at_its_own_bits(model, tokens) -> None:
    """Three sequences at three plans in one batch give what each gives alone; one bit costs more than four."""
    bits = np.random.default_rng(0).integers(1, 5, (3, 4, 8)).astype(np.uint8)
    bits[1], bits[2] = 1, 4
    model.prefill(tokens)
    together, full = model.decode(bits), model.decode(None)
    alone = []
    for row in range(3):
        model.prefill(tokens[row : row + 1])
        alone.append(model.decode(bits[row : row + 1])[0])
    np.testing.assert_allclose(together, alone, atol=1e-4)
    assert together[1] - full[1] > 10 * abs(together[2] - full[2])
