"""The whole journey as `make demo` runs it: model, vLLM, plugin, device process, both clocks, one JSON line last."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).parent / "vllm-ndp"
KEYS = (
    *("plugin_active", "device_pid", "engine_pid", "moe_layers", "experts", "hot_experts", "avg_bits", "requests"),
    *("tokens", "hot_pairs", "cold_pairs", "fallback_pairs", "measured_tpot_ms", "simulated_tpot_us"),
    *("measured_import_s", "measured_start_s", "measured_generate_s", "texts"),
)


@pytest.mark.vllm
def test_demo_tells_one_json_object_where_it_is_asked_for():
    """8 prompts x 8 tokens; all but the first token of each are decode rows: 8 * 7 * 4 layers * 2 experts = 448."""
    environment = dict(os.environ)
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    done = subprocess.run(
        [PROGRAM, "demo", "--tokens", "8", "--json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert tuple(result) == KEYS
    assert result["plugin_active"] is True
    assert (result["moe_layers"], result["experts"], result["hot_experts"]) == (4, 8, 2)
    assert (result["requests"], result["tokens"], len(result["texts"])) == (8, 64, 8)
    assert 2.0 <= result["avg_bits"] <= 3.5  # 3, and half a bit more from four requests on
    assert result["hot_pairs"] + result["cold_pairs"] + result["fallback_pairs"] == 448
    assert result["hot_pairs"] > 0
    assert result["cold_pairs"] > 0
    assert result["measured_tpot_ms"] > 0
    assert result["simulated_tpot_us"] > 0
    assert min(result[f"measured_{part}_s"] for part in ("import", "start", "generate")) >= 0
    assert all(isinstance(text, str) and text for text in result["texts"])

    ours, table = done.stderr.splitlines()[:2]
    assert ours.startswith("vllm-ndp: starting vLLM")
    assert table.startswith("vllm-ndp: what is effective")  # and no line of torch, triton or vLLM before it
    assert "Warning" not in done.stderr
    assert result["device_pid"] != result["engine_pid"]
    assert not psutil.pid_exists(result["device_pid"])
    assert not psutil.pid_exists(result["engine_pid"])
