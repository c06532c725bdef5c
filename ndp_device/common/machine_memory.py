"""How much memory this process may have: the machine's, and what control groups and resource limits leave of it.

Control groups are nested. A limit of any group above the process holds for it, so every group from the process's own to
the root of the mount counts, in versions 2 (`memory.max`, `memory.high`) and 1 (`memory.limit_in_bytes`). That is where
systemd, Slurm and containers put theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ndp_device.common.errors import ConfigError

Read = Callable[[str], str | None]
"""A file's text by its path below the root; None where there is none."""
_GROUPS = PurePosixPath("sys/fs/cgroup")
_LIMITS = ("Max address space", "Max data size")
"""Lines of /proc/self/limits: RLIMIT_AS and RLIMIT_DATA."""


@dataclass(frozen=True)
class FoundMemory:
    """Bytes."""

    total: int
    """Physical."""
    available: int
    """Without the swapping of anybody: page cache counts, since it gives way."""
    cached: int
    """Of cached files, mapped ones among them: a checkpoint that is read in place."""
    limit: int | None = None
    """The lowest limit of a control group or of the process, if it is below the total."""
    left: int | None = None
    """The least that such a limit leaves beside what its group holds already."""

    @property
    def usable(self) -> int:
        """That this process may have at most."""
        return self.total if self.limit is None else self.limit

    @property
    def room(self) -> int:
        """That a server may take of this machine now."""
        return min(self.available, self.usable if self.left is None else max(self.left, 0))


def text_of(path: str) -> str | None:
    try:
        return Path("/", path).read_text().strip()
    except (OSError, ValueError):
        return None


def control_groups(controller: str, read: Read = text_of) -> Iterator[tuple[int, str]]:
    """(version, directory below the root) of each group that holds this process, its own first, for one controller."""
    yield from ((1, str(_GROUPS / controller)), (2, str(_GROUPS)))  # a container's own, whatever the host calls it
    for line in (read("proc/self/cgroup") or "").splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mounts = [_GROUPS / controllers, _GROUPS / controller] if controllers else [_GROUPS, _GROUPS / "unified"]
        groups = PurePosixPath(path.lstrip("/"))
        if ".." in groups.parts:  # outside of what this process sees
            continue
        for mount in mounts:
            for group in (groups, *groups.parents):
                yield (1 if controllers else 2), str(mount / group)


def memory_found(read: Read = text_of) -> FoundMemory | None:
    """The memory of this machine and the limits on it. None where the kernel does not say."""
    lines = (line.split() for line in (read("proc/meminfo") or "").splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) > 1}
    if "MemAvailable" not in sizes:
        return None
    total = sizes["MemTotal"]
    limits = [(one, held) for one, held in _limits(read) if one < total]
    limit, left = (min((one - less * held for one, held in limits), default=None) for less in (0, 1))
    return FoundMemory(total, sizes["MemAvailable"], sizes.get("Cached", 0), limit, left)


def required_memory() -> FoundMemory:
    """The same. Raises ConfigError where the kernel does not say."""
    found = memory_found()
    if found is None:
        raise ConfigError("/proc/meminfo does not say how much memory there is: mount /proc, or give --host-memory")
    return found


def process_memory(pids: Iterable[int | None]) -> dict[str, int]:
    """Bytes `held` and `mapped` by these processes together; of None, and of one that is gone, nothing.

    Held is a process's own and goes when it ends. Mapped are pages of files in the page cache: processes that map the
    same file share them, and Linux gives them up when a process needs the memory.
    """
    found = {"held": 0, "mapped": 0}
    for pid in pids:
        text = None if pid is None else text_of(f"proc/{pid}/status")
        for line in (text or "").splitlines():
            name, _, value = line.partition(":")
            if kind := {"RssAnon": "held", "RssShmem": "held", "RssFile": "mapped"}.get(name):
                found[kind] += int(value.split()[0]) << 10
    return found


def give_memory_back() -> None:
    """Give free memory back to the system. glibc keeps that of large messages for later
    ones, and some 170 MiB of an engine of 1.2 GiB after loading."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _limits(read: Read) -> Iterator[tuple[int, int]]:
    """(limit, bytes that its group holds already)"""
    for version, group in control_groups("memory", read):
        for name in ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",):
            text = read(f"{group}/{name}")
            if text is not None and text.strip().isdigit():  # else "max"
                yield int(text), _held(group, version, read)
    for line in (read("proc/self/limits") or "").splitlines():
        name, soft = line[:26].strip(), line[26:].split()[:1]
        if name in _LIMITS and soft and soft[0].isdigit():  # else "unlimited"
            yield int(soft[0]), 0


def _held(group: str, version: int, read: Read) -> int:
    """Bytes of all processes of a group. Its page cache gives way, but for what lies in files of memory alone."""
    whole, of_all = ("memory.current", "") if version == 2 else ("memory.usage_in_bytes", "total_")
    text, stated = read(f"{group}/{whole}") or "", (read(f"{group}/memory.stat") or "").split()
    sizes = dict(zip(stated[::2], map(int, stated[1::2]), strict=False))
    cached = sizes.get("file" if version == 2 else "total_cache", 0) - sizes.get(f"{of_all}shmem", 0)
    return max(int(text) - cached, 0) if text.strip().isdigit() else 0
