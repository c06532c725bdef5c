"""Memory of this machine and of its processes: what is there, what is held, what is mapped. Knows Linux's files.

Held is a process's own and goes when it ends. Mapped are pages of files in the page cache. Processes that map the same
file share them, and Linux gives them up when a process needs the memory. Does not know models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class FoundMemory:
    total: int
    available: int
    """Without the swapping of anybody: page cache counts, since it gives way."""
    cached: int
    """Bytes of cached files, mapped ones among them: a checkpoint that is read in place."""
    limit: int | None = None
    """Limit of the control group, if it is below the total."""

    @property
    def room(self) -> int:
        return self.available if self.limit is None else min(self.available, self.limit)


def process_memory(pids: Iterable[int | None]) -> dict[str, int]:
    """Bytes `held` and `mapped` by these processes together; of None, and of one that is gone, nothing."""
    found = {"held": 0, "mapped": 0}
    for pid in pids:
        text = None if pid is None else _text_of(f"proc/{pid}/status")
        for line in (text or "").splitlines():
            name, _, value = line.partition(":")
            if kind := {"RssAnon": "held", "RssShmem": "held", "RssFile": "mapped"}.get(name):
                found[kind] += int(value.split()[0]) << 10
    return found


def _text_of(path: str) -> str | None:
    try:
        return Path("/", path).read_text().strip()
    except OSError:
        return None


def memory_found(read: Callable[[str], str | None] = _text_of) -> FoundMemory | None:
    """read: a file's text by its path below the root. None where the kernel does not say."""
    lines = (line.split() for line in (read("proc/meminfo") or "").splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) > 1}
    if "MemAvailable" not in sizes:
        return None
    total = sizes["MemTotal"]
    limits = [int(text) for path in _LIMITS if (text := read(path)) is not None and text.strip().isdigit()]
    limit = min((one for one in limits if one < total), default=None)
    return FoundMemory(total, sizes["MemAvailable"], sizes.get("Cached", 0), limit)
