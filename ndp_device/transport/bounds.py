"""Memory of messages without an end: bounded in bytes, over all connections together.

libzmq bounds the bytes of a frame, not the frames of a message, and shows no part of a message that has no end. A frame
of one byte costs it 64 bytes, so what was sent says little: counted is the memory that this process takes. libzmq
reads in a thread of its own, also while the device computes; so does this.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ndp_device.transport import sockets

MAX_UNHEARD_BYTES = 256 << 20
"""Most memory that this process may gain while a connection pours in bytes of which no message comes."""

_LOOK_S, _CALM_LOOK_S = 0.005, 0.02
_SEEN_POURING = 3  # looks at unread bytes since a message was heard, before a connection can be the cause
_log = logging.getLogger(__name__)


class Bounds:
    """Looks every 5 ms while bytes pour in, else every 20 ms."""

    def __init__(self, heard_ns: Mapping[int, int], end: Callable[[int], object]) -> None:
        """heard_ns: descriptor of each connection -> when a message of it was last heard. end: ends one."""
        self._heard_ns, self._end = heard_ns, end
        self._pouring: dict[
            int, tuple[int, int, int]
        ] = {}  # descriptor -> last heard, bytes unread, looks that saw some
        self._calm_bytes = _private_bytes()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ndp-bounds", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """End the connection that was seen most, if the memory gained since none was seen is too much."""
        before, self._pouring = self._pouring, {}
        for fd, heard_ns in list(self._heard_ns.items()):
            unread = sockets.num_unread(fd)
            heard_before_ns, unread_before, times = before.get(fd, (heard_ns, 0, 0))
            if heard_ns != heard_before_ns:
                continue
            # as many as before: libzmq may have stopped reading, its queue of whole messages is full
            times += unread not in (0, unread_before)
            if times:
                self._pouring[fd] = heard_ns, unread, times
        now_bytes = _private_bytes()
        self._calm_bytes = min(self._calm_bytes, now_bytes) if self._pouring else now_bytes
        if now_bytes - self._calm_bytes <= MAX_UNHEARD_BYTES or not self._pouring:
            return
        fd, (_, _, times) = max(self._pouring.items(), key=lambda seen: seen[1][2])
        if times >= _SEEN_POURING:
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


def give_memory_back() -> None:
    """Give free memory back to the system. glibc keeps the memory of large messages for later ones."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _private_bytes() -> int:
    """Memory of this process that no file backs."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
