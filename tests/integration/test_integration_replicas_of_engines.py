"""Data parallelism: whole engines side by side on one device, offline and behind one server."""

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import one_engine
import openai
import pytest
from engines import (
    PATIENT_DEADLINE_MS,
    PROMPTS,
    free_port,
    stock_tokens_of,
    user_environment,
)
from served_model import serving

from vllm_ndp.device_client.process import DeviceProcess

pytestmark = [pytest.mark.vllm, pytest.mark.ranks]

TOKENS = 12
UNEVEN = (PROMPTS[:3], PROMPTS[3:])
"""Prompts of rank 0 and rank 1: one of them runs dry and then keeps step with the other without a request."""


def stock_tokens() -> dict[str, list[int]]:
    """Of stock vLLM in one process; its CPU build cannot run experts in data-parallel ranks at all."""
    return dict(zip(PROMPTS, stock_tokens_of(PROMPTS, TOKENS), strict=True))


def test_two_replicas_on_one_device_give_the_tokens_of_stock_vllm_and_count_their_own_requests_only(
    device: DeviceProcess,
) -> None:
    settings = {"hot_experts": 3, "cold_precision": "full", "devices": device.address}
    group = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(free_port())}

    def run(rank: int) -> dict[str, Any]:
        environment = group | {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)}
        return one_engine.run(settings, UNEVEN[rank], TOKENS, environment=environment)

    with ThreadPoolExecutor(2) as pool:
        offline, stock = list(pool.map(run, (0, 1))), stock_tokens()
    for prompts, said in zip(UNEVEN, offline, strict=True):
        assert said["tokens"][0] == [stock[prompt] for prompt in prompts]
        (totals,) = said["totals"]
        assert totals["prefills"] == len(prompts)
        assert totals["cold_pairs"] > 0
        assert totals["fallback_pairs"] == totals["sidecar_mismatches"] == 0
        for report in said["reports"][0]:
            decode = sum(report[f"{kind}_pairs"] for kind in ("hot", "spilled", "cold"))
            assert decode == (TOKENS - 1) * 4 * 2
            assert report["simulated_tpot_us"] > 0
            assert report["measured_tpot_ms"] > 0


def test_a_server_of_two_replicas_gives_the_tokens_of_stock_vllm(device: DeviceProcess, tmp_path: Path):
    port, stock, log = free_port(), stock_tokens(), tmp_path / "log"
    settings = {
        "hot_experts": 3,
        "cold_precision": "full",
        "devices": device.address,
        "deadline_ms": PATIENT_DEADLINE_MS,
    }
    options = ["--served-model-name", "tiny", "--data-parallel-size", "2", "--max-model-len", "512"]
    with serving(settings, [*options, "--max-num-seqs", "8"], port, user_environment(OMP_NUM_THREADS="1"), log):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300)

        def ask(prompt: str) -> Any:
            options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0}
            extra = {"ignore_eos": True, "return_token_ids": True}
            return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **options)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, PROMPTS * 2))
        for prompt, answer in zip(PROMPTS * 2, answers, strict=True):
            assert answer.choices[0].token_ids == stock[prompt]
            assert answer.kv_transfer_params["ndp"]["simulated_tpot_us"] > 0
            assert answer.kv_transfer_params["ndp"]["fallback_pairs"] == 0
        assert log.read_text(errors="replace").count("what is effective") == 2
        status = ask_server(port, "status")
        steps = [worker["totals"]["steps"] for worker in status["workers"]]
        assert len(steps) == 2
        assert min(steps) > 0
        assert len(status["finished"]) == len(answers)
        for answer in answers:
            (report,) = ask_server(port, f"requests/{answer.id}")["finished"].values()
            assert report == answer.kv_transfer_params["ndp"]


def ask_server(port: int, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/ndp/{path}", timeout=60) as answer:
        said = json.loads(answer.read())
    assert isinstance(said, dict)
    return said
