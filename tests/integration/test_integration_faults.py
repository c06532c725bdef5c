"""A device that is killed or frozen in mid-generation costs time only: every request completes with the same tokens.

Identity mode in fp32, so that what the device computes and what the engine computes instead is the same arithmetic.
"""

import os
import signal
import threading
from collections import Counter
from typing import Any

import pytest
from engines import PATIENCE_S, PROMPTS, check_pairs, engine, greedy, token_ids
from until import until

from vllm_ndp.config import NdpSettings

pytestmark = pytest.mark.vllm
TOKENS = 160
DEFAULT_DEADLINE_MS = NdpSettings().deadline_ms


@pytest.fixture(scope="module")
def llm():  # type: ignore[no-untyped-def]
    with engine(settings={"cold_precision": "full", "hot_experts": 2, "deadline_ms": 300}) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(llm):  # type: ignore[no-untyped-def]
    """Tokens of a run to which nothing was done; on a busy machine some answers come later than 300 ms there too."""
    outputs = greedy(llm, PROMPTS, TOKENS)
    assert_every_decode_pair_is_in_the_report(outputs, TOKENS)
    return token_ids(outputs)


def assert_every_decode_pair_is_in_the_report(outputs, tokens: int) -> None:  # type: ignore[no-untyped-def]
    """All tokens but the first are decode rows of 4 layers and 2 experts; each was computed, some by the device."""
    for output in outputs:
        report = output.kv_transfer_params["ndp"]
        assert report["decode_rows"] == tokens - 1
        check_pairs(report, 4 * 2)
        assert report["cold_pairs"] > 0


def totals(llm):  # type: ignore[no-untyped-def]
    return llm.collective_rpc("ndp_totals")[0]


def device_pid(llm):  # type: ignore[no-untyped-def]
    return llm.collective_rpc("ndp_status")[0]["device_pid"]


def disturb_after(llm, num_steps: int, action) -> threading.Thread:  # type: ignore[no-untyped-def]
    """Run `action` from a thread once the engine has made so many steps: in mid-generation, wherever that is."""
    target = totals(llm)["steps"] + num_steps

    def wait_then_act() -> None:
        from vllm_ndp.integration.controller import current_controller

        until(lambda: current_controller().log.steps >= target, PATIENCE_S, pause_s=0.001)
        action()

    thread = threading.Thread(target=wait_then_act)
    thread.start()
    return thread


def wait_until_used_again(llm) -> None:  # type: ignore[no-untyped-def]
    def is_used() -> bool:
        before = totals(llm)
        greedy(llm, PROMPTS[:1], 4)
        after = totals(llm)
        return after["cold_pairs"] > before["cold_pairs"] and after["fallback_pairs"] == before["fallback_pairs"]

    until(is_used, pause_s=0.2)


def test_a_killed_device_costs_no_request_and_changes_no_token(llm, undisturbed) -> None:  # type: ignore[no-untyped-def]
    killed = device_pid(llm)
    thread = disturb_after(llm, 20, lambda: os.kill(killed, signal.SIGKILL))
    outputs = greedy(llm, PROMPTS, TOKENS)
    thread.join()
    assert token_ids(outputs) == undisturbed
    reports = [output.kv_transfer_params["ndp"] for output in outputs]
    assert sum(report["fallback_pairs"] for report in reports) > 0
    wait_until_used_again(llm)
    assert device_pid(llm) != killed, "an embedded device that died is started again"


def test_prompts_whose_plan_is_made_while_the_device_is_frozen_are_answered_without_it(llm, undisturbed) -> None:  # type: ignore[no-untyped-def]
    frozen = device_pid(llm)
    os.kill(frozen, signal.SIGSTOP)
    try:
        outputs = greedy(llm, PROMPTS, TOKENS)
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert token_ids(outputs) == undisturbed
    assert all(output.kv_transfer_params["ndp"]["cold_pairs"] == 0 for output in outputs)
    wait_until_used_again(llm)


def test_prompts_that_a_frozen_device_does_not_answer_are_no_decode(llm) -> None:  # type: ignore[no-untyped-def]
    """A request of one token has no decode row, so that none of its pairs is one of decode."""
    before = totals(llm)
    llm.reset_prefix_cache()
    greedy(llm, PROMPTS, 1)
    between = totals(llm)
    assert between["prefill_device_pairs"] > before["prefill_device_pairs"]
    llm.reset_prefix_cache()
    os.kill(device_pid(llm), signal.SIGSTOP)
    try:
        reports = [output.kv_transfer_params["ndp"] for output in greedy(llm, PROMPTS, 1)]
    finally:
        os.kill(device_pid(llm), signal.SIGCONT)
    causes = Counter(totals(llm)["fallback_causes"]) - Counter(between["fallback_causes"])
    assert sum(report["prefill_fallback_pairs"] for report in reports) == causes.total()
    assert causes["late"] > 0  # then the device is down, and what a prompt needs of it is streamed
    for report in reports:
        assert (report["fallback_pairs"], report["decode_rows"]) == (0, 0)
        check_pairs(report, 4 * 2)
    wait_until_used_again(llm)


SLOW_GPU = {"gpu.hbm_bytes_per_s": 300_000_000_000}
"""With it hot experts of the test model are worth sending, on every machine."""


@pytest.mark.parametrize(
    "prices",
    [
        {"hardware": None},
        {"hot_experts": 5, "hardware_overrides": SLOW_GPU, "devices": 2},
    ],
    ids=["by default", "of two devices to which hot experts are sent"],
)
def test_the_same_replicas_stand_in_for_a_dead_device_token_for_token(prices: dict[str, Any]) -> None:
    """fallback="same" with 2-bit experts: what the engine computes alone is what the device would have answered.

    Hot experts that would run on it to save time do so here, and prompts. Status and metrics say meanwhile that the
    device is down, and why.
    """
    defaults = {"hot_experts": 2, "avg_bits": 2.0, "fallback": "same", "deadline_ms": DEFAULT_DEADLINE_MS}
    with engine(settings=defaults | prices, disable_log_stats=False) as llm:
        for _ in range(2):  # the second time begins with the experts in place that the third begins with
            llm.reset_prefix_cache()
            with_device = greedy(llm, PROMPTS, 48)
        llm.reset_prefix_cache()
        pids = llm.collective_rpc("ndp_status")[0]["device_pids"]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            without = greedy(llm, PROMPTS, 48)
            device = llm.collective_rpc("ndp_live")[0]["device"]
            is_up = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:ndp_device_up"]
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        wait_until_used_again(llm)
        llm.reset_prefix_cache()
        thread = disturb_after(llm, 20, lambda: os.kill(pids[0], signal.SIGKILL))
        killed = greedy(llm, PROMPTS, 48)
        thread.join()
    assert (device["state"], is_up) == ("down", [0])
    assert device["reason"]
    before, reports = ([output.kv_transfer_params["ndp"] for output in outputs] for outputs in (with_device, without))
    assert all(report["cold_pairs"] == 0 and report["fallback_pairs"] > 0 for report in reports)
    assert_every_decode_pair_is_in_the_report(with_device, 48)
    if "hardware_overrides" in prices:
        assert sum(report["spilled_pairs"] for report in before) > 0
    for there, here in zip(before, reports, strict=True):  # no pair changed its weights, and each that moved is told
        assert (here["hot_pairs"], here["spilled_pairs"]) == (there["hot_pairs"], 0)
        assert here["fallback_pairs"] == there["cold_pairs"] + there["spilled_pairs"] + there["fallback_pairs"]
        assert here["prefill_fallback_pairs"] == there["prefill_device_pairs"] + there["prefill_fallback_pairs"]
    assert token_ids(without) == token_ids(with_device)
    assert token_ids(killed) == token_ids(with_device)
