"""The shared-memory transport and its thread under sanitizers: their own tests, once more."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nanobind
import pytest
from paths import ROOT

THREADED = (
    "vllm_ndp/device_client/test_device_without_codec.py",
    "vllm_ndp/device_client/test_device_sender_thread.py",
)
TESTS = {
    "address,undefined": (
        "ndp_device/transport/test_device_shm.py",
        "ndp_device/transport/test_device_layer_messages.py",
        "ndp_device/transport/test_device_shm_sockets.py",
        "ndp_device/protocol/test_device_codec.py",
        *THREADED,
    ),
    "thread": THREADED,
}
RUNTIMES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
RUN = """
import importlib.util, sys
import pytest
spec = importlib.util.spec_from_file_location("ndp_device.transport._shm", sys.argv[1])
sys.modules["ndp_device.transport._shm"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


ACCESS = re.compile(
    r"^  (?:Previous )?(?:atomic )?(?:read|write) of size .*\n((?:    #.*\n)+)", re.MULTILINE | re.IGNORECASE
)


def both_are_ours(report: str) -> bool:
    """Of a race: Python, numpy and ZeroMQ are built without the sanitizer, which does not see how these agree."""
    return ["transport/csrc" in stack for stack in ACCESS.findall(report)] == [True, True]


def runtime(name: str) -> str:
    return subprocess.run(
        ["c++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.sanitizers
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a compiler")
@pytest.mark.parametrize("sanitizers", TESTS)
def test_whatever_the_other_side_writes_no_byte_outside_a_buffer_is_touched_and_threads_do_not_race(
    tmp_path: Path, sanitizers: str
) -> None:
    subprocess.run(
        [
            *("cmake", "-S", str(ROOT), "-B", str(tmp_path), f"-DNDP_SANITIZE={sanitizers}"),
            *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"),
        ],
        check=True,
        capture_output=True,
    )
    subprocess.run(["cmake", "--build", str(tmp_path), "--target", "_shm"], check=True, capture_output=True)
    environment = os.environ | {
        "LD_PRELOAD": " ".join(map(runtime, (*RUNTIMES[sanitizers], "libstdc++.so.6"))),
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={tmp_path}/found",  # Python itself leaks
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={tmp_path}/found",
        "TSAN_OPTIONS": f"report_signal_unsafe=0:exitcode=0:log_path={tmp_path}/found",
    }
    (module,) = tmp_path.glob("_shm.*.so")
    tests = [str(ROOT / "tests" / name) for name in TESTS[sanitizers]]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(module), *tests], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    found = "\n".join(path.read_text() for path in tmp_path.glob("found*"))
    if sanitizers == "thread":
        found = "\n".join(filter(both_are_ours, found.split("=" * 18)))
    assert not found, found
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
