"""Real engines beside devices that compute and have no simulated time: nothing falls back, and nothing says 0 ps."""

from pathlib import Path

import pytest
from engines import MODEL, PROMPTS, engine, greedy, replay_of, stock_tokens_of, token_ids, trace_of

from vllm_ndp.device_client.process import DeviceProcess
from vllm_ndp.integration.serving.metrics import NdpStats

pytestmark = pytest.mark.vllm

TOKENS = 6
OF_TOKENS = ("simulated_ttft_us", "simulated_tpot_us", "simulated_token_us")


def test_beside_a_device_without_simulated_time_tokens_are_stocks_and_all_that_tells_of_times_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two devices: a layer has no time where one of them has none (test_device_group.py)."""
    real = DeviceProcess.spawn(MODEL, None, hardware="none")
    simulating = DeviceProcess.spawn(MODEL, None)
    settings = {"hot_experts": 3, "cold_precision": "full", "prefill": "streamed", "record": str(tmp_path / "trace")}
    counted, add_step = NdpStats(), NdpStats.add_step
    monkeypatch.setattr(NdpStats, "add_step", lambda self, step: (add_step(self, step), add_step(counted, step)))
    try:
        with engine(settings=settings | {"devices": [simulating.address, real.address]}) as llm:
            outputs = greedy(llm, PROMPTS, TOKENS)
            totals, status = (llm.collective_rpc(name)[0] for name in ("ndp_totals", "ndp_status"))
    finally:
        real.terminate()
        simulating.terminate()
    assert token_ids(outputs) == stock_tokens_of(PROMPTS, TOKENS)
    assert totals["cold_pairs"] > 0
    assert totals["fallback_pairs"] == totals["prefill_fallback_pairs"] == 0
    assert totals["fallback_causes"] == {}
    assert totals["simulated_ps"] is totals["simulated_device"] is None
    assert status["unsimulated"] == "the device's time"
    for report in (output.kv_transfer_params["ndp"] for output in outputs):
        assert report["unsimulated"] == "the device's time"
        assert {report[name] for name in OF_TOKENS} == {None}
        assert report["measured_tpot_ms"] > 0
        assert "simulated_device_us" not in report
    assert counted.data["messages"] > 0
    assert not [key for key in counted.data if key.startswith(("simulated_ps", "device:"))]
    trace = trace_of(tmp_path / "trace")
    replayed = replay_of(trace)
    steps = len(replayed.steps)
    assert replayed.lacks.startswith(f"the trace has no simulated times of {steps} of its {steps} steps")
    assert replayed.plan_mismatches == 0
    assert replayed.steps_identical == 0
    assert (trace.events["measured_step_s"] > 0).all()
