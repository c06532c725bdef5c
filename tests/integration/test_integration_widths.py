"""Replicas of some widths through an engine: plans use those that are there, or one sentence says why none can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, engine, greedy, sentence
from paths import MODEL

from ndp_device.calibration.build import build_data_free
from ndp_device.common.errors import ConfigError

pytestmark = pytest.mark.vllm
TOKENS = 8


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], str]:
    made = {}
    for bits in ((1, 2), (2, 4)):
        directory: Path = tmp_path_factory.mktemp("widths") / "replicas"
        build_data_free(MODEL, directory, bits=bits, show_progress=False)
        made[bits] = str(directory)
    return made


@pytest.mark.parametrize(
    ("bits", "settings", "average"),
    [
        ((1, 2), {"hot_experts": 3}, 2.0),
        ((2, 4), {"hot_experts": 0, "policy": {"bit_rule": "uniform"}}, 3.0),
        ((2, 4), {"hot_experts": 3, "debug": {"bits_for": "batch"}}, 3.0),
    ],
    ids=["to the widest", "uniform", "of the batch"],
)
def test_plans_use_the_widths_of_the_replicas(
    replicas: dict[tuple[int, ...], str], bits: tuple[int, ...], settings: dict[str, Any], average: float
) -> None:
    """No pair falls back: the device is never asked for a width that it does not have."""
    with engine(settings={**settings, "avg_bits": 3, "replicas": replicas[bits]}) as llm:
        outputs = greedy(llm, PROMPTS[:2], TOKENS)
        (totals,) = llm.collective_rpc("ndp_totals")
    assert totals["fallback_pairs"] == 0
    for output in outputs:
        assert len(output.outputs[0].token_ids) == TOKENS
        report = output.kv_transfer_params["ndp"]
        assert bits[0] <= report["avg_bits"] <= bits[-1]
        if settings["hot_experts"] == 0:
            assert report["avg_bits"] == pytest.approx(average, abs=0.35)  # experts are used unequally


@pytest.mark.parametrize(
    ("bits", "settings", "says"),
    [
        ((2, 4), {"avg_bits": 1.5}, "the narrowest replicas"),
        ((2, 4), {"avg_bits": 3, "debug": {"offload_bits": 3}}, "these settings need [3] too"),
        ((1, 2), {"avg_bits": 8}, "these settings need [8] too"),
        ((1, 2), {"avg_bits": 2, "plan": "joint"}, "a joint plan needs replicas of 1, 2, 3, 4 bits"),
    ],
)
def test_what_no_plan_can_be_made_of_is_refused_with_what_to_change(
    replicas: dict[tuple[int, ...], str], bits: tuple[int, ...], settings: dict[str, Any], says: str
) -> None:
    asked = {"hot_experts": 3, "replicas": replicas[bits]} | settings
    with pytest.raises(ConfigError) as error, engine(settings=asked):
        pass
    assert says in sentence(error)
