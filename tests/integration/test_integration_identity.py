"""With nothing quantized the plugin is stock vLLM, token by token, and its rows are where it believes they are."""

from __future__ import annotations

import pytest
from engines import MODEL, last_json
from in_this_process import run_here

pytestmark = pytest.mark.vllm


def test_verify_finds_every_token_identical_eager_and_compiled_chunked_and_cached() -> None:
    """4 passes (eager, compiled) x (chunked prefill, prefix cache) of 8 prompts x 32 tokens = 1024 tokens."""
    done = run_here("vllm-ndp", "verify", MODEL, "--hot-experts", "3")
    assert done.returncode == 0, done.stderr[-2000:]
    result = last_json(done.stdout)
    assert result["tokens_total"] == result["tokens_identical"] == 1024
    assert result["sidecar_mismatches"] == 0
    assert result["row_checks"] > 100
    assert result["cold_pairs"] > 1000, "the device must have computed something"
