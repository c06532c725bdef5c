"""Whatever an engine of ours has started ends with the process that asked for it, at any moment of the start-up.

Each test starts a user's script and ends it at one moment. Everything below is stopped meanwhile, so that the moment is
the same on a busy machine; it goes on once the script is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from engines import MODEL, PATIENCE_S, device_processes, user_environment

pytestmark = pytest.mark.vllm

SCRIPT = """
import sys
from vllm import LLM

if __name__ == "__main__":
    LLM(sys.argv[1], quantization="ndp", kv_cache_memory_bytes=64 << 20, max_model_len=256, enforce_eager=True)
    print("ready", flush=True)
    input()
"""


def started_for(front: int) -> list[psutil.Process]:
    """Engine, workers and devices of a front, whoever their parent is by now: all of them inherit its mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_alive = process.pid != front and process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get("NDP_ENGINE_OWNER") == str(front):
                found.append(process)
    return found


def send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def has_worker(front: int, log: Path) -> bool:
    """A worker is two below the front, the engine between them."""
    below = psutil.Process(front).children(recursive=True)
    return any(process.ppid() in {other.pid for other in below} for process in below if process.num_threads() > 1)


def quantizes(front: int, log: Path) -> bool:
    return "building data-free ones once" in log.read_text(errors="replace")


def starts_a_device(front: int, log: Path) -> bool:
    return bool(device_processes(front))


def is_ready(front: int, log: Path) -> bool:
    return "ready\n" in log.read_text(errors="replace")


@pytest.mark.parametrize(
    ("ends", "moment"),
    [
        (signal.SIGKILL, has_worker),
        (signal.SIGTERM, quantizes),
        (signal.SIGKILL, quantizes),
        (signal.SIGKILL, starts_a_device),
        (signal.SIGKILL, is_ready),
    ],
)
def test_nothing_of_ours_outlives_its_script(ends: int, moment: Callable[[int, Path], bool], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    log, deadline = tmp_path / "log", time.monotonic() + PATIENCE_S
    with tempfile.TemporaryDirectory(prefix="run-") as runtime, log.open("wb") as output:
        environment = user_environment(NDP_CACHE_DIR=str(tmp_path / "cache"), XDG_RUNTIME_DIR=runtime)
        words = [sys.executable, tmp_path / "script.py", MODEL]
        front = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output)
        try:
            while not moment(front.pid, log):
                assert front.poll() is None, log.read_text(errors="replace")[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.01)
            below = started_for(front.pid)
            assert below
            send(below, signal.SIGSTOP)
            front.send_signal(ends)
            front.wait(PATIENCE_S)
        finally:
            front.kill()
            front.wait()
            send(started_for(front.pid), signal.SIGCONT)
        while (left := started_for(front.pid)) and time.monotonic() < deadline:
            time.sleep(0.2)
        send(left, signal.SIGKILL)
        assert left == []
        assert os.listdir(runtime) == []
