"""Large bodies in fragments: joined to the byte, and whatever is missing, late, foreign or too much is one error."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from paths import ROOT
from server_by_hand import HandServer, answer, ask, host_of

from ndp_device.common.errors import DeviceUnavailable, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport import checksum, fragments, zmq_server
from ndp_device.transport.zmq_client import ZmqTransport

BODY = random.Random(0).randbytes(fragments.CUT_FROM_BYTES + 12345)
PEER = ROOT / "benchmarks" / "protocol_roundtrip.py"


def header(number: int = 1, ndp: int = msg.VERSION) -> bytes:
    return codec.encode(msg.Ping(number, ndp=ndp))[0]


def cut(number: int = 1, body: bytes = BODY) -> list[list[Any]]:
    return [
        [bytes(frame) for frame in frames]
        for frames in fragments.cut(number, header(number), body, writes_checksum=True)
    ]


def join(parts: list[list[Any]]) -> tuple[bytes, memoryview] | None:
    joining = fragments.Joining(parts[0])
    message = None
    for frames in parts[1:]:
        assert message is None
        message = joining.add(frames)
    return message


@pytest.mark.parametrize("copy_into", ["extension", "python"])
@pytest.mark.parametrize("size", [fragments.CUT_FROM_BYTES, len(BODY), (20 << 20) + 1, msg.MAX_BODY_BYTES])
def test_what_was_cut_joins_to_the_same_bytes(size: int, copy_into: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if copy_into == "python":
        monkeypatch.setattr(checksum, "copy_into", checksum.copy_into_in_python)
    body = random.Random(size).randbytes(size)
    parts = cut(7, body)
    assert 2 <= len(parts) <= fragments.MAX_FRAGMENTS
    assert all(len(frames[1]) >= fragments.MIN_FRAGMENT_BYTES for frames in parts[:-1])
    message = join(parts)
    assert message is not None
    assert message[0] == checksum.write(header(7), body)
    assert message[1] == body
    written = checksum.write(header(7), body)
    assert [
        [bytes(frame) for frame in frames] for frames in fragments.cut(7, written, body, writes_checksum=False)
    ] == parts


def fragment(number: int, offset: int, total: int) -> bytes:
    return msgspec.msgpack.encode(msg.Fragment(number, offset, total))


FIRST, SECOND, *REST = cut()
SIZE = len(FIRST[1])
LIES: dict[str, list[list[Any]]] = {
    "one is missing": [FIRST, *REST],
    "one comes twice": [FIRST, SECOND, SECOND],
    "two change places": [FIRST, REST[0], SECOND],
    "it has no beginning": [SECOND],
    "it is of another message": [FIRST, cut(2)[1]],
    "another message begins": [FIRST, cut(2)[0]],
    "it ends too soon": [FIRST, [*SECOND, REST[-1][2]]],
    "it never ends": [FIRST, SECOND, *REST[:-1], REST[-1][:2]],
    "the checksum is too long": [FIRST, SECOND, *REST[:-1], [*REST[-1], b""]],
    "no header": [FIRST[:2]],
    "no bytes": [FIRST[:1]],
    "too small": [[FIRST[0], FIRST[1][: fragments.MIN_FRAGMENT_BYTES - 1], FIRST[2]]],
    "empty": [[FIRST[0], b"", FIRST[2]]],
    "more bytes than announced": [FIRST, [SECOND[0], BODY]],
    "too large a body": [[fragment(1, 0, msg.MAX_BODY_BYTES + 1), *FIRST[1:]]],
    "a small body": [[fragment(1, 0, SIZE), *FIRST[1:]]],
    "too large a header": [[*FIRST[:2], bytes(4097)]],
    "too small a header": [[*FIRST[:2], bytes(4)]],
    "another total": [FIRST, [fragment(1, SIZE, len(BODY) + 1), SECOND[1]]],
    "a negative offset": [[msgspec.msgpack.encode(["piece", 1, -1, len(BODY)]), *FIRST[1:]]],
    "not a fragment": [[b"\x94\xc1\xc1\xc1", *FIRST[1:]]],
    "a bomb": [[b"\x94" * 4000, *FIRST[1:]]],
    "a flipped bit": [FIRST, [SECOND[0], b"\0" + SECOND[1][1:]], *REST],
    "a flipped bit in the header": [[*FIRST[:2], FIRST[2][:-6] + b"\xff" + FIRST[2][-5:]], SECOND, *REST],
}


@pytest.mark.parametrize("lie", LIES)
def test_whatever_does_not_join_is_one_error(lie: str) -> None:
    with pytest.raises(RemoteProtocolError):
        join(LIES[lie])


@pytest.fixture
def host(server: HandServer) -> Iterator[ZmqTransport]:
    host = host_of(server.address)
    yield host
    host.close()


class Raw:
    """Sockets that say what they like."""

    def __init__(self, kind: int, address: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.address, self.kind = address, kind

    def open(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(self.kind)
        socket.setsockopt(zmq.LINGER, 0)
        if self.kind == zmq.ROUTER:
            socket.bind(self.address)
        else:
            socket.connect(self.address)
        return socket


@pytest.fixture
def raw_host(server: HandServer) -> Iterator[Raw]:
    raw = Raw(zmq.DEALER, server.address)
    yield raw
    raw.context.destroy(linger=0)


def check(received: Any) -> None:
    if received.damage is not None:
        raise RemoteProtocolError(received.damage)


def joining(server: HandServer) -> int:
    """Messages of which some fragments are here."""
    return sum(peer.joining is not None for peer in server._peers.values())


def test_fragments_are_sent_only_to_a_peer_that_has_shown_that_it_joins_them(
    server: HandServer, host: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another major version is not sent what it may not read. Both directions with ours."""
    sent = []
    monkeypatch.setattr(
        fragments, "cut", lambda *args, real=fragments.cut, **options: sent.append(args[0]) or real(*args, **options)
    )
    other = header(3, 2 << 8)
    server.send(ask(server, host, (other, b"")).client, (other, b""))
    answer(host)
    assert not fragments.must_cut(BODY, host._version)
    frames = (header(3), BODY)
    host._version = msg.VERSION
    for _ in range(2):
        received = ask(server, host, frames)
        check(received)
        assert bytes(received.frames[1]) == BODY
        server.send(received.client, frames)
        assert bytes(answer(host)[1]) == BODY
    assert len(sent) == 4


def test_small_messages_between_large_ones_arrive_in_order(server: HandServer, host: ZmqTransport) -> None:
    host._version = msg.VERSION
    for number in range(12):
        while not host.send((header(number), BODY if number % 2 else b"")):
            time.sleep(0.001)
    for number in range(12):
        received = server.until_one()
        check(received)
        assert codec.peek_id(received.frames[0]) == number
        assert len(received.frames[1]) == (len(BODY) if number % 2 else 0)


REFUSED = [lie for lie in LIES if not lie.startswith(("another message", "it is of", "more bytes"))]


@pytest.mark.parametrize("lie", REFUSED)
def test_a_device_refuses_a_broken_message_with_a_sentence_and_serves_the_next(
    server: HandServer, raw_host: Raw, lie: str
) -> None:
    socket = raw_host.open()
    for frames in LIES[lie]:
        socket.send_multipart(frames)
    received = server.until_one()
    with pytest.raises(RemoteProtocolError):
        check(received)
    socket.send_multipart([checksum.write(header(99), b""), b""])
    while codec.peek_id(received.frames[0]) != 99:
        received = server.until_one()
    check(received)
    assert not joining(server)


def test_a_half_received_message_is_dropped_when_its_host_begins_another(server: HandServer, raw_host: Raw) -> None:
    socket = raw_host.open()
    for frames in (*cut(1)[:-1], *cut(2)):
        socket.send_multipart(frames)
    received = server.until_one()
    assert codec.peek_id(received.frames[0]) == 2
    check(received)
    assert not joining(server)
    for frames in (*cut(3)[:-1], [checksum.write(header(4), b""), b""], cut(3)[-1]):
        socket.send_multipart(frames)
    assert codec.peek_id(server.until_one().frames[0]) == 4
    received = server.until_one()
    with pytest.raises(RemoteProtocolError, match="no message that has begun"):
        check(received)


@pytest.mark.parametrize("gone", [True, False])
def test_a_half_received_message_is_dropped_when_its_host_has_gone_or_takes_too_long(
    server: HandServer, raw_host: Raw, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    socket = raw_host.open()
    socket.send_multipart(FIRST)
    while not joining(server):
        assert server.one(50) is None
    if gone:
        socket.close()
    else:
        monkeypatch.setattr(zmq_server, "_HALF_NS", 0)
    for _ in range(100):
        server.receive(20)
        if not server._peers:
            break
    assert server._peers == {}


@pytest.mark.parametrize("lie", [lie for lie in LIES if not lie.startswith("more bytes")])
def test_a_host_gives_up_a_connection_that_breaks_a_message(tmp_path: Path, lie: str) -> None:
    raw = Raw(zmq.ROUTER, f"ipc://{tmp_path}/device")
    router = raw.open()
    host = host_of(raw.address)
    try:
        while not host.send((header(), b"")):
            time.sleep(0.001)
        client, *_ = router.recv_multipart()
        for frames in (*LIES[lie], [checksum.write(header(5), b""), b""]):
            router.send_multipart([client, *frames])
        with pytest.raises(RemoteProtocolError):
            answer(host)
    finally:
        host.close()
        raw.context.destroy(linger=0)


def test_a_host_that_does_not_read_gets_whole_answers_or_loses_its_connection(
    server: HandServer, host: ZmqTransport
) -> None:
    """The answers to the 8 requests that a host may have in flight may wait; a hundred more may not."""
    client = ask(server, host, (header(), b"")).client
    for number in range(8):
        server.send(client, (header(number), BODY))
    for number in range(8):
        frames = answer(host)
        assert codec.peek_id(frames[0]) == number
        assert bytes(frames[1]) == BODY
    for number in range(8, 108):
        server.send(client, (header(number), BODY))
    assert client not in server._peers
    with pytest.raises((DeviceUnavailable, RemoteProtocolError), match=r"lost|broke off|was expected"):
        use_until_lost(host, BODY)


def use_until_lost(host: ZmqTransport, body: bytes) -> None:
    """The answer may have been on its way already; then it is right."""
    while True:
        assert bytes(answer(host)[1]) == body


def test_kill_9_in_the_middle_of_a_message_is_seen_at_once_and_the_next_peer_is_used(tmp_path: Path) -> None:
    body = random.Random(1).randbytes(48 << 20)
    rng = random.Random(2)
    for life in range(6):
        address = f"ipc://{tmp_path}/private{life}/device"
        peer = subprocess.Popen([sys.executable, PEER, "--echo", address], stdout=subprocess.PIPE)
        host = host_of(address)
        try:
            assert peer.stdout is not None
            peer.stdout.readline()
            while not host.send((header(), b"")):
                time.sleep(0.001)
            answer(host)
            host._version = msg.VERSION
            assert host.send((header(2), body))
            if life < 5:
                time.sleep(rng.random() * 0.1)
                peer.kill()
                with pytest.raises(DeviceUnavailable):
                    use_until_lost(host, body)
            else:
                assert bytes(answer(host)[1]) == body
        finally:
            host.close()
            peer.kill()
            peer.communicate()
