"""How two frames get from one process to another. The only file that imports zmq; knows nothing of their content.

    ZmqServer   ROUTER, in the device        ZmqTransport        DEALER with a socket monitor, in the host
                                             InProcessTransport  no socket: the handler is called directly

Everything is bounded: queues, message sizes, the time a silent peer may hold a half-open connection. ipc sockets live
in a directory only their owner can enter; tcp is for this machine only, because nothing here is encrypted.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import stat
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from ndp_device.errors import ConfigError, DeviceUnavailable
from ndp_device.protocol.messages import MAX_BODY_BYTES

Buffer = bytes | bytearray | memoryview
Frames = Sequence[Buffer]

MAX_IPC_PATH_BYTES = 107  # sun_path of sockaddr_un holds 108 with its closing zero
_ZERO_COPY_BYTES = 256 << 10  # measured elsewhere: copying is cheaper below 64 KB, dearer above 1 MB
_SEND_QUEUE, _RECEIVE_QUEUE = 16, 64
_HANDSHAKE_MS = 500
_CONNECT_MS = 2000
_RECONNECT_MS, _RECONNECT_MAX_MS = 5, 200
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """One context per process, made when first needed: a forked child must not touch its parent's."""
    pid = os.getpid()
    if pid not in _contexts:
        _contexts[pid] = zmq.Context()
    return _contexts[pid]


@dataclass(frozen=True)
class Address:
    """Where a device listens: ipc:///absolute/path or tcp://loopback:port."""

    text: str
    ipc_path: Path | None

    @classmethod
    def parse(cls, text: str) -> Address:
        scheme, separator, rest = text.partition("://")
        if separator and scheme == "ipc":
            if rest.startswith("@"):
                raise ConfigError(f"{text}: abstract sockets have no owner, anybody may connect; give an absolute path")
            if not rest.startswith("/"):
                raise ConfigError(f"{text}: the path of an ipc address must be absolute, for example ipc:///run/x/ndp")
            if len(os.fsencode(rest)) > MAX_IPC_PATH_BYTES:
                raise ConfigError(
                    f"an ipc path may have {MAX_IPC_PATH_BYTES} bytes, got {len(os.fsencode(rest))}; use a shorter one"
                )
            return cls(text, Path(rest))
        if separator and scheme == "tcp":
            host, _, port = rest.rpartition(":")
            if not _is_loopback(host):
                raise ConfigError(f"{text}: tcp is not encrypted, so only loopback is allowed, for example 127.0.0.1")
            if not (port.isdecimal() and int(port) < 65536) and port != "*":
                raise ConfigError(f"{text}: the port must be 0..65535, got {port!r}")
            return cls(text, None)
        raise ConfigError(f"an address must look like ipc:///path or tcp://127.0.0.1:port, got {text!r}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class ZmqServer:
    """The device's end: receives frames from any client, answers one client by its name."""

    def __init__(self, address: str) -> None:
        parsed = Address.parse(address)
        self._lock: int | None = None
        if parsed.ipc_path is not None:
            _make_private(parsed.ipc_path.parent)
            self._lock = _take(parsed.ipc_path)
        self._socket = _context().socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, _RECEIVE_QUEUE),
            (zmq.RCVHWM, _RECEIVE_QUEUE),
            (zmq.MAXMSGSIZE, MAX_BODY_BYTES),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(option, value)
        self._bind(address, parsed)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _bind(self, address: str, parsed: Address) -> None:
        previous = os.umask(0o077)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            reason = "another process listens there" if error.errno == zmq.EADDRINUSE else os.strerror(error.errno or 0)
            raise ConfigError(f"cannot listen on {address}: {reason}; choose another address") from None
        finally:
            os.umask(previous)
        if parsed.ipc_path is not None:
            mode = parsed.ipc_path.lstat().st_mode
            if mode & 0o077:
                self.close()
                raise ConfigError(
                    f"{parsed.ipc_path} is open to others (mode {stat.filemode(mode)}); refusing to serve"
                )

    def receive(self, timeout_ms: int) -> tuple[bytes, list[Buffer]] | None:
        """(client, its frames), or None after timeout_ms. Two frames are kept; more show as one empty frame."""
        if not self._socket.poll(timeout_ms):
            return None
        client = self._socket.recv()
        frames: list[Buffer] = []
        while self._socket.getsockopt(zmq.RCVMORE):
            frame = self._socket.recv(copy=False)
            if len(frames) < 2:
                frames.append(_content(frame))
            elif len(frames) == 2:
                frames.append(b"")
        return client, frames

    def send(self, client: bytes, frames: Frames) -> None:
        """Never blocks; a client that is gone or does not read loses its answer."""
        try:
            _send(self._socket, [client, *frames])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise

    def close(self) -> None:
        self._socket.close(linger=0)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class ClientTransport(Protocol):
    """The host's end of one connection attempt. After `receive` raised, close it and make another."""

    def send(self, frames: Frames) -> bool:
        """Hand the frames over without waiting. False: no connection, or its queue is full."""
        ...

    def receive(self, timeout_s: float) -> Frames | None:
        """The next message; None after timeout_s or as soon as the connection is made. Raises DeviceUnavailable."""
        ...

    def close(self) -> None: ...


class ZmqTransport:
    """A DEALER whose monitor tells within milliseconds that the device died; libzmq's heartbeat tells that it froze."""

    def __init__(self, address: str, *, heartbeat_ms: int = 100) -> None:
        Address.parse(address)
        self._socket = _context().socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, _SEND_QUEUE),
            (zmq.RCVHWM, _RECEIVE_QUEUE),
            (zmq.MAXMSGSIZE, MAX_BODY_BYTES),
            (zmq.IMMEDIATE, 1),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.CONNECT_TIMEOUT, _CONNECT_MS),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
            (zmq.HEARTBEAT_IVL, heartbeat_ms),
            (zmq.HEARTBEAT_TIMEOUT, 5 * heartbeat_ms),
            (zmq.HEARTBEAT_TTL, 5 * heartbeat_ms),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._polled = [(self._socket, zmq.POLLIN), (self._monitor, zmq.POLLIN)]
        self._socket.connect(address)

    def send(self, frames: Frames) -> bool:
        try:
            _send(self._socket, frames)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s: float) -> Frames | None:
        frames = self._receive_now()
        if frames is not None:
            return frames
        ready = dict(zmq.zmq_poll(self._polled, max(round(timeout_s * 1e3), 0)))
        if self._socket in ready:
            return self._receive_now()
        if self._monitor in ready:
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            if event == zmq.EVENT_DISCONNECTED:
                raise DeviceUnavailable("the connection to the device was lost")
        return None

    def _receive_now(self) -> Frames | None:
        try:
            return [_content(frame) for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


class InProcessTransport:
    """Calls `reply` where a socket would be: same frames, same checks, no other process."""

    def __init__(self, reply: Callable[[bytes, Frames], Frames], client: bytes = b"in-process") -> None:
        self._reply, self._client = reply, client
        self._replies: deque[Frames] = deque(maxlen=_RECEIVE_QUEUE)

    def send(self, frames: Frames) -> bool:
        self._replies.append(self._reply(self._client, frames))
        return True

    def receive(self, timeout_s: float) -> Frames | None:
        return self._replies.popleft() if self._replies else None

    def close(self) -> None:
        self._replies.clear()


def _send(socket: zmq.Socket[bytes], frames: Frames) -> None:
    large = len(frames[-1]) >= _ZERO_COPY_BYTES  # the codec makes a new body for each message: safe to lend
    socket.send_multipart(frames, zmq.NOBLOCK, copy=not large)


def _content(frame: zmq.Frame) -> Buffer:
    """Small frames lie anywhere in libzmq's read buffer: copied, they are aligned."""
    content: Buffer = frame.bytes if len(frame) < _ZERO_COPY_BYTES else frame.buffer
    return content


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must belong to you alone (mode 0700) because the device's socket lives in it, "
            f"got {stat.filemode(status.st_mode)}; make a directory for it"
        )


def _take(path: Path) -> int:
    """Lock the address: libzmq would let a second device steal the path without a word."""
    handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(handle, 32).decode(errors="replace").strip() or "?"
        os.close(handle)
        raise ConfigError(
            f"a device with pid {holder} already listens on ipc://{path}; stop it or choose another address"
        ) from None
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
    return handle
