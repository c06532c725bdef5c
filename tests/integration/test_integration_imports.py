"""Answers of vLLM with routing in them are imported as what they hold: recorded by vLLM itself (routed_experts.py says
how on CPU), and with the bundled recording's routing in answers of vLLM's classes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import routed_experts
from engines import last_json, run_program, trace_of

from vllm_ndp.traces.importers import ImportSettings, import_trace
from vllm_ndp.traces.trace import Trace

pytestmark = pytest.mark.vllm

BUNDLED = Path(__file__).resolve().parents[1] / "data" / "tiny-mixtral-trace"


def test_answers_in_the_classes_of_vllm_are_imported_as_the_routing_they_hold(tmp_path):
    """Half of the answers say where the prompt ends by its tokens, half by usage alone."""
    from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionResponseChoice, UsageInfo
    from vllm.utils.serial_utils import numpy2base64

    recorded = Trace.load(BUNDLED)
    lines = []
    for sequence in recorded.sequences:
        prompt, decoded = len(sequence.prompt_ids), len(sequence.decode_ids)
        choice = CompletionResponseChoice(
            index=0,
            text="",
            finish_reason="length",
            prompt_token_ids=list(range(prompt)) if sequence.request % 2 else None,
            routed_experts=numpy2base64(np.concatenate([sequence.prompt_ids, sequence.decode_ids])),
        )
        usage = UsageInfo(
            prompt_tokens=prompt, completion_tokens=decoded + 1, total_tokens=prompt + decoded + 1
        )  # the last token has no row
        lines.append(CompletionResponse(model="tiny", choices=[choice], usage=usage).model_dump_json())
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    imported = import_trace(tmp_path / "answers.jsonl", "vllm", ImportSettings("tiny", num_experts=8))
    assert imported.prompt_len.tolist() == recorded.prompt_len.tolist()
    assert np.array_equal(imported.ids, recorded.ids)


def test_what_vllm_itself_records_is_what_our_recorder_saw_of_the_same_run(tmp_path):
    done = run_program(sys.executable, Path(routed_experts.__file__), tmp_path / "trace")
    assert done.returncode == 0, done.stderr[-4000:]
    answers = last_json(done.stdout)["answers"]
    (tmp_path / "answers.jsonl").write_text("\n".join(answers))
    imported = import_trace(tmp_path / "answers.jsonl", "vllm", ImportSettings("tiny", num_experts=8))
    ours = trace_of(tmp_path / "trace")
    assert imported.prompt_len.tolist() == ours.prompt_len.tolist()
    assert len(imported.sequences) == len(routed_experts.TOKENS)
    for theirs, own, tokens in zip(imported.sequences, ours.sequences, routed_experts.TOKENS, strict=True):
        assert len(theirs.decode_ids) == tokens - 1  # the last token has no row
        for rows, seen in ((theirs.prompt_ids, own.prompt_ids), (theirs.decode_ids, own.decode_ids)):
            assert np.array_equal(np.sort(rows, axis=2), np.sort(seen, axis=2))
