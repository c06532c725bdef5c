"""Whatever an engine of ours has started ends with the process that asked for it, at any moment of the start-up.

Each test starts a user's script and ends it at one moment (ends.py).
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import ends
import pytest
from engines import IN_PROCESS, PATIENCE_S

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGTERM, ends.quantizes),
        (signal.SIGKILL, ends.starts_a_device),
    ],
)
def test_nothing_of_ours_outlives_its_script(
    number: int, moment: Callable[[ends.Run], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in IN_PROCESS:
        monkeypatch.delenv(name)
    left = ends.left_by(moment, number, PATIENCE_S)
    assert left == {"processes": {}, "files": []}
