"""The plugin installed but not asked for: vLLM as if it were not there."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import MODEL, PROMPTS, engine, greedy, last_json, run_program
from in_this_process import run_here

pytestmark = pytest.mark.vllm

PROGRAM = Path(__file__).with_name("generate_tokens.py")


def generate(**environment: str) -> dict[str, Any]:
    done = run_program(sys.executable, PROGRAM, MODEL, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *_ = (line for line in done.stdout.splitlines() if line.startswith("{"))
    assert "vllm-ndp" not in done.stdout.partition(first)[0]
    return json.loads(first)


def test_a_plugin_that_nobody_asked_for_leaves_worker_methods_and_tokens_and_starts_nothing() -> None:
    """Once no plugin is loaded at all, and once every installed one is, ours among them."""
    without, installed = generate(VLLM_PLUGINS=""), generate()
    assert without["our_modules"] == []
    assert "vllm_ndp.integration.plugin" in installed["our_modules"]
    for name in ("worker", "moe_methods", "connector", "devices", "tokens"):
        assert installed[name] == without[name]
    assert installed["worker"].startswith("vllm.")
    assert installed["moe_methods"]
    assert not any("Ndp" in method for method in installed["moe_methods"])
    assert installed["devices"] == 0
    assert installed["connector"] is False
    assert "vllm_ndp.integration.controller" not in installed["our_modules"]
    assert "vllm_ndp.device_client.client" not in installed["our_modules"]
    assert all(len(tokens) == 16 for tokens in installed["tokens"])


# -- With nothing quantized the plugin is stock vLLM, token by token, and its rows are where it believes they are ------


def test_verify_finds_every_token_identical_eager_and_compiled_chunked_and_cached() -> None:
    """4 passes (eager, compiled) x (chunked prefill, prefix cache) of 8 prompts x 32 tokens = 1024 tokens."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()  # that of an engine which failed in a test before: stock vLLM has no connector
    done = run_here("vllm-ndp", "verify", MODEL, "--hot-experts", "3")
    assert done.returncode == 0, done.stderr[-2000:]
    result = last_json(done.stdout)
    assert result["tokens_total"] == result["tokens_identical"] == 1024
    assert result["sidecar_mismatches"] == 0
    assert result["row_checks"] > 100
    assert result["cold_pairs"] > 1000, "the device must have computed something"


# -- In bf16 the plugin is close to stock vLLM, not equal: cold experts round elsewhere. How close is measured here ----


TOKENS = 48


def logprobs(llm, prompts):  # type: ignore[no-untyped-def]
    """[prompt][token] log-probabilities of the greedy choices, and the choices."""
    outputs = greedy(llm, prompts, TOKENS, logprobs=5)
    return [
        [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs]
        for output in outputs
    ], [list(output.outputs[0].token_ids) for output in outputs]


def distances(mine, stock, my_ids, stock_ids):  # type: ignore[no-untyped-def]
    """|d| over the tokens in both top-5 lists, while both continuations are still the same."""
    found = []
    for a, b, ids_a, ids_b in zip(mine, stock, my_ids, stock_ids, strict=True):
        for step_a, step_b, id_a, id_b in zip(a, b, ids_a, ids_b, strict=True):
            found += [abs(step_a[token] - step_b[token]) for token in step_a.keys() & step_b.keys()]
            if id_a != id_b:
                break
    return np.array(found)


@pytest.fixture(scope="module")
def stock():  # type: ignore[no-untyped-def]
    with engine(dtype="bfloat16") as llm:
        return logprobs(llm, PROMPTS)


def test_bf16_logprobs_stay_close_to_stock_with_a_full_precision_device(stock) -> None:  # type: ignore[no-untyped-def]
    with engine(dtype="bfloat16", settings={"cold_precision": "full", "hot_experts": 2}) as llm:
        mine, my_ids = logprobs(llm, PROMPTS)
    distance = distances(mine, stock[0], my_ids, stock[1])
    assert len(distance) > 200
    assert distance.mean() <= 0.02
    assert np.quantile(distance, 0.98) <= 0.12


def test_all_experts_hot_is_stock_token_for_token_in_bf16(stock) -> None:  # type: ignore[no-untyped-def]
    with engine(dtype="bfloat16", settings={"hot_experts": 8}) as llm:
        mine, my_ids = logprobs(llm, PROMPTS)
    assert my_ids == stock[1]
    assert distances(mine, stock[0], my_ids, stock[1]).max() == 0
