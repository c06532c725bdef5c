"""An error inside a layer is seen as it is, and the engine serves the next request."""

from __future__ import annotations

import resource
import time

import pytest
from engines import PROMPTS, REPLICAS, engine, greedy, token_ids

pytestmark = pytest.mark.vllm


def test_what_a_layer_raises_is_not_masked_and_the_next_request_is_served(monkeypatch):
    """Before the answer, and while a message is under way. Once `end_step: every layer must have ended` hid the cause,
    and the next request died of the open step."""
    from vllm_ndp.integration.hot_slots import CpuSlotKernel

    with engine(settings={"hot_experts": 3, "avg_bits": 2.0, "replicas": str(REPLICAS), "execution": "paper"}) as llm:
        before = token_ids(greedy(llm, [PROMPTS[0]], 6))
        fused = CpuSlotKernel.fused
        for at, prompt in (("hot", PROMPTS[1]), ("sent", PROMPTS[2])):
            calls: list[int] = []

            def fails_once(self, x, *arguments, at=at, calls=calls):  # type: ignore[no-untyped-def]
                calls.append(len(x))
                if at == "hot" or (len(x) == 1 and len(calls) > 6):  # a decode row, whose message has left
                    monkeypatch.undo()
                    raise ArithmeticError("a kernel that fails")
                return fused(self, x, *arguments)

            monkeypatch.setattr(CpuSlotKernel, "fused", fails_once)
            with pytest.raises(Exception, match="a kernel that fails"):
                greedy(llm, [prompt], 6)
            assert calls, "the error must have been raised"
            llm.llm_engine.abort_request(list(llm.llm_engine.output_processor.request_states), internal=True)
            assert token_ids(greedy(llm, [PROMPTS[0]], 6)) == before
        totals = llm.collective_rpc("ndp_totals")[0]
        assert totals["device_state"] == "up"
        assert totals["fallback_pairs"] == 0


def test_a_trace_that_cannot_be_written_any_longer_costs_no_request(tmp_path, capsys):
    """The kernel refuses every write to a file, as on a full disk; the trace holds what was written before."""
    from vllm_ndp.traces.trace import Trace

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    settings = {"hot_experts": 8, "cold_precision": "full", "record": str(tmp_path / "trace")}
    with engine(settings=settings) as llm:
        before = token_ids(greedy(llm, [PROMPTS[0]], 6))
        time.sleep(3)  # what waits reaches the disk every two seconds
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            assert token_ids(greedy(llm, [PROMPTS[0]], 6)) == before
            time.sleep(3)
            assert token_ids(greedy(llm, [PROMPTS[0]], 6)) == before
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err.count("requests go on without a trace") == 1
    assert len(Trace.load(tmp_path / "trace").prompt_len) >= 1
