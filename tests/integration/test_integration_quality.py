"""A served request loses on held-out text what the quality benchmark's own forward says it loses."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import MODEL

from ndp_device.calibration.build import build_data_free
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.store import ExpertStore

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replicas")
    build_data_free(MODEL, directory, show_progress=False)
    return directory


@pytest.fixture(scope="module")
def settings(replicas: Path) -> dict[str, Any]:
    deadline_ms = 60_000.0  # as the benchmark's: a late answer is computed in full precision
    return {
        "avg_bits": 1.5,
        "hot_experts": 2,
        "replicas": str(replicas),
        "hardware": "h100-ndp512",  # its prices: two engines decide alike
        "deadline_ms": deadline_ms,
    }


@pytest.fixture(scope="module")
def measured(replicas: Path, settings: dict[str, Any]) -> Any:
    """Sequences, the benchmark's own forward of them, and what the engine in this process says: (tokens, nll, nll)."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        quality, served = importlib.import_module("quality"), importlib.import_module("quality_served")
        held_out = quality.held_out_sequences(MODEL, 1)
        sequences = torch.cat([held_out["german"], held_out["python"]])
        model = quality.MixedModel(MODEL, ExpertStore(MODEL, replicas, kernel=NativeKernel()))
        harness = served.harness_nll(model, sequences, quality.Cell(1.5, 2, "relative", "prefill"), replicas)
        full = model.decode(None)
        assert (harness - full > 0.05).all()  # the bits are felt, so a plan that was not followed would show
        through_engine, totals = served.served_nll(sequences, settings)
    assert totals["cold_pairs"] > 0
    assert totals["fallback_pairs"] == 0
    return sequences.tolist(), harness, through_engine, full


@pytest.mark.quality
def test_served_decode_nll_is_the_quality_benchmarks(measured: Any) -> None:
    """Forced tokens through the real engine and device process, two sequences at their own plans.

    Beside float32 the device rounds activations to 8 bits, which is a tenth of what another plan would do.
    """
    _, harness, through_engine, _ = measured
    np.testing.assert_allclose(through_engine, harness, atol=5e-3)


@pytest.mark.quality
def test_pairs_at_widths_of_their_own_router_weight_lose_what_the_benchmark_computes_at_those_widths(
    replicas: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the experts are hot. Other widths would show: with one width for each expert another loss comes."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    quality, served = importlib.import_module("quality"), importlib.import_module("quality_served")
    sequences = quality.held_out_sequences(MODEL, 1)["german"]
    model = quality.MixedModel(MODEL, ExpertStore(MODEL, replicas, kernel=NativeKernel()))
    by_pair, by_expert = (
        served.harness_nll(model, sequences, quality.Cell(1.5, 4, rule, "prefill"), replicas)
        for rule in ("pairs", "layers")
    )
    told = settings | {"hot_experts": 4, "policy": {"bit_rule": "pairs"}, "execution": "paper"}
    through_engine, totals = served.served_nll(sequences, told)
    assert totals["cold_pairs"] > 0
    assert totals["fallback_pairs"] == 0
    np.testing.assert_allclose(through_engine, by_pair, atol=5e-3)
    assert (np.abs(by_expert - by_pair) > 1e-2).all()


def test_forced_tokens_are_a_list_of_ids() -> None:
    from vllm import SamplingParams

    from vllm_ndp.integration.forced_tokens import FORCED, ForcedTokens

    ForcedTokens.validate_params(SamplingParams())
    ForcedTokens.validate_params(SamplingParams(extra_args={FORCED: [7, 8]}))
    for tokens in ([], [True], "7"):
        with pytest.raises(ValueError, match="must be a list of token ids"):
            ForcedTokens.validate_params(SamplingParams(extra_args={FORCED: tokens}))
