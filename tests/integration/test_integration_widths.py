"""Replicas of some widths through an engine: plans use those that are there, or one sentence says why none can."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from engines import LONG_PROMPTS, MODEL, PROMPTS, engine, greedy, sentence, stock_tokens_of, token_ids

from ndp_device.calibration.build import build_data_free
from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import REPLICA_WIDTHS

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
    ],
    ids=["to the widest", "uniform"],
)
def test_plans_use_the_widths_of_the_replicas(
    replicas: dict[tuple[int, ...], str], bits: tuple[int, ...], settings: dict[str, Any], average: float
) -> None:
    """No pair falls back: the device is never asked for a width that it does not have."""
    with engine(settings={**settings, "avg_bits": 3, "replicas": replicas[bits]}) as llm:
        outputs = greedy(llm, PROMPTS[:2], TOKENS)
        (totals,), (status,) = llm.collective_rpc("ndp_totals"), llm.collective_rpc("ndp_status")
    assert totals["fallback_pairs"] == 0
    assert status["avg_bits"] == average
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


# -- 8 bits: cold experts on the device, hot ones in slots, a joint plan -----------------------------------------------

MANY = 16
JOINT = {"plan": "joint", "hot_experts": 2, "avg_bits": 8}


@pytest.fixture(scope="module")
def replicas_of_bytes(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("bytes") / "replicas"
    build_data_free(MODEL, directory, bits=REPLICA_WIDTHS, show_progress=False)
    return str(directory)


@pytest.mark.parametrize(
    "settings",
    [{"hot_experts": 4, "slot_bits": 8, "avg_bits": 8}, JOINT],
    ids=["device and slots", "joint"],
)
def test_8_bits_serve_and_the_report_tells_them(replicas_of_bytes: str, settings: dict[str, object]) -> None:
    with engine(settings={**settings, "replicas": replicas_of_bytes}) as llm:
        outputs = greedy(llm, PROMPTS[:2], MANY)
    for output in outputs:
        assert len(output.outputs[0].token_ids) == MANY
        report = output.kv_transfer_params["ndp"]
        assert report["avg_bits"] == 8 or settings is JOINT


# -- a window in every layer -------------------------------------------------------------------------------------------

SETTINGS = {"cold_precision": "full", "hot_experts": 4}


def windowed(tmp_path: Path, window: int) -> Path:
    copy = tmp_path / f"window-{window}"
    shutil.copytree(MODEL, copy, ignore=shutil.ignore_patterns("eval", "traces", "licences"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    return copy


def test_a_window_that_no_request_outgrows_gives_the_tokens_of_none(tmp_path: Path) -> None:
    """Chunks and the prefix cache read the routing of positions that a shorter window would have forgotten."""
    with engine(windowed(tmp_path, 512), settings=SETTINGS, max_model_len=512, max_num_batched_tokens=64) as llm:
        found = [token_ids(greedy(llm, LONG_PROMPTS, 16)) for _ in range(2)]
        (totals,) = llm.collective_rpc("ndp_totals")
    assert totals["sidecar_mismatches"] == 0
    assert found == [stock_tokens_of(LONG_PROMPTS, 16)] * 2


def test_a_shorter_window_is_refused_with_the_length_that_it_allows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error, engine(windowed(tmp_path, 256), settings=SETTINGS, max_model_len=512):
        pass
    assert "use --max-model-len 256 or less" in sentence(error)
