"""One model run by ranks, stages, tiers and devices: tokens of stock vLLM, every pair once, a clock that replays.

A stage has a device, plans and a clock of its own; a request's report is of all stages. Stock vLLM's own CPU kernel
ignores its expert map, so stock in one process is the yardstick of expert parallelism, too.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from engines import (
    IN_PROCESS,
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
    replay_of,
    run_program,
    stock_tokens_of,
    token_ids,
    trace_of,
)

from ndp_device.common.errors import ConfigError
from vllm_ndp.cost_model.gpu_timing import PipelineClock
from vllm_ndp.device_client.process import DeviceProcess
from vllm_ndp.layer.split import DECODE_KINDS
from vllm_ndp.traces.trace import Trace

pytestmark = pytest.mark.vllm

RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
EXPERT_RANKS = RANKS | {"enable_expert_parallel": True}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
TOKENS, LAYERS, TOP_K = 16, 4, 2
IDENTITY: dict[str, Any] = {"hot_experts": 3, "cold_precision": "full"}
QUANTIZED: dict[str, Any] = {"avg_bits": 2.0, "replicas": str(REPLICAS)}
SLOW_GPU = {"gpu.hbm_bytes_per_s": 300_000_000_000}
"""With this GPU the test model's small experts are worth sending to the device, even from two GPUs."""
SLOW_CPU = {"host.memory_bytes_per_s": 2_000_000_000}
"""With this one a layer waits for its warm experts."""
FAST_CPU = {"host.memory_bytes_per_s": 10**13, "link.dma_launch_ps": 0, "link.dma_latency_ps": 0}
"""And here the CPU has a warm expert sooner than the device a cold one."""


class Ran(NamedTuple):
    """What one engine made of the prompts, twice; of each worker its totals and status; a trace for each stage."""

    passes: list[list[Any]]
    totals: list[dict[str, Any]]
    status: list[dict[str, Any]]
    traces: list[Trace]

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [output.kv_transfer_params["ndp"] for outputs in self.passes for output in outputs]


def run(directory: Path, settings: dict[str, Any], **options: Any) -> Ran:
    """The second pass comes from the prefix cache."""
    options = {"max_num_batched_tokens": 64} | options
    with engine(settings=settings | {"record": str(directory)}, **options) as llm:
        passes = [greedy(llm, LONG_PROMPTS, TOKENS) for _ in range(2)]
        totals, status = llm.collective_rpc("ndp_totals"), llm.collective_rpc("ndp_status")
    of_stages = [directory / "stage-0", directory / "stage-1"] if "pipeline_parallel_size" in options else [directory]
    return Ran(passes, totals, status, list(map(trace_of, of_stages)))


def check_pairs_and_replays(ran: Ran) -> None:
    """No pair was lost or counted twice, no plan was another one, and all times come out again."""
    for totals in ran.totals:
        assert totals["fallback_pairs"] == totals["prefill_fallback_pairs"] == totals["sidecar_mismatches"] == 0
    for report in ran.reports:
        assert sum(report[f"{kind}_pairs"] for kind in DECODE_KINDS) == (TOKENS - 1) * LAYERS * TOP_K
        assert len(report["simulated_token_us"]) == TOKENS - 1
        assert min(report["simulated_token_us"]) > 0
    for trace in ran.traces:
        replayed = replay_of(trace)
        assert len(replayed.steps) == ran.totals[0]["steps"]
        assert (replayed.fallback_steps, replayed.plan_mismatches) == (0, 0)
        assert replayed.identical


FEW = {"max_num_seqs": 3}
WAITS_NOT: dict[str, Any] = {"debug": {"gpu": "thread"}}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two ranks": ({}, RANKS),
    "ranks with whole experts": ({}, EXPERT_RANKS),
    "such ranks and warm experts": ({"warm_experts": 2}, EXPERT_RANKS),
    "such ranks and layers that do not wait": (WAITS_NOT | {"execution": "paper"}, EXPERT_RANKS),
    "two stages": ({}, STAGES),
    "no cold expert": ({"hot_experts": 2, "warm_experts": 6, "hardware_overrides": SLOW_CPU}, FEW),
    "warm experts and two devices with parts": (
        {"hot_experts": 2, "warm_experts": 2, "devices": 2, "debug": {"device_experts": "split"}},
        FEW,
    ),
    "warm experts and layers that do not wait": ({"hot_experts": 2, "warm_experts": 2} | WAITS_NOT, FEW),
}
"""What is set beside IDENTITY, and vLLM's options."""


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """The run of a layout, made once."""

    @cache
    def made(layout: str) -> Ran:
        settings, options = LAYOUTS[layout]
        return run(tmp_path_factory.mktemp("trace") / "run", IDENTITY | settings, **options)

    return made


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[] if o in (RANKS, FEW) else pytest.mark.ranks) for n, (_, o) in LAYOUTS.items()],
)
def test_in_full_precision_a_layout_gives_the_tokens_of_stock_vllm_counts_each_pair_once_and_replays(
    layout: str, identity: Callable[[str], Ran]
) -> None:
    settings, ran = IDENTITY | LAYOUTS[layout][0], identity(layout)
    assert [token_ids(outputs) for outputs in ran.passes] == [stock_tokens_of(LONG_PROMPTS, TOKENS)] * 2
    check_pairs_and_replays(ran)
    warm = settings.get("warm_experts", 0)
    for totals in ran.totals:
        assert totals["hot_pairs"] > 0
        assert (totals["warm_pairs"] > 100) == (warm > 0)
        assert (totals["cold_pairs"] > 0) == (settings["hot_experts"] + warm < 8)
    same = ("steps", "prefills", "row_checks", "migrated_experts", "kept_experts")  # ranks plan alike and count alike
    counted = [{k: v for k, v in totals.items() if k in same or k.endswith("_pairs")} for totals in ran.totals]
    told = counted[: len(ran.traces)]
    assert len(told) > 1 or counted == told * len(counted)
    assert counted[0]["row_checks"] > 0
    for kind in ("warm", "cold"):
        assert sum(report[f"{kind}_pairs"] for report in ran.reports) == sum(one[f"{kind}_pairs"] for one in told)
    assert {report["warm_experts"] for report in ran.reports} == {warm}
    assert {status["warm_experts"] for status in ran.status} == {warm}


EXPERT_BYTES = 3 * 128 * 256 * 4


@pytest.mark.parametrize(
    ("layout", "hot_bytes", "says"),
    [
        ("two ranks", LAYERS * 3 * EXPERT_BYTES // 2, "2, each 1/2 of every hot expert; rank 0"),
        pytest.param(
            *("ranks with whole experts", LAYERS * 2 * EXPERT_BYTES, "2, each 1/2 of the hot experts; rank 0 sends"),
            marks=pytest.mark.ranks,
        ),
    ],
)
def test_each_worker_holds_its_part_and_ranks_have_one_device(
    layout: str, hot_bytes: int, says: str, identity: Callable[[str], Ran]
) -> None:
    """Three hot experts on two ranks: one has two of a layer, the other one and a slot to spare."""
    first, second = (ran := identity(layout)).status
    assert first["hot_bytes"] == second["hot_bytes"] == hot_bytes
    assert first["ranks"].startswith(says)
    assert first["device_pid"] is not None
    assert "device_pid" not in second
    live = ran.traces[0].provenance.live
    assert live is not None
    assert live.num_gpus == 2
    assert live.whole_experts == (layout == "ranks with whole experts")


@pytest.mark.ranks
def test_each_stage_has_its_layers_and_a_device_of_its_own(identity: Callable[[str], Ran]) -> None:
    first, second = (ran := identity("two stages")).status
    assert first["moe_layers"] == second["moe_layers"] == LAYERS // 2
    assert first["hot_bytes"] == second["hot_bytes"] == LAYERS // 2 * 3 * EXPERT_BYTES
    assert len({first["device_pid"], second["device_pid"], None}) == 3
    assert first["ranks"] == "stage 0 of 2: a device, plan and clock of its own"
    lives = [trace.provenance.live for trace in ran.traces]
    assert [(live.stage, live.num_stages) for live in lives if live is not None] == [(0, 2), (1, 2)]


@pytest.mark.ranks
def test_the_reports_clock_is_that_of_the_stages_one_after_the_other(identity: Callable[[str], Ran]) -> None:
    """Composed again from the two traces: a request's last token is as late as its report says."""
    ran = identity("two stages")
    first, second = ran.traces
    assert np.array_equal(first.events["step"], second.events["step"])
    ends = [trace.events["simulated_start_ps"] + trace.events["simulated_step_ps"] for trace in ran.traces]
    took = [np.diff(of_stage, prepend=0) for of_stage in ends]
    clock, begun, tokens = PipelineClock(2), dict[int, int](), dict[int, list[int]]()
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
    assert len(ran.reports) == len(tokens)
    for request, report in enumerate(ran.reports):
        assert report["simulated_ttft_us"] == round((tokens[request][0] - begun[request]) / 1e6, 6)
        mean = (tokens[request][-1] - tokens[request][0]) / (TOKENS - 1) / 1e6
        assert report["simulated_tpot_us"] == pytest.approx(mean, abs=1e-6)


@pytest.mark.ranks
def test_a_lost_device_of_ranks_changes_no_token_in_full_precision() -> None:
    """What rank 0 computes instead is whole experts: its own half of them and the other's."""
    with engine(settings=IDENTITY, max_num_batched_tokens=64, **RANKS) as llm:
        pid = llm.collective_rpc("ndp_status")[0]["device_pid"]
        tokens = kill_in_the_middle(llm, LONG_PROMPTS, TOKENS, pid)
        leader, other = llm.collective_rpc("ndp_totals")
    assert tokens == stock_tokens_of(LONG_PROMPTS, TOKENS)
    assert leader["fallback_pairs"] > 0 == other["fallback_pairs"]


NARROW = {"gpu.hbm_bytes_per_s": 50_000_000_000}
BALANCED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "ranks with whole experts": (
        {"hot_experts": 5, "hardware_overrides": SLOW_GPU},
        EXPERT_RANKS,
        ("hot", "spilled", "cold"),
    ),
    "two stages, each with losses of its own": ({"hot_experts": 4}, STAGES, ("hot", "cold")),
    "three tiers and three devices": (
        {"hot_experts": 4, "warm_experts": 1, "devices": 3, "hardware_overrides": SLOW_GPU}
        | {"debug": {"bits_for": "request", "device_experts": {"copies": 1}}},
        FEW,
        ("hot", "spilled", "warm", "cold"),
    ),
    "slots narrower than what is offloaded, to two devices with halves": (
        {"hot_experts": 5, "slot_bits": 4, "devices": 2, "prefill": "streamed", "hardware_overrides": NARROW}
        | {"debug": {"offload_bits": 1, "device_experts": "split"}},
        FEW,
        ("hot", "spilled", "cold"),
    ),
    "slots of two bits": (
        {"hot_experts": 6, "slot_bits": 2, "warm_experts": 1, "avg_bits": 1.0, "execution": "paper"},
        FEW,
        ("hot", "warm", "cold", "prefill", "prefill_device"),
    ),
}
"""What is set, vLLM's options, and where pairs must have run."""


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[] if o is FEW else pytest.mark.ranks) for n, (_, o, _) in BALANCED.items()],
)
def test_a_quantized_layout_counts_each_pair_once_and_replays(layout: str, tmp_path: Path) -> None:
    """Ranks choose alike which hot experts leave; slots of two bits hold six experts in a third of what two take in
    float32."""
    settings, options, kinds = BALANCED[layout]
    ran = run(tmp_path / "trace", QUANTIZED | settings, **options)
    check_pairs_and_replays(ran)
    for totals in ran.totals:
        assert min(totals[f"{kind}_pairs"] for kind in kinds) > 0
    assert len({(totals["hot_pairs"], totals["spilled_pairs"]) for totals in ran.totals}) == len(ran.traces)
    if "two bits" in layout:
        assert ran.status[0]["slot_bits"] == 2
        assert ran.status[0]["hot_bytes"] < 2 * LAYERS * EXPERT_BYTES / 3
        assert ran.totals[0]["migrated_experts"] > 0 == ran.totals[0]["kept_experts"]
        assert ran.totals[0]["spilled_pairs"] == 0
    if "tiers" in layout:
        assert all(1.7 < report["avg_bits"] <= 2.0 for report in ran.reports)


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"plan": "joint"}, ("hot", "cold")),
        ({"avg_bits": 3.0, "plan": "joint+host", "hardware_overrides": FAST_CPU}, ("hot", "warm")),
    ],
    ids=["gpu and devices", "all tiers"],
)
def test_a_joint_plan_runs_live_and_replays_to_the_picosecond(
    tmp_path: Path, settings: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    """The GPU memory of K experts in bf16 holds more of them at widths of their own; plans and times come out again."""
    settings = QUANTIZED | {"hot_experts": 1, "devices": 2} | settings
    ran = run(tmp_path / "trace", settings, dtype="bfloat16", **FEW)
    check_pairs_and_replays(ran)
    (totals,) = ran.totals
    assert min(totals[f"{kind}_pairs"] for kind in kinds) > 0
    assert totals["spilled_pairs"] == totals["kept_experts"] == 0
    assert max(report["hot_experts"] for report in ran.reports) > settings["hot_experts"]
    plans = ran.traces[0].plans
    held = {16: 3 * 128 * 256 * 2} | {bits: 3 * 128 * 256 * bits // 8 for bits in (2, 3, 4)}
    taken = [
        sum(held[cell - 32] for cell in cells.ravel().tolist() if cell > 32)
        for cells in plans["cells"][plans["request"] == -1]
    ]
    assert 0 < max(taken) <= LAYERS * settings["hot_experts"] * held[16]


def test_prices_are_measured_on_devices_that_run_already_and_their_clocks_do_not_notice(tmp_path: Path) -> None:
    devices = [DeviceProcess.spawn(MODEL, REPLICAS, hardware_overrides=SLOW_GPU) for _ in range(2)]
    settings = QUANTIZED | {"hot_experts": 3, "debug": {"prices": "measured"}, "hardware_overrides": SLOW_GPU}
    try:
        ran = run(tmp_path / "trace", settings | {"devices": [device.address for device in devices]}, **FEW)
    finally:
        for device in devices:
            device.terminate()
    check_pairs_and_replays(ran)
    assert ran.totals[0]["cold_pairs"] > 0


@pytest.mark.ranks
def test_ranks_offload_the_same_experts_whatever_becomes_of_the_device_and_the_leader_stands_in_for_it() -> None:
    """Each rank chooses which hot experts run on the device; another choice on one of them would lose pairs."""
    settings = QUANTIZED | {"hot_experts": 6, "hardware_overrides": SLOW_GPU}
    with engine(settings=settings, **RANKS) as llm:
        greedy(llm, LONG_PROMPTS, TOKENS)
        leader, other = llm.collective_rpc("ndp_totals")
        assert leader["spilled_pairs"] == other["spilled_pairs"] > 0
        pid = llm.collective_rpc("ndp_status")[0]["device_pid"]
        after = kill_in_the_middle(llm, LONG_PROMPTS, TOKENS, pid)
        leader, other = llm.collective_rpc("ndp_totals")
    assert leader["hot_pairs"] == other["hot_pairs"]
    assert leader["fallback_pairs"] > 0 == other["fallback_pairs"]
    assert [len(tokens) for tokens in after] == [TOKENS] * len(PROMPTS)


@pytest.mark.ranks
def test_a_leader_that_finds_no_device_ends_every_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = {"cold_precision": "full", "devices": f"ipc://{tmp_path / 'nobody'}"}
    with pytest.raises(Exception, match="initialization failed"), engine(settings=settings, **RANKS):
        pass
    assert "rank 0 cannot start: no device answered at" in capfd.readouterr().err
    assert not device_processes()
    for child in multiprocessing.active_children():  # vLLM ends the other rank, and does not wait for it
        if "VllmWorker" in child.name:
            child.join(PATIENCE_S)
            assert not child.is_alive()


def config_of(layout: dict[str, Any], **settings: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    plugin: dict[str, Any] = {"quantization": "ndp", "additional_config": {"ndp": settings}}
    return EngineArgs(str(MODEL), max_model_len=128, **plugin, **layout).create_engine_config()


@pytest.mark.parametrize(
    ("layout", "settings", "wanted"),
    [
        (RANKS, {"plan": "joint"}, "'plan' 'joint' beside tensor or expert parallelism.* drop"),
        (RANKS, {"slot_bits": 4}, "'slot_bits' 4 beside tensor or expert parallelism.* drop"),
        (
            STAGES,
            {"policy": {"name": "static", "prior": str(MODEL / "prior.npy")}},
            "a prior of the whole model beside pipeline parallelism",
        ),
    ],
)
def test_settings_that_a_layout_has_no_way_for_are_refused_before_loading(
    layout: dict[str, Any], settings: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        config_of(layout, **settings)


def test_parts_that_the_kernel_cannot_take_are_refused_before_loading() -> None:
    from vllm_ndp.integration import compat

    config = config_of(RANKS)
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
    config = config_of(RANKS)
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
ranks = Ranks(holds_whole_experts=False)
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


@pytest.mark.ranks
def test_ranks_hear_the_leader_know_each_others_cores_and_the_one_that_was_started_otherwise_says_so(
    tmp_path: Path,
) -> None:
    (tmp_path / "told_apart.py").write_text(TOLD_APART)
    port = str(free_port())
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda rank: run_program(sys.executable, tmp_path / "told_apart.py", rank, port), "01"))
    assert [process.returncode for process in done] == [0, 0], done[0].stderr + done[1].stderr
    leader, other = ([line for line in one.stdout.splitlines() if line and line[0].islower()] for one in done)
    assert leader[:3] == other[:3] == ["cores [0, 1, 5]", "told by 0", "up False True"]
    assert leader[3:] == ["equal", "equal"]
    assert other[3].startswith("differs: rank 1 has replicas with digest C, rank 0 has B: start every rank with the")
    assert other[4].startswith("differs: rank 1 planned otherwise than rank 0 (checksums 00000008 and 00000007)")


STOCK = """
import sys
from vllm import LLM
if __name__ == "__main__":
    LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=64 << 20,
        block_size=32, pipeline_parallel_size=2, distributed_executor_backend="mp").generate("a", use_tqdm=False)
"""


@pytest.mark.families  # of stock vLLM alone, three processes: it can only change with the pinned version
def test_stock_vllm_still_needs_the_room_that_our_worker_makes(tmp_path: Path) -> None:
    """When this fails, vLLM runs two stages without compilation itself: drop `_make_room_for_the_stage_before`."""
    (tmp_path / "stock.py").write_text(STOCK)
    done = run_program(sys.executable, tmp_path / "stock.py", MODEL, OMP_NUM_THREADS="1", **IN_PROCESS)
    assert done.returncode != 0
    assert "assert self.intermediate_tensors is not None" in done.stderr + done.stdout
