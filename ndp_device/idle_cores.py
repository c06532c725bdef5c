"""Whether the cores that this process may use have time that no other program wants. Knows /proc/stat and a clock.

Asked before work that nobody waits for. A lower priority would not do: the kernel does not let a thread of an ordinary
user take it back. Then a request that waits for work at the lowest priority waits for all other programs.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

OTHERS_MAY_USE = 0.25
"""Part of our cores' time that others may use. A guess: below half of two cores, so that one busy neighbour is seen."""

_SHORTEST_S, _LONGEST_S = 0.1, 1.0  # ticks are 10 ms; what was long ago says nothing about now


class Look(NamedTuple):
    """Seconds since some beginning: the clock's, those our cores were busy, those this process used."""

    at: float
    busy: float
    own: float


def look_at_cores() -> Look:
    """Where /proc/stat does not tell, every core counts as busy all the time."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    at = time.monotonic()
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        mine = [list(map(int, words[1:9])) for words in lines if words and words[0] in cores]
    except (OSError, ValueError):
        mine = []
    # user nice system idle iowait irq softirq steal
    ticks = sum(sum(times) - times[3] - times[4] for times in mine)
    known = len(mine) == len(cores) and any(times[3] for times in mine)
    return Look(at, ticks / os.sysconf("SC_CLK_TCK") if known else at * len(cores), time.process_time())


class IdleCores:
    """`are_idle()` looks at what was between this look and the last one."""

    def __init__(self) -> None:
        self._last = look_at_cores()
        self._quiet = False

    def are_idle(self) -> bool:
        now = look_at_cores()
        elapsed = now.at - self._last.at
        if elapsed < _SHORTEST_S:
            return self._quiet
        others = (now.busy - self._last.busy) - (now.own - self._last.own)
        share = others / (elapsed * len(os.sched_getaffinity(0)))
        self._quiet = elapsed <= _LONGEST_S and share < OTHERS_MAY_USE
        self._last = now
        return self._quiet
