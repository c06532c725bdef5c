"""Shared memory beside a real socket: who speaks where, what memory cannot take, and how either end gives it up."""

import mmap
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacked_device import Device, execute
from failpoints import with_checksum
from server_by_hand import PATIENCE_S, HandServer, host_of, serving

from ndp_device.common.errors import DeviceUnavailable, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol.messages import VERSION, Ping
from ndp_device.transport import shm
from ndp_device.transport.zmq_client import ZmqTransport


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[tuple[HandServer, ZmqTransport]]:
    server = serving(tmp_path)
    transport = host_of(server.address)
    yield server, transport
    transport.close()
    server.close()


FRAMES = (codec.encode(Ping(1))[0], b"body")


def attach(server: HandServer, transport: ZmqTransport) -> bytes:
    while not transport.send(FRAMES):
        server.one(1)
    received = None
    while received is None:
        received = server.one(100)
    offer = server.offer_memory(received.client)
    assert offer is not None
    assert transport.attach(offer)
    return received.client


def test_the_device_answers_in_memory_only_after_the_host_spoke_there(sockets: tuple[HandServer, ZmqTransport]) -> None:
    server, transport = sockets
    client = attach(server, transport)
    memory = transport._channel
    assert memory is not None
    server.send(client, FRAMES)
    assert memory.take() is None
    while transport.receive(1.0) is None:
        pass
    assert transport.send(FRAMES)
    received = server.one(1000)
    assert received is not None
    assert server._peers[client].is_lent
    assert server._peers[client].used_ns == received.seen_ns
    server.send(client, FRAMES)
    assert memory.take() is not None


def test_what_memory_cannot_take_arrives_through_the_socket_checked(sockets: tuple[HandServer, ZmqTransport]) -> None:
    server, transport = sockets
    client = attach(server, transport)
    large = (FRAMES[0], random.Random(1).randbytes(shm.BODY_ROOM + 1))
    transport._version = server._peers[client].version = VERSION  # as after Hello
    for frames in (FRAMES, large, FRAMES):
        assert transport.send(frames)
        received = server.until_one()
        assert server._peers[client].is_lent == (frames is not large)
        assert received.damage is None
        assert bytes(received.frames[1]) == frames[1]
        received.release()
        server.send(client, frames)
        answer = None
        while answer is None:
            answer = transport.receive(5.0)
        assert bytes(answer[1]) == frames[1]


def test_a_flipped_bit_in_memory_is_noticed(sockets: tuple[HandServer, ZmqTransport]) -> None:
    server, transport = sockets
    client = attach(server, transport)
    transport.send(FRAMES)
    assert server.one(1000) is not None
    header, body = with_checksum(server, client, FRAMES)
    server.send(client, (header, bytes(body)[:-1] + b"Y"), writes_checksum=False)
    with pytest.raises(RemoteProtocolError, match="checksum"):
        transport.receive(1.0)


@pytest.mark.parametrize("spin_us", ["0", "20"])
def test_a_host_learns_at_once_that_the_device_gave_the_memory_up(
    sockets: tuple[HandServer, ZmqTransport], spin_us: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged ring costs the connection: the host is told by its doorbell, not by its deadline, nor by asking."""
    monkeypatch.setattr("ndp_device.transport.zmq_client._DOORBELL_LOST_S", PATIENCE_S)
    server, transport = sockets
    client = attach(server, transport)
    transport._spinner.spin_ns = int(spin_us) * 1000
    assert transport.send(FRAMES)
    memory = transport._channel
    assert memory is not None
    memory._mapping[mmap.PAGESIZE : mmap.PAGESIZE + 8] = (10**6).to_bytes(8, "little")
    assert server.one(100) is None
    assert client not in server._peers
    with pytest.raises(DeviceUnavailable, match=r"given up|was lost"):
        transport.receive(PATIENCE_S)


def test_a_request_whose_doorbell_was_written_over_is_answered_long_before_its_deadline(
    sockets: tuple[HandServer, ZmqTransport],
) -> None:
    """The device sleeps, and the flag that asks to be rung for is gone: the host rings once more, by the socket."""
    server, transport = sockets
    client = attach(server, transport)
    transport._spinner.spin_ns = server._spinner.spin_ns = 0
    memory = server._peers[client].channel
    assert memory is not None
    stop = threading.Event()

    def serve() -> None:
        for received in iter(lambda: server.one(60_000), None):
            received.release()
            server.send(received.client, FRAMES)
            if stop.is_set():
                return

    thread = threading.Thread(target=serve)
    thread.start()
    time.sleep(0.2)  # it sleeps
    flags = slice(mmap.PAGESIZE + 128, mmap.PAGESIZE + 132)
    assert any(memory._mapping[flags])
    memory._mapping[flags] = bytes(4)
    stop.set()
    assert transport.send(FRAMES)
    assert host_answer(transport, 20.0) is not None
    thread.join()


@pytest.mark.parametrize("offset", [mmap.PAGESIZE, 2 * mmap.PAGESIZE + 64], ids=["what it wrote", "what it returned"])
def test_a_host_whose_own_counters_were_written_over_gives_the_memory_up_at_once(
    sockets: tuple[HandServer, ZmqTransport], offset: int
) -> None:
    server, transport = sockets
    attach(server, transport)
    transport._spinner.spin_ns = 0
    assert transport.send(FRAMES)
    memory = transport._channel
    assert memory is not None
    memory._mapping[offset : offset + 8] = (77).to_bytes(8, "little")
    with pytest.raises(RemoteProtocolError, match="wrote over"):
        host_answer(transport, 20.0)


def test_a_device_whose_own_counters_were_written_over_ends_the_connection_when_it_is_rung_for(
    sockets: tuple[HandServer, ZmqTransport],
) -> None:
    """Its answer is lost: nobody but the device can know that. The host rings after 50 ms, and is sent away."""
    server, transport = sockets
    client = attach(server, transport)
    transport._spinner.spin_ns = 0
    assert transport.send(FRAMES)
    server.until_one().release()
    server.send(client, FRAMES)
    memory = transport._channel
    assert memory is not None
    memory._mapping[2 * mmap.PAGESIZE : 2 * mmap.PAGESIZE + 8] = bytes(8)
    ended = threading.Thread(target=lambda: server.until(0))
    ended.start()
    with pytest.raises(DeviceUnavailable, match=r"given up|was lost"):
        host_answer(transport, 20.0)
    ended.join()


def host_answer(transport: ZmqTransport, seconds: float) -> object:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (frames := transport.receive(end - time.monotonic())) is not None:
            return frames
    return None


def test_the_segment_of_a_host_that_is_gone_is_freed(sockets: tuple[HandServer, ZmqTransport]) -> None:
    server, transport = sockets
    client = attach(server, transport)
    channel = server._peers[client].channel
    assert channel is not None
    server.one(100)
    assert not channel._closed  # it is there, only silent
    transport.close()
    for _ in range(50):
        server.one(20)
    assert channel._closed
    transport.close = lambda: None  # type: ignore[method-assign]


def test_two_threads_exchange_a_thousand_messages_whoever_sleeps(sockets: tuple[HandServer, ZmqTransport]) -> None:
    server, transport = sockets
    attach(server, transport)
    stop = threading.Event()

    def echo() -> None:
        while not stop.is_set():
            received = server.one(10)
            if received is not None:
                assert received.damage is None
                frames = tuple(bytes(frame) for frame in received.frames)
                received.release()
                server.send(received.client, frames)

    thread = threading.Thread(target=echo)
    thread.start()
    try:
        rng = random.Random(3)
        for number in range(1000):
            if rng.random() < 0.05:
                stop.wait(rng.random() * 0.004)  # long enough for either side to fall asleep
            body = rng.randbytes(rng.choice((0, 10, 5000, 70_000, 300_000)))
            assert transport.send((b"%010d" % number + bytes(4), body))
            answer = None
            while answer is None:
                answer = transport.receive(10.0)
            assert bytes(answer[0]).startswith(b"%010d" % number)
            assert bytes(answer[1]) == body
    finally:
        stop.set()
        thread.join()


def test_where_no_shared_memory_can_be_had_the_socket_serves(model_dir: Path, tmp_path: Path) -> None:
    """Under a limit of what a file, and so a memfd, may grow to. The same numbers: test_device_client_faults.py."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 << 10, 1000 << 10))

    with Device(model_dir, tmp_path, limit) as device, device.host() as client:
        assert not client.uses_shared_memory
        execute(client)


BOTH_ENDS = """
import atexit, gc, os, sys, time
from pathlib import Path
import zmq.utils.garbage
pid = os.getpid()
@atexit.register
def last():  # after the ends of this process, before libzmq's lent memory is freed
    patience_s = time.monotonic() + 10
    while os.getpid() == pid and zmq.utils.garbage.gc.refs and time.monotonic() < patience_s:
        time.sleep(0.01)
    print("lent:", os.getpid() == pid and len(zmq.utils.garbage.gc.refs))
from ndp_device.transport import connect, listen
from ndp_device.transport.keys import make_keys

how, folder = sys.argv[1].split(), Path(sys.argv[2])
keys, own, address = None, None, f"ipc://{folder}/private/device"
if "keys" in how:
    make_keys(folder / "keys", "host")
    keys, own, address = folder / "keys", folder / "keys" / "host.key_secret", "tcp://127.0.0.1:*"
server = listen(address, keys)
client = connect(server.address, own)
while not client.send((bytes(12), b"question")):
    server.receive(1)
while not (arrived := server.receive(100)):
    pass
for _ in range(8):  # of which nobody reads one, and whose memory is lent to libzmq
    server.send(arrived[0].client, (bytes(12), bytes(1 << 20)))
if "cycle" in how:
    server.on_gone = lambda client, server=server: None
if "dropped" in how:
    del server, client, arrived
    gc.collect()
if "forked" in how:
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        client.receive(10)
        client.send((bytes(12), b"still here"))
        assert bytes(server.receive(10_000)[0].frames[1]) == b"still here"
print("ended")
"""


@pytest.mark.parametrize("how", ["left", "dropped", "dropped cycle", "forked"])
@pytest.mark.parametrize("way", ["ipc", "keys"])
def test_what_nobody_closed_ends_with_its_owner_or_with_the_process(way: str, how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BOTH_ENDS, f"{way} {how}", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ended\nlent: 0\n")
