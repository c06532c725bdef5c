"""The shared-memory transport: the same two frames, written into ring slots that host and device both map.

The device makes the segment, a sealed memfd. It has no name, so no crash can orphan it and nobody can find it. It is
sealed, so it cannot shrink under us. The host opens it through /proc/<device>/fd, which the kernel allows to the same
user only. A side that wants to sleep says so in the segment and is woken through a pipe or the socket (its "doorbell").

Everything here may refuse: no extension, no memory, another user, a strange slot. Then the socket carries the message.
Spinning, copying, the checksum, and a layer's two messages are C++ (csrc/channel.h, csrc/layer_messages.h). What is no
sound Result is left to the codec.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import mmap
import os
import secrets
import stat
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol.codec import Buffer, Frames
from ndp_device.protocol.messages import MAJOR, VERSION, Result, SlotOffer
from ndp_device.transport import _shm

Taken = tuple[bytes, Any, bool]
"""Header, body, and whether the checksum fits both."""

NUM_RING_SLOTS = 4
BODY_ROOM = 20 << 20  # of each slot; pages are taken from the system when a message first needs them
HOST_SPIN_US = 500  # to sleep and be woken costs 50 to 100 us, a third of a small layer
_BRIEFLY_NS = 20_000
_BRIEF_SPINS = 31  # after a whole spin in vain: where answers take longer, spinning costs as much as before
DEVICE_SPIN_US = 5000  # outlasts the gap between two steps of a small model: an idle device wakes in half a millisecond
MAX_CHANNELS = 16
MAX_CHECKED_BODY_BYTES: int = _shm.MAX_CHECKED_BODY_BYTES
CALM_FIRST_NS, CALM_LAST_NS = 10_000_000, 6_400_000_000
_KEPT_NS = 2_000_000
_DOORBELLS, _DOORBELLS_MARK = struct.Struct("<4sii"), b"BELL"  # after the token, with file numbers: device, host
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Put(enum.Enum):
    """Fate of a message: it must take the socket; it lies in a ring slot; … and its reader sleeps, so ring."""

    REFUSED = 0
    DONE = 1
    DOORBELL = 2


PUT = tuple(Put)
"""By what the extension returns."""


class Sound(NamedTuple):
    """A Result as it should be. Its sums y f32 [T, H] are finite, and lie in memory of their own."""

    reply: Result
    y: NDArray[np.float32]


class ShmChannel:
    """One mapped segment, seen from one side."""

    def __init__(self, fd: int, doorbells: tuple[int, int], offer: SlotOffer, *, is_device: bool) -> None:
        """`doorbells`: the pipe that wakes this side, the one that wakes the other; -1 where there is none."""
        self.offer = offer
        self.doorbell = doorbells[0]
        self._fds = [fd, *(doorbell for doorbell in doorbells if doorbell >= 0)]
        self._mapping = mmap.mmap(fd, _shm.Channel.total_bytes(offer.num_slots, offer.body_room))
        self.ring = _shm.Channel(self._mapping, fd, *doorbells, offer.num_slots, offer.body_room, is_device)
        self.has_spoken = False  # device: the host has attached and used it
        self._closed = False

    @classmethod
    def create(cls) -> ShmChannel | None:
        """A new segment of this process, None where that is impossible."""
        opened: list[int] = []
        try:
            fd = os.memfd_create("ndp-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            opened.append(fd)
            token = secrets.token_bytes(16)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, _shm.Channel.total_bytes(NUM_RING_SLOTS, BODY_ROOM))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            os.posix_fallocate(fd, 0, 3 * mmap.PAGESIZE)
            # The device's own doorbell is open both ways, so that it never looks as if nobody could ring any more; the
            # host's is not, so that the host sees when the device has given it up.
            for mode in (os.O_RDWR, os.O_WRONLY):
                ends = os.pipe2(os.O_CLOEXEC)
                try:
                    opened.append(_open_again(os.getpid(), ends[0], mode))
                finally:
                    for end in ends:
                        os.close(end)
            os.pwrite(fd, token + _DOORBELLS.pack(_DOORBELLS_MARK, *opened[1:]), 0)
            offer = SlotOffer(os.getpid(), fd, token, NUM_RING_SLOTS, BODY_ROOM)
            return cls(fd, (opened[1], opened[2]), offer, is_device=True)
        except (OSError, ValueError):
            for fd in opened:
                os.close(fd)
            return None

    @classmethod
    def attach(cls, offer: SlotOffer) -> ShmChannel | None:
        """The device's segment mapped here, None unless it is provably that one."""
        try:
            fd = _open_again(offer.pid, offer.fd, os.O_RDWR)  # a file with a lease on it would keep us for a minute
        except OSError:
            return None
        opened = [fd]
        try:
            status = os.fstat(fd)
            genuine = (
                stat.S_ISREG(status.st_mode)
                and status.st_uid == os.geteuid()
                and status.st_size == _shm.Channel.total_bytes(offer.num_slots, offer.body_room)
                and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
                and os.pread(fd, len(offer.token), 0) == offer.token
            )
            if genuine:
                doorbells = _attach_doorbells(offer, os.pread(fd, _DOORBELLS.size, len(offer.token)))
                opened.extend(doorbell for doorbell in doorbells if doorbell >= 0)
                return cls(fd, doorbells, offer, is_device=False)
        except (OSError, ValueError, OverflowError):
            pass
        for fd in opened:
            os.close(fd)
        return None

    def put(self, frames: Frames, *, writes_checksum: bool = False) -> Put:
        """Publish a message; `writes_checksum`: on the way."""
        try:
            state: int = self.ring.put(frames[0], frames[1], writes_checksum)
        except ValueError as error:
            raise RemoteProtocolError(f"the shared memory was damaged: {error}") from None
        return PUT[state]

    def take(self) -> Taken | None:
        """The next message. A large body lies in the slot itself: it is valid until `release`."""
        try:
            taken: Taken | None = self.ring.take()
        except ValueError as error:
            raise RemoteProtocolError(f"the shared memory was damaged: {error}") from None
        if taken is not None and isinstance(taken[1], tuple):
            header, (offset, size), intact = taken
            return header, memoryview(self._mapping)[offset : offset + size].toreadonly(), intact
        return taken

    def put_execute(self, asked: Sequence[int], tensors: Sequence[NDArray[Any]]) -> Put:
        """Publish an Execute. asked: fields of messages.Execute in their order. REFUSED: its frames may still go."""
        state: int = _shm.put_execute(self.ring, VERSION, asked, *tensors)
        return PUT[state]

    def take_result(self) -> Sound | None:
        """The next message if it is a sound Result; else None, and it stays the next."""
        if (found := _shm.take_result(self.ring, MAJOR)) is None:
            return None
        reply = codec.described_result(found[0])
        return Sound(reply, np.frombuffer(found[1], np.float32).reshape(reply.tensors[0].shape))

    def release(self) -> None:
        """Give the slot of the oldest message taken back, if there is one."""
        if not self._closed:
            self.ring.release()

    def awake(self) -> None:
        if not self._closed:
            self.ring.awake()

    def close(self) -> None:
        self._closed = True
        del self.ring
        with contextlib.suppress(BufferError):  # somebody still reads a body; the mapping goes with the last reader
            self._mapping.close()
        for fd in self._fds:
            os.close(fd)


def _attach_doorbells(offer: SlotOffer, described: bytes) -> tuple[int, int]:
    """The host's doorbell to read, the device's to write; -1 twice unless they are pipes of this user."""
    mark, device_doorbell, host_doorbell = _DOORBELLS.unpack(described)
    if mark != _DOORBELLS_MARK:
        return -1, -1
    opened: list[int] = []
    try:
        # read and write: ringing a device that has died must not raise SIGPIPE in somebody else's program
        for number, mode in ((host_doorbell, os.O_RDONLY), (device_doorbell, os.O_RDWR)):
            opened.append(_open_again(offer.pid, number, mode))
            status = os.fstat(opened[-1])
            if not stat.S_ISFIFO(status.st_mode) or status.st_uid != os.geteuid():
                raise OSError("not a pipe of this user")
    except OSError:
        for fd in opened:
            os.close(fd)
        return -1, -1
    return opened[0], opened[1]


def _open_again(pid: int, fd: int, mode: int) -> int:
    return os.open(f"/proc/{pid}/fd/{fd}", mode | os.O_NONBLOCK | os.O_CLOEXEC)


def checked_part(body: Buffer) -> Buffer:
    """The part of a body in a ring slot that is checked: to check a large one would cost more than to carry it."""
    return body if len(body) <= MAX_CHECKED_BODY_BYTES else b""


class Spinner:
    """Looks at memory for a bounded time before its owner goes to sleep, as long as the core is its own.

    A process that spins on a core that others wait for loses a whole time slice when a message does come. So after a
    spin that lost the core for 0.5 ms, the owner does not spin for 10 ms. That time doubles with each such loss, up to
    6.4 s. It is 10 ms again after 2 ms of spinning without a loss, so a neighbour of few short tasks costs little.
    After a whole spin in vain the next spins are brief: the other side may want this core for its work.
    """

    def __init__(self, default_us: int) -> None:
        text = os.environ.get("NDP_SPIN_US", "")  # 0 = never
        self.spin_ns = (int(text) if text.isdecimal() else default_us) * 1000
        self._calm_ns, self._calm_until_ns = 0, 0
        self._kept_ns = 0  # spent on spinning without a loss since the last one
        self._brief_spins = 0  # that are left

    def spin(self, channels: Sequence[ShmChannel], timeout_ns: int | None = None) -> bool:
        """True as soon as one of the channels can be read."""
        began_ns = time.monotonic_ns()
        if self.is_calm:
            return False
        if timeout_ns is None:
            timeout_ns = self.next_ns()
        seen: int = _shm.spin([channel.ring for channel in channels], timeout_ns)
        if not seen & 1:
            self.fail(timeout_ns)
        if seen & 2:
            self.lose()
        elif self._calm_ns:
            self._kept_ns += time.monotonic_ns() - began_ns
            if self._kept_ns > _KEPT_NS:
                self._calm_ns = 0
        return bool(seen & 1)

    def next_ns(self) -> int:
        """How long to spin next; 0: there is no point in it."""
        if self.is_calm:
            return 0
        if not self._brief_spins:
            return self.spin_ns
        self._brief_spins -= 1
        return min(self.spin_ns, _BRIEFLY_NS)

    def fail(self, timeout_ns: int) -> None:
        """Nothing came for so long."""
        if timeout_ns == self.spin_ns:
            self._brief_spins = _BRIEF_SPINS

    def lose(self) -> None:
        """Somebody else had the core during a spin."""
        self._calm_ns = min(2 * self._calm_ns or CALM_FIRST_NS, CALM_LAST_NS)
        self._calm_until_ns, self._kept_ns = time.monotonic_ns() + self._calm_ns, 0

    @property
    def is_calm(self) -> bool:
        """There is no point in spinning now."""
        return not self.spin_ns or time.monotonic_ns() < self._calm_until_ns
