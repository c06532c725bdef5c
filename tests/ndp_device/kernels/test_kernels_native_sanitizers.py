"""The kernels under the address and undefined-behaviour sanitizers, as a program of their own (kernel_check.cpp)."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from paths import ROOT


@pytest.mark.sanitizers
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a compiler")
def test_no_path_reads_or_writes_outside_its_buffers_or_relies_on_undefined_behaviour(tmp_path: Path) -> None:
    """Every path, 1 to 4 bits, one and two limbs, 10 awkward shapes; the sanitizers end it at their first find."""
    subprocess.run(
        ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DNDP_SANITIZE=address,undefined"],
        check=True,
        capture_output=True,
    )
    subprocess.run(["cmake", "--build", str(tmp_path), "--parallel", "2"], check=True, capture_output=True)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # ASan must come first
    done = subprocess.run([str(tmp_path / "kernel_check")], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"] == 0
    assert result["checks"] >= 80  # of one path
