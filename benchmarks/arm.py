"""An engine in a process of its own that answers questions, one line each: arms of a benchmark that take turns.

    the benchmark    Arm([sys.executable, __file__, "--arm", name, ...]).ask("measure")
    the arm          answer(lambda question: {...})         once its engine has served something

Engines print what they like: an answer is a line with a mark before it. Knows processes, and no measure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

_MARK = "ANSWER "
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


class Arm:
    def __init__(self, command: list[str], *, limit_s: float = 900, **environment: str) -> None:
        """Returns when the process is ready. Ends this program with the last words of one that is not.

        limit_s: for getting ready, and for each answer. environment: of what the caller's own does not name.
        """
        self._limit_s = limit_s
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the process)
        self._process = subprocess.Popen(
            command,
            env=_QUIET | environment | os.environ,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._answer()

    def ask(self, question: object = None) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Timer(self._limit_s, os.killpg, (self._process.pid, signal.SIGKILL))  # engines have processes
        late.start()
        try:
            for line in self._process.stdout:
                if line.startswith(_MARK):
                    found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                    return found
        finally:
            late.cancel()
        self._errors.seek(0)
        raise SystemExit(f"an engine ended:\n{self._errors.read()[-3000:]}")


def answer(act: Callable[[Any], Mapping[str, Any]]) -> None:
    """In the process of an arm: say that it is ready, then answer until there are no more questions."""
    print(f"{_MARK}{{}}", flush=True)
    for line in sys.stdin:
        print(_MARK + json.dumps(act(json.loads(line))), flush=True)
