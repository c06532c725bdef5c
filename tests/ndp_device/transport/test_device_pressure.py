"""Peers that press on what a device shares among all: memory, descriptors, room, the time between two requests.

As in test_device_attacks.py the attackers are plain sockets; there each message was bad, here each is allowed and all
of them together are not.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from attacked_device import Device, assert_serves
from server_by_hand import Hands, Ticking, connected, served_ids

from ndp_device.errors import DeviceUnavailable
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport import connection as limits
from ndp_device.transport import connections, peers, strangers, zmtp
from ndp_device.transport.connection import Connection, HandshakeTime
from ndp_device.transport.listener import Listener
from ndp_device.transport.system import READABLE, System
from ndp_device.transport.zmq_client import ZmqTransport
from ndp_device.transport.zmq_server import ZmqServer
from vllm_ndp.device.client import DeviceClient


def test_peers_that_announce_more_than_there_is_memory_do_not_end_the_device(device: Device) -> None:
    """50 frames of 60 MiB that have only begun, where the system gives half a gigabyte more."""
    room = psutil.Process(device.process.pid).memory_info().vms + (512 << 20)
    resource.prlimit(device.process.pid, resource.RLIMIT_AS, (room, room))
    peers = []
    for _ in range(50):
        peer = device.raw()
        peer.sendall(b"\x02" + (60 << 20).to_bytes(8, "big") + bytes(70_000))
        peers.append(peer)
    time.sleep(0.5)
    assert device.process.poll() is None
    for peer in peers:
        peer.close()
    assert_serves(device)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Hands, socket.socket]]:
    """The device's end of a connection that has greeted, its clock, and the host's end."""
    theirs, ours = socket.socketpair()
    ours.setblocking(False)
    clock = Hands()
    connection = Connection(b"1", ours, clock, None, HandshakeTime())
    theirs.sendall(zmtp.GREETING + zmtp.HOST_READY)
    connection.read(clock.now_ns)
    yield connection, clock, theirs
    connection.close()
    theirs.close()


def test_a_host_whose_messages_follow_each_other_closely_is_not_late(
    ends: tuple[Connection, Hands, socket.socket],
) -> None:
    """A message of 100 bytes each second, but never between two of them a moment without an unfinished one."""
    connection, clock, host = ends
    one = bytes((0, 100)) + bytes(100)
    host.sendall(one[:50])
    for _ in range(3 * limits.MESSAGE_NS // 10**9):
        connection.read(clock.now_ns)
        assert not connection.is_late(clock.now_ns)
        clock.sleep(1)
        host.sendall(one[50:] + one[:50])
        connection.read(clock.now_ns)
        assert not connection.is_late(clock.now_ns)
        connection.take()
    clock.sleep(limits.MESSAGE_NS / 1e9 + 1)  # and then the last one never ends
    host.sendall(one[50:60])
    connection.read(clock.now_ns)
    assert connection.is_late(clock.now_ns)


def test_a_host_whose_bytes_the_device_leaves_unread_is_not_late(
    ends: tuple[Connection, Hands, socket.socket],
) -> None:
    """Its 16 requests wait for one that takes half a minute; the 17th has begun to arrive."""
    connection, clock, host = ends
    one = bytes((0, 100)) + bytes(100)
    host.sendall(limits.MAX_WAITING * one + one[:50])
    while connection.may_wait:
        connection.read(clock.now_ns)
    connection.read(clock.now_ns)
    clock.sleep(30)
    assert not connection.is_late(clock.now_ns)
    connection.take()
    assert not connection.is_late(clock.now_ns)
    host.sendall(one[50:])
    connection.parse(clock.now_ns)
    connection.read(clock.now_ns)
    assert len(connection.waiting) == limits.MAX_WAITING


def test_hosts_that_computed_once_and_went_silent_do_not_keep_others_out(
    server: ZmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tcp a machine that lost its power says nothing; after as many restarts as there are places nobody came in."""
    monkeypatch.setattr(connections, "MAX_PEERS", 2)
    monkeypatch.setattr(peers, "_ASLEEP_NS", 300_000_000)
    gone, here = connected(server, 1), connected(server, 2)
    assert len(served_ids(server, 2, 0, lambda id: True)) == 2
    time.sleep(0.3)
    here.send(codec.encode(msg.Ping(2)))
    assert served_ids(server, 1, 0, lambda id: True) == [2]
    late = connected(server, 3)
    assert served_ids(server, 1, 0, lambda id: True) == [3]
    here.send(codec.encode(msg.Ping(2)))
    assert served_ids(server, 1, 0, lambda id: True) == [2]
    for transport in (gone, here, late):
        transport.close()


def test_a_connection_by_tcp_ends_when_its_host_is_gone_without_a_word() -> None:
    listener = Listener("tcp://127.0.0.1:0", has_keys=False, backlog=1)
    host = socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2])))
    connection = listener.accept()
    assert connection is not None
    accepted, process = connection
    assert process is None
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert 0 < accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
    assert 0 < accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 90_000
    for end in (host, accepted, listener):
        end.close()


def test_answers_to_requests_that_came_by_memory_are_bounded_too(
    server: ZmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that asks through the ring and reads nothing: what the ring cannot take waits for the socket."""
    monkeypatch.setattr(connections, "MAX_HELD_BYTES", 8 << 20)
    host = connected(server, 1)
    assert served_ids(server, 1, 0, lambda id: True) == [1]
    (peer,) = server._peers.values()
    answer = codec.encode(msg.Ping(1))[0], bytearray(1 << 20)
    for _ in range(20):
        server.send(peer.name, answer)
    assert sum(peer.connection.held_bytes for peer in server._peers.values()) <= 8 << 20
    host.close()


def test_strangers_that_send_without_an_end_take_a_part_of_the_time_while_a_host_computes(tmp_path: Path) -> None:
    """Commands of ZeroMQ itself, which no request is charged for. To read one costs a millisecond here, so that
    in a turn some of 20 are looked after and then none for a while; each of them has its turn."""
    system = Ticking()
    server = ZmqServer(f"ipc://{tmp_path}/private/device", system=system)
    host = connected(server, 1)
    received = server.receive(0) or server.receive(0)
    assert received is not None
    strangers = []
    for _ in range(20):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(server.address.removeprefix("ipc://"))
        stranger.setblocking(False)
        stranger.sendall(zmtp.GREETING + zmtp.HOST_READY)
        strangers.append(stranger)
    while len(server._peers) < 21 or not all(peer.connection._reader.is_ready for peer in server._peers.values()):
        server._connections.look()
    for stranger in strangers:
        stranger.recv(1 << 16)
    turns = 0
    served = Counter[int]()
    while len(served) < 20:
        for number, stranger in enumerate(strangers):
            with contextlib.suppress(BlockingIOError):
                stranger.send(zmtp.PING * 100)
            with contextlib.suppress(BlockingIOError):
                served[number] += len(stranger.recv(1 << 16))
        server.served(received.client, 0, computed=True, greeted=True)
        before = {peer.name: peer.connection.heard_ns for peer in server._peers.values()}
        server._connections.look()
        assert len(server._peers) == 21
        assert sum(peer.connection.heard_ns != before[peer.name] for peer in server._peers.values()) <= 5
        turns += 1
        assert turns < 1000, served
    host.send(codec.encode(msg.Ping(7)))
    server._connections.look()
    assert [codec.peek_id(waits.frames[0]) for waits in server._peers[received.client].connection.waiting] == [7]
    for peer in (*strangers, host):
        peer.close()
    server.close()


def test_a_host_that_paused_comes_before_strangers_that_never_do(tmp_path: Path) -> None:
    """Nothing was computed for seconds and strangers had the device to themselves; then the host asks again."""
    system = Ticking()
    server = ZmqServer(f"ipc://{tmp_path}/private/device", system=system)
    host, stranger = connected(server, 1), connected(server, 2)
    assert sorted(served_ids(server, 2, 0, lambda id: id == 1)) == [1, 2]
    system.sleep(10)
    for number in range(3, 40):  # which they are hardly charged for, so that they have credit all the time
        stranger.send(codec.encode(msg.Ping(number)))
        assert served_ids(server, 1, 10, lambda id: False) == [number]
    for _ in range(8):
        stranger.send(codec.encode(msg.Ping(40)))
    host.send(codec.encode(msg.Ping(1)))
    while sum(len(peer.connection.waiting) for peer in server._peers.values()) < 9:
        server._connections.look()
    assert served_ids(server, 1, 0, lambda id: id == 1) == [1]
    asked_ns = system.now_ns  # what strangers had before is no debt: they wait a quarter of a second at most
    for _ in range(8):
        host.send(codec.encode(msg.Ping(1)))
    ids = served_ids(server, 9, 0, lambda id: id == 1)
    while 40 not in ids:
        host.send(codec.encode(msg.Ping(1)))
        ids += served_ids(server, 1, 0, lambda id: id == 1)
    assert system.now_ns - asked_ns < 2 * strangers.WAIT_NS
    for peer in (host, stranger):
        peer.close()
    server.close()


OPENS_CONNECTIONS = """
import socket, sys
held = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for connection in held:
    connection.connect(sys.argv[1])
print("here", flush=True)
sys.stdin.read()
"""


def test_a_process_that_opens_connections_without_an_end_keeps_no_newcomer_out(tmp_path: Path) -> None:
    """All have come just now, and the clock stands still: none of them would go, and more wait in the queue."""
    system = System()
    system.clock = Hands()
    server = ZmqServer(f"ipc://{tmp_path}/private/device", system=system)
    path = server.address.removeprefix("ipc://")
    command = [sys.executable, "-c", OPENS_CONNECTIONS, path, str(connections.MAX_PEERS + 40)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as greedy:
        assert greedy.stdout is not None
        assert greedy.stdout.readline() == b"here\n"
        newcomer = socket.socket(socket.AF_UNIX)
        newcomer.connect(path)
        newcomer.sendall(zmtp.GREETING + zmtp.HOST_READY)
        for _ in range(connections.MAX_PEERS):
            server._connections.look()
        processes = Counter(peer.process for peer in server._peers.values())
        assert processes == {greedy.pid: connections.MAX_PEERS - 1, os.getpid(): 1}
        newcomer.close()
        server.close()
        greedy.communicate()


def test_a_newcomer_has_its_turn_among_hosts_that_ask_without_an_end(server: ZmqServer) -> None:
    """They said Hello and never compute."""
    greeted = [connected(server, number) for number in range(4)]
    assert sorted(served_ids(server, 4, 0, lambda id: False)) == [0, 1, 2, 3]
    newcomer = ZmqTransport(server.address)
    hello = msg.Hello(9, versions=(msg.VERSION, msg.VERSION), client="newcomer")
    sent, ids = False, list[int]()
    while 9 not in ids:
        for number, host in enumerate(greeted):
            host.send(codec.encode(msg.Ping(number)))
        sent = sent or newcomer.send(codec.encode(hello))
        while any(not peer.connection.waiting for peer in server._peers.values() if peer.was_served):
            server._connections.look(0.001)
        is_here = any(peer.connection.waiting and not peer.was_served for peer in server._peers.values())
        ids += served_ids(server, 1, 0, lambda id: False)
        if is_here:
            ids += served_ids(server, 5, 0, lambda id: False)
            assert 9 in ids
    for host in (*greeted, newcomer):
        host.close()


def test_a_peer_that_is_sent_away_in_the_turn_in_which_it_spoke_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both places are taken, a stranger has one and speaks, and another one comes, for which it is sent away."""
    monkeypatch.setattr(connections, "MAX_PEERS", 2)
    system = Ticking()
    server = ZmqServer(f"ipc://{tmp_path}/private/device", system=system)
    path = server.address.removeprefix("ipc://")
    host = connected(server, 1)
    received = server.receive(0) or server.receive(0)
    assert received is not None
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    strangers[0].connect(path)
    while len(server._peers) < 2:
        server._connections.look()
    for stranger in strangers[1:]:
        server.served(received.client, 0, computed=True, greeted=True)
        stranger.connect(path)
        (spoke,) = (peer for peer in server._peers.values() if peer.name != received.client)
        sockets = server._connections
        sockets._strangers.rest_until_ns = 0
        happened = [(sockets._listener.fileno(), READABLE), (spoke.connection.fileno(), READABLE)]
        sockets._look_after_strangers(happened, system.now_ns)
        server._connections.look()
    assert len(server._peers) == 2
    assert received.client in server._peers
    for end in (*strangers, host):
        end.close()
    server.close()


LISTENS = """
import os, socket, sys, time
s = socket.socket(socket.AF_UNIX)
s.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
s.listen(8)
print("listens", flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_host_does_not_speak_to_a_device_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be shown every activation, and its numbers would be believed."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    other = subprocess.Popen(
        [python, "-c", LISTENS, str(folder / "device")], stdout=subprocess.PIPE, text=True, user=65534, cwd="/"
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline()
        monkeypatch.setattr(os, "geteuid", lambda: 1234)  # what a host of that user would be told
        with pytest.raises(DeviceUnavailable, match="user 65534 listens there, this host belongs to user 1234"):
            DeviceClient(f"ipc://{folder}/device").connect(0.2)
    finally:
        other.kill()
        other.communicate()
        shutil.rmtree(folder)
