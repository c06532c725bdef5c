"""Plans over tiers, live: hot experts on the GPU, warm ones on the host's CPU, cold ones on one device or two."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engines import MODEL, PROMPTS, REPLICAS, engine, greedy, stock_tokens_of, token_ids

from ndp_device.checkpoint.files import model_digest
from ndp_device.replicas.format import load_losses
from vllm_ndp.device_client.process import DeviceProcess
from vllm_ndp.integration.report import PAIR_KINDS
from vllm_ndp.lab.exact.live import replay_live
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.traces.trace import Trace

pytestmark = pytest.mark.vllm

SLOW_GPU = {"gpu.hbm_bytes_per_s": 300_000_000_000}
"""With this GPU the test model's small experts are worth sending to the device."""
SLOW_CPU = {"host.memory_bytes_per_s": 2_000_000_000}
"""With this one a layer waits for its warm experts."""
FAST_CPU = {"host.memory_bytes_per_s": 10**13, "link.dma_launch_ps": 0, "link.dma_latency_ps": 0}
"""And here the CPU has a warm expert sooner than the device a cold one."""
TWO = {"devices": 2, "replicas": str(REPLICAS)}
TOKENS, LAYERS, TOP_K = 12, 4, 2


class Ran(NamedTuple):
    """What one engine made of the prompts: together, and then the last one again, which the prefix cache knows."""

    tokens: list[list[int]]
    reports: list[dict[str, Any]]
    totals: dict[str, Any]
    status: dict[str, Any]


def run(directory: Path, settings: dict[str, Any], **options: Any) -> Ran:
    with engine(settings={**settings, "record": str(directory)}, **options) as llm:
        outputs = greedy(llm, PROMPTS, TOKENS) + greedy(llm, PROMPTS[-1:], TOKENS)
        totals, status = llm.collective_rpc("ndp_totals")[0], llm.collective_rpc("ndp_status")[0]
    reports = [output.kv_transfer_params["ndp"] for output in outputs]
    return Ran(token_ids(outputs), reports, totals, status)


def replayed_to_the_picosecond(directory: Path, losses: LossTable) -> bool:
    again = replay_live(Trace.load(directory, model_digest=model_digest(MODEL)), losses)
    assert len(again.steps) > TOKENS
    assert (again.fallback_steps, again.plan_mismatches) == (0, 0)
    return again.identical


@pytest.fixture(scope="module")
def stock_tokens() -> list[list[int]]:
    tokens = stock_tokens_of(PROMPTS, TOKENS)
    return [*tokens, tokens[-1]]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"hot_experts": 3, "warm_experts": 2}, {"max_num_batched_tokens": 48, "enable_prefix_caching": True}),
        ({"hot_experts": 2, "warm_experts": 6, "hardware_overrides": SLOW_CPU}, {}),
        ({"hot_experts": 2, "warm_experts": 2, "devices": 2, "debug": {"device_experts": "split"}}, {}),
        ({"hot_experts": 2, "warm_experts": 2, "debug": {"gpu": "thread"}}, {}),
    ],
    ids=[
        "all three tiers, chunked",
        "no cold expert",
        "two devices with parts",
        "layers that do not wait",
    ],
)
def test_in_full_precision_warm_experts_leave_stocks_tokens_and_their_run_replays(
    tmp_path: Path, stock_tokens: list[list[int]], settings: dict[str, Any], options: dict[str, Any]
) -> None:
    ran = run(tmp_path / "trace", {**settings, "cold_precision": "full"}, max_num_seqs=3, **options)
    assert ran.tokens == stock_tokens
    assert min(ran.totals["hot_pairs"], ran.totals["warm_pairs"] - 100) > 0
    assert (ran.totals["cold_pairs"] > 0) == (settings["hot_experts"] + settings["warm_experts"] < 8)
    assert ran.totals["fallback_pairs"] == ran.totals["sidecar_mismatches"] == 0
    for report in ran.reports:
        assert sum(report[f"{kind}_pairs"] for kind in ("hot", "warm", "cold")) == (TOKENS - 1) * LAYERS * TOP_K
        assert report["warm_experts"] == settings["warm_experts"]
    assert sum(report["warm_pairs"] for report in ran.reports) == ran.totals["warm_pairs"]
    assert ran.status["warm_experts"] == settings["warm_experts"]
    assert ran.status["warm"] == "the host's CPU, full precision, kernel native"
    assert replayed_to_the_picosecond(tmp_path / "trace", LossTable.nominal(LAYERS, 8))


def test_a_balanced_run_over_three_tiers_replays_to_the_picosecond(tmp_path: Path) -> None:
    """Hot experts leave the GPU for a device only where the host's CPU does not take longer than both."""
    settings = {
        "hot_experts": 4,
        "warm_experts": 1,
        "avg_bits": 2.0,
        "debug": {"bits_for": "request", "device_experts": {"copies": 1}},
        "hardware_overrides": SLOW_GPU,
    }
    ran = run(tmp_path / "trace", settings | TWO, max_num_seqs=3)
    assert ran.totals["fallback_pairs"] == ran.totals["prefill_fallback_pairs"] == 0
    assert min(ran.totals[f"{kind}_pairs"] for kind in ("hot", "spilled", "warm", "cold")) > 0
    assert all(1.7 < report["avg_bits"] <= 2.0 for report in ran.reports)
    for report in ran.reports:
        kinds = [report[f"{kind}_pairs"] for kind in PAIR_KINDS if not kind.startswith("prefill")]
        assert sum(kinds) == (TOKENS - 1) * LAYERS * TOP_K
    losses = LossTable.from_measured(*load_losses(REPLICAS, "relative"))
    assert replayed_to_the_picosecond(tmp_path / "trace", losses)


def test_hot_slots_at_two_bits_hold_more_experts_in_the_same_bytes_and_their_run_replays(tmp_path: Path) -> None:
    """Six experts of a layer in a third of what two take in float32. All 8 at 4 bits leave nothing to the device."""
    settings = {"hot_experts": 6, "slot_bits": 2, "warm_experts": 1, "avg_bits": 1.0, "replicas": str(REPLICAS)}
    ran = run(tmp_path / "trace", {**settings, "execution": "paper"}, max_num_seqs=3)
    assert ran.status["slot_bits"] == 2
    assert ran.status["hot_bytes"] < 2 * LAYERS * 3 * 128 * 256 * 4 / 3
    assert min(ran.totals[f"{kind}_pairs"] for kind in ("hot", "warm", "cold", "prefill", "prefill_device")) > 0
    assert ran.totals["migrated_experts"] > 0 == ran.totals["kept_experts"]
    assert ran.totals["fallback_pairs"] == ran.totals["spilled_pairs"] == 0
    losses = LossTable.from_measured(*load_losses(REPLICAS, "relative"))
    assert replayed_to_the_picosecond(tmp_path / "trace", losses)


def test_slots_narrower_than_what_is_offloaded_are_balanced_and_replay(tmp_path: Path) -> None:
    settings = {
        "hot_experts": 5,
        "slot_bits": 4,
        "avg_bits": 2.0,
        "debug": {"offload_bits": 1},
        "replicas": str(REPLICAS),
    }
    more = {"prefill": "streamed", "hardware_overrides": {"gpu.hbm_bytes_per_s": 50_000_000_000}}
    ran = run(tmp_path / "trace", settings | more, max_num_seqs=3)
    assert min(ran.totals[f"{kind}_pairs"] for kind in ("hot", "spilled", "cold")) > 0
    losses = LossTable.from_measured(*load_losses(REPLICAS, "relative"))
    assert replayed_to_the_picosecond(tmp_path / "trace", losses)


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({"hot_experts": 1, "avg_bits": 2.0, "plan": "joint"}, ("hot", "cold")),
        (
            {
                "hot_experts": 1,
                "avg_bits": 3.0,
                "plan": "joint+host",
                "hardware_overrides": FAST_CPU,
            },
            ("hot", "warm"),
        ),
    ],
    ids=["gpu and devices", "all tiers"],
)
def test_a_joint_plan_runs_live_and_replays_to_the_picosecond(
    tmp_path: Path, settings: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    """The GPU memory of K experts in bf16 holds more of them at widths of their own; plans and times come out again."""
    options = {"max_num_seqs": 3, "dtype": "bfloat16"}
    ran = run(tmp_path / "trace", settings | TWO, **options)
    assert min(ran.totals[f"{kind}_pairs"] for kind in kinds) > 0
    assert ran.totals["fallback_pairs"] == ran.totals["spilled_pairs"] == ran.totals["kept_experts"] == 0
    assert max(report["hot_experts"] for report in ran.reports) > settings["hot_experts"]
    for report in ran.reports:
        pairs = [report[f"{kind}_pairs"] for kind in PAIR_KINDS if not kind.startswith("prefill")]
        assert sum(pairs) == (TOKENS - 1) * LAYERS * TOP_K
    trace = Trace.load(tmp_path / "trace", model_digest=model_digest(MODEL))
    placed = trace.plans["cells"][trace.plans["request"] == -1]
    held = {16: 3 * 128 * 256 * 2} | {bits: 3 * 128 * 256 * bits // 8 for bits in (2, 3, 4)}
    taken = [sum(held[cell - 32] for cell in cells.ravel().tolist() if cell > 32) for cells in placed]
    assert 0 < max(taken) <= LAYERS * settings["hot_experts"] * held[16]
    losses = LossTable.from_measured(*load_losses(REPLICAS, "relative"))
    assert replayed_to_the_picosecond(tmp_path / "trace", losses)


def test_prices_are_measured_on_devices_that_run_already_and_their_clocks_do_not_notice(tmp_path: Path) -> None:
    devices = [DeviceProcess.spawn(MODEL, REPLICAS, hardware_overrides=SLOW_GPU) for _ in range(2)]
    settings = {"hot_experts": 3, "avg_bits": 2.0, "debug": {"prices": "measured"}, "replicas": str(REPLICAS)}
    settings |= {"devices": [device.address for device in devices], "hardware_overrides": SLOW_GPU}
    try:
        ran = run(tmp_path / "trace", settings, max_num_seqs=3)
    finally:
        for device in devices:
            device.terminate()
    assert ran.totals["cold_pairs"] > 0 == ran.totals["fallback_pairs"]
    losses = LossTable.from_measured(*load_losses(REPLICAS, "relative"))
    assert replayed_to_the_picosecond(tmp_path / "trace", losses)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"plan": "joint"}, "'plan' 'joint' beside tensor or expert parallelism.* drop"),
        ({"slot_bits": 4}, "'slot_bits' 4 beside tensor or expert parallelism.* drop"),
    ],
)
def test_tiers_beside_ranks_that_split_layers_are_refused_before_loading(settings: dict[str, Any], wanted: str) -> None:
    from vllm import EngineArgs

    from ndp_device.common.errors import ConfigError

    options = {"tensor_parallel_size": 2, "max_model_len": 128, "additional_config": {"ndp": settings}}
    with pytest.raises(ConfigError, match=wanted):
        EngineArgs(model=str(MODEL), quantization="ndp", **options).create_engine_config()


def test_slots_of_eight_bits_are_refused_where_the_replicas_have_none() -> None:
    from ndp_device.common.errors import ConfigError
    from ndp_device.kernels import load_kernel
    from vllm_ndp.integration.quantized_slots import ReplicaFill

    replicas = MODEL.with_name(f"{MODEL.name}-replicas")
    with pytest.raises(ConfigError, match=r"'slot_bits' is 8, the replicas in .* have \[1, 2, 3, 4\] bits: run"):
        ReplicaFill(MODEL, replicas, 8, load_kernel("reference"), range(1), {})
