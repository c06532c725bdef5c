"""The benchmarks a user would run: vLLM's own with the plugin, and ours with both arms."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from engines import MODEL, PATIENT_DEADLINE_MS, ROOT, VLLM_PROGRAM, last_json, run_program

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


def test_our_throughput_benchmark_prints_both_clocks_of_both_arms():
    done = run_program(
        *(sys.executable, ROOT / "benchmarks" / "benchmark_throughput.py", "--rounds", "1", "--prompts", "2"),
        *(
            "--batch",
            "2",
            "--input-len",
            "16",
            "--output-len",
            "8",
            "--settings",
            json.dumps({"deadline_ms": PATIENT_DEADLINE_MS}),
        ),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # each arm has a process of its own already
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = last_json(done.stdout)
    assert result["model"] == "tiny-mixtral"
    assert result["measured_stock_tokens_per_s"] > 0
    assert result["measured_ndp_tokens_per_s"] > 0
    assert result["measured_ratio"] == pytest.approx(
        result["measured_ndp_tokens_per_s"] / result["measured_stock_tokens_per_s"]
    )
    assert result["simulated_tpot_us"] > 0
    assert result["simulated_ttft_us"] > 0
    assert "measured tokens/s" in done.stdout
    assert "simulated TPOT us" in done.stdout
