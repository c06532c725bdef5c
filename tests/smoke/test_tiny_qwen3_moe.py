"""The second bundled model is the trained one, its recorded routing its own, and prompts tell of it what they should.

Knows transformers, not vLLM. Made by models/training/train.py; its texts and tokenizer are the first model's.
"""

from __future__ import annotations

import importlib
import json
import math
from types import ModuleType

import numpy as np
import pytest
from paths import MODEL as FIRST
from paths import ROOT

from ndp_device.checkpoint.files import model_digest
from ndp_device.checkpoint.opening import open_checkpoint
from vllm_ndp.lab.analysis import analyse
from vllm_ndp.planning.policies import read_prior
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
    prior = read_prior(MODEL / "prior.npy")
    for num_hot in (16, 8):
        covered = analyse(trace, num_hot, prior=prior).coverage
        assert covered["random"].high < covered["static"].low
        assert covered["static"].high < covered["prefill"].low
        assert covered["prefill"].mean < covered["oracle"].mean
