"""Memory that a process holds is told from files that it maps, and a machine's memory from what may be used of it."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ndp_device.common.machine_memory import memory_found, process_memory

MIB = 1 << 20


def test_a_mapped_file_is_not_held_and_memory_of_ones_own_is(tmp_path: Path) -> None:
    """64 MiB of a file that are read, then 64 MiB that are written, and as many that processes may share."""
    (tmp_path / "file").write_bytes(os.urandom(MIB) * 64)
    before = process_memory([os.getpid()])
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        assert sum(pages[at] for at in range(0, len(pages), 4096)) >= 0
        mapped = process_memory([os.getpid()])
    # New pages: the allocator would hand out some that an earlier test's garbage left, which are held already.
    with (
        mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own,
        mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as shared,
    ):
        own.write(b"1" * (64 * MIB))
        held = process_memory([os.getpid()])
        shared.write(b"1" * (64 * MIB))
        both = process_memory([os.getpid()])
    assert 60 * MIB < mapped["mapped"] - before["mapped"] < 80 * MIB
    assert mapped["held"] - before["held"] < 16 * MIB
    assert 60 * MIB < held["held"] - mapped["held"] < 80 * MIB
    assert 60 * MIB < both["held"] - held["held"] < 80 * MIB


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


GIB = 1 << 30
MACHINE = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n"}
SERVICE = "sys/fs/cgroup/system.slice/vllm.service"
UNIT = {"proc/self/cgroup": "0::/system.slice/vllm.service\n"}
JOB = {"proc/self/cgroup": "7:cpu,cpuacct:/\n4:memory:/slurm/uid_1/job_2\n0::/other\n"}
JOB_2 = "sys/fs/cgroup/memory/slurm/uid_1/job_2/memory.limit_in_bytes"
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
UNLIMITED_V1 = "9223372036854771712"


@pytest.mark.parametrize(
    "files",
    [
        {f"{V2}/memory.max": str(4 * GIB)},
        {f"{V1}/memory.limit_in_bytes": str(4 * GIB), "proc/self/cgroup": "4:memory:/docker/0123\n"},
        UNIT | {f"{SERVICE}/memory.max": str(4 * GIB)},
        UNIT | {f"{SERVICE}/memory.high": str(4 * GIB)},
        UNIT | {f"{SERVICE}/memory.max": "max", f"{V2}/system.slice/memory.max": str(4 * GIB)},
        UNIT | {f"{SERVICE}/memory.max": str(8 * GIB), f"{SERVICE}/memory.high": str(4 * GIB)},
        {"proc/self/cgroup": "0::/job\n", f"{V2}/unified/job/memory.max": str(4 * GIB)},
        JOB | {JOB_2: str(4 * GIB), f"{V1}/memory.limit_in_bytes": UNLIMITED_V1},
        JOB | {JOB_2: UNLIMITED_V1, f"{V1}/slurm/uid_1/memory.limit_in_bytes": str(4 * GIB)},
        {"proc/self/limits": f"Max address space         {4 * GIB}           unlimited            bytes\n"},
        {"proc/self/limits": f"Max data size             {4 * GIB}           {8 * GIB}           bytes\n"},
    ],
)
def test_every_limit_around_the_process_counts(files: dict[str, str]) -> None:
    found = memory_found((MACHINE | files).get)
    assert found is not None
    assert (found.room, found.usable, found.limit) == (4 * GIB, 4 * GIB, 4 * GIB)


@pytest.mark.parametrize(
    "files",
    [
        {
            f"{V2}/memory.max": str(8 * GIB),
            f"{V2}/memory.current": str(7 * GIB),
            f"{V2}/memory.stat": f"anon {5 * GIB}\nfile {2 * GIB}\nshmem {GIB}\n",
        },
        JOB
        | {
            JOB_2: str(8 * GIB),
            f"{V1}/slurm/uid_1/job_2/memory.usage_in_bytes": str(7 * GIB),
            f"{V1}/slurm/uid_1/job_2/memory.stat": f"cache 0\ntotal_cache {GIB}\n",
        },
        UNIT
        | {
            f"{SERVICE}/memory.max": str(4 * GIB),
            f"{V2}/system.slice/memory.max": str(8 * GIB),
            f"{V2}/system.slice/memory.current": str(6 * GIB),
        },
    ],
)
def test_what_others_of_a_group_hold_is_no_room(files: dict[str, str]) -> None:
    found = memory_found((MACHINE | files).get)
    assert found is not None
    assert found.room == 2 * GIB


@pytest.mark.parametrize(
    "files",
    [
        UNIT | {f"{V2}/other.slice/memory.max": str(GIB), f"{V2}/system.slice/other.service/memory.max": str(GIB)},
        JOB | {JOB_2: UNLIMITED_V1, f"{V1}/slurm/uid_1/job_3/memory.limit_in_bytes": str(GIB)},
        {"proc/self/cgroup": "0::/../other\n", f"{V2}/../other/memory.max": str(GIB)},
        {"proc/self/limits": "Max address space         unlimited            unlimited            bytes\n"},
        {"proc/self/cgroup": "nonsense\n\n::::\n"},
    ],
)
def test_limits_of_others_do_not_count(files: dict[str, str]) -> None:
    found = memory_found((MACHINE | files).get)
    assert found is not None
    assert (found.room, found.usable, found.limit) == (60 * GIB, 64 * GIB, None)


def test_plan_and_tune_take_what_the_process_may_have() -> None:
    """In a process with an address space of 6 GiB, less than this machine's memory."""
    code = "from ndp_device.common.machine_memory import room_bytes, usable_bytes;print(room_bytes(), usable_bytes())"
    least = min(6 * GIB, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - MIB)
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (least, least)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(least)] * 2
