"""Waiting for what another thread or process brings about."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(so: Callable[[], T], seconds: float = 60.0, *, told: Callable[[], object] = str, pause_s: float = 0.01) -> T:
    """The first value of `so` that counts as true; an assertion with what `told` says where none comes."""
    end = time.monotonic() + seconds
    while not (found := so()):
        assert time.monotonic() < end, told() or "it did not come about"
        time.sleep(pause_s)
    return found
