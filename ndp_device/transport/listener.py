"""Where a device listens, and who may connect there: one device at an address, its own user over a path.

Knows addresses, locks and credentials; nothing of what is said on a connection.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import struct
from pathlib import Path

from ndp_device.errors import ConfigError
from ndp_device.transport.address import Address, make_private, require_private, take

CREDENTIALS = struct.Struct("3i")
_NOTICE_THE_DEAD = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 90_000),
)
"""A machine that lost its power says no goodbye: without these its connection would keep its place for ever."""

_log = logging.getLogger(__name__)


class Listener:
    """One listening socket. `address` is what hosts connect to, with the port that was chosen for `*`."""

    def __init__(self, address: str, *, has_keys: bool, backlog: int) -> None:
        """backlog: connections that may wait to be accepted.

        Raises ConfigError where another device or program has the address, or its folder is not private.
        """
        self.path: Path | None = Address.parse(address, has_keys=has_keys).ipc_path
        self.address = address
        self._lock: int | None = None
        self._socket: socket.socket | None = None
        try:
            self._socket = self._bound(backlog)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Of the socket; -1 once it is closed."""
        return -1 if self._socket is None else self._socket.fileno()

    def accept(self) -> tuple[socket.socket, int | None] | None:
        """The next connection of a peer that may come in, and the process it is of; None: the peer may not, or is gone.

        It does not block. The process is None over tcp, where the system does not say it.

        Raises BlockingIOError where none waits, and OSError where the system has no room for one.
        """
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except ConnectionAbortedError:
            return None
        connection.setblocking(False)
        if self.path is None:
            _prepare(connection)
            return connection, None
        process, user, _ = CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )
        if user in (os.geteuid(), 0):  # whatever the path's mode says
            return connection, process or None  # 0: of a container that has numbers of its own
        _log.warning("process %d of user %d was refused: this device belongs to user %d", process, user, os.geteuid())
        connection.close()
        return None

    def close(self) -> None:
        """Leave the address to others."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            if self.path is not None:
                self.path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _bound(self, backlog: int) -> socket.socket:
        path = self.path
        if path is not None:
            make_private(path.parent)
            self._lock = take(path)
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(path.lstat().st_mode):
                    raise ConfigError(f"{path} is not a socket and will not be replaced; choose another address")
                path.unlink()  # of a device that was killed: the lock is ours
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host.strip("[]")
        family = socket.AF_UNIX if path is not None else socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        previous = os.umask(0o077)
        try:
            if path is not None:
                bound.bind(str(path))
                require_private(path)
            else:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind((host, 0 if port == "*" else int(port)))
            bound.listen(backlog)
        except OSError as error:
            bound.close()
            used = error.errno == errno.EADDRINUSE
            reason = "another process listens there" if used else os.strerror(error.errno or 0)
            raise ConfigError(f"cannot listen on {self.address}: {reason}; choose another address") from None
        finally:
            os.umask(previous)
        if path is None:
            host, port = bound.getsockname()[:2]
            self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        return bound


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for level, option, value in _NOTICE_THE_DEAD:
        connection.setsockopt(level, option, value)
