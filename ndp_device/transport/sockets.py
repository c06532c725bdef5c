"""Common parts of both ends of a libzmq connection: frames, limits, the context of a process, and how they end.

`Bounds` limits the memory of messages without an end, on the device.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import resource
import socket
import struct
import sys
import termios
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec

import zmq
import zmq.utils.garbage  # registers its end of the process first, so that it comes after ours

from ndp_device.common.machine_memory import give_memory_back
from ndp_device.protocol.codec import Buffer
from ndp_device.protocol.messages import MAX_BODY_BYTES

DOORBELL: list[Buffer] = [b""]
"""The message that only says: look into the shared memory."""

_ZERO_COPY_BYTES = 256 << 10  # copying is cheaper below 64 KB, dearer above 1 MB
_DESCRIPTORS = 65_536
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}
_endings: set[Callable[[], object]] = set()
_Arguments = ParamSpec("_Arguments")


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """One per process, made when first needed: a forked child must not touch its parent's."""
    pid = os.getpid()
    if pid not in _contexts:
        _contexts[pid] = zmq.Context()
    return _contexts[pid]


def configure(socket: zmq.Socket[bytes], address: str, *, sent: int, received: int) -> None:
    """Options of either end; most messages that libzmq holds, each way."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, sent),
        (zmq.RCVHWM, received),
        (zmq.MAXMSGSIZE, MAX_BODY_BYTES),
        (zmq.HANDSHAKE_IVL, 500),
        (zmq.IPV6, int("[" in address)),
        # a machine that lost its power says no goodbye: without these its connection would stay for ever
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 60),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 3),
        (zmq.TCP_MAXRT, 90_000),
    ):
        socket.setsockopt(option, value)


def send(socket: zmq.Socket[bytes], frames: Sequence[Buffer | zmq.Frame]) -> None:
    """Without waiting. A large last frame is lent, not copied: the codec makes a new body for each message."""
    large = any(len(frame) >= _ZERO_COPY_BYTES for frame in frames)
    socket.send_multipart(frames, zmq.NOBLOCK, copy=not large)


def content(frame: zmq.Frame) -> Buffer:
    """Small frames lie anywhere in libzmq's read buffer: copied, they are aligned."""
    held: Buffer = frame.bytes if len(frame) < _ZERO_COPY_BYTES else frame.buffer
    return held


def num_unread(descriptor: int) -> int:
    """Bytes that a connection has received and libzmq has not read yet; 0 of one that has just ended."""
    with contextlib.suppress(OSError):
        return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
    return 0


def shut(descriptor: int) -> None:
    """End a connection: libzmq has no call to end one of a ROUTER; the system has."""
    with contextlib.suppress(OSError), _of_ours(descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _of_ours(descriptor: int) -> Iterator[socket.socket]:
    """Another descriptor of the same connection: libzmq may close its own at any time, and the system give it away."""
    own = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=own)
    except OSError:  # it is no socket any more
        os.close(own)
        raise
    with connection:
        yield connection


def owner_of(descriptor: int) -> int | None:
    """The user who listens at the other end of an ipc connection; None of one that has just ended."""
    with contextlib.suppress(OSError), _of_ours(descriptor) as connection:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[1])
    return None


def allow_many_descriptors() -> None:
    """libzmq ends the process where an ipc connection finds no descriptor: there are to be enough of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def ends_with(
    owner: object, end: Callable[_Arguments, object], *arguments: _Arguments.args, **options: _Arguments.kwargs
) -> Callable[[], object]:
    """Run `end` once: when this is called, when `owner` is collected, or when the process ends.

    Left to Python, a context of libzmq may be collected before its sockets, and waits for them for ever. A process that
    ends frees lent frames while libzmq still sends them, and aborts. A forked child leaves its parent's sockets alone.
    """
    pid = os.getpid()

    def end_here() -> None:
        if end_here in _endings:
            _endings.discard(end_here)
            if os.getpid() == pid:
                end(*arguments, **options)

    _endings.add(end_here)
    weakref.finalize(owner, end_here).atexit = False  # at the end of the process a finalizer may refuse to run
    return end_here


@atexit.register
def _end_all() -> None:
    for end in list(_endings):
        end()
    if os.getpid() in _contexts:
        context().destroy(linger=0)


MAX_UNHEARD_BYTES = 256 << 20
"""Most memory that this process may gain while a connection pours in bytes of which no message comes."""

_LOOK_S, _CALM_LOOK_S = 0.005, 0.02
_SEEN_READ = 3  # looks at bytes that are being read since a message was heard, to be taken for the cause
_log = logging.getLogger(__name__)


class Bounds:
    """Memory of messages without an end: bounded in bytes, over all connections together.

    libzmq bounds the bytes of a frame, not the frames of a message, and shows no part of a message that has no end. A
    frame of one byte costs it 64 bytes, so what was sent says little: counted is the memory that this process takes.
    libzmq reads in a thread of its own, also while the device computes; so does this: every 5 ms while bytes pour in,
    else every 20 ms.
    """

    def __init__(self, heard_ns: Mapping[int, int], end: Callable[[int], object]) -> None:
        """heard_ns: descriptor of each connection -> when a message of it was last heard. end: ends one."""
        self._heard_ns, self._end = heard_ns, end
        self._pouring: dict[int, tuple[int, int, int]] = {}
        """Descriptor -> last heard, bytes unread, looks at others since there were fewer: libzmq reads."""
        self._calm_bytes = _private_bytes()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ndp-bounds", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """End the connection that was read most, if the memory gained since nothing was unread is too much.

        What only grows is not read, since libzmq's queue of whole messages is full: no memory goes to it. So are a
        host's doorbells, while the device prepares the experts of a plan.
        """
        before, self._pouring = self._pouring, {}
        for fd, heard_ns in list(self._heard_ns.items()):
            unread = num_unread(fd)
            heard_before_ns, unread_before, times = before.get(fd, (heard_ns, 0, 0))
            if heard_ns != heard_before_ns:
                continue
            times += unread < unread_before or (times > 0 and unread > unread_before)
            if unread or times:
                self._pouring[fd] = heard_ns, unread, times
        now_bytes = _private_bytes()
        self._calm_bytes = min(self._calm_bytes, now_bytes) if self._pouring else now_bytes
        if now_bytes - self._calm_bytes <= MAX_UNHEARD_BYTES or not self._pouring:
            return
        fd, (_, _, times) = max(self._pouring.items(), key=lambda seen: seen[1][2])
        if times >= _SEEN_READ:
            _log.warning("a host was sent away: its message has no end")
            self._end(fd)
            del self._pouring[fd]
            give_memory_back()  # of those that were ended before

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_LOOK_S if self._pouring else _CALM_LOOK_S):
            self.look()


def _private_bytes() -> int:
    """Memory of this process that no file backs."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
