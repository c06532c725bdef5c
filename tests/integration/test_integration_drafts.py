"""Speculative decoding: tokens of stock vLLM, and drafts in reports, traces and clocks."""

from itertools import chain
from pathlib import Path

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


def test_drafts_change_no_token_and_are_told_by_reports_clocks_and_a_trace_that_replays(tmp_path: Path) -> None:
    """In identity mode, its hot set changing from prompt to prompt; the second pass hits the cache."""
    settings = {"hot_experts": 3, "cold_precision": "full", "record": str(tmp_path / "trace")}
    said = one_engine.run(settings, LONG_PROMPTS, TOKENS, passes=2, speculative_config=NGRAM)
    assert said["tokens"] == [stock_tokens_of(LONG_PROMPTS, TOKENS)] * 2
    (totals,) = said["totals"]
    assert totals["sidecar_mismatches"] == totals["fallback_pairs"] == 0

    reports = list(chain(*said["reports"]))
    assert sum(report.get("accepted_drafts", 0) for report in reports) > 0
    for report in reports:
        assert len(report["simulated_token_us"]) == len(report["measured_token_ms"]) == TOKENS - 1
        accepted, drafted = report.get("accepted_drafts", 0), report.get("drafted_tokens", 0)
        assert 0 <= accepted <= drafted
        assert report.get("rejected_pairs", 0) == (drafted - accepted) * LAYERS * TOP_K
        decode = sum(report[f"{kind}_pairs"] for kind in ("hot", "spilled", "cold", "fallback"))
        assert decode >= report.get("rejected_pairs", 0) + (TOKENS - 5) * LAYERS * TOP_K
        # tokens that one step yields share its end: an accepted draft costs no time, and all add up to the request's
        assert report["simulated_token_us"].count(0.0) == accepted

    trace = trace_of(tmp_path / "trace")
    assert 0 < (trace.phase == REJECTED).sum() < (trace.phase == DECODE).sum()
    for request in range(len(trace.prompt_len)):  # rejected rows are no tokens of their request
        positions = trace.position[(trace.phase == DECODE) & (trace.request == request)]
        assert np.array_equal(positions, np.arange(positions[0], positions[0] + len(positions)))  # each once, in order
        assert TOKENS - 1 <= len(positions) < TOKENS - 1 + NGRAM["num_speculative_tokens"] + 1
        assert len(trace.sequences[request].decode_ids) == len(positions)
    replay = replay_of(trace)
    assert len(replay.steps) == totals["steps"]
    assert replay.identical


def test_a_draft_model_changes_no_token_and_its_reports_hold_no_simulated_time_of_a_token():
    """The draft is the model itself, unquantized, so that nearly every guess is right."""
    with engine(settings={"hot_experts": 3, "cold_precision": "full"}, speculative_config=DRAFT) as llm:
        outputs = greedy(llm, LONG_PROMPTS, TOKENS)
        (totals,) = llm.collective_rpc("ndp_totals")
    assert token_ids(outputs) == stock_tokens_of(LONG_PROMPTS, TOKENS)
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
