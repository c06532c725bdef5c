"""Who may come in by tcp: hosts with a key that is allowed, and no others, whatever they send before they are known."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ndp_device.errors import ConfigError, DeviceUnavailable, NdpError, RemoteProtocolError
from ndp_device.probe import Probe
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg

pytest.importorskip("nacl", reason="keys need PyNaCl")
from ndp_device.transport import connection, zmtp
from ndp_device.transport.address import Address
from ndp_device.transport.curve import CurveSession
from ndp_device.transport.keys import DeviceKeys, HostKeys, make_keys
from ndp_device.transport.zmq_client import ZmqTransport
from ndp_device.transport.zmq_server import ZmqServer

PATIENCE_S = 60.0
PROGRAM = [sys.executable, "-P", "-m", "ndp_device"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", None)
    return tmp_path / "keys"


@pytest.fixture
def echo(keys: Path) -> Iterator[ZmqServer]:
    """Every message comes back to its host."""
    server = ZmqServer("tcp://127.0.0.1:0", DeviceKeys.read(keys))
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            if received := server.receive(20):
                header = bytes(received.frames[0])[:-4] + bytes(4)
                server.send(received.client, (header, bytearray(received.frames[1])))

    thread = threading.Thread(target=serve)
    thread.start()
    yield server
    ending.set()
    thread.join()
    server.close()


def exchange(transport: ZmqTransport, body: bytes = b"", number: int = 1) -> bytes:
    """What comes back for one message. Raises what the transport raises."""
    header, _ = codec.encode(msg.Ping(number))
    end = time.monotonic() + PATIENCE_S
    while not transport.send((header, bytearray(body))):
        assert time.monotonic() < end
        assert transport.receive(0.02) is None
    while (reply := transport.receive(0.1)) is None:
        assert time.monotonic() < end
    return bytes(reply[1])


def receive_for_long(transport: ZmqTransport) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        transport.receive(0.1)


def why_not(address: str, keys: HostKeys | None) -> str:
    transport = ZmqTransport(address, keys=keys)
    try:
        with pytest.raises(DeviceUnavailable) as refusal:
            exchange(transport)
        return str(refusal.value)
    finally:
        transport.close()


@pytest.mark.parametrize("size", [0, 100, 8 << 10, 64 << 10, (1 << 20) + 3, 9 << 20])
def test_a_host_with_the_right_key_gets_its_own_bytes_back(echo: ZmqServer, keys: Path, size: int) -> None:
    transport = ZmqTransport(echo.address, keys=HostKeys.read(keys / "host.key"))
    try:
        body = os.urandom(size)
        assert exchange(transport, body) == body
    finally:
        transport.close()


def test_a_host_that_is_silent_for_seconds_stays_connected(echo: ZmqServer, keys: Path) -> None:
    """PING and PONG travel in boxes as well; after 2 s without one the host would give up."""
    transport = ZmqTransport(echo.address, keys=HostKeys.read(keys / "host.key"))
    try:
        exchange(transport)
        time.sleep(3)
        assert exchange(transport, b"still", 2) == b"still"
    finally:
        transport.close()


def test_a_host_whose_key_is_not_allowed_is_told_so(echo: ZmqServer, keys: Path) -> None:
    make_keys(keys, "stranger")
    (keys / "allowed" / "stranger.pub").unlink()
    assert "does not allow this host's key" in why_not(echo.address, HostKeys.read(keys / "stranger.key"))


def test_a_host_without_keys_is_told_that_some_are_wanted(echo: ZmqServer) -> None:
    assert "the device wants keys" in why_not(echo.address, None)


def test_a_host_with_keys_is_told_that_the_device_has_none(keys: Path) -> None:
    server = ZmqServer("tcp://127.0.0.1:0")
    threading.Thread(target=lambda: [server.receive(20) for _ in range(200)], daemon=True).start()
    assert "the device has no keys" in why_not(server.address, HostKeys.read(keys / "host.key"))


def test_a_host_that_knows_another_devices_key_is_told_so(echo: ZmqServer, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", None)
    said = why_not(echo.address, HostKeys.read(tmp_path / "other" / "host.key"))
    assert "its key is another one" in said


def test_a_revoked_host_is_sent_away_and_does_not_come_back(echo: ZmqServer, keys: Path) -> None:
    make_keys(keys, "second")
    first, second = HostKeys.read(keys / "host.key"), HostKeys.read(keys / "second.key")
    time.sleep(0.6)  # the list is looked at again after half a second
    transport = ZmqTransport(echo.address, keys=second)
    other = ZmqTransport(echo.address, keys=first)
    try:
        exchange(transport)
        exchange(other)
        (keys / "allowed" / "second.pub").unlink()
        with pytest.raises(DeviceUnavailable, match="was lost"):
            receive_for_long(transport)
        assert exchange(other, b"here", 2) == b"here"
    finally:
        transport.close()
        other.close()
    assert "does not allow" in why_not(echo.address, second)


def test_damaged_lists_let_nobody_in(echo: ZmqServer, keys: Path) -> None:
    (keys / "allowed" / "host.pub").write_text("{}")
    time.sleep(0.6)
    assert "does not allow" in why_not(echo.address, HostKeys.read(keys / "host.key"))


# -- files -------------------------------------------------------------------------------------------------------------


def test_secrets_are_written_for_the_owner_alone_and_never_replaced(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        made = make_keys(tmp_path / "keys", "a")
    finally:
        os.umask(previous)
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    before = (tmp_path / "keys" / "device.key").read_text()
    with pytest.raises(ConfigError, match="is not replaced"):
        make_keys(tmp_path / "keys", "a")
    make_keys(tmp_path / "keys", "b")
    assert (tmp_path / "keys" / "device.key").read_text() == before
    assert json.loads((tmp_path / "keys" / "b.key").read_text())["device"] == json.loads(before)["public"]


@pytest.mark.parametrize("name", ["device", "../up", "", ".hidden", "a" * 65])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    if name:
        with pytest.raises(ConfigError, match="name must be"):
            make_keys(tmp_path / "keys", name)


@pytest.mark.parametrize("file", ["device.key", "host.key"])
def test_a_secret_that_others_can_read_is_refused(keys: Path, file: str) -> None:
    (keys / file).chmod(0o644)
    with pytest.raises(ConfigError, match=r"0600.*-rw-r--r--"):
        DeviceKeys.read(keys) if file == "device.key" else HostKeys.read(keys / file)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"public": "00", "secret": "00"}', "[" * 9999, '{"public": 1}'])
def test_files_that_are_no_keys_are_refused_in_one_sentence(keys: Path, text: str) -> None:
    for path in (keys / "device.key", keys / "allowed" / "host.pub"):
        kept = path.read_text()
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read as a key"):
            DeviceKeys.read(keys)
        path.write_text(kept)


def test_a_device_that_allows_nobody_does_not_start(keys: Path) -> None:
    (keys / "allowed" / "host.pub").unlink()
    with pytest.raises(ConfigError, match="allows no host"):
        DeviceKeys.read(keys)


def test_what_may_be_listened_on() -> None:
    for address in ("tcp://192.0.2.1:5", "tcp://[2001:db8::1]:5"):
        with pytest.raises(ConfigError, match="only loopback"):
            Address.parse(address)
        assert Address.parse(address, has_keys=True).ipc_path is None
    for address in ("tcp://0.0.0.0:5", "tcp://[::]:5", "tcp://*:5", "tcp://:5"):
        for has_keys in (False, True):
            with pytest.raises(ConfigError, match="name the one address that"):
                Address.parse(address, has_keys=has_keys)
    with pytest.raises(ConfigError, match="no effect"):
        Address.parse("ipc:///run/x/ndp", has_keys=True)


# -- the program -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_programs_serve_and_ask_with_keys(model_dir: Path, tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    made = subprocess.run([*PROGRAM, "keygen", keys, "--host", "me"], capture_output=True, text=True, check=True)
    assert len(json.loads(made.stdout)["written"]) == 3
    command = [*PROGRAM, "serve", str(model_dir), "--address", "tcp://127.0.0.1:0", "--keys", keys]
    with open(os.devnull) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        process = subprocess.Popen(
            [*command, "--kernel", "reference"], stdout=subprocess.PIPE, text=True, pass_fds=[inherited.fileno()]
        )
        number = inherited.fileno()
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        with Probe(address, timeout_s=PATIENCE_S, keys=tmp_path / "keys" / "me.key") as probe:
            assert probe.hello().num_layers == 2
        done = subprocess.run([*PROGRAM, "ping", address], capture_output=True, text=True)
        assert done.returncode == 2
        assert re.fullmatch(r"ndp-device: the device wants keys: .*\n", done.stderr)
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        handles = {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir() if path.name == str(number)}
        assert os.devnull not in handles
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


# -- before they are known ---------------------------------------------------------------------------------------------


def session(keys: Path) -> CurveSession:
    read = DeviceKeys.read(keys)
    return CurveSession(read.secret, read.public, lambda key: True)


def test_nothing_but_a_handshake_is_read_of_a_stranger(keys: Path) -> None:
    for sent in (
        b"\x00\x05hello",  # a message before the handshake
        b"\x04\x06\x05READY",  # the command of the other mechanism
        b"\x04\x0b\x07MESSAGE" + bytes(3),
        b"\x06" + (2000).to_bytes(8, "big"),  # a command of 2000 bytes
        b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),  # a HELLO whose box is empty
        b"\x04\xc8\x05HELLO\x02\x00" + bytes(192),
    ):
        reader = zmtp.Reader(session(keys))
        arrive(reader, zmtp.CURVE_GREETING.replace(b"\x01" + bytes(31), bytes(32)))
        assert reader.next() == (None, False)
        arrive(reader, sent)
        with pytest.raises(RemoteProtocolError):
            reader.next()


def arrive(reader: zmtp.Reader, data: bytes) -> None:
    reader.buffer()[: len(data)] = data
    reader.filled(len(data))


def test_frames_that_are_replayed_forged_or_unboxed_end_the_connection(keys: Path) -> None:
    """A host made of libsodium itself, so that every byte of its frames is in the test's hands."""
    from nacl import bindings as sodium

    known = session(keys)
    device = DeviceKeys.read(keys).public
    public, secret = sodium.crypto_box_keypair()
    ours, own = sodium.crypto_box_keypair()
    number = (1).to_bytes(8, "big")
    hello = b"\x05HELLO\x01\x00" + bytes(72) + ours + number
    welcome = known.obey(hello + sodium.crypto_box(bytes(64), b"CurveZMQHELLO---" + number, device, own))
    plain = sodium.crypto_box_open(welcome[24:], b"WELCOME-" + welcome[8:24], device, own)
    theirs, cookie = plain[:32], plain[32:]
    nonce = os.urandom(16)
    vouch = nonce + sodium.crypto_box(ours + device, b"VOUCH---" + nonce, theirs, secret)
    number = (2).to_bytes(8, "big")
    box = sodium.crypto_box(public + vouch, b"CurveZMQINITIATE" + number, theirs, own)
    for damaged in (bytes(96) + number + box, cookie + number + bytes(len(box)), cookie + (1).to_bytes(8, "big") + box):
        with pytest.raises(RemoteProtocolError):
            known.obey(b"\x08INITIATE" + damaged)
    known = session(keys) if known.peer_key is not None else known
    known._heard = 1
    known.obey(b"\x08INITIATE" + cookie + number + box)
    assert known.peer_key == public

    def frame(count: int, content: bytes) -> bytes:
        short = count.to_bytes(8, "big")
        return b"\x07MESSAGE" + short + sodium.crypto_box(content, b"CurveZMQMESSAGEC" + short, theirs, own)

    good = frame(3, b"\x00hello")
    assert known.opened(good) == (0, b"hello")
    for bad in (good, frame(2, b"\x00old"), frame(4, b"\x00x")[:-1] + b"\x00", b"hello", b"", frame(4, b"\x00")[:20]):
        with pytest.raises(RemoteProtocolError):
            known.opened(bad)
    assert known.opened(frame(4, b"\x01next")) == (1, b"next")


def test_handshakes_of_strangers_take_a_bounded_part_of_the_time(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time for handshakes at all none is answered, and the connections end by their own time limit."""
    monkeypatch.setattr(connection, "HANDSHAKES_NS", 0)
    server = ZmqServer("tcp://127.0.0.1:0", DeviceKeys.read(keys))
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.settimeout(0.2)
        stranger.sendall(zmtp.CURVE_GREETING.replace(b"\x01" + bytes(31), bytes(32)))
        stranger.sendall(b"\x04\xc8\x05HELLO\x01\x00" + bytes(192))
        answer, end = b"", time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            server.receive(20)
            try:
                data = stranger.recv(4096)
            except TimeoutError:
                continue
            if not data:
                break
            answer += data
        assert answer == zmtp.CURVE_GREETING
    server.close()


def test_errors_of_keys_are_this_packages(keys: Path) -> None:
    with pytest.raises(NdpError):
        HostKeys.read(keys / "absent.key")
    with pytest.raises(ConfigError, match="device's own key"):
        HostKeys.read(keys / "device.key")
