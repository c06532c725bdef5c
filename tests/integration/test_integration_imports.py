"""Answers of vLLM's server with routing in them, written by vLLM's own classes, are imported as what they hold.

vLLM 0.32 returns routing from its newer model runner only, which wants Triton: no CPU build can record such an answer,
so the routing here is that of the bundled recording, and the answer around it is vLLM's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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
