"""Who spends processor time: every thread below a process, as Linux counts it.

Nothing is attached to the threads and nothing has to be installed: /proc/PID/task/TID/schedstat says in nanoseconds how
long a thread ran and how long it was ready to run and waited for a core. Knows /proc. Does not know engines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

LEAST_MS = 0.2
"""Of a step: threads with less share one line."""
_OTHERS = ("others", "")


class Thread(NamedTuple):
    process: str  # device, engine, worker or front-end
    name: str
    number: int  # Linux's, which tells threads of one name apart


class Spent(NamedTuple):
    """Seconds."""

    ran: float
    in_system: float  # of these; counted in hundredths of a second
    waited: float


Times = Mapping[Thread, Spent]


def descendants(pid: int) -> Iterator[int]:
    """This process and all below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from descendants(int(child))


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def thread_times(pid: int) -> dict[Thread, Spent]:
    """Of every thread of this process and of all below it, since it began. Threads that end meanwhile are left out."""
    found = {}
    for each in descendants(pid):
        process = "front-end" if each == pid else _process_named(command_of(each))
        for task in Path(f"/proc/{each}/task").iterdir():
            try:
                name, of_stat = (task / "stat").read_text().partition("(")[2].rsplit(")", 1)
                ran, waited = (int(text) * 1e-9 for text in (task / "schedstat").read_text().split()[:2])
            except (OSError, ValueError):
                continue
            in_system = int(of_stat.split()[12]) / os.sysconf("SC_CLK_TCK")
            number = int(task.name)
            found[Thread(process, "main" if number == each else name, number)] = Spent(ran, in_system, waited)
    return found


def _process_named(command: str) -> str:
    for word, name in (("ndp_device", "device"), ("EngineCore", "engine"), ("Worker", "worker")):
        if word in command:
            return name
    return command.split()[0].rpartition("/")[2] if command.strip() else "?"


def spent_between(before: Times, after: Times) -> dict[Thread, Spent]:
    none = Spent(0, 0, 0)
    pairs = {thread: (before.get(thread, none), now) for thread, now in after.items()}
    return {thread: Spent(*(b - a for a, b in zip(*pair, strict=True))) for thread, pair in pairs.items()}


def rows_of_step(before: Times, after: Times, steps: int) -> list[dict[str, Any]]:
    """Milliseconds of a step, the busiest thread first: {"process", "thread", "ms", "system_ms", "waited_ms"}."""
    sums: dict[tuple[str, str], list[float]] = {}
    for thread, spent in spent_between(before, after).items():
        small = 1e3 * (spent.ran + spent.waited) / steps < LEAST_MS
        key = _OTHERS if small else (thread.process, f"{thread.name} {thread.number}")
        sums[key] = [a + b for a, b in zip(sums.get(key, [0, 0, 0]), spent, strict=True)]
    ordered = sorted(sums.items(), key=lambda item: (item[0] == _OTHERS, -item[1][0]))
    return [
        {"process": process, "thread": thread.rpartition(" ")[0]}
        | {name: round(1e3 * s / steps, 2) for name, s in zip(("ms", "system_ms", "waited_ms"), spent, strict=True)}
        for (process, thread), spent in ordered
    ]
