"""A server that is told nothing sizes itself, says so, and what it says by hand is the same server."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from engines import REPLICAS
from test_integration_refusals import configure

from vllm_ndp.operating.sizing import KV_BLOCK

pytestmark = pytest.mark.vllm

TOLD: dict[str, Any] = {"replicas": str(REPLICAS)}


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    lines = capfd.readouterr().err.splitlines()
    return [line.removeprefix("vllm-ndp: ") for line in lines if line.startswith("vllm-ndp: ")]


def test_a_server_that_is_told_nothing_sizes_itself_and_says_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    config = configure(additional_config={"ndp": TOLD, "other": 1}, max_num_seqs=2)
    chosen = config.additional_config["ndp"]
    assert chosen["hot_experts"] in (0, 4)
    assert chosen["avg_bits"] == 4.0
    per_token = 4 * 2 * 2 * 32 * 2
    assert config.cache_config.kv_cache_memory_bytes == pytest.approx((2 * 128 + KV_BLOCK) * per_token, abs=2)
    sized, expected, by_hand = said(capfd)
    assert sized.startswith("sized to ")
    assert "% of an expert's output" in expected
    words = shlex.split(by_hand.removeprefix("by hand: "))
    given = json.loads(words[words.index("--additional-config") + 1])["ndp"]

    again = configure(additional_config={"ndp": TOLD | given, "other": 1}, kv_cache_memory_bytes=int(words[1]))
    assert again.additional_config == config.additional_config
    assert again.cache_config.kv_cache_memory_bytes == config.cache_config.kv_cache_memory_bytes
    assert said(capfd) == []


@pytest.mark.parametrize("given", [{"hot_experts": 2}, {"hardware": "h100-ndp512"}, {"cold_precision": "full"}])
def test_whoever_says_what_is_held_chooses_all_of_it(given: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    config = configure(additional_config={"ndp": given})
    assert config.additional_config == {"ndp": given}
    assert config.cache_config.kv_cache_memory_bytes is None
    assert said(capfd) == []


def test_a_kv_cache_that_was_given_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    config = configure(additional_config={"ndp": TOLD}, kv_cache_memory_bytes=1 << 20)
    assert config.cache_config.kv_cache_memory_bytes == 1 << 20
    assert "--kv-cache-memory-bytes" not in said(capfd)[2]


def test_a_choice_that_leaves_measured_prices_nothing_to_decide_is_not_made(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a hot expert and with streamed prompts: whoever asked for the prices keeps the hot ones."""
    given = TOLD | {"prefill": "streamed", "debug": {"prices": "measured"}}
    config = configure(additional_config={"ndp": given})
    hot = config.additional_config["ndp"].get("hot_experts")
    assert hot == 4 or (hot is None and "not sized to this machine: " in said(capfd)[0])
