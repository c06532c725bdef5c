"""Every script of `examples/` does what its first lines say, started as they say. `host_of_your_own.py` is started in
test_device_program.py, beside a device; the one that starts vLLM in tests/integration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

BIN = Path(sys.executable).parent
ELSEWHERE = {"host_of_your_own.py", "serve_offline.py"}
EXPECTED = {
    "plan_a_server.py": ("1 of 8 experts hot", "vllm serve mistralai/Mixtral-8x7B-v0.1 --quantization ndp"),
    "policy_of_your_own.py": ("prefill ", "sticky ", "oracle "),
    "ask_a_device.py": ("y (2, 128)", "simulated_ns"),
    "replay_a_recording.py": ("h100-ndp512", "h200-gen5", "context_aware"),
    "quantize_and_check.sh": ("32 experts, data-free", '"ok": true', '"serve": "vllm serve'),
}


def test_every_example_is_run_by_a_test() -> None:
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} == set(EXPECTED) | ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs_and_prints_what_it_is_about(name: str, tmp_path: Path) -> None:
    arguments = [ROOT / "models" / "tiny-mixtral", tmp_path / "replicas"] if name.endswith(".sh") else []
    program = "bash" if name.endswith(".sh") else sys.executable
    done = subprocess.run(
        [program, ROOT / "examples" / name, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    for text in EXPECTED[name]:
        assert text in done.stdout
