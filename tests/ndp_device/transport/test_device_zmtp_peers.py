"""Both our ends of ZeroMQ's protocol against libzmq, which knows nothing of them; devices that a host must survive."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from ndp_device.errors import DeviceUnavailable, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport import checksum, zmtp
from ndp_device.transport.keys import DeviceKeys, HostKeys, make_keys
from ndp_device.transport.zmq_client import ZmqTransport
from ndp_device.transport.zmq_server import ZmqServer

SIZES = [0, 100, 255, 256, 8 << 10, 64 << 10, (64 << 10) + 1, 3 << 20]
HEADER = codec.encode(msg.Ping(1, ndp=256))[0]  # 1.0: nothing travels in fragments
PATIENT = 400  # looks of 50 ms


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(params=["open", "keys"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    if request.param == "open":
        return None
    pytest.importorskip("nacl", reason="keys need PyNaCl")
    make_keys(tmp_path / "keys", None)
    return tmp_path / "keys"


def answer(host: ZmqTransport, body: bytes) -> bytes:
    for _ in range(PATIENT):
        if host.send((HEADER, bytearray(body))):
            break
        host.receive(0.05)
    for _ in range(PATIENT):
        if (frames := host.receive(0.05)) is not None:
            return bytes(frames[1])
    raise AssertionError("no answer")


def test_our_host_speaks_with_libzmqs_router(
    context: zmq.Context[zmq.Socket[bytes]], directory: Path | None, tmp_path: Path
) -> None:
    router = context.socket(zmq.ROUTER)
    keys = None
    if directory is not None:
        keys = HostKeys.read(directory / "host.key")
        router.curve_server = True
        router.curve_secretkey = z85.encode(DeviceKeys.read(directory).secret)
    router.setsockopt(zmq.HEARTBEAT_IVL, 20)  # its PING is answered in between
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 60_000)
    router.bind("tcp://127.0.0.1:*")
    ended = threading.Event()

    def echo() -> None:
        while not ended.is_set():
            if router.poll(20):
                router.send_multipart(router.recv_multipart())

    thread = threading.Thread(target=echo)
    thread.start()
    host = ZmqTransport(router.last_endpoint.decode(), keys=keys, heartbeat_ms=200)
    try:
        for size in SIZES:
            body = os.urandom(size)
            assert answer(host, body) == body
        for _ in range(20):
            assert host.receive(0.02) is None  # longer than either side waits for a sign of life
        assert answer(host, b"still") == b"still"
    finally:
        ended.set()
        thread.join()
        host.close()


def test_our_device_speaks_with_libzmqs_dealer(
    context: zmq.Context[zmq.Socket[bytes]], directory: Path | None, tmp_path: Path
) -> None:
    dealer = context.socket(zmq.DEALER)
    keys = None
    if directory is not None:
        keys, host = DeviceKeys.read(directory), HostKeys.read(directory / "host.key")
        dealer.curve_publickey, dealer.curve_secretkey = z85.encode(host.public), z85.encode(host.secret)
        dealer.curve_serverkey = z85.encode(host.device)
    server = ZmqServer("tcp://127.0.0.1:0", keys)
    dealer.setsockopt(zmq.HEARTBEAT_IVL, 20)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 60_000)
    dealer.connect(server.address)
    try:
        for size in SIZES:
            body = os.urandom(size)
            dealer.send_multipart([checksum.write(HEADER, body), body])
            received = None
            while received is None:
                received = server.receive(50)
            assert received.damage is None
            server.send(received.client, received.frames)
            while not dealer.poll(0):
                server.receive(1)
            assert dealer.recv_multipart()[1] == body
    finally:
        dealer.close()
        server.close()


class Liar:
    """A device that shakes hands as it should, and then says what a test wants, until nobody listens."""

    def __init__(self, path: Path, *said: bytes, for_ever: bool) -> None:
        self.address = f"ipc://{path}"
        self.num_said = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._said, self._for_ever = said, for_ever
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(zmtp.GREETING + zmtp.READY)
            reader = zmtp.Reader()
            while reader.next()[0] is None:
                reader.filled(connection.recv_into(reader.buffer()))
            while True:
                for part in self._said:
                    connection.sendall(part)
                    self.num_said += len(part)
                if not self._for_ever:
                    self._ended.wait()
                    return

    def close(self) -> None:
        self._ended.set()
        self._listener.close()
        self._thread.join()


def connected(liar: Liar, heartbeat_ms: int = 400) -> ZmqTransport:
    host = ZmqTransport(liar.address, heartbeat_ms=heartbeat_ms)
    while not host.send((HEADER, b"")):
        host.receive(0.01)
    return host


def hear_nothing(host: ZmqTransport) -> None:
    for _ in range(PATIENT):
        assert host.receive(0.05) is None


def test_a_message_that_never_ends_costs_the_connection_and_bounded_memory(tmp_path: Path) -> None:
    """Frames of 1 MiB with the flag that more follow: the fifth is one too many. libzmq's DEALER takes them all."""
    liar = Liar(tmp_path / "device", b"\x03" + (1 << 20).to_bytes(8, "big"), bytes(1 << 20), for_ever=True)
    host = connected(liar)
    try:
        with pytest.raises(RemoteProtocolError, match="4 frames"):
            hear_nothing(host)
    finally:
        host.close()
        liar.close()
    assert liar.num_said < 8 << 20


def test_a_device_that_talks_without_an_end_does_not_keep_its_host(tmp_path: Path) -> None:
    """PING after PING: every look at it ends, and takes what it may take at most."""
    ping = b"\x04\x07\x04PING\x00\x00"
    liar = Liar(tmp_path / "device", ping * 10_000, for_ever=True)
    host = connected(liar)
    try:
        for _ in range(20):
            assert host.receive(0.001) is None
        assert host._unsent_bytes <= 65 << 10
    finally:
        host.close()
        liar.close()


def test_a_device_that_falls_silent_is_lost_after_a_few_heartbeats(tmp_path: Path) -> None:
    liar = Liar(tmp_path / "device", for_ever=False)
    host = connected(liar, heartbeat_ms=20)
    try:
        with pytest.raises(DeviceUnavailable, match="was lost"):
            hear_nothing(host)
    finally:
        host.close()
        liar.close()


def test_a_device_that_speaks_before_it_is_asked_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "device"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    host = ZmqTransport(f"ipc://{path}")
    connection, _ = listener.accept()
    connection.sendall(zmtp.GREETING + zmtp.READY + b"\x00\x05hello")
    with pytest.raises(RemoteProtocolError, match="before it was asked"):
        hear_nothing(host)
    host.close()
    connection.close()
    listener.close()
