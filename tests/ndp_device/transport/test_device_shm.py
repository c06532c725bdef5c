"""The shared-memory transport: two frames through ring slots, the doorbell, every reason to take the socket instead."""

import fcntl
import mmap
import os
import random
import select
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from ndp_device.common.errors import RemoteProtocolError
from ndp_device.protocol.messages import SlotOffer
from ndp_device.transport import _shm, shm
from ndp_device.transport.base import write_checksum
from ndp_device.transport.shm import NUM_RING_SLOTS, Put, ShmChannel

LENGTHS = (*range(200), 255, 256, 257, 1023, 4096, 8191, 65536, 65537, 300_001)


def test_the_checksum_is_zlibs_for_any_length_alignment_and_beginning() -> None:
    crc32 = _shm.crc32
    data = random.Random(5).randbytes(LENGTHS[-1] + 16)
    for length in LENGTHS:
        for offset in range(16 if length < 300 else 3):
            part = memoryview(data)[offset : offset + length]
            assert crc32(part) == zlib.crc32(part), (length, offset)
            assert crc32(part, 0xDEADBEEF) == zlib.crc32(part, 0xDEADBEEF)
            cut = length // 3
            assert crc32(part[cut:], crc32(part[:cut])) == zlib.crc32(part)


@pytest.mark.parametrize("size", [*range(0, 130, 3), 8191, 65535, 65536, 65537, 300_001])
def test_the_checksum_made_while_copying_is_that_of_the_socket(
    channels: tuple[ShmChannel, ShmChannel], size: int
) -> None:
    host, device = channels
    body = random.Random(size).randbytes(size)
    for length in (4, 5, 67, 68, 200, 4096):
        header = random.Random(length).randbytes(length)
        assert host.put((header, body), writes_checksum=True) is Put.DONE
        taken = device.take()
        assert taken is not None
        assert taken[0] == write_checksum(header, shm.checked_part(body))
        assert bytes(taken[1]) == body
        assert taken[2]
        device.release()
    assert host.put((b"abc", body), writes_checksum=True) is Put.REFUSED  # no room for a checksum


def test_any_flipped_bit_of_a_message_in_memory_is_seen_while_it_is_taken(
    channels: tuple[ShmChannel, ShmChannel],
) -> None:
    host, device = channels
    rng = random.Random(9)
    first = 3 * mmap.PAGESIZE + 64  # the header of the first slot; its body lies 4096 bytes further
    for number in range(200):
        assert host.put((bytes(100), bytes(1000)), writes_checksum=True) is Put.DONE
        at = first + number % NUM_RING_SLOTS * host.ring.slot_stride
        at += rng.randrange(100) if number % 2 else 4096 + rng.randrange(1000)
        host._mapping[at] ^= 1 << rng.randrange(8)
        taken = device.take()
        assert taken is not None
        assert not taken[2]
        device.release()


@pytest.mark.parametrize("size", [0, 1, 63, 4096, 65536, 65537, 256 << 10, (256 << 10) + 1, 1 << 20, 20 << 20])
def test_a_message_of_any_size_arrives_as_it_was_in_both_directions(
    channels: tuple[ShmChannel, ShmChannel], size: int
) -> None:
    for sender, receiver in (channels, channels[::-1]):
        body = random.Random(size).randbytes(size)
        for number in range(2 * NUM_RING_SLOTS + 1):
            assert sender.put((b"header %d" % number, body)) is Put.DONE
            frames = receiver.take()
            assert frames is not None
            assert bytes(frames[0]) == b"header %d" % number
            assert bytes(frames[1]) == body
            assert receiver.take() is None
            receiver.release()


def test_a_large_body_is_read_where_it_lies_and_cannot_be_written(channels: tuple[ShmChannel, ShmChannel]) -> None:
    host, device = channels
    host.put((b"h", bytes(1 << 20)))
    frames = device.take()
    assert frames is not None
    array = np.frombuffer(frames[1], np.uint8)
    assert not array.flags.writeable
    device.close()  # the mapping stays as long as somebody reads in it
    assert not array.any()
    device.close = lambda: None  # type: ignore[method-assign]


def test_a_full_ring_and_a_body_too_large_are_left_to_the_socket(channels: tuple[ShmChannel, ShmChannel]) -> None:
    host, device = channels
    assert host.put((b"h", bytes(shm.BODY_ROOM + 1))) is Put.REFUSED
    assert host.put((bytes(4097), b"")) is Put.REFUSED
    for _ in range(NUM_RING_SLOTS):
        assert host.put((b"h", b"")) is Put.DONE
    assert host.put((b"h", b"")) is Put.REFUSED
    assert device.take() is not None
    assert host.put((b"h", b"")) is Put.REFUSED  # taken is not released
    device.release()
    assert host.put((b"h", b"")) is Put.DONE


def test_a_sleeper_is_rung_for_once_and_nobody_falls_asleep_beside_a_message(
    channels: tuple[ShmChannel, ShmChannel],
) -> None:
    for writer, sleeper in (channels, channels[::-1]):
        assert sleeper.ring.prepare_sleep()
        assert not is_rung(sleeper)
        assert writer.put((b"h", b"")) is Put.DONE
        assert is_rung(sleeper)
        sleeper.awake()
        assert not is_rung(sleeper)
        assert writer.put((b"h", b"")) is Put.DONE
        assert not sleeper.ring.prepare_sleep()
        assert not is_rung(sleeper)
        sleeper.take()
        sleeper.take()
        assert sleeper.ring.prepare_sleep()
        sleeper.awake()
        sleeper.release()
        assert writer.put((b"h", b"")) is Put.DONE
        assert not is_rung(sleeper)


def is_rung(sleeper: ShmChannel) -> bool:
    return bool(select.select([sleeper.doorbell], [], [], 0)[0])


def test_a_bell_that_nobody_hears_never_blocks_who_rings(channels: tuple[ShmChannel, ShmChannel]) -> None:
    """A hostile reader asks to be rung and does not read its pipe of 64 KiB."""
    host, device = channels
    for _ in range(70_000):
        assert host.ring.prepare_sleep()
        assert device.put((b"h", b"")) is Put.DONE
        assert host.take() is not None
        host.release()
    assert is_rung(host)


def test_a_host_that_went_away_is_left_to_the_socket(channels: tuple[ShmChannel, ShmChannel]) -> None:
    host, device = channels
    assert host.ring.prepare_sleep()
    for fd in host._fds[1:]:
        os.close(fd)
    del host._fds[1:]
    assert device.put((b"h", b"")) is Put.DOORBELL


@pytest.mark.parametrize("side", ["host", "device"])
def test_peers_without_pipes_are_rung_for_through_the_socket(side: str) -> None:
    """A device of 1.0 writes no file numbers; one whose numbers are nonsense, or no pipes, counts as one."""
    for described in (b"", b"NONE", b"BELL" + struct.pack("<ii", 10**6, 10**6), b"BELL" + struct.pack("<ii", 0, 10**6)):
        device = ShmChannel.create()
        assert device is not None
        os.pwrite(device.offer.fd, described.ljust(12, b"\0"), 16)
        host = ShmChannel.attach(device.offer)
        assert host is not None
        assert host.doorbell == -1
        writer, sleeper = (device, host) if side == "host" else (host, device)
        assert sleeper.ring.prepare_sleep()
        assert writer.put((b"h", b"")) is Put.DOORBELL
        host.close()
        device.close()


def test_no_descriptor_outlives_a_channel() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        device = ShmChannel.create()
        assert device is not None
        host = ShmChannel.attach(device.offer)
        assert host is not None
        host.close()
        assert ShmChannel.attach(msgspec.structs.replace(device.offer, token=bytes(16))) is None
        device.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_spinning_ends_with_a_message_or_with_its_time(channels: tuple[ShmChannel, ShmChannel]) -> None:
    host, device = channels
    assert not shm.Spinner(100).spin([device])
    timer = threading.Timer(0.05, lambda: host.put((b"h", b"")))
    timer.start()
    assert shm.Spinner(60_000_000).spin([device])
    timer.join()


def test_after_a_spin_in_vain_the_next_ones_are_brief(
    channels: tuple[ShmChannel, ShmChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where answers take longer than a spin, the core belongs to whoever computes them."""
    asked: list[int] = []

    def spin(rings: list[object], timeout_ns: int) -> int:
        asked.append(timeout_ns)
        return 0

    monkeypatch.setattr(shm, "_shm", SimpleNamespace(spin=spin))
    spinner = shm.Spinner(500)
    for _ in range(34):
        spinner.spin([channels[1]])
    assert [asked.index(500_000), asked.count(500_000), asked[32]] == [0, 2, 500_000]
    assert set(asked) == {500_000, 20_000}


def test_a_lost_core_pauses_spinning_for_10_ms_and_longer_only_while_losses_go_on(
    channels: tuple[ShmChannel, ShmChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs take a core for a millisecond several times a second: that must not end spinning for seconds."""
    now, found, looks = [0], [0], [0]

    def spin(rings: list[object], timeout_ns: int) -> int:
        looks[0] += 1
        now[0] += 50_000
        return found[0]

    def looks_after(milliseconds: int, result: int) -> int:
        """How often a spinner looks if it is asked once, so much later."""
        now[0] += milliseconds * 1_000_000
        before, found[0] = looks[0], result
        spinner.spin([channels[1]], 50_000)
        return looks[0] - before

    monkeypatch.setattr(shm, "_shm", SimpleNamespace(spin=spin))
    monkeypatch.setattr(shm, "time", SimpleNamespace(monotonic_ns=lambda: now[0]))
    spinner, lost = shm.Spinner(5000), 2
    assert [looks_after(1, lost), looks_after(9, 0), looks_after(2, lost)] == [1, 0, 1]
    assert [looks_after(11, 0), looks_after(10, 0)] == [0, 1]  # after a second loss 20 ms
    assert sum(looks_after(0, 0) for _ in range(50)) == 50  # 2.5 ms without a loss
    assert [looks_after(0, lost), looks_after(9, 0), looks_after(2, 0)] == [1, 0, 1]
    assert [looks_after(0, lost), looks_after(11, 0)] == [1, 0]  # what went well before the last loss counts no more


def test_who_loses_the_core_while_spinning_stops_spinning_for_a_while(channels: tuple[ShmChannel, ShmChannel]) -> None:
    """Two spinners and two busy loops on one core: each spin of 20 ms is interrupted."""
    program = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\nwhile True: pass"
    rivals = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        spinner = shm.Spinner(20_000)
        for _ in range(500):
            spinner.spin([channels[1]])
            if spinner.is_calm:
                break
        assert spinner.is_calm
        channels[0].put((b"h", b""))
        assert not spinner.spin([channels[1]])  # it does not even look
    finally:
        os.sched_setaffinity(0, mine)
        for rival in rivals:
            rival.kill()
            rival.wait()


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (mmap.PAGESIZE, 10**6),  # messages written
        (3 * mmap.PAGESIZE, 7),  # number of the message
        (3 * mmap.PAGESIZE + 8, 4097),  # bytes of its header
        (3 * mmap.PAGESIZE + 16, 1 << 40),  # bytes of its body
    ],
)
def test_what_the_peer_scribbles_is_refused(channels: tuple[ShmChannel, ShmChannel], offset: int, value: int) -> None:
    host, device = channels
    host.put((b"h", b"body"))
    host._mapping[offset : offset + 8] = value.to_bytes(8, "little")
    with pytest.raises(RemoteProtocolError, match="shared memory was damaged"):
        device.take()


def test_a_reader_that_returns_what_it_never_had_is_refused(channels: tuple[ShmChannel, ShmChannel]) -> None:
    host, device = channels
    device._mapping[mmap.PAGESIZE + 64 : mmap.PAGESIZE + 72] = (9).to_bytes(8, "little")
    with pytest.raises(RemoteProtocolError, match="returned slots"):
        host.put((b"h", b""))


LEASE = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print(fd, flush=True)
time.sleep(100)
"""


def test_a_file_that_the_device_holds_a_lease_on_does_not_keep_its_host_waiting(tmp_path: Path) -> None:
    """Who opens such a file waits until its holder gives it up, 45 s at most, and then again at the next greeting."""
    holder = subprocess.Popen([sys.executable, "-c", LEASE, str(tmp_path / "file")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        line = holder.stdout.readline()
        if not line:
            pytest.skip("no lease can be had on this file system")
        offers = [SlotOffer(holder.pid, int(line), bytes(16), 4, 1 << 20)]
        attached = threading.Thread(target=lambda: offers.append(ShmChannel.attach(offers[0])), daemon=True)  # type: ignore[arg-type]
        attached.start()
        attached.join(20)
        assert offers[1:] == [None]
    finally:
        holder.kill()
        holder.communicate()


def test_only_the_very_segment_is_attached(channels: tuple[ShmChannel, ShmChannel], tmp_path: Path) -> None:
    offer = channels[1].offer
    total = os.fstat(offer.fd).st_size
    plain = (tmp_path / "file").open("w+b")  # right size, right token, but it can shrink under us
    plain.truncate(total)
    os.pwrite(plain.fileno(), offer.token, 0)
    other = ShmChannel.create()
    assert other is not None
    for change in (
        {"token": bytes(16)},
        {"num_slots": NUM_RING_SLOTS + 1},
        {"body_room": shm.BODY_ROOM - (1 << 20)},
        {"fd": plain.fileno()},
        {"fd": other.offer.fd},
        {"fd": 10**6},
        {"pid": 2**31},
    ):
        assert ShmChannel.attach(msgspec.structs.replace(offer, **change)) is None
    assert os.fstat(offer.fd).st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(offer.fd, total // 2)
    assert fcntl.fcntl(offer.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    plain.close()
    other.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("which", ["segment", "doorbell"])
def test_neither_a_segment_nor_a_doorbell_of_another_user_is_attached(which: str) -> None:
    device = ShmChannel.create()
    assert device is not None
    assert device.offer is not None
    segment, own_doorbell, _ = device._fds
    os.fchown(segment if which == "segment" else own_doorbell, 65534, -1)
    host = ShmChannel.attach(device.offer)
    if which == "segment":
        assert host is None
    else:
        assert host is not None
        assert host.doorbell == -1
        host.close()
    device.close()
