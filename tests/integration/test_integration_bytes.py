"""Experts at 8 bits through an engine: cold ones on the device, hot ones in slots, and both in a joint plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import PROMPTS, engine, greedy
from paths import MODEL

from ndp_device.calibration.build import build_data_free
from ndp_device.common.widths import REPLICA_WIDTHS

pytestmark = pytest.mark.vllm
TOKENS = 16
JOINT = {"plan": "joint", "hot_experts": 2, "avg_bits": 8}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("bytes") / "replicas"
    build_data_free(MODEL, directory, bits=REPLICA_WIDTHS, show_progress=False)
    return str(directory)


@pytest.mark.parametrize(
    "settings",
    [{"hot_experts": 0, "avg_bits": 8}, {"hot_experts": 4, "slot_bits": 8, "avg_bits": 8}, JOINT],
    ids=["cold", "slots", "joint"],
)
def test_8_bits_serve_and_the_report_tells_them(replicas: str, settings: dict[str, object]) -> None:
    with engine(settings={**settings, "replicas": replicas}) as llm:
        outputs = greedy(llm, PROMPTS[:2], TOKENS)
    for output in outputs:
        assert len(output.outputs[0].token_ids) == TOKENS
        report = output.kv_transfer_params["ndp"]
        assert report["avg_bits"] == 8 or settings is JOINT
