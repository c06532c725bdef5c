"""Bodies of many MiB through the socket: in order, whole, or seen to be lost."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT
from server_by_hand import HandServer, answer, ask, host_of

from ndp_device.common.errors import DeviceUnavailable
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport.zmq_client import ZmqTransport

BODY = random.Random(0).randbytes((8 << 20) + 12345)
PEER = ROOT / "benchmarks" / "protocol_roundtrip.py"


def header(number: int = 1) -> bytes:
    return codec.encode(msg.Ping(number))[0]


@pytest.fixture
def host(server: HandServer) -> Iterator[ZmqTransport]:
    made = host_of(server.address)
    yield made
    made.close()


def test_small_messages_between_large_ones_arrive_in_order(server: HandServer, host: ZmqTransport) -> None:
    for number in range(12):
        while not host.send((header(number), BODY if number % 2 else b"")):
            time.sleep(0.001)
    for number in range(12):
        received = server.until_one()
        assert received.damage is None
        assert codec.peek_id(received.frames[0]) == number
        assert bytes(received.frames[1]) == (BODY if number % 2 else b"")


def test_the_longest_body_arrives_in_both_directions(server: HandServer, host: ZmqTransport) -> None:
    body = random.Random(1).randbytes(msg.MAX_BODY_BYTES)
    received = ask(server, host, (header(), body))
    assert received.damage is None
    server.send(received.client, (header(), received.frames[1]))
    assert bytes(answer(host)[1]) == body


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
    with pytest.raises(DeviceUnavailable, match="lost"):
        use_until_lost(host, BODY)


def use_until_lost(host: ZmqTransport, body: bytes) -> None:
    """The answer may have been on its way already; then it is right."""
    while True:
        assert bytes(answer(host)[1]) == body


def test_kill_9_in_the_middle_of_a_message_is_seen_at_once_and_the_next_peer_is_used(tmp_path: Path) -> None:
    body = random.Random(1).randbytes(48 << 20)
    rng = random.Random(2)
    for life in range(4):
        address = f"ipc://{tmp_path}/private{life}/device"
        peer = subprocess.Popen([sys.executable, PEER, "--echo", address], stdout=subprocess.PIPE)
        host = host_of(address)
        try:
            assert peer.stdout is not None
            peer.stdout.readline()
            while not host.send((header(), b"")):
                time.sleep(0.001)
            answer(host)
            assert host.send((header(2), body))
            if life < 3:
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
