"""What a transport asks of the system: the time, sockets, and to wait for them. tests/simulation has another one.

Knows no protocol. Sockets never block, and come back as soon as they have begun to connect.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ndp_device.protocol.codec import Buffer
from ndp_device.transport.address import Address
from ndp_device.transport.listener import CREDENTIALS, Listener

READABLE, WRITABLE, ENDED = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


class Clock(Protocol):
    """The standard library's `time` is one."""

    def monotonic(self) -> float: ...

    def monotonic_ns(self) -> int: ...

    def thread_time_ns(self) -> int: ...

    def sleep(self, seconds: float, /) -> None: ...


class Stream(Protocol):
    """One end of a connection. Raises BlockingIOError where it would have to wait, OSError where that broke."""

    def fileno(self) -> int: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int: ...

    def close(self) -> None: ...


class Poller(Protocol):
    """select.epoll is one."""

    def register(self, fd: int, eventmask: int, /) -> None: ...

    def modify(self, fd: int, eventmask: int, /) -> None: ...

    def unregister(self, fd: int, /) -> None: ...

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]: ...

    def close(self) -> None: ...


class ForeignListener(OSError):
    """Who listens at a path is another user."""


class HostSystem(Protocol):
    """What the host's end of a connection needs."""

    @property
    def clock(self) -> Clock: ...

    def connect(self, address: Address) -> Stream:
        """A socket on its way to the address. Raises OSError where nobody listens, ForeignListener where the wrong
        user does."""
        ...

    def poller(self) -> Poller: ...

    def run_beside(self, work: Callable[[], None]) -> None:
        """Do the work while the caller goes on."""
        ...


class Listening(Protocol):
    """listener.Listener is one."""

    @property
    def path(self) -> Path | None: ...

    @property
    def address(self) -> str: ...

    def fileno(self) -> int: ...

    def accept(self) -> tuple[Stream, int | None] | None: ...

    def close(self) -> None: ...


class DeviceSystem(Protocol):
    """What the device's end of all connections needs."""

    @property
    def clock(self) -> Clock: ...

    def listen(self, address: str, *, has_keys: bool, backlog: int) -> Listening: ...

    def poller(self) -> Poller: ...

    def run_beside(self, work: Callable[[], None]) -> None: ...


class System:
    """The real one."""

    clock: Clock = time

    def connect(self, address: Address) -> Stream:
        family, where = socket.AF_UNIX, str(address.ipc_path)
        if address.ipc_path is None:
            host, _, port = address.text.removeprefix("tcp://").rpartition(":")
            family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]  # type: ignore[assignment]
        connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            if address.ipc_path is None:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.connect(where)
            if address.ipc_path is not None:
                _require_own(connection)
        except BlockingIOError:
            if address.ipc_path is not None:  # its queue of new connections is full
                connection.close()
                raise
        except BaseException:
            connection.close()
            raise
        return connection

    def listen(self, address: str, *, has_keys: bool, backlog: int) -> Listening:
        return Listener(address, has_keys=has_keys, backlog=backlog)

    def poller(self) -> Poller:
        return select.epoll()

    def run_beside(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name="ndp-beside", daemon=True).start()


def _require_own(connection: socket.socket) -> None:
    """A device sees activations and is believed its numbers: one of root's or of this user. Root may use anybody's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, uid, _ = CREDENTIALS.unpack(credentials)
    if uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise ForeignListener(f"user {uid} listens there, this host belongs to user {os.geteuid()}")


SYSTEM = System()
