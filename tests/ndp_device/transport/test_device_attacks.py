"""Peers that are wrong, against the real program, and who can do what: by real sockets and processes.

The wrong peers are plain sockets, the honest host is the plugin's own client.
"""

import contextlib
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from attacked_device import PATIENCE_S, Device, assert_serves, execute, request
from caller import pairs_of
from raw_zmtp import GREETING, READY, WITHOUT_HANDSHAKE, connected, greeted, message
from server_by_hand import HandServer, answer, ask, host_of, serving
from small_checkpoint import EXPERTS, HIDDEN, LAYERS
from until import until

from ndp_device.common.errors import ConfigError, DeviceUnavailable
from ndp_device.handler import Handler
from ndp_device.probe import Probe
from ndp_device.process import MAX_LINES, AtMost
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.server import Server
from ndp_device.transport import shm, sockets, zmq_server
from ndp_device.transport.address import is_foreign, take
from ndp_device.transport.base import write_checksum
from ndp_device.transport.zmq_client import ZmqTransport
from vllm_ndp.device_client.client import DeviceClient


def test_a_refusal_that_would_be_too_long_to_send_does_not_end_the_device(device: Device) -> None:
    """985 characters of four bytes: the sentence that quotes them has more than the 4096 bytes of a header."""
    fields = {"type": "ping", "id": 1, "ndp": msg.VERSION, "tensors": [["\U0001f480" * 985, "float32", [1], 0]]}
    connection = device.raw()
    connection.sendall(message(write_checksum(msgpack.packb({**fields, "crc": bytes(4)}), b""), b""))
    answer = b""
    connection.settimeout(PATIENCE_S)
    while b"bad_request" not in answer:
        part = connection.recv(65536)
        assert part
        answer += part
    connection.close()
    assert_serves(device)


def until_none_waits(device: Device) -> None:
    """Of the requests."""
    with Probe(device.address, timeout_s=PATIENCE_S) as probe:
        waiting = 1
        while waiting:
            pong, _ = probe.ask(msg.Ping(probe.next_id()))
            assert isinstance(pong, msg.Pong)
            waiting = pong.queue_depth


def test_answers_that_are_not_read_are_bounded_over_all_peers_together(device: Device) -> None:
    before = device.resident()
    plan = msg.InstallPlan(2, epoch=1, expected_epoch=0), {"replicas": np.full((LAYERS, EXPERTS), 16, np.uint8)}
    x = np.zeros((msg.MAX_TOKENS, HIDDEN), np.float32)
    pure = msg.Execute(4, epoch=1, layer=0, step=0, submit_ps=0, ttl_us=1 << 60)
    flood = request(pure, pairs_of(x, [], [], [], []))
    deaf = [device.raw() for _ in range(20)]
    for connection in deaf:
        connection.sendall(request(msg.Hello(1, versions=(msg.VERSION, msg.VERSION), client="deaf")) + request(*plan))
        connection.sendall(request(msg.ActivatePlan(3, epoch=1)))
        connection.settimeout(PATIENCE_S)
    most = 0
    for _ in range(75):  # fewer answers than libzmq holds of one host
        for connection in deaf:
            with contextlib.suppress(OSError):  # in time it is refused, in whatever way
                connection.sendall(flood)
        until_none_waits(device)
        most = max(most, device.resident())
    assert 75 * len(deaf) * x.nbytes > 2 * zmq_server.MAX_UNREAD_BYTES
    assert most < before + zmq_server.MAX_UNREAD_BYTES + (100 << 20)  # and requests
    assert_serves(device)


@pytest.mark.parametrize(
    ("frame", "num_peers"), [(b"\x01\x00", 6), (b"\x01\x01A", 1), (b"\x01\xff" + bytes(255), 6)],
    ids=["empty", "tiny", "small"],
)  # fmt: skip
def test_a_message_without_an_end_costs_its_connection(device: Device, frame: bytes, num_peers: int) -> None:
    """libzmq bounds the bytes of a frame, not the frames of a message, and hands over whole messages only."""
    frames = frame * (1 << 12)
    with device.honest_host():
        before = most = device.resident()
        pouring = [device.raw() for _ in range(num_peers)]
        while pouring and most < before + (3 << 30):
            for connection in list(pouring):
                try:
                    connection.sendall(frames)
                except OSError:
                    pouring.remove(connection)
            most = max(most, device.resident())
        assert not pouring
        assert most < before + 2 * sockets.MAX_UNHEARD_BYTES


@pytest.mark.parametrize(
    ("unread", "ends"),
    [([2, 4, 6, 8, 10, 12, 14], False), ([9, 9, 9, 9, 9, 9, 9], False), ([9, 4, 0, 7, 2, 8, 3], True)],
    ids=["doorbells", "held back", "poured"],
)
def test_a_host_whose_bytes_are_not_read_is_kept_while_the_device_takes_memory_for_its_plan(
    monkeypatch: pytest.MonkeyPatch, unread: list[int], *, ends: bool
) -> None:
    """A device that prepared 700 MB of experts for a plan sent the host that waited for it away."""
    ended: list[int] = []
    bounds = sockets.Bounds({7: 1}, ended.append)
    bounds.close()  # looks by itself no longer
    memory = iter(range(0, 1 << 40, 100 << 20))
    monkeypatch.setattr(sockets, "_private_bytes", lambda: next(memory))
    bounds.look()
    for each in unread:
        monkeypatch.setattr(sockets, "num_unread", lambda fd, each=each: each)
        bounds.look()
    assert ended[:1] == ([7] if ends else [])


def test_a_host_whose_messages_are_heard_whole_is_kept_however_much_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    heard_ns, ended = {7: 1}, list[int]()
    bounds = sockets.Bounds(heard_ns, ended.append)
    bounds.close()  # looks by itself no longer
    memory = iter(range(0, 1 << 40, 100 << 20))
    monkeypatch.setattr(sockets, "_private_bytes", lambda: next(memory))
    for each in [9, 4, 0, 7, 2, 8, 3]:
        monkeypatch.setattr(sockets, "num_unread", lambda fd, each=each: each)
        heard_ns[7] += 1
        bounds.look()
    assert not ended


def test_memory_of_hosts_that_have_gone_is_the_systems_again(device: Device) -> None:
    """glibc keeps freed memory for itself. Held by whole pages: what unread parts of messages took."""
    assert_serves(device)
    before, crowd = device.resident(), [device.raw() for _ in range(8)]
    while device.resident() < before + (128 << 20):
        for connection in crowd:
            connection.sendall((b"\x01\xff" + bytes(255)) * 256)
    for connection in crowd:
        connection.close()
    until(lambda: device.resident() < before + (16 << 20), pause_s=0.1)


def test_room_is_made_by_who_never_spoke_then_by_who_was_silent_longest(
    server: HandServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_server, "MAX_CONNECTIONS", 3)

    def next_one(speaks: bool) -> socket.socket:
        connection = greeted(server.address)
        if speaks:
            speak(connection)
        else:
            server.receive(10)
        return connection

    def speak(connection: socket.socket) -> None:
        connection.sendall(message(b"head", b""))
        server.until_one()

    hosts = [next_one(speaks=True) for _ in range(2)]
    speak(hosts[0])
    hosts += [next_one(speaks=False), next_one(speaks=False)]
    assert hosts[2].recv(1) == b""  # came first, of those that never spoke
    hosts.append(next_one(speaks=True))
    assert hosts[3].recv(1) == b""
    hosts.append(next_one(speaks=True))
    assert hosts[1].recv(1) == b""
    speak(hosts[0])  # who had spoken again after the second
    for connection in hosts:
        connection.close()


def test_memory_is_given_to_others_where_it_is_not_used(server: HandServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "MAX_CHANNELS", 2)
    monkeypatch.setattr(zmq_server, "_KEEP_MEMORY_NS", 0)
    hosts = [host_of(server.address) for _ in range(4)]
    names = [ask(server, host, (b"head", b"")).client for host in hosts]
    assert all(server.offer_memory(name) for name in names[:3])
    assert names[0] not in server._peers  # asked first
    for peer in server._peers.values():
        if peer.channel is not None:
            peer.channel.has_spoken = True
    assert server.offer_memory(names[3]) is None
    for host in hosts:
        host.close()


def test_answers_that_nobody_reads_are_counted_with_their_frames_until_their_host_is_gone(server: HandServer) -> None:
    host = host_of(server.address)
    client = ask(server, host, (b"head", b"")).client
    server.send(client, (b"head", b"body"))
    assert server._peers[client].uncounted == 2 * (4 + zmq_server._FRAME_BYTES)
    server.send(client, (b"head", bytes(zmq_server._COUNTED_BYTES)))
    assert server._unread_bytes > zmq_server._COUNTED_BYTES
    host.close()
    server.until(0)
    assert server._unread_bytes == 0


def test_a_hosts_name_cannot_forge_a_line_of_the_log_and_many_cannot_fill_it(device: Device) -> None:
    forged = "2026-11-22 00:00:00,000 ERROR the disk is full"
    for number in range(300):
        connection = device.raw()
        name = f"x\r\n{forged}\n\x1b[2J{number}"
        connection.sendall(request(msg.Hello(1, versions=(msg.VERSION, msg.VERSION), client=name)))
        assert connection.recv(64)
        connection.close()
    log = device.log.read_text()
    assert not any(line.startswith(forged) for line in log.splitlines())
    assert "\x1b" not in log
    assert len(log.splitlines()) < 200


def test_warnings_have_lines_of_their_own_and_a_minute_later_the_lost_ones_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, at_most = [100.0], AtMost()
    monkeypatch.setattr("ndp_device.process.time", SimpleNamespace(monotonic=lambda: now[0]))

    def passed(level: int, times: int) -> int:
        return sum(at_most.filter(logging.makeLogRecord({"msg": "x", "levelno": level})) for _ in range(times))

    assert [passed(logging.INFO, MAX_LINES + 5), passed(logging.WARNING, MAX_LINES + 2)] == [MAX_LINES] * 2
    now[0] += 61
    record = logging.makeLogRecord({"msg": "x", "levelno": logging.INFO})
    assert at_most.filter(record)
    assert record.getMessage() == "x (7 lines of the minute before were left out)"


def test_failures_that_are_not_in_a_row_do_not_end_a_device() -> None:
    """A hundred in a row do: there is no hope then."""
    asked, handler = [0], SimpleNamespace(num_executed=0, prepare_ahead=lambda: False)

    def receive(timeout_ms: int) -> list[object]:
        asked[0] += 1
        if asked[0] <= 150 and asked[0] % 75:
            raise OSError("as the test wants it")
        if asked[0] > 150 and not recovers:
            raise OSError("and from now on")
        if asked[0] > 150:
            signal.raise_signal(signal.SIGTERM)
        return []

    recovers, stops = True, [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    carrier = SimpleNamespace(receive=receive, offer_memory=None, on_gone=None)
    try:
        Server(carrier, handler).run()  # type: ignore[arg-type]
        recovers, asked[0] = False, 150
        with pytest.raises(OSError, match="from now on"):
            Server(carrier, handler).run()  # type: ignore[arg-type]
    finally:
        for number, stop in zip((signal.SIGTERM, signal.SIGINT), stops, strict=True):
            signal.signal(number, stop)
    assert asked[0] == 250


HELLO = GREETING + READY
WRONG = {
    **WITHOUT_HANDSHAKE,
    "another version of ZMTP": GREETING[:10] + b"\x09" + GREETING[11:],
    "another mechanism": GREETING[:12] + b"PLAIN".ljust(20, b"\0") + bytes(32) + READY,
    "garbage after the greeting": GREETING + bytes(range(255, 0, -1)) * 8,
    "8 GiB announced": HELLO + b"\x02" + (8 << 30).to_bytes(8, "big"),
    "more than a frame may have": HELLO + b"\x02" + (65 << 20).to_bytes(8, "big") + bytes(70_000),
    "too many frames": HELLO + message(*[b"x"] * 9),
}
"""What a wrong peer sends, and loses its connection by."""


@pytest.mark.parametrize("what", [*WRONG, "half a handshake", "nothing"])
def test_a_wrong_peer_loses_its_connection_and_an_honest_host_nothing(device: Device, what: str) -> None:
    sent = (WRONG | {"half a handshake": GREETING[:30]}).get(what, b"")
    with device.honest_host() as client:
        peer = device.raw() if sent.startswith(HELLO) else connected(device.address)
        sent = sent.removeprefix(HELLO)
        peer.settimeout(PATIENCE_S)
        peer.sendall(sent)
        with contextlib.suppress(ConnectionError):
            while peer.recv(4096):
                execute(client)
        peer.close()
    assert device.resident() < 1 << 30


@pytest.mark.parametrize("by_tcp", [False, True], ids=["ipc", "tcp"])
def test_peers_without_a_handshake_cost_an_honest_host_nothing(model_dir: Path, tmp_path: Path, by_tcp: bool) -> None:
    """libzmq takes whatever is no greeting for ZMTP 1.0. Two hundred such messages ended a device once."""
    with Device(model_dir, tmp_path, by_tcp=by_tcp) as device:
        with device.honest_host() as client:
            for _ in range(40):
                for sent in WITHOUT_HANDSHAKE.values():
                    peer = connected(device.address)
                    with contextlib.suppress(ConnectionError):
                        peer.sendall(sent)
                    execute(client)
                    peer.close()
        assert device.process.poll() is None
        assert "Traceback" not in device.log.read_text()


def test_the_name_that_libzmq_gives_next_is_not_known(device: Device) -> None:
    """A peer that has it ends the process by an assertion of libzmq, whose names began at the same number each time."""
    first = 0x6B8B4567  # the first number of glibc's rand() without a seed
    with device.honest_host() as client:
        takers = [greeted(device.address, b"\0" + (first + number).to_bytes(4, "big")) for number in range(8)]
        others = [device.raw() for _ in range(8)]
        execute(client)
        for connection in (*takers, *others):
            connection.close()
    assert_serves(device)


def test_a_message_that_cannot_be_looked_at_costs_its_own_host_alone(
    server: HandServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised over it: what others sent before and after it is handed over, in the same call."""
    damage = zmq_server.damage_of

    def failing(header: codec.Buffer, body: codec.Buffer) -> str | None:
        if bytes(body) == b"bad":
            raise IndexError("a mistake of this program")
        return damage(header, body)

    monkeypatch.setattr(zmq_server, "damage_of", failing)
    hosts = [host_of(server.address) for _ in range(3)]
    for number, body in enumerate((b"good", b"good", b"good", b"good", b"bad", b"good")):
        ask_only(hosts[number % 3], (b"head", body))
    arrived = [server.until_one().frames[1] for _ in range(5)]
    assert [bytes(body) for body in arrived] == [b"good"] * 5
    server.until(2)
    for host in hosts:
        host.close()


def test_what_was_read_before_a_failure_is_handed_over(server: HandServer, monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_of(server.address)
    ask(server, host, (b"head", b"first"))
    monkeypatch.setattr(zmq_server, "_CHECK_NS", 0)
    monkeypatch.setattr(server, "_check", lambda now_ns: 1 // 0)
    ask_only(host, (b"head", b"second"))
    handed_over = []
    for _ in range(100):
        time.sleep(0.01)  # the message is under way
        with contextlib.suppress(ZeroDivisionError):
            handed_over += server.receive(100)
    assert [bytes(received.frames[1]) for received in handed_over] == [b"second"]
    host.close()


def test_an_answer_that_cannot_be_sent_costs_its_own_host_alone(
    server: HandServer, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Handler.of_files(model_dir)
    device, hosts = Server(server, handler), [host_of(server.address) for _ in range(2)]
    first = ask(server, hosts[0], codec.encode(msg.Ping(1)))
    second = ask(server, hosts[1], codec.encode(msg.Ping(2)))
    send = server.send
    monkeypatch.setattr(server, "send", lambda client, frames: 1 // (client != first.client) and send(client, frames))
    for received in (first, second):
        device.serve(received)
    assert codec.decode_reply(*answer(hosts[1]))[0].id == 2
    with pytest.raises(DeviceUnavailable):
        answer(hosts[0])
    for host in hosts:
        host.close()


def ask_only(host: ZmqTransport, frames: codec.Frames) -> None:
    until(lambda: host.send(frames), pause_s=0)


def test_a_host_that_floods_is_sent_away(device: Device) -> None:
    with device.honest_host() as client:
        peer = device.raw()
        peer.settimeout(PATIENCE_S)
        flood = request(msg.Ping(1)) * 500

        def attack() -> None:
            for _ in range(200):
                peer.sendall(flood)
                execute(client)

        with pytest.raises(ConnectionError):
            attack()
    assert_serves(device)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that others can be let into, as those of pytest cannot."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


TRIES = """
import os, socket, sys
try:
    s = socket.socket(socket.AF_UNIX if sys.argv[1] == "ipc" else socket.AF_INET)
    s.connect(sys.argv[2] if sys.argv[1] == "ipc" else ("127.0.0.1", int(sys.argv[2])))
    s.settimeout(20)
    print(len(s.recv(10)))
except OSError as error:
    print(type(error).__name__)
"""


def said(kind: str, where: str, user: int) -> str:
    """What a process of that user gets of a device."""
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    done = subprocess.run(
        [python, "-c", TRIES, kind, where], capture_output=True, text=True, user=user, cwd="/", timeout=PATIENCE_S
    )
    return done.stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_cannot_open_the_path_of_a_device_and_is_refused_where_it_was_opened(reachable: Path) -> None:
    path = reachable / "private" / "device"
    with contextlib.closing(serving(reachable)):
        assert said("ipc", str(path), 65534) == "PermissionError"
        assert said("ipc", str(path), os.geteuid()) == "10"
        for each in (reachable, reachable / "private", path):
            each.chmod(0o777)
        assert said("ipc", str(path), 65534) in ("0", "ConnectionResetError", "BrokenPipeError")
        assert said("ipc", str(path), os.geteuid()) == "10"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_host_does_not_speak_to_a_device_of_another_user(reachable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be shown every activation, and its numbers would be believed."""
    with monkeypatch.context() as as_another:
        as_another.setattr(os, "geteuid", lambda: 1234)
        assert [is_foreign(user) for user in (None, 0, 1234, 1235)] == [False, False, False, True]
    with contextlib.closing(serving(reachable)) as server, monkeypatch.context() as as_another:
        os.chown(reachable / "private" / "device", 65534, -1)
        as_another.setattr(os, "geteuid", lambda: 1234)  # what a host of that user would see
        with pytest.raises(DeviceUnavailable, match="another user than 1234 listens there"):
            DeviceClient(server.address).connect(0.2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a socket away")
def test_a_host_looks_at_the_sockets_owner_again_after_the_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was nothing at the path when it began to connect."""
    with (
        contextlib.closing(host_of(f"ipc://{tmp_path}/private/device")) as host,
        contextlib.closing(serving(tmp_path)),
        monkeypatch.context() as as_another,
    ):
        os.chown(tmp_path / "private" / "device", 65534, -1)
        as_another.setattr(os, "geteuid", lambda: 1234)
        with pytest.raises(DeviceUnavailable, match="another user than 1234 listens there"):
            answer(host)


LISTENS = """
import os, socket, sys, time
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listening.listen()
print("ready", flush=True)
connection, _ = listening.accept()
connection.sendall(bytes.fromhex(sys.argv[2]))
time.sleep(600)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_host_asks_the_system_who_listens_not_the_path_alone(
    reachable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reachable.chmod(0o777)
    path = reachable / "device"
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    said = (GREETING + READY.replace(b"DEALER", b"ROUTER")).hex()
    process = subprocess.Popen([python, "-c", LISTENS, str(path), said], stdout=subprocess.PIPE, user=65534, cwd="/")
    assert process.stdout is not None
    try:
        assert process.stdout.readline()
        os.chown(path, 1234, -1)  # looks like the host's own
        monkeypatch.setattr(os, "geteuid", lambda: 1234)
        host = host_of(f"ipc://{path}")
        with pytest.raises(DeviceUnavailable, match="another user than 1234 listens there"):
            answer(host)
        host.close()
    finally:
        monkeypatch.undo()
        process.kill()
        process.communicate()


@pytest.mark.parametrize("mode", [0o770, 0o710, 0o720, 0o740, 0o701, 0o702, 0o704])
def test_a_device_listens_in_no_directory_that_others_can_enter_or_read(tmp_path: Path, mode: int) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private").chmod(mode)
    with pytest.raises(ConfigError, match="must belong to you alone"):
        serving(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_device_listens_in_no_directory_of_another_user_nor_behind_a_link(tmp_path: Path) -> None:
    """Whoever owns a link chooses the directory, and may choose another one later."""
    (tmp_path / "private").mkdir(mode=0o700)
    os.chown(tmp_path / "private", 65534, -1)
    with pytest.raises(ConfigError, match="must belong to you alone"):
        serving(tmp_path)
    (tmp_path / "private").rmdir()
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "private").symlink_to(tmp_path / "own")
    with pytest.raises(ConfigError, match="must belong to you alone"):
        serving(tmp_path)


def test_a_file_in_the_place_of_the_socket_is_not_replaced(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "device").write_text("a letter")
    with pytest.raises(ConfigError, match="is not a socket and will not be replaced"):
        serving(tmp_path)
    assert (private / "device").read_text() == "a letter"
    (private / "device").unlink()
    serving(tmp_path).close()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(private / "device"))
    stale.close()
    serving(tmp_path).close()


def test_the_lock_and_the_socket_of_a_device_are_closed_to_others(server: HandServer) -> None:
    path = Path(server.address.removeprefix("ipc://"))
    for closed in (path, path.with_name(f"{path.name}.lock")):
        assert stat.S_IMODE(closed.lstat().st_mode) & 0o077 == 0
    server.close()
    assert not path.exists()
    lock = path.with_name(f"{path.name}.lock")
    lock.write_text("4194303\n4194303\n")  # a longer pid, of the device before
    os.close(take(path))
    assert lock.read_text() == f"{os.getpid()}\n"
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
