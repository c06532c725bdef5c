"""Real engines beside devices that compute and have no simulated time: nothing falls back, and nothing says 0 ps."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import MODEL, PROMPTS, engine, greedy, replay_of, stock_tokens_of, token_ids, trace_of

from vllm_ndp.device_client.process import DeviceProcess
from vllm_ndp.integration.serving.metrics import NdpStats

pytestmark = pytest.mark.vllm

TOKENS = 6
FULL = {"hot_experts": 3, "cold_precision": "full", "prefill": "streamed"}
OF_TOKENS = ("simulated_ttft_us", "simulated_tpot_us", "simulated_token_us")


@dataclass
class Said:
    tokens: list[list[int]]
    reports: list[dict[str, Any]]
    totals: dict[str, Any]
    status: dict[str, Any]
    stats: dict[str, Any]
    trace: Path


@pytest.fixture(scope="module")
def stock_tokens() -> list[list[int]]:
    return stock_tokens_of(PROMPTS, TOKENS)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Said]:
    """One of two devices: a layer has no time where one of them has none (test_device_group.py)."""
    real = DeviceProcess.spawn(MODEL, None, hardware="none")
    simulating = DeviceProcess.spawn(MODEL, None)
    trace = tmp_path_factory.mktemp("hardware") / "trace"
    settings = FULL | {"devices": [simulating.address, real.address], "record": str(trace)}
    counted, add_step = NdpStats(), NdpStats.add_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NdpStats, "add_step", lambda self, step: (add_step(self, step), add_step(counted, step)))
        with engine(settings=settings) as llm:
            outputs = greedy(llm, PROMPTS, TOKENS)
            totals, status = (llm.collective_rpc(name)[0] for name in ("ndp_totals", "ndp_status"))
    reports = [output.kv_transfer_params["ndp"] for output in outputs]
    yield Said(token_ids(outputs), reports, totals, status, counted.data, trace)
    real.terminate()
    simulating.terminate()


def test_its_answers_are_used_and_give_stock_tokens(said: Said, stock_tokens: list[list[int]]) -> None:
    assert said.tokens == stock_tokens
    assert said.totals["cold_pairs"] > 0
    assert said.totals["fallback_pairs"] == said.totals["prefill_fallback_pairs"] == 0
    assert said.totals["fallback_causes"] == {}


def test_every_report_is_null_where_no_simulated_time_exists_and_says_what_is_missing(said: Said) -> None:
    for report in said.reports:
        assert report["unsimulated"] == "the device's time"
        assert {report[name] for name in OF_TOKENS} == {None}
        assert report["measured_tpot_ms"] > 0
        assert "simulated_device_us" not in report
    assert said.totals["simulated_ps"] is None
    assert said.totals["simulated_device"] is None


def test_metrics_count_its_messages_and_no_simulated_second(said: Said) -> None:
    assert said.stats["messages"] > 0
    assert not [key for key in said.stats if key.startswith(("simulated_ps", "device:"))]


def test_what_is_effective_says_that_it_has_no_simulated_time(said: Said) -> None:
    assert said.status["unsimulated"] == "the device's time"


def test_a_trace_of_it_replays_its_plans_and_says_in_one_sentence_what_it_lacks(said: Said) -> None:
    trace = trace_of(said.trace)
    replayed = replay_of(trace)
    steps = len(replayed.steps)
    assert replayed.lacks.startswith(f"the trace has no simulated times of {steps} of its {steps} steps")
    assert replayed.plan_mismatches == 0
    assert replayed.steps_identical == 0
    assert (trace.events["measured_step_s"] > 0).all()
