"""Balanced execution in real vLLM: what a spilled hot expert computes, and what the reports say of it."""

import pytest
from engines import PROMPTS, REPLICAS, engine, greedy, token_ids

pytestmark = pytest.mark.vllm

ENDLESS_GPU = {"gpu.hbm_bytes_per_s": 1_000_000_000}
"""So slow that every hot expert is faster on the device."""


BATCHES = {"few-rows": 4, "many-rows": 20}
SETTINGS = {
    "spilled": {"hot_experts": 5, "debug": {"bits_for": "request", "offload_bits": 1}},
    "cold": {"hot_experts": 0},
}


@pytest.fixture(scope="module")
def runs():
    """{batch: {settings: (outputs, totals of this batch alone)}}; one engine for each settings serves both batches."""
    found = {batch: {} for batch in BATCHES}
    common = {
        "avg_bits": 1.0,
        "debug": {"bits_for": "request"},
        "replicas": str(REPLICAS),
        "hardware_overrides": ENDLESS_GPU,
    }
    for name, settings in SETTINGS.items():
        with engine(settings={**common, **settings}, max_num_seqs=max(BATCHES.values())) as llm:
            for batch, size in BATCHES.items():
                llm.reset_prefix_cache()
                before = llm.collective_rpc("ndp_totals")[0]
                prompts = [f"{number} {PROMPTS[number % len(PROMPTS)]}" for number in range(size)]
                outputs = greedy(llm, prompts, 16, logprobs=1)
                after = llm.collective_rpc("ndp_totals")[0]
                pairs = {key: after[key] - before[key] for key in ("hot_pairs", "cold_pairs", "spilled_pairs")}
                found[batch][name] = outputs, pairs
    return found


@pytest.mark.parametrize("batch", BATCHES)
def test_a_model_whose_hot_experts_all_spill_decodes_like_one_without_hot_experts(runs, batch):
    outputs = {name: run[0] for name, run in runs[batch].items()}
    totals = {name: run[1] for name, run in runs[batch].items()}
    assert token_ids(outputs["spilled"]) == token_ids(outputs["cold"])
    for mine, other in zip(outputs["spilled"], outputs["cold"], strict=True):
        # activations of one limb: inputs that differ in the last bit may round to another of 255 steps
        assert mine.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=2e-2)
    assert totals["cold"]["spilled_pairs"] == totals["spilled"]["hot_pairs"] == 0
    assert totals["spilled"]["spilled_pairs"] > 100
    assert totals["spilled"]["spilled_pairs"] + totals["spilled"]["cold_pairs"] == totals["cold"]["cold_pairs"]
    reports = [output.kv_transfer_params["ndp"] for output in outputs["spilled"]]
    assert sum(report["spilled_pairs"] for report in reports) == totals["spilled"]["spilled_pairs"]
