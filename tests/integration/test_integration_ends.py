"""Whatever an engine of ours has started ends with the process that asked for it, at any moment of the start-up.

A run starts a user's script, a few lines around `vllm.LLM`, and stops everything below it at one moment, so that the
moment is the same on a busy machine. Then the script gets its signal, and the rest goes on. Left is what still lives
some time later, by what it is, and what lies in the private directory of the device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import IN_PROCESS, MODEL, PATIENCE_S, REPLICAS
from until import until

pytestmark = pytest.mark.vllm
SCRIPT = """
import json, sys
from vllm import LLM

if __name__ == "__main__":
    LLM(sys.argv[1], quantization="ndp", kv_cache_memory_bytes=64 << 20, max_model_len=256, enforce_eager=True,
        additional_config={"ndp": json.loads(sys.argv[2])})
    input()
"""
MARK = "NDP_TEST_ENDS"
"""In the environment of the script, whence all processes below it inherit it."""


class Run:
    """One script, and what was started for it, whoever the parent of that is by now."""

    def __init__(self, folder: Path, runtime: Path, settings: dict[str, Any]) -> None:
        """runtime: a short path, where the device's private directory will lie."""
        self._mark, self._folder, self.log, self.runtime = uuid.uuid4().hex, folder.resolve(), folder / "log", runtime
        (folder / "script.py").write_text(SCRIPT)
        ours = {"NDP_CACHE_DIR": str(folder / "cache"), "XDG_RUNTIME_DIR": str(runtime), MARK: self._mark}
        words = [sys.executable, str(folder / "script.py"), str(MODEL), json.dumps(settings)]
        with self.log.open("wb") as output:
            self.script = subprocess.Popen(
                words, cwd=folder, env=os.environ | ours, stdin=subprocess.PIPE, stdout=output, stderr=output
            )

    def below(self) -> list[psutil.Process]:
        """By the mark, or by the folder they work in: vLLM's processes write their title over their environment."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_alive = process.pid != self.script.pid and process.status() != psutil.STATUS_ZOMBIE
                if is_alive and (process.environ().get(MARK) == self._mark or process.cwd() == str(self._folder)):
                    found.append(process)
        return found

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end_at(self, moment: Callable[[Run], bool], number: int, grace_s: float) -> dict[str, Any]:
        """Processes that live so long after the script's end, by what they are; and names in the private directory."""
        try:
            self._wait_for(moment)
            self._stop_and_signal(number)
        finally:
            self.script.kill()
            self.script.wait()
            send(self.below(), signal.SIGCONT)
        end = time.monotonic() + grace_s
        while (left := self.below()) and time.monotonic() < end:
            time.sleep(0.2)
        found = {"processes": dict(Counter(map(what_is, left))), "files": sorted(os.listdir(self.runtime))}
        send(left, signal.SIGKILL)
        return found

    def _wait_for(self, moment: Callable[[Run], bool]) -> None:
        def has_come() -> bool:
            assert self.script.poll() is None, self.said()[-3000:]
            return moment(self)

        until(has_come, PATIENCE_S)

    def _stop_and_signal(self, number: int) -> None:
        below = self.below()
        assert below, "nothing had been started"
        send(below, signal.SIGSTOP)
        self.script.send_signal(number)
        self.script.wait(PATIENCE_S)


def send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def what_is(process: psutil.Process) -> str:
    """engine, worker, device, or Python's own helper."""
    with suppress(psutil.Error):
        words = " ".join(process.cmdline())
        for name, sign in (("device", "ndp_device"), ("engine", "EngineCore"), ("worker", "Worker"),
                           ("resource tracker", "resource_tracker")):  # fmt: skip
            if sign in words:
                return name
    return "process that has not said yet what it is"


def quantizes(run: Run) -> bool:
    return "building data-free ones" in run.said()


def starts_a_device(run: Run) -> bool:
    return any(what_is(process) == "device" for process in run.below())


@pytest.mark.programs  # a device alone: test_integration_cli.py
@pytest.mark.parametrize(
    ("number", "moment", "settings"),
    [
        pytest.param(signal.SIGTERM, quantizes, {}, id="quantizes"),  # the engine has a process of its own
        pytest.param(  # and here it is the script
            *(signal.SIGKILL, starts_a_device, {"replicas": str(REPLICAS)}), id="starts a device"
        ),
    ],
)
def test_nothing_of_ours_outlives_its_script(
    number: int, moment: Callable[[Run], bool], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in IN_PROCESS:
        if not settings or name != "VLLM_ENABLE_V1_MULTIPROCESSING":
            monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(prefix="run-") as runtime:
        left = Run(Path(folder), Path(runtime), settings).end_at(moment, number, PATIENCE_S)
    assert left == {"processes": {}, "files": []}
