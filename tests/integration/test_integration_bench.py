"""The benchmark a user would run: vLLM's own with the plugin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines import MODEL, VLLM_PROGRAM, run_program

pytestmark = [pytest.mark.vllm, pytest.mark.programs]


def test_vllm_bench_throughput_runs_with_the_plugin(tmp_path: Path):
    result_file = tmp_path / "result.json"
    done = run_program(
        *(VLLM_PROGRAM, "bench", "throughput", "--model", MODEL, "--quantization", "ndp"),
        *("--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "12", "--num-prompts", "8"),
        *("--max-model-len", "128", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--enforce-eager", "--output-json", result_file),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "vllm-ndp: what is effective" in done.stderr
    assert "tokens/s" in done.stdout
    result = json.loads(result_file.read_text())
    assert result["num_requests"] == 8
    assert result["tokens_per_second"] > 0
