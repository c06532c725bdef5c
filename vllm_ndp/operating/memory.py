"""Memory of processes: what is held, what is mapped. Knows Linux's files; machine_memory.py knows limits.

Held is a process's own and goes when it ends. Mapped are pages of files in the page cache. Processes that map the same
file share them, and Linux gives them up when a process needs the memory. Does not know models.
"""

from __future__ import annotations

from collections.abc import Iterable

from ndp_device.common.errors import ConfigError
from ndp_device.common.machine_memory import memory_found, text_of

__all__ = ["memory_found", "process_memory", "room_bytes"]


def room_bytes() -> int:
    """Bytes that a server may take of this machine now. Raises ConfigError where the kernel does not say."""
    found = memory_found()
    if found is None:
        raise ConfigError("/proc/meminfo does not say how much memory there is: mount /proc, or give --host-memory")
    return found.room


def process_memory(pids: Iterable[int | None]) -> dict[str, int]:
    """Bytes `held` and `mapped` by these processes together; of None, and of one that is gone, nothing."""
    found = {"held": 0, "mapped": 0}
    for pid in pids:
        text = None if pid is None else text_of(f"proc/{pid}/status")
        for line in (text or "").splitlines():
            name, _, value = line.partition(":")
            if kind := {"RssAnon": "held", "RssShmem": "held", "RssFile": "mapped"}.get(name):
                found[kind] += int(value.split()[0]) << 10
    return found
