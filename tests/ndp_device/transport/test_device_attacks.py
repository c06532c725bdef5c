"""Peers that mean harm, against the real program: each test ended, starved or filled a device once.

The attackers are plain sockets and libzmq's, the honest host is the plugin's own client.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq
from attacked_device import PATIENCE_S, Device, assert_serves, execute, is_ended, message, request
from small_checkpoint import EXPERTS, HIDDEN, LAYERS

from ndp_device.errors import ConfigError, DeviceUnavailable
from ndp_device.probe import Probe
from ndp_device.protocol import messages as msg
from ndp_device.transport import connection as limits
from ndp_device.transport import connections, peers, shm
from ndp_device.transport.zmq_server import ZmqServer
from vllm_ndp.device.client import DeviceClient


def test_a_refusal_that_would_be_too_long_to_send_does_not_end_the_device(device: Device) -> None:
    """985 characters of four bytes: the sentence that quotes them has more than the 4096 bytes of a header."""
    fields = {"type": "ping", "id": 1, "ndp": msg.VERSION, "tensors": [["\U0001f480" * 985, "float32", [1], 0]]}
    before = msgpack.packb({**fields, "crc": bytes(4)})[:-4]
    connection = device.raw()
    connection.sendall(message(before + zlib.crc32(before).to_bytes(4, "little"), b""))
    answer = b""
    connection.settimeout(PATIENCE_S)
    while b"bad_request" not in answer:
        part = connection.recv(65536)
        assert part
        answer += part
    connection.close()
    assert_serves(device)


def predicted_names(count: int) -> list[bytes]:
    """What libzmq's ROUTER calls its next nameless peers: 00 and a counter that begins at an unseeded rand()."""
    libc = ctypes.CDLL(None)
    libc.srand(1)
    low, high = libc.rand(), libc.rand()
    first = (low | high << 31) & 0xFFFFFFFF
    return [b"\0" + (first + number).to_bytes(4, "big") for number in range(count)]


def test_peers_that_take_each_others_names_do_not_end_the_device(device: Device) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        attackers = []
        for name in (*predicted_names(8), b""):
            attacker = context.socket(zmq.DEALER)
            attackers.append(attacker)
            attacker.setsockopt(zmq.LINGER, 0)
            if name:
                attacker.setsockopt(zmq.ROUTING_ID, name)
            attacker.connect(device.address)
            attacker.send_multipart([b"x", b""])
            time.sleep(0.1)
        assert_serves(device)
    finally:
        context.destroy(linger=0)


def test_peers_that_only_ping_do_not_cost_a_silent_host_its_session(device: Device) -> None:
    with device.host(shared_memory=False) as client:
        execute(client)
        pingers = []
        for _ in range(connections.MAX_PEERS + 40):
            connection = device.raw()
            connection.sendall(request(msg.Ping(1)))
            pingers.append(connection)
            time.sleep(0.002)
        execute(client)
        assert (client.counters.lost, client.counters.refused) == (0, 0)
        with Probe(device.address, timeout_s=PATIENCE_S) as probe:
            assert probe.describe().num_sessions == 1
        for connection in pingers:
            connection.close()


def test_peers_that_ask_for_shared_memory_and_go_silent_do_not_keep_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = msg.Hello(1, versions=(msg.VERSION, msg.VERSION), client="keeper", wants_slots=True)
    keepers = [device.raw() for _ in range(shm.MAX_CHANNELS)]
    for connection in keepers:
        connection.sendall(request(hello))
        connection.settimeout(PATIENCE_S)
        answer = b""
        while b"welcome" not in answer:
            answer += connection.recv(65536)
    time.sleep(peers._KEEP_MEMORY_NS / 1e9)
    with device.host() as client:
        assert client.uses_shared_memory
        execute(client)
    for connection in keepers:
        connection.close()


def test_a_message_that_never_ends_ends_its_connection(device: Device) -> None:
    before = device.resident()
    connection = device.raw()
    frame = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
    connection.settimeout(PATIENCE_S)
    assert is_ended(lambda: connection.sendall(frame), tries=300)
    assert device.resident() < before + (64 << 20)
    assert_serves(device)


def test_answers_that_are_not_read_are_bounded(device: Device) -> None:
    before = device.resident()
    plan = msg.InstallPlan(2, epoch=1, expected_epoch=0), {"replicas": np.full((LAYERS, EXPERTS), 16, np.uint8)}
    x = np.zeros((msg.MAX_TOKENS, HIDDEN), np.float32)
    empty = {"pair_rows": np.int32, "pair_experts": np.int32, "pair_bits": np.uint8, "gates": np.float32}
    nothing = {name: np.zeros(0, dtype) for name, dtype in empty.items()}
    pure = msg.Execute(4, epoch=1, layer=0, step=0, submit_ps=0, ttl_us=1 << 60)
    connection = device.raw()
    connection.sendall(request(msg.Hello(1, versions=(msg.VERSION, msg.VERSION), client="deaf")) + request(*plan))
    connection.sendall(request(msg.ActivatePlan(3, epoch=1)))
    connection.settimeout(0.5)
    flood = request(pure, {"x": x, **nothing})
    with contextlib.suppress(OSError):  # in time it is refused, in whatever way
        for _ in range((400 << 20) // x.nbytes):
            connection.sendall(flood)
    assert device.resident() < before + 3 * limits.MAX_UNREAD_BYTES
    assert_serves(device)


def test_a_device_without_a_free_descriptor_goes_on_and_accepts_again(model_dir: Path, tmp_path: Path) -> None:
    device = Device(model_dir, tmp_path, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)))
    crowd = []
    try:
        with device.host() as client:
            execute(client)
            for _ in range(100):
                connection = socket.socket(socket.AF_UNIX)
                connection.setblocking(False)
                crowd.append(connection)
                if connection.connect_ex(str(device.path)):
                    break
            time.sleep(0.3)
            for _ in range(20):
                execute(client)
            assert client.counters.lost == 0
        for connection in crowd:
            connection.close()
        assert_serves(device)
    finally:
        device.process.kill()
        device.process.communicate()


def test_a_hosts_name_cannot_forge_a_line_of_the_log_and_many_cannot_fill_it(device: Device) -> None:
    forged = "2026-11-22 00:00:00,000 ERROR the disk is full"
    for number in range(300):
        connection = device.raw()
        name = f"x\r\n{forged}\n\x1b[2J{number}"
        connection.sendall(request(msg.Hello(1, versions=(msg.VERSION, msg.VERSION), client=name)))
        connection.settimeout(PATIENCE_S)
        assert connection.recv(64)
        connection.close()
    log = device.log.read_text()
    assert not any(line.startswith(forged) for line in log.splitlines())
    assert "\x1b" not in log
    assert len(log.splitlines()) < 200


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_is_refused_even_where_the_path_is_open_to_all() -> None:
    directory = Path(tempfile.mkdtemp())
    server = ZmqServer(f"ipc://{directory}/private/device")
    try:
        for path in (directory, directory / "private", directory / "private" / "device"):
            path.chmod(0o777)
        program = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
            "s.settimeout(20); print(len(s.recv(64)))"
        )
        for user, expected in ((65534, "0"), (os.geteuid(), "64")):
            python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
            process = subprocess.Popen(
                [python, "-c", program, str(directory / "private" / "device")],
                stdout=subprocess.PIPE,
                text=True,
                user=user,
                cwd="/",
            )
            while process.poll() is None:
                server.receive(20)
            assert process.communicate()[0].strip() == expected
    finally:
        server.close()
        subprocess.run(["rm", "-rf", str(directory)], check=True)


def test_a_file_in_the_place_of_the_socket_is_not_replaced(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "device").write_text("a letter")
    with pytest.raises(ConfigError, match="is not a socket and will not be replaced"):
        ZmqServer(f"ipc://{private}/device")
    assert (private / "device").read_text() == "a letter"
    (private / "device").unlink()
    ZmqServer(f"ipc://{private}/device").close()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(private / "device"))
    stale.close()
    ZmqServer(f"ipc://{private}/device").close()


def test_the_lock_and_the_socket_of_a_device_are_closed_to_others(server: ZmqServer) -> None:
    path = Path(server.address.removeprefix("ipc://"))
    assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0
    server.close()
    assert not path.exists()
    with pytest.raises(DeviceUnavailable):
        DeviceClient(server.address).connect(0.05)


def test_a_million_pairs_are_refused_before_they_are_looked_at(device: Device) -> None:
    """12 MiB of pairs cost the device 2 GiB once: they were spread out before they were counted."""
    before = device.resident()
    count = 1_000_000
    with device.host(shared_memory=False) as client:
        nothing = np.zeros(count, np.int32)
        x, bits, gates = np.ones((1, HIDDEN), np.float32), np.full(count, 16, np.uint8), np.ones(count, np.float32)
        with pytest.raises(DeviceUnavailable, match="131072 pairs, got 1000000"):
            client.finish_execute(client.begin_execute(0, 0, 0, x, nothing, nothing, bits, gates))
    assert device.resident() < before + (100 << 20)
    assert_serves(device)
