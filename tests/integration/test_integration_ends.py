"""Whatever an engine of ours has started ends with the process that asked for it, at any moment of the start-up.

Each test starts a user's script and ends it at one moment (benchmarks/ends.py, which has stock vLLM beside it).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest
from engines import IN_PROCESS, PATIENCE_S, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import ends

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGKILL, ends.has_worker),
        (signal.SIGTERM, ends.quantizes),
        (signal.SIGKILL, ends.quantizes),
        (signal.SIGKILL, ends.starts_a_device),
        (signal.SIGKILL, ends.is_ready),
    ],
)
def test_nothing_of_ours_outlives_its_script(
    number: int, moment: Callable[[ends.Run], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in IN_PROCESS:
        monkeypatch.delenv(name)
    left = ends.left_by("plugin", moment, number, PATIENCE_S)
    assert left == {"processes": {}, "files": []}
