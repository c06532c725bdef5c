"""Settings that once refused each other, served together: stock's tokens where nothing is quantized, and a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import MODEL, PROMPTS, REPLICAS, engine, greedy, token_ids

from ndp_device.checkpoint.files import model_digest
from ndp_device.replicas.loss_table import load_losses
from vllm_ndp.device_client.process import DeviceProcess
from vllm_ndp.lab.exact.live import replay_live
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.traces.trace import Trace

pytestmark = pytest.mark.vllm

TOKENS = 12
SLOW_GPU = {"gpu.hbm_bytes_per_s": 300_000_000_000}
"""With this GPU it pays to send the test model's hot experts to devices."""
FAST_CPU = {"host.memory_bytes_per_s": 10**13, "link.dma_launch_ps": 0, "link.dma_latency_ps": 0}
"""And here the CPU has a warm expert sooner than a device a cold one."""
FULL = {"hot_experts": 2, "warm_experts": 2, "cold_precision": "full"}
TWO = {"devices": 2, "replicas": str(REPLICAS)}


def run(directory: Path, settings: dict[str, Any], **options: Any) -> tuple[list[list[int]], dict[str, Any]]:
    with engine(settings=settings | {"record": str(directory)}, max_num_seqs=3, **options) as llm:
        tokens = token_ids(greedy(llm, PROMPTS, TOKENS))
        totals: dict[str, Any] = llm.collective_rpc("ndp_totals")[0]
    assert totals["fallback_pairs"] == totals["prefill_fallback_pairs"] == totals["sidecar_mismatches"] == 0
    return tokens, totals


def assert_replays(directory: Path, losses: LossTable) -> None:
    again = replay_live(Trace.load(directory, model_digest=model_digest(MODEL)), losses)
    assert len(again.steps) > TOKENS
    assert (again.fallback_steps, again.plan_mismatches) == (0, 0)
    assert again.identical


@pytest.fixture(scope="module")
def stock_tokens() -> list[list[int]]:
    with engine(max_num_seqs=3) as llm:
        return token_ids(greedy(llm, PROMPTS, TOKENS))


BESIDE = {
    "two devices with copies": {"devices": 2},
    "two devices with parts": {"devices": 2, "debug": {"device_experts": "split"}},
    "layers that do not wait": {"debug": {"gpu": "thread"}},
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_warm_experts_leave_stocks_tokens_beside(
    tmp_path: Path, stock_tokens: list[list[int]], beside: dict[str, Any]
) -> None:
    tokens, totals = run(tmp_path / "trace", FULL | beside)
    assert tokens == stock_tokens
    assert min(totals[f"{kind}_pairs"] for kind in ("hot", "warm", "cold")) > 0
    assert_replays(tmp_path / "trace", LossTable.nominal(4, 8))


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        (
            {
                "hot_experts": 4,
                "warm_experts": 1,
                "avg_bits": 2.0,
                "debug": {"device_copies": 1},
                "hardware_overrides": SLOW_GPU,
            },
            ("hot", "spilled", "warm", "cold"),
        ),
        ({"plan": "joint", "hot_experts": 1, "avg_bits": 2.0}, ("hot", "cold")),
        (
            {
                "plan": "joint",
                "hot_experts": 1,
                "avg_bits": 3.0,
                "debug": {"tiers": "gpu+host+device"},
                "hardware_overrides": FAST_CPU,
            },
            ("hot", "warm"),
        ),
    ],
    ids=["balanced over three tiers", "joint", "joint over all tiers"],
)
def test_plans_over_tiers_and_several_devices_replay_to_the_picosecond(
    tmp_path: Path, settings: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    _, totals = run(tmp_path / "trace", settings | TWO, dtype="bfloat16")
    assert min(totals[f"{kind}_pairs"] for kind in kinds) > 0
    assert_replays(tmp_path / "trace", LossTable.from_measured(*load_losses(REPLICAS, "relative")))


def test_prices_are_measured_on_devices_that_run_already_and_their_clocks_do_not_notice(tmp_path: Path) -> None:
    devices = [DeviceProcess.spawn(MODEL, REPLICAS, hardware_overrides=SLOW_GPU) for _ in range(2)]
    settings = {"hot_experts": 3, "avg_bits": 2.0, "debug": {"prices": "measured"}, "replicas": str(REPLICAS)}
    settings |= {"devices": [device.address for device in devices], "hardware_overrides": SLOW_GPU}
    try:
        _, totals = run(tmp_path / "trace", settings)
    finally:
        for device in devices:
            device.terminate()
    assert totals["cold_pairs"] > 0
    assert_replays(tmp_path / "trace", LossTable.from_measured(*load_losses(REPLICAS, "relative")))
