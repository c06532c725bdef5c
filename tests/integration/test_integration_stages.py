"""Two stages of a pipeline run one model: tokens of stock vLLM, a device, plan and clock for each, one report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import (
    IN_PROCESS,
    LONG_PROMPTS,
    MODEL,
    REPLICAS,
    engine,
    greedy,
    run_program,
    stock_tokens_of,
    token_ids,
)

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import ConfigError
from ndp_device.replicas.format import load_losses
from vllm_ndp.cost_model.gpu_timing import PipelineClock
from vllm_ndp.lab.exact.live import replay_live
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.traces.trace import Trace

pytestmark = pytest.mark.vllm

TWO_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
TOKENS = 12
LAYERS, TOP_K = 4, 2


@pytest.fixture(scope="module")
def stock_tokens() -> list[list[int]]:
    return stock_tokens_of(LONG_PROMPTS, TOKENS)


def record(directory: Any, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Two passes, and the trace of each stage."""
    settings = settings | {"record": str(directory)}
    with engine(settings=settings, max_num_batched_tokens=64, **TWO_STAGES, **options) as llm:
        passes = [greedy(llm, LONG_PROMPTS, TOKENS) for _ in range(2)]
        totals, status = llm.collective_rpc("ndp_totals"), llm.collective_rpc("ndp_status")
    traces = [Trace.load(directory / f"stage-{stage}", model_digest=model_digest(MODEL)) for stage in (0, 1)]
    return {"passes": passes, "totals": totals, "status": status, "traces": traces}


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("trace") / "stages"
    return record(directory, {"hot_experts": 3, "cold_precision": "full"})


@pytest.mark.ranks
def test_two_stages_give_the_tokens_of_stock_vllm(identity: dict[str, Any], stock_tokens: list[list[int]]):
    """Without compilation, where vLLM's own CPU build cannot run a second stage."""
    assert [token_ids(outputs) for outputs in identity["passes"]] == [stock_tokens, stock_tokens]
    for totals in identity["totals"]:
        assert totals["cold_pairs"] > 0
        assert totals["fallback_pairs"] == totals["sidecar_mismatches"] == 0


@pytest.mark.ranks
def test_each_stage_has_its_layers_and_a_device_of_its_own(identity: dict[str, Any]):
    first, second = identity["status"]
    assert first["moe_layers"] == second["moe_layers"] == LAYERS // 2
    assert first["hot_bytes"] == second["hot_bytes"] == 2 * 3 * 3 * 128 * 256 * 4
    assert len({first["device_pid"], second["device_pid"], None}) == 3
    assert first["ranks"] == "stage 0 of 2: a device, plan and clock of its own"


@pytest.mark.ranks
def test_a_report_adds_up_the_layers_of_both_stages(identity: dict[str, Any]):
    for outputs in identity["passes"]:
        for output in outputs:
            report = output.kv_transfer_params["ndp"]
            decode = sum(report[f"{kind}_pairs"] for kind in ("hot", "spilled", "cold", "fallback"))
            assert decode == (TOKENS - 1) * LAYERS * TOP_K
            assert len(report["simulated_token_us"]) == TOKENS - 1
            assert min(report["simulated_token_us"]) > 0
    totals = identity["totals"]
    told = sum(output.kv_transfer_params["ndp"]["cold_pairs"] for outputs in identity["passes"] for output in outputs)
    assert told == totals[0]["cold_pairs"] + totals[1]["cold_pairs"]


@pytest.mark.ranks
def test_each_stage_replays_to_the_picosecond(identity: dict[str, Any]):
    for stage, trace in enumerate(identity["traces"]):
        assert (trace.provenance.live.stage, trace.provenance.live.num_stages) == (stage, 2)
        assert replay_live(trace, LossTable.nominal(LAYERS // 2, 8)).identical


@pytest.mark.ranks
def test_the_reports_clock_is_that_of_the_stages_one_after_the_other(identity: dict[str, Any]):
    """Composed again from the two traces: a request's last token is as late as its report says."""
    first, second = identity["traces"]
    assert np.array_equal(first.events["step"], second.events["step"])
    took = []
    for trace in (first, second):
        ends = trace.events["simulated_start_ps"] + trace.events["simulated_step_ps"]
        took.append(np.diff(ends, prepend=0))
    clock, begun, tokens = PipelineClock(2), {}, {}
    for step, *of_stages in zip(first.events["step"], *took, strict=True):
        rows = (first.step == step) & (first.phase < 2)
        requests = np.unique(first.request[rows]).tolist()
        start, end = clock.run([int(value) for value in of_stages], map(str, requests))
        for request in requests:
            begun.setdefault(request, start)
            known = first.prompt_len[request] + len(tokens.get(request, []))
            if first.position[rows & (first.request == request)].max() + 1 >= known:
                tokens.setdefault(request, []).append(end)
                clock.note_token(str(request), end)
    reports = [output.kv_transfer_params["ndp"] for outputs in identity["passes"] for output in outputs]
    assert len(reports) == len(tokens)
    for request, report in enumerate(reports):
        assert report["simulated_ttft_us"] == round((tokens[request][0] - begun[request]) / 1e6, 6)
        mean = (tokens[request][-1] - tokens[request][0]) / (TOKENS - 1) / 1e6
        assert report["simulated_tpot_us"] == pytest.approx(mean, abs=1e-6)


@pytest.mark.ranks
def test_a_quantized_run_plans_with_each_stages_own_losses(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("trace") / "stages"
    said = record(directory, {"hot_experts": 4, "avg_bits": 2.0, "replicas": str(REPLICAS)})
    losses = LossTable.from_measured(*load_losses(REPLICAS, "relative"))
    for stage, trace in enumerate(said["traces"]):
        assert replay_live(trace, losses.of_layers(slice(2 * stage, 2 * stage + 2))).identical
    assert all(totals["cold_pairs"] > 0 for totals in said["totals"])


def test_a_prior_of_the_whole_model_is_refused_beside_stages(tmp_path: Path):
    from vllm.engine.arg_utils import EngineArgs

    prior = tmp_path / "prior.npy"
    np.save(prior, np.ones((4, 8)))
    settings = {"policy": {"name": "static", "prior": str(prior)}}
    with pytest.raises(ConfigError, match="a prior of the whole model beside pipeline parallelism"):
        EngineArgs(
            str(MODEL), quantization="ndp", additional_config={"ndp": settings}, **TWO_STAGES
        ).create_engine_config()


STOCK = """
import sys
from vllm import LLM
if __name__ == "__main__":
    LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=64 << 20,
        block_size=32, pipeline_parallel_size=2, distributed_executor_backend="mp").generate("a", use_tqdm=False)
"""


@pytest.mark.families  # of stock vLLM alone, three processes: it can only change with the pinned version
def test_stock_vllm_still_needs_the_room_that_our_worker_makes(tmp_path: Any):
    """When this fails, vLLM runs two stages without compilation itself: drop `_make_room_for_the_stage_before`."""
    (tmp_path / "stock.py").write_text(STOCK)
    done = run_program(sys.executable, tmp_path / "stock.py", MODEL, OMP_NUM_THREADS="1", **IN_PROCESS)
    assert done.returncode != 0
    assert "assert self.intermediate_tensors is not None" in done.stderr + done.stdout
