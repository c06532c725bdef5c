"""Memory that a process holds is told from files that it maps, and a machine's memory from what may be used of it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from vllm_ndp.operating.memory import memory_found, process_memory

MIB = 1 << 20


def test_a_mapped_file_is_not_held_and_memory_of_ones_own_is(tmp_path: Path) -> None:
    """64 MiB of a file that are read, then 64 MiB that are written."""
    (tmp_path / "file").write_bytes(os.urandom(MIB) * 64)
    before = process_memory([os.getpid()])
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        assert sum(pages[at] for at in range(0, len(pages), 4096)) >= 0
        mapped = process_memory([os.getpid()])
    own = bytearray(b"1") * (64 * MIB)
    held = process_memory([os.getpid()])
    assert 60 * MIB < mapped["mapped"] - before["mapped"] < 80 * MIB
    assert mapped["held"] - before["held"] < 16 * MIB
    assert 60 * MIB < held["held"] - mapped["held"] < 80 * MIB
    del own


def test_processes_that_are_not_ours_or_are_gone_hold_nothing() -> None:
    assert process_memory([None, 1 << 30]) == {"held": 0, "mapped": 0}


def test_the_room_is_what_is_available_within_the_limit() -> None:
    files = {"proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 3072 kB\nCached: 1024 kB\n"}
    free = memory_found(files.get)
    assert free is not None
    assert (free.total, free.room, free.cached, free.limit) == (4 * MIB, 3 * MIB, MIB, None)
    limited = memory_found((files | {"sys/fs/cgroup/memory.max": f"{MIB}\n"}).get)
    assert limited is not None
    assert limited.room == limited.limit == MIB
    assert memory_found({"sys/fs/cgroup/memory.max": "max"}.get) is None
