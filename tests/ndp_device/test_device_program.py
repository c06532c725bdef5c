"""The program `ndp-device` as a real process: what it prints, what it refuses, when it ends, who may reach it."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from paths import MODEL, ROOT
from small_checkpoint import LAYERS
from until import until

from ndp_device.common.errors import ConfigError
from ndp_device.kernels.native import NativeKernel
from ndp_device.probe import Probe
from ndp_device.replicas.format import ReplicaFiles
from ndp_device.transport import connect, listen
from ndp_device.transport.address import Address

pytestmark = pytest.mark.slow  # together: each test starts programs

REPLICAS = MODEL.with_name("tiny-mixtral-replicas")
PATIENT = ("--timeout-s", "60")  # a busy machine is no reason to fail
PROGRAM = [sys.executable, "-P", "-m", "ndp_device"]


@pytest.fixture
def address(tmp_path: Path) -> str:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    return f"ipc://{private}/device"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=120)


def last_line(output: str) -> dict[str, Any]:
    return json.loads(output.strip().splitlines()[-1])


def refused(*arguments: str) -> str:
    """The one sentence of a command that must fail."""
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    sentences = [line for line in done.stderr.splitlines() if line.startswith("ndp-device: ")]
    assert len(sentences) == 1
    assert "Traceback" not in done.stderr
    return sentences[0]


@contextmanager
def serving(address: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = subprocess.Popen(
        [*PROGRAM, "serve", "--address", address, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_a_device_says_when_it_is_ready_answers_questions_and_stops_on_sigterm(
    address: str, model_dir: Path, replicas_dir: Path
) -> None:
    with serving(address, str(model_dir), "--replicas", str(replicas_dir)) as (process, ready):
        assert ready == {
            "ready": True,
            "address": address,
            "pid": process.pid,
            "incarnation": ready["incarnation"],
        }
        assert last_line(run("ping", address, *PATIENT).stdout)["incarnation"] == ready["incarnation"]
        described = last_line(run("describe", address, *PATIENT).stdout)
        assert {"incarnation", "model_digest"} <= described.keys()
        named = [described[name] for name in ("protocol", "replicas", "pid", "hardware", "foreign_modules")]
        assert named == ["2.0", "data-free", process.pid, "h100-ndp512", []]
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in mapped
        assert "/vllm/" not in mapped
        process.send_signal(signal.SIGTERM)
        output, log = process.communicate(timeout=60)
        assert process.returncode == 0
        assert last_line(output) == {"stopped": True, "executed": 0, "refused": 0}
        assert "Traceback" not in log


def test_a_replica_directory_is_verified_without_a_device(replicas_dir: Path, tmp_path: Path) -> None:
    verified = last_line(run("verify", "--replicas", str(replicas_dir)).stdout)
    assert (verified["ok"], verified["replicas"], verified["bits"]) == (True, "data-free", [1, 2, 3, 4, 8])
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in replicas_dir.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            data[-1] ^= 1
        (damaged / file.name).write_bytes(data)
    assert "experts-00000.safetensors" in refused("verify", "--replicas", str(damaged))


def test_a_second_device_on_one_path_is_refused_with_the_pid_of_the_first(address: str, model_dir: Path) -> None:
    with serving(address, str(model_dir)) as (process, ready):
        assert f"pid {process.pid} already listens" in refused(
            "serve", str(model_dir), "--insecure-loopback", "--address", address
        )
        assert last_line(run("ping", address, *PATIENT).stdout)["incarnation"] == ready["incarnation"]


def test_a_device_that_was_killed_leaves_nothing_that_stops_the_next(address: str, model_dir: Path) -> None:
    with serving(address, str(model_dir)) as (process, first):
        process.kill()
        process.wait()
        with serving(address, str(model_dir)) as (_, second):
            assert second["incarnation"] != first["incarnation"]
            assert last_line(run("ping", address, *PATIENT).stdout)["incarnation"] == second["incarnation"]


def test_a_port_in_use_is_named(model_dir: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        assert f"cannot listen on {address}" in refused(
            "serve", str(model_dir), "--insecure-loopback", "--address", address
        )


def test_a_tcp_device_listens_on_loopback_only(model_dir: Path) -> None:
    with serving("tcp://127.0.0.1:0", str(model_dir), "--insecure-loopback") as (process, ready):
        listening = [c.laddr for c in psutil.Process(process.pid).net_connections("inet") if c.status == "LISTEN"]
        assert [f"tcp://{host}:{port}" for host, port in listening] == [ready["address"]]
        assert listening[0].ip == "127.0.0.1"
        assert last_line(run("ping", ready["address"], "--key", "insecure-loopback", *PATIENT).stdout)["pong"] is True


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ipc://@abstract", "abstract"),
        ("ipc://relative/path", "absolute"),
        ("ipc://" + "/x" * 60, "107 bytes, got 120"),
        ("tcp://127.0.0.1:99999", "port must be"),
        ("tcp://127.0.0.1", "name the one address that hosts come to, and a port"),
        ("udp://127.0.0.1:1", "ipc:///path or tcp"),
        ("nonsense", "ipc:///path or tcp"),
    ],
)
def test_an_impossible_address_is_refused(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Address.parse(address)


def test_the_longest_path_the_system_allows_works() -> None:
    with tempfile.TemporaryDirectory(prefix="ndp-", dir="/tmp") as short:  # pytest's own may be too long
        room = 107 - len(f"{short}/")
        server = listen(f"ipc://{short}/{'x' * room}", None)
        server.close()
        with pytest.raises(ConfigError, match="107 bytes, got 108"):
            listen(f"ipc://{short}/{'x' * (room + 1)}", None)


def test_a_directory_that_is_made_the_socket_and_its_lock_are_its_owners_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        server = listen(f"ipc://{tmp_path}/made/device", None)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "made" / "device").stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE((tmp_path / "made" / "device.lock").stat().st_mode) == 0o600
    server.close()


def test_unknown_hardware_and_a_model_that_is_none_are_one_sentence(
    address: str, model_dir: Path, tmp_path: Path
) -> None:
    assert "did you mean 'h100-ndp512'" in refused(
        "serve", str(model_dir), "--address", address, "--hardware", "h100-ndp5"
    )
    assert "config.json" in refused("serve", str(tmp_path), "--address", address)
    assert "give a model" in refused("serve", "--address", address)
    assert "no device answered" in refused("ping", address, "--timeout-s", "0.2")
    assert "section.field=value" in refused("serve", str(model_dir), "--address", address, "--set", "x")


def test_a_device_ends_with_its_parent_but_not_with_the_thread_that_started_it(address: str, model_dir: Path) -> None:
    """The parent starts the device from a thread that ends at once, waits for it to be ready, then is killed."""
    program = f"""
import subprocess, sys, threading, os, time
def start():
    global device
    device = subprocess.Popen({[*PROGRAM, "serve", "--address", address, str(model_dir)]!r}
        + ["--die-with-parent", str(os.getpid())], stdout=subprocess.PIPE)
thread = threading.Thread(target=start); thread.start(); thread.join()
device.stdout.readline(); print(device.pid, flush=True); time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    device = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.6)
    assert last_line(run("ping", address, *PATIENT).stdout)["pong"] is True
    parent.kill()
    parent.communicate()
    until(lambda: not device.is_running() or device.status() == psutil.STATUS_ZOMBIE)


def test_a_message_of_one_or_three_frames_is_refused_and_the_next_one_served(address: str, model_dir: Path) -> None:
    with serving(address, str(model_dir)):
        for frames in ([b"one"], [b"one", b"two", b"three"], [b"", b""]):
            transport = connect(address, None)
            until(lambda: transport._to_socket(frames))  # noqa: B023
            reply = None
            while reply is None:
                reply = transport.receive(5.0)
            assert b"bad_request" in bytes(reply[0])
            transport.close()
        with Probe(address, timeout_s=60) as probe:
            assert probe.hello().num_layers == LAYERS


def test_a_host_in_pyzmq_and_msgpack_alone_computes_on_a_device(address: str) -> None:
    """The example's row through two experts, beside the kernel's own result."""
    with serving(address, str(MODEL), "--replicas", str(REPLICAS)):
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / "host_of_your_own.py", address],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    store, kernel = ReplicaFiles(REPLICAS), NativeKernel()
    experts = [kernel.prepare(store.expert(0, expert, bits)) for expert, bits in ((0, 3), (1, 2))]
    x = np.random.default_rng(0).standard_normal((1, store.manifest.model.hidden_size)).astype(np.float32)
    pairs = np.array([0, 0], np.int32), np.array([0, 1], np.int32), np.array([0.75, 0.25], np.float32)
    y = kernel.execute(x, experts, *pairs)
    assert f"y: {y[0, :4].round(4)}" in done.stdout
    assert "'weight_bytes': 73728" in done.stdout
