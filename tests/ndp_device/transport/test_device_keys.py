"""Who may come in by tcp: hosts with a key that is allowed, and no others, whatever they send before they are known."""

import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from server_by_hand import HandServer, host_of
from zmq.auth import load_certificate

from ndp_device.common.errors import ConfigError, DeviceUnavailable, NdpError
from ndp_device.probe import Probe
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport.address import Address
from ndp_device.transport.keys import AllowList, DeviceKeys, HostKeys, make_keys
from ndp_device.transport.zmq_client import ZmqTransport
from vllm_ndp.device_client.client import DeviceClient

PATIENCE_S = 60.0
PROGRAM = [sys.executable, "-P", "-m", "ndp_device"]


def _writable(path: Path) -> None:
    path.chmod(path.stat().st_mode | 0o020)


def _of_another(path: Path) -> None:
    os.chown(path, 65534, -1)


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", None)
    return tmp_path / "keys"


@pytest.fixture
def echo(keys: Path) -> Iterator[HandServer]:
    """Every message comes back to its host."""
    server = HandServer(Address.parse("tcp://127.0.0.1:0", has_keys=True), DeviceKeys.read(keys))
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            if received := server.one(20):
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


def why_not(address: str, keys: Path | None) -> str:
    transport = host_of(address, keys)
    try:
        with pytest.raises(DeviceUnavailable) as refusal:
            exchange(transport)
        return str(refusal.value)
    finally:
        transport.close()


@pytest.mark.parametrize("size", [0, 100, 8 << 10, 64 << 10, (1 << 20) + 3, 9 << 20])
def test_a_host_with_the_right_key_gets_its_own_bytes_back(echo: HandServer, keys: Path, size: int) -> None:
    transport = host_of(echo.address, keys / "host.key_secret")
    try:
        body = os.urandom(size)
        assert exchange(transport) == b""
        assert exchange(transport, body) == body
    finally:
        transport.close()


def test_a_host_whose_key_is_not_allowed_is_told_so(echo: HandServer, keys: Path) -> None:
    make_keys(keys, "stranger")
    (keys / "allowed" / "stranger.key").unlink()
    assert "does not allow this host's key" in why_not(echo.address, keys / "stranger.key_secret")


def test_a_host_without_keys_is_told_that_some_are_wanted(echo: HandServer) -> None:
    assert "the device wants keys" in why_not(echo.address, None)


def test_a_host_with_keys_is_told_that_the_device_has_none(keys: Path) -> None:
    server = HandServer(Address.parse("tcp://127.0.0.1:0", insecure_loopback=True))
    assert "the device has no keys" in why_not(server.address, keys / "host.key_secret")
    server.close()


def test_a_host_that_knows_another_devices_key_is_told_so(echo: HandServer, tmp_path: Path) -> None:
    make_keys(tmp_path / "other", None)
    said = why_not(echo.address, tmp_path / "other" / "host.key_secret")
    assert "its key is another one" in said


def test_a_revoked_host_is_sent_away_and_does_not_come_back(echo: HandServer, keys: Path) -> None:
    make_keys(keys, "second")
    first, second = keys / "host.key_secret", keys / "second.key_secret"
    time.sleep(0.6)  # the list is looked at again after half a second
    transport = host_of(echo.address, second)
    other = host_of(echo.address, first)
    try:
        exchange(transport)
        exchange(other)
        (keys / "allowed" / "second.key").unlink()
        with pytest.raises(DeviceUnavailable, match="was lost"):
            receive_for_long(transport)
        assert exchange(other, b"here", 2) == b"here"
    finally:
        transport.close()
        other.close()
    assert "does not allow" in why_not(echo.address, second)


def test_damaged_lists_let_nobody_in(echo: HandServer, keys: Path) -> None:
    (keys / "allowed" / "host.key").write_text("{}")
    time.sleep(0.6)
    assert "does not allow" in why_not(echo.address, keys / "host.key_secret")


def test_secrets_are_written_for_the_owner_alone_and_never_replaced(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        made = make_keys(tmp_path / "keys", "a")
    finally:
        os.umask(previous)
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    before = (tmp_path / "keys" / "device.key_secret").read_text()
    with pytest.raises(ConfigError, match="is not replaced"):
        make_keys(tmp_path / "keys", "a")
    make_keys(tmp_path / "keys", "b")
    assert (tmp_path / "keys" / "device.key_secret").read_text() == before
    assert HostKeys.read(tmp_path / "keys" / "b.key_secret").device == load_certificate(made[1])[0]


@pytest.mark.parametrize("name", ["device", "../up", ".hidden", "a" * 65])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name must be"):
        make_keys(tmp_path / "keys", name)


@pytest.mark.parametrize(("mode", "got"), [(0o640, "-rw-r-----"), (0o604, "-rw----r--")])
@pytest.mark.parametrize("file", ["device.key_secret", "host.key_secret"])
def test_a_secret_that_others_can_read_is_refused(keys: Path, file: str, mode: int, got: str) -> None:
    (keys / file).chmod(mode)
    with pytest.raises(ConfigError, match=f"0600.*{got}"):
        DeviceKeys.read(keys) if file == "device.key_secret" else HostKeys.read(keys / file)


@AS_ROOT
def test_a_secret_of_another_user_is_refused(keys: Path) -> None:
    _of_another(keys / "device.key_secret")
    with pytest.raises(ConfigError, match="readable by you alone"):
        DeviceKeys.read(keys)


def test_a_list_of_hosts_is_read_to_a_bound(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_keys(keys, "more")
    monkeypatch.setattr("ndp_device.transport.keys._MAX_HOSTS", 1)
    assert list(DeviceKeys.read(keys).allowed().values()) == ["host"]


def test_a_machine_that_is_gone_is_given_up_after_a_minute_and_a_half(echo: HandServer, keys: Path) -> None:
    host = host_of(echo.address, keys / "host.key_secret")
    for end in (echo._socket, host._socket):
        idle, between, times = (end.getsockopt(getattr(zmq, f"TCP_KEEPALIVE_{of}")) for of in ("IDLE", "INTVL", "CNT"))
        assert (end.getsockopt(zmq.TCP_KEEPALIVE), idle + times * between) == (1, 90)
        assert end.getsockopt(zmq.TCP_MAXRT) == 90_000  # ms, where something is under way
    host.close()


@pytest.mark.parametrize("text", ["", "curve", "public-key = 1", 'public-key = "' + 40 * "~", "[" * 9999, "\0"])
def test_files_that_are_no_keys_are_refused_in_one_sentence(keys: Path, text: str) -> None:
    for path in (keys / "device.key_secret", keys / "allowed" / "host.key"):
        kept = path.read_text()
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read as a key"):
            DeviceKeys.read(keys)
        path.write_text(kept)


def test_a_device_that_allows_nobody_does_not_start(keys: Path) -> None:
    (keys / "allowed" / "host.key").unlink()
    with pytest.raises(ConfigError, match="allows no host"):
        DeviceKeys.read(keys)


def test_what_may_be_listened_on() -> None:
    for address in ("tcp://192.0.2.1:5", "tcp://[2001:db8::1]:5", "tcp://127.0.0.1:5", "tcp://localhost:5"):
        with pytest.raises(ConfigError, match="tcp needs keys"):
            Address.parse(address)
        assert Address.parse(address, has_keys=True).ipc_path is None
    for address in ("tcp://192.0.2.1:5", "tcp://[2001:db8::1]:5"):
        with pytest.raises(ConfigError, match="for loopback only"):
            Address.parse(address, insecure_loopback=True)
    assert Address.parse("tcp://127.0.0.1:5", insecure_loopback=True).ipc_path is None
    for address in ("tcp://0.0.0.0:5", "tcp://[::]:5", "tcp://*:5", "tcp://:5"):
        for has_keys in (False, True):
            with pytest.raises(ConfigError, match="name the one address that"):
                Address.parse(address, has_keys=has_keys)
    with pytest.raises(ConfigError, match="no effect"):
        Address.parse("ipc:///run/x/ndp", has_keys=True)
    with pytest.raises(ConfigError, match="tcp needs keys"):  # on the host's side, too
        DeviceClient("tcp://127.0.0.1:5").connect(5)


@pytest.mark.slow
def test_the_programs_serve_and_ask_with_keys(model_dir: Path, tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    made = subprocess.run([*PROGRAM, "keygen", keys, "--host", "me"], capture_output=True, text=True, check=True)
    assert len(json.loads(made.stdout)["written"]) == 4
    command = [*PROGRAM, "serve", str(model_dir), "--address", "tcp://127.0.0.1:0", "--keys", keys]
    with open(os.devnull) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        process = subprocess.Popen([*command], stdout=subprocess.PIPE, text=True, pass_fds=[inherited.fileno()])
        number = inherited.fileno()
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        with Probe(address, timeout_s=PATIENCE_S, keys=tmp_path / "keys" / "me.key_secret") as probe:
            assert probe.hello().num_layers == 2
        done = subprocess.run([*PROGRAM, "ping", address, "--key", "insecure-loopback"], capture_output=True, text=True)
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


def test_errors_of_keys_are_this_packages(keys: Path) -> None:
    with pytest.raises(NdpError):
        HostKeys.read(keys / "absent.key_secret")
    with pytest.raises(ConfigError, match="device's own key"):
        HostKeys.read(keys / "device.key_secret")
    with pytest.raises(ConfigError, match="has no secret"):
        HostKeys.read(keys / "allowed" / "host.key")


@pytest.mark.parametrize("opened", [_writable, pytest.param(_of_another, marks=AS_ROOT)])
@pytest.mark.parametrize("where", ["allowed/host.key", "allowed", ".", ".."])
def test_a_key_that_another_user_could_replace_lets_nobody_in(
    tmp_path: Path, where: str, opened: Callable[[Path], None]
) -> None:
    """Before the device starts, while it runs, and when a key is made."""
    keys = tmp_path / "above" / "keys"
    make_keys(keys, None)
    read = DeviceKeys.read(keys)
    listed, warnings = read.allowed(), []
    allow_list = AllowList(read, warnings.append)
    opened((keys / where).resolve())
    with pytest.raises(ConfigError, match="must be writable by you and root alone"):
        DeviceKeys.read(keys)
    allow_list._looked_s = 0.0
    assert [allow_list.name(key) for key in listed] == [None]
    assert "must be writable by you and root alone" in warnings[0]
    if where != "allowed/host.key":
        with pytest.raises(ConfigError, match="must be writable by you and root alone"):
            make_keys(keys, "another")


@pytest.mark.parametrize("opened", [_writable, pytest.param(_of_another, marks=AS_ROOT)])
def test_a_host_takes_no_devices_key_that_another_user_could_replace(
    keys: Path, opened: Callable[[Path], None]
) -> None:
    HostKeys.read(keys / "host.key_secret")
    opened(keys / "device.key")
    with pytest.raises(ConfigError, match="must be writable by you and root alone"):
        HostKeys.read(keys / "host.key_secret")


def test_a_directory_above_that_is_everybodys_may_be_so_if_its_entries_are_not(tmp_path: Path) -> None:
    """As /tmp is. The directory of the keys may not: whoever adds a file there comes in."""
    tmp_path.chmod(0o1777)
    make_keys(tmp_path / "keys", None)
    assert len(DeviceKeys.read(tmp_path / "keys").allowed()) == 1
    (tmp_path / "keys" / "allowed").chmod(0o1777)
    with pytest.raises(ConfigError, match="must be writable by you and root alone"):
        DeviceKeys.read(tmp_path / "keys")
