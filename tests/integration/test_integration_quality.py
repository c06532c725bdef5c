"""A served request loses on held-out text what the quality benchmark's own forward says it loses."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from ndp_device.calibration.build import build_data_free
from ndp_device.kernels.reference import ReferenceKernel
from ndp_device.replicas.store import ExpertStore

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-mixtral"


@pytest.mark.vllm
def test_served_decode_nll_is_the_quality_benchmarks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Forced tokens through the real engine and device process, two sequences at their own plans, both in float32."""
    import torch

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    quality, served = importlib.import_module("quality"), importlib.import_module("quality_served")
    build_data_free(MODEL, tmp_path, show_progress=False)
    held_out = quality.held_out_sequences(MODEL, 1)
    sequences = torch.cat([held_out["german"], held_out["python"]])

    model = quality.MixedModel(MODEL, ExpertStore(MODEL, tmp_path, kernel=ReferenceKernel()))
    cell = quality.Cell(1.5, 2, "relative", "prefill")
    harness = served.harness_nll(model, sequences, cell, tmp_path)
    full = model.decode(None)
    settings = {"avg_bits": 1.5, "hot_experts": 2, "replicas": str(tmp_path), "kernel": "reference"}
    through_engine, totals = served.served_nll(sequences, settings)

    assert totals["cold_pairs"] > 0
    assert totals["fallback_pairs"] == 0
    assert (harness - full > 0.05).all()  # the bits are felt, so a plan that was not followed would show
    np.testing.assert_allclose(through_engine, harness, atol=1e-3)
