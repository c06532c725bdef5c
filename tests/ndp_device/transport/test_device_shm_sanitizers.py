"""The shared-memory transport under the address and undefined-behaviour sanitizers: its own tests, once more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

TESTS = (
    "transport/test_device_shm.py",
    "transport/test_device_layer_messages.py",
    "transport/test_device_shm_sockets.py",
    "protocol/test_device_codec.py",
    "transport/test_device_fragments.py",
)
RUN = """
import importlib.util, sys
import pytest
spec = importlib.util.spec_from_file_location("ndp_device.transport._shm", sys.argv[1])
sys.modules["ndp_device.transport._shm"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def runtime(name: str) -> str:
    return subprocess.run(
        ["c++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.sanitizers
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a compiler")
def test_whatever_the_other_side_writes_no_byte_outside_a_buffer_is_touched(tmp_path: Path) -> None:
    nanobind = pytest.importorskip("nanobind")
    subprocess.run(
        [
            *("cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DNDP_SANITIZE=ON"),
            *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"),
        ],
        check=True,
        capture_output=True,
    )
    subprocess.run(["cmake", "--build", str(tmp_path), "--target", "_shm"], check=True, capture_output=True)
    environment = os.environ | {
        "LD_PRELOAD": " ".join(map(runtime, ("libasan.so", "libubsan.so", "libstdc++.so.6"))),
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={tmp_path}/found",  # Python itself leaks
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={tmp_path}/found",
    }
    (module,) = tmp_path.glob("_shm.*.so")
    tests = [str(ROOT / "tests" / "ndp_device" / name) for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(module), *tests], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    found = "\n".join(path.read_text() for path in tmp_path.glob("found*"))
    assert not found, found
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
