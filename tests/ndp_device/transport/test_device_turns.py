"""Whose turn it is among the peers of a device, and who gives way: the server's queue without a program around it."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from attacked_device import is_ended
from server_by_hand import PATIENCE_S, Ticking, connected, served_ids

from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport import connection as limits
from ndp_device.transport import connections, zmtp
from ndp_device.transport.zmq_client import ZmqTransport
from ndp_device.transport.zmq_server import ZmqServer


def test_a_flood_of_one_host_lets_every_other_request_pass_at_once(server: ZmqServer) -> None:
    """1000 requests of one host wait; whatever another one asks is next, and the one after it again."""
    flooder, honest = connected(server, 1), connected(server, 2)
    assert sorted(served_ids(server, 2, 1_000_000, lambda id: True)) == [1, 2]
    for _ in range(1000):
        flooder.send(codec.encode(msg.Ping(1)))
    served_ids(server, 20, 1_000_000, lambda id: True)
    for _ in range(10):
        honest.send(codec.encode(msg.Ping(2)))
        while sum(len(peer.connection.waiting) > 0 for peer in server._peers.values()) < 2:
            server._connections.look(0.001)
        assert 2 in served_ids(server, 2, 1_000_000, lambda id: True)
    flooder.close()
    honest.close()


def test_peers_that_never_compute_get_a_tenth_of_the_time_while_a_host_computes(server: ZmqServer) -> None:
    honest, stranger = connected(server, 2), connected(server, 1)
    assert sorted(served_ids(server, 2, 0, lambda id: id == 2)) == [1, 2]
    for _ in range(8):
        stranger.send(codec.encode(msg.Ping(1)))
        honest.send(codec.encode(msg.Ping(2)))
    while sum(len(peer.connection.waiting) for peer in server._peers.values()) < 16:
        server._connections.look(0.001)
    ids = served_ids(server, 16, 1_000_000, lambda id: id == 2)
    assert ids.count(1) == 8  # none is lost
    assert ids[:9].count(2) >= 7
    honest.close()
    stranger.close()


def test_connections_of_strangers_take_a_part_of_the_time_while_a_host_computes(tmp_path: Path) -> None:
    """To accept four takes milliseconds here: as long as a host computes five pass before the next; else none do."""
    system = Ticking()
    server = ZmqServer(f"ipc://{tmp_path}/private/device", system=system)
    path = server.address.removeprefix("ipc://")
    host = connected(server, 1)
    (received,) = [server.receive(0) or server.receive(0)]
    assert received is not None
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    for stranger in strangers[:20]:
        stranger.connect(path)
    while len(server._peers) < 21:
        num_peers = len(server._peers)
        server._connections.look()
        assert len(server._peers) > num_peers
    for stranger in strangers[20:]:
        stranger.connect(path)
    before, waits = system.now_ns, 0
    while len(server._peers) < 41:
        server.served(received.client, 0, computed=True, greeted=True)
        num_peers = len(server._peers)
        server._connections.look()
        waits += len(server._peers) == num_peers
        assert len(server._peers) <= num_peers + 4
    assert waits >= 4
    assert system.now_ns - before >= 4 * 5_000_000
    for peer in (*strangers, host):
        peer.close()
    server.close()


def test_requests_are_read_only_as_far_as_they_may_wait(server: ZmqServer) -> None:
    flooder = connected(server, 1)
    for _ in range(120):
        flooder.send(codec.encode(msg.Ping(1)))
    for _ in range(50):
        server._connections.look(0.001)
    (peer,) = server._peers.values()
    assert len(peer.connection.waiting) == limits.MAX_WAITING
    assert len(served_ids(server, 121, 0, lambda id: True)) == 121
    flooder.close()


def test_a_host_that_computes_is_never_sent_away_for_another(
    server: ZmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_PEERS", 2)
    hosts = [connected(server, number) for number in (1, 2)]
    assert len(served_ids(server, 2, 0, lambda id: True)) == 2
    late = ZmqTransport(server.address)
    for _ in range(20):
        server.receive(10)
        assert not late.send(codec.encode(msg.Ping(3)))
    assert len(server._peers) == 2
    for transport in (*hosts, late):
        transport.close()


def test_what_all_peers_hold_is_bounded_and_strangers_go_first(
    server: ZmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_HELD_BYTES", 8 << 20)
    honest = connected(server, 1)
    served_ids(server, 1, 0, lambda id: True)
    greedy = socket.socket(socket.AF_UNIX)
    greedy.connect(server.address.removeprefix("ipc://"))
    greedy.setblocking(False)
    greedy.sendall(zmtp.GREETING + zmtp.HOST_READY + b"\x03" + (60 << 20).to_bytes(8, "big"))

    def send() -> None:
        server._connections.look(0.001)
        greedy.send(bytes(1 << 20))

    assert is_ended(send, tries=100_000)
    assert len(server._peers) == 1
    honest.send(codec.encode(msg.Ping(5)))
    assert served_ids(server, 1, 0, lambda id: True) == [5]
    honest.close()


def test_a_stopped_peer_in_the_middle_of_a_greeting_is_thrown_out(server: ZmqServer) -> None:
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(server.address.removeprefix("ipc://"))
    silent.sendall(zmtp.GREETING[:30])
    deadline = time.monotonic() + PATIENCE_S
    while not server._peers:
        server._connections.look(0.01)
    while server._peers and time.monotonic() < deadline:
        server.receive(50)
    assert not server._peers
    silent.close()
