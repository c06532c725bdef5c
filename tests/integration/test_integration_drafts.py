"""Speculative decoding: tokens of stock vLLM, and drafts in reports, traces and clocks."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import one_engine
import pytest
from engines import LONG_PROMPTS, MODEL, engine, greedy, replay_of, stock_tokens_of, token_ids, trace_of

from ndp_device.common.errors import ConfigError
from vllm_ndp.traces.format import DECODE, REJECTED

pytestmark = pytest.mark.vllm

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
DRAFT = {"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 2}
TOKENS = 24
LAYERS, TOP_K = 4, 2


@pytest.fixture(scope="module")
def stock_tokens() -> list[list[int]]:
    return stock_tokens_of(LONG_PROMPTS, TOKENS)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recorded run in identity mode, its hot set changing from prompt to prompt; the second pass hits the cache."""
    directory = tmp_path_factory.mktemp("trace") / "drafts"
    settings = {"hot_experts": 3, "cold_precision": "full", "record": str(directory)}
    said = one_engine.run(settings, LONG_PROMPTS, TOKENS, passes=2, speculative_config=NGRAM)
    said["trace"] = trace_of(directory)
    return said


def test_drafts_change_no_token(drafted: dict[str, Any], stock_tokens: list[list[int]]):
    assert drafted["tokens"] == [stock_tokens, stock_tokens]
    (totals,) = drafted["totals"]
    assert totals["sidecar_mismatches"] == totals["fallback_pairs"] == 0


def test_a_report_counts_accepted_tokens_and_not_steps(drafted: dict[str, Any]):
    reports = list(chain(*drafted["reports"]))
    assert sum(report.get("accepted_drafts", 0) for report in reports) > 0
    for report in reports:
        assert len(report["simulated_token_us"]) == len(report["measured_token_ms"]) == TOKENS - 1
        assert 0 <= report.get("accepted_drafts", 0) <= report.get("drafted_tokens", 0)
        rejected = report.get("drafted_tokens", 0) - report.get("accepted_drafts", 0)
        assert report.get("rejected_pairs", 0) == rejected * LAYERS * TOP_K
        decode = sum(report[f"{kind}_pairs"] for kind in ("hot", "spilled", "cold", "fallback"))
        assert decode >= report.get("rejected_pairs", 0) + (TOKENS - 5) * LAYERS * TOP_K


def test_tokens_that_one_step_yields_share_its_end(drafted: dict[str, Any]):
    """An accepted draft costs no time of its own, so some intervals are 0, and all add up to the request's time."""
    for report in chain(*drafted["reports"]):
        zeros = report["simulated_token_us"].count(0.0)
        assert zeros == report.get("accepted_drafts", 0)


def test_a_trace_marks_rejected_rows_which_are_no_tokens_of_their_request(drafted: dict[str, Any]):
    trace = drafted["trace"]
    assert 0 < (trace.phase == REJECTED).sum() < (trace.phase == DECODE).sum()
    accepted = trace.phase == DECODE
    for request in range(len(trace.prompt_len)):
        rows = accepted & (trace.request == request)
        positions = trace.position[rows]
        assert np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions)))  # each once, in order
        assert TOKENS - 1 <= len(positions) < TOKENS - 1 + NGRAM["num_speculative_tokens"] + 1
        assert len(trace.sequences[request].decode_ids) == len(positions)


def test_a_drafted_run_replays_to_the_picosecond(drafted: dict[str, Any]):
    replay = replay_of(drafted["trace"])
    assert len(replay.steps) == drafted["totals"][0]["steps"]
    assert replay.identical


def test_a_draft_model_changes_no_token_and_its_reports_hold_no_simulated_time_of_a_token(
    stock_tokens: list[list[int]],
):
    """The draft is the model itself, unquantized, so that nearly every guess is right."""
    with engine(settings={"hot_experts": 3, "cold_precision": "full"}, speculative_config=DRAFT) as llm:
        outputs = greedy(llm, LONG_PROMPTS, TOKENS)
        (totals,) = llm.collective_rpc("ndp_totals")
    assert token_ids(outputs) == stock_tokens
    assert totals["sidecar_mismatches"] == totals["fallback_pairs"] == 0
    assert totals["simulated_ps"] is None
    for report in (output.kv_transfer_params["ndp"] for output in outputs):
        assert report["accepted_drafts"] > 0
        assert report["unsimulated"] == "the draft model's time"
        assert len(report["measured_token_ms"]) == TOKENS - 1
        assert {report[f"simulated_{name}_us"] for name in ("ttft", "tpot", "token")} == {None}


def test_a_recording_beside_a_draft_model_is_refused(tmp_path: Path):
    settings = {"record": str(tmp_path / "trace")}
    with (
        pytest.raises(ConfigError, match="'record' beside a draft model, whose time is in no simulated clock"),
        engine(settings=settings, speculative_config=DRAFT),
    ):
        pass
