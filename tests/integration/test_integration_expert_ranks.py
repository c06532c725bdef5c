"""Two ranks, each with whole hot experts (expert parallelism): tokens of stock vLLM, every pair once, one clock.

Stock vLLM's own CPU kernel ignores its expert map and ends in a segmentation fault here, so stock in one process is the
yardstick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import (
    LONG_PROMPTS,
    MODEL,
    REPLICAS,
    engine,
    greedy,
    stock_tokens_of,
    token_ids,
)

from ndp_device.checkpoint.files import model_digest
from ndp_device.replicas.format import load_losses
from vllm_ndp.lab.exact.live import replay_live
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.traces.trace import Trace

pytestmark = [pytest.mark.vllm, pytest.mark.ranks]

EXPERT_RANKS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "distributed_executor_backend": "mp",
    "max_num_batched_tokens": 64,
}
TOKENS = 16
SLOW_GPU = {"gpu.hbm_bytes_per_s": 300_000_000_000}


@pytest.fixture(scope="module")
def stock_tokens() -> list[list[int]]:
    return stock_tokens_of(LONG_PROMPTS, TOKENS)


def record(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Two passes, the second from the prefix cache."""
    with engine(settings=settings | {"record": str(directory)}, **EXPERT_RANKS) as llm:
        passes = [greedy(llm, LONG_PROMPTS, TOKENS) for _ in range(2)]
        totals, status = llm.collective_rpc("ndp_totals"), llm.collective_rpc("ndp_status")
    trace = Trace.load(directory, model_digest=model_digest(MODEL))
    return {"passes": passes, "totals": totals, "status": status, "trace": trace}


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three hot experts on two ranks: one has two of a layer, the other one and a slot to spare."""
    directory = tmp_path_factory.mktemp("trace") / "identity"
    return record(directory, {"hot_experts": 3, "cold_precision": "full"})


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("trace") / "balanced"
    settings = {"hot_experts": 5, "avg_bits": 2.0, "replicas": str(REPLICAS), "hardware_overrides": SLOW_GPU}
    return record(directory, settings)


def test_ranks_with_whole_experts_give_the_tokens_of_stock_vllm(
    identity: dict[str, Any], stock_tokens: list[list[int]]
):
    assert [token_ids(outputs) for outputs in identity["passes"]] == [stock_tokens, stock_tokens]
    for totals in identity["totals"]:
        assert totals["cold_pairs"] > 0
        assert totals["fallback_pairs"] == totals["sidecar_mismatches"] == 0


def test_each_rank_has_slots_for_its_part_of_the_hot_experts(identity: dict[str, Any]):
    for status in identity["status"]:
        assert status["hot_bytes"] == 4 * 2 * 3 * 128 * 256 * 4  # layers, slots, matrices, sizes, bytes
        assert status["ranks"].startswith("2, each 1/2 of the hot experts; rank 0 sends")


@pytest.mark.parametrize("run", ["identity", "balanced"])
def test_every_pair_is_counted_once(run: str, request: pytest.FixtureRequest):
    said = request.getfixturevalue(run)
    assert said["totals"][0]["hot_pairs"] == said["totals"][1]["hot_pairs"]
    for outputs in said["passes"]:
        for output in outputs:
            report = output.kv_transfer_params["ndp"]
            decode = sum(report[f"{kind}_pairs"] for kind in ("hot", "spilled", "cold", "fallback"))
            assert decode == (TOKENS - 1) * 4 * 2


def test_a_balanced_run_offloads_alike_on_every_rank(balanced: dict[str, Any]):
    leader, other = balanced["totals"]
    assert leader["spilled_pairs"] == other["spilled_pairs"] > 0


def test_the_slowest_rank_counts_and_replay_finds_it_again(identity: dict[str, Any], balanced: dict[str, Any]):
    """Which rank holds which expert follows from the plans, so a trace need not say it."""
    assert identity["trace"].provenance.live.whole_experts
    assert replay_live(identity["trace"], LossTable.nominal(4, 8)).identical
    assert replay_live(balanced["trace"], LossTable.from_measured(*load_losses(REPLICAS, "relative"))).identical


BESIDE = {
    "warm experts, which the leader's CPU computes": {"warm_experts": 2},
    "layers that do not wait": {"debug": {"gpu": "thread"}, "execution": "paper"},
}


@pytest.mark.parametrize("beside", list(BESIDE))
def test_ranks_with_whole_experts_work_together_with(
    beside: str, tmp_path: Path, stock_tokens: list[list[int]]
) -> None:
    said = record(tmp_path / "trace", {"hot_experts": 3, "cold_precision": "full"} | BESIDE[beside])
    assert [token_ids(outputs) for outputs in said["passes"]] == [stock_tokens, stock_tokens]
    leader, other = ({k: v for k, v in totals.items() if k.endswith("_pairs")} for totals in said["totals"])
    assert leader == other
    assert leader["cold_pairs"] > 0
    assert (leader["warm_pairs"] > 0) == ("warm" in beside)
    assert replay_live(said["trace"], LossTable.nominal(4, 8)).identical
