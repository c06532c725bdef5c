"""The quality benchmark's forward is the model's own: full precision is transformers, and sequences do not mix."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from paths import MODEL, ROOT

from ndp_device.calibration.build import build_data_free
from ndp_device.kernels.reference import ReferenceKernel
from ndp_device.replicas.store import ExpertStore

pytestmark = [pytest.mark.slow, pytest.mark.quality]


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    sys.path.append(str(ROOT / "benchmarks"))
    return importlib.import_module("quality")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replicas")
    build_data_free(MODEL, directory, show_progress=False)
    return directory


@pytest.fixture(scope="module")
def model(quality: ModuleType, replicas: Path):
    return quality.MixedModel(MODEL, ExpertStore(MODEL, replicas, kernel=ReferenceKernel()))


@pytest.fixture(scope="module")
def tokens(quality: ModuleType):
    import torch

    sequences = quality.held_out_sequences(MODEL, 1)
    return torch.cat([sequences[domain] for domain in ("c", "german", "prose")])


def test_full_precision_is_the_plain_model(quality: ModuleType, model, tokens) -> None:
    """Decode rows predict tokens prompt + 1 .. end: the first generated token belongs to the prefill."""
    import torch
    from transformers import MixtralForCausalLM

    model.prefill(tokens)
    everything_cold = np.full((3, 4, 8), 16, np.uint8)
    everything_hot = np.zeros((3, 4, 8), np.uint8)
    mixed, hot, cold = model.decode(None), model.decode(everything_hot), model.decode(everything_cold)
    plain = MixtralForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
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


def test_prompt_statistics_count_the_prompt_and_nothing_else(quality: ModuleType, model, tokens) -> None:
    stats = model.prefill(tokens)
    assert [one.num_tokens for one in stats] == [quality.PROMPT_TOKENS] * 3
    assert not np.array_equal(stats[0].counts, stats[1].counts)


def test_the_oracle_sees_the_decode_and_the_prefill_policy_does_not(
    quality: ModuleType, model, tokens, replicas
) -> None:
    prompt = model.prefill(tokens)[0]
    model.decode(None)
    decode = model.routing_stats()[0]
    losses = quality.loss_tables(replicas)
    prior = quality.importance(prompt)
    cells = [quality.Cell(2.0, 2, "importance", source) for source in ("prefill", "oracle")]
    from_prompt, from_decode = (quality.plan_of(cell, prompt, decode, prior, losses).bits for cell in cells)
    assert np.array_equal(from_prompt, quality.plan_of(cells[0], prompt, prompt, prior, losses).bits)
    assert np.array_equal(from_decode, quality.plan_of(cells[0], decode, decode, prior, losses).bits)
    assert not np.array_equal(from_prompt, from_decode)
