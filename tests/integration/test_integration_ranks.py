"""Two ranks run one model by tensor parallelism: tokens of stock vLLM, one device, one clock, every pair once."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import (
    LONG_PROMPTS,
    MODEL,
    PATIENCE_S,
    PROMPTS,
    REPLICAS,
    device_processes,
    engine,
    free_port,
    greedy,
    kill_in_the_middle,
    run_program,
    stock_tokens_of,
    token_ids,
)

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import ConfigError
from vllm_ndp.lab.exact.live import replay_live
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.traces.trace import Trace

pytestmark = pytest.mark.vllm

TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
TOKENS = 16
IDENTITY = {"hot_experts": 3, "cold_precision": "full"}
SLOW_GPU = {"gpu.hbm_bytes_per_s": 300_000_000_000}
"""With this GPU it pays to send the test model's hot experts to the device, even from two GPUs."""


@pytest.fixture(scope="module")
def stock_tokens() -> list[list[int]]:
    return stock_tokens_of(LONG_PROMPTS, TOKENS)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of two ranks in identity mode: two passes, the second from the prefix cache."""
    directory = tmp_path_factory.mktemp("trace") / "two-ranks"
    settings = IDENTITY | {"record": str(directory)}
    with engine(settings=settings, max_num_batched_tokens=64, **TWO_RANKS) as llm:
        passes = [greedy(llm, LONG_PROMPTS, TOKENS) for _ in range(2)]
        totals, status = llm.collective_rpc("ndp_totals"), llm.collective_rpc("ndp_status")
    return {"passes": passes, "totals": totals, "status": status, "directory": directory}


def test_two_ranks_give_the_tokens_of_stock_vllm(recorded: dict[str, Any], stock_tokens: list[list[int]]):
    assert [token_ids(outputs) for outputs in recorded["passes"]] == [stock_tokens, stock_tokens]
    leader, other = recorded["totals"]
    assert leader["cold_pairs"] > 0
    assert leader["fallback_pairs"] == other["fallback_pairs"] == 0
    assert leader["row_checks"] == other["row_checks"] > 0
    assert leader["sidecar_mismatches"] == other["sidecar_mismatches"] == 0


def test_each_rank_plans_alike_and_counts_alike(recorded: dict[str, Any]):
    """The checksums of their plans are compared before every step; an engine whose ranks differ does not get here."""
    leader, other = recorded["totals"]
    same = ("steps", "prefills", "migrated_experts", "kept_experts", "hot_pairs", "cold_pairs", "prefill_pairs")
    assert {key: leader[key] for key in same} == {key: other[key] for key in same}


def test_each_rank_holds_half_of_every_hot_expert_and_one_of_them_has_a_device(recorded: dict[str, Any]):
    leader, other = recorded["status"]
    assert leader["hot_bytes"] == other["hot_bytes"] == 4 * 3 * 3 * 128 * (256 // 2) * 4
    assert leader["device_pid"] is not None
    assert "device_pid" not in other
    assert leader["ranks"].startswith("2, each 1/2 of every hot expert; rank 0")


def test_a_report_of_two_ranks_counts_every_pair_once(recorded: dict[str, Any]):
    for outputs in recorded["passes"]:
        for output in outputs:
            report = output.kv_transfer_params["ndp"]
            decode = sum(report[f"{kind}_pairs"] for kind in ("hot", "spilled", "cold", "fallback"))
            assert decode == (TOKENS - 1) * 4 * 2  # rows after the prompt, layers, experts per token
            assert len(report["simulated_token_us"]) == TOKENS - 1


def test_the_trace_of_two_ranks_replays_to_the_picosecond(recorded: dict[str, Any]):
    trace = Trace.load(recorded["directory"], model_digest=model_digest(MODEL))
    assert trace.provenance.live is not None
    assert trace.provenance.live.num_gpus == 2
    replay = replay_live(trace, LossTable.nominal(4, 8))
    assert len(replay.steps) == recorded["totals"][0]["steps"]
    assert replay.identical


@pytest.fixture(scope="module")
def balanced_and_killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A quantized, balanced run whose device is killed in the middle of a generation, and comes back."""
    settings = {"hot_experts": 6, "avg_bits": 2.0, "replicas": str(REPLICAS), "hardware_overrides": SLOW_GPU}
    with engine(settings=settings, **TWO_RANKS) as llm:
        before = token_ids(greedy(llm, LONG_PROMPTS, TOKENS))
        healthy = llm.collective_rpc("ndp_totals")
        device = llm.collective_rpc("ndp_status")[0]["device_pid"]
        after = kill_in_the_middle(llm, LONG_PROMPTS, TOKENS, device)
        totals = llm.collective_rpc("ndp_totals")
    return {"before": before, "after": after, "healthy": healthy, "totals": totals}


@pytest.mark.ranks
def test_ranks_offload_the_same_experts_whatever_becomes_of_the_device(balanced_and_killed: dict[str, Any]):
    """Each rank chooses which hot experts run on the device; another choice on one of them would lose pairs."""
    leader, other = balanced_and_killed["healthy"]
    assert leader["spilled_pairs"] == other["spilled_pairs"] > 0
    leader, other = balanced_and_killed["totals"]
    assert leader["hot_pairs"] == other["hot_pairs"]
    assert other["fallback_pairs"] == 0


@pytest.mark.ranks
def test_only_the_leader_stands_in_for_a_device_that_died(balanced_and_killed: dict[str, Any]):
    assert balanced_and_killed["totals"][0]["fallback_pairs"] > 0
    assert [len(tokens) for tokens in balanced_and_killed["after"]] == [TOKENS] * len(PROMPTS)


@pytest.mark.ranks
def test_a_lost_device_changes_no_token_in_full_precision(stock_tokens: list[list[int]]):
    """What rank 0 computes instead is whole experts: its own half of them and the other's."""
    with engine(settings=IDENTITY, max_num_batched_tokens=64, **TWO_RANKS) as llm:
        assert (
            kill_in_the_middle(llm, LONG_PROMPTS, TOKENS, llm.collective_rpc("ndp_status")[0]["device_pid"])
            == stock_tokens
        )
        leader, other = llm.collective_rpc("ndp_totals")
    assert leader["fallback_pairs"] > 0
    assert other["fallback_pairs"] == 0


@pytest.mark.ranks
def test_a_leader_that_finds_no_device_ends_every_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    settings = {"cold_precision": "full", "devices": f"ipc://{tmp_path / 'nobody'}"}
    with pytest.raises(Exception, match="initialization failed"), engine(settings=settings, **TWO_RANKS):
        pass
    assert "rank 0 cannot start: no device answered at" in capfd.readouterr().err
    assert not device_processes()
    for child in multiprocessing.active_children():  # vLLM ends the other rank, and does not wait for it
        if "VllmWorker" in child.name:
            child.join(PATIENCE_S)
            assert not child.is_alive()


def config_of_two_ranks(**settings: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    plugin: dict[str, Any] = {"quantization": "ndp", "additional_config": {"ndp": settings}}
    return EngineArgs(str(MODEL), **plugin, **TWO_RANKS).create_engine_config()


def test_parts_that_the_kernel_cannot_take_are_refused_before_loading():
    from vllm_ndp.integration import compat

    config = config_of_two_ranks()
    config.parallel_config.tensor_parallel_size = 16  # more than the test model has heads: vLLM would refuse first
    with pytest.raises(
        ConfigError, match="cuts experts of intermediate size 256 into parts that are no multiple of 32"
    ):
        compat.check(config)


def test_ranks_without_numa_nodes_of_their_own_get_cores_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """And stock vLLM still ends there: when the second half fails, `compat.bind_ranks` has nothing left to do."""
    from vllm.utils.cpu_resource_utils import get_visible_memory_node
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    if len(get_visible_memory_node()) > 1:
        pytest.skip("this machine has a NUMA node for each of two ranks")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    config = config_of_two_ranks()
    lists = os.environ["VLLM_CPU_OMP_THREADS_BIND"].split("|")
    cores = [int(core) for part in lists for core in part.split(",")] if lists != ["nobind"] else []
    assert sorted(cores) == (sorted(os.sched_getaffinity(0)) if cores else [])
    assert len(lists) == (2 if cores else 1)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    with pytest.raises(AssertionError, match="Not enough allowed NUMA nodes to bind threads"):
        OMPProcessManager(config)


# -- what ranks tell each other, between two real processes of vLLM's own group ------------------------------------

TOLD_APART = """
import sys
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.config import VllmConfig, set_current_vllm_config
from ndp_device.common.errors import ConfigError
from vllm_ndp.integration.facts import Ranks

rank, port = int(sys.argv[1]), sys.argv[2]
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
    ensure_model_parallel_initialized(2, 1)
ranks = Ranks.of_this_worker(holds_whole_experts=False)
print("cores", sorted(ranks.merge({rank, 5})))
print("told", ranks.from_leader(f"by {rank}"))
ranks.require_equal({"settings": "A", "replicas with digest": "B"})
print("up", *ranks.agree(devices_up=(rank == 1, True), plans=7))
for tell in (
    lambda: ranks.require_equal({"settings": "A", "replicas with digest": "BC"[rank]}),
    lambda: ranks.agree(devices_up=(True,), plans=7 + rank),
):
    try:
        tell()
        print("equal")
    except (ConfigError, RuntimeError) as error:
        print("differs:", error)
"""


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What rank 0 and rank 1 printed."""
    from concurrent.futures import ThreadPoolExecutor

    script = tmp_path_factory.mktemp("ranks") / "told_apart.py"
    script.write_text(TOLD_APART)
    port = str(free_port())
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda rank: run_program(sys.executable, script, rank, port), ("0", "1")))
    for process in done:
        assert process.returncode == 0, process.stderr
    return [[line for line in process.stdout.splitlines() if line and line[0].islower()] for process in done]


@pytest.mark.ranks
def test_ranks_hear_the_leader_and_know_each_others_cores(two_processes: list[list[str]]):
    for lines in two_processes:
        assert lines[:3] == ["cores [0, 1, 5]", "told by 0", "up False True"]


@pytest.mark.ranks
def test_the_rank_that_was_started_with_something_else_says_so(two_processes: list[list[str]]):
    leader, other = two_processes
    assert leader[3:] == ["equal", "equal"]
    assert other[3].startswith("differs: rank 1 has replicas with digest C, rank 0 has B: start every rank with the")
    assert other[4].startswith("differs: rank 1 planned otherwise than rank 0 (checksums 00000008 and 00000007)")
