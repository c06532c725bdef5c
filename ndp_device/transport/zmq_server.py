"""The device's end of a ZeroMQ connection: ROUTER. Of the content of frames it knows the checksum.

Between processes of one machine the frames may lie in shared memory instead (shm.py); then the socket carries the
doorbell that wakes a sleeper, and every message the memory cannot take. Queues, message sizes and the time that a
silent peer may hold a half-open connection are bounded.
"""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import zmq

from ndp_device.errors import ConfigError, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol.codec import Frames
from ndp_device.protocol.messages import MAX_BODY_BYTES, SlotOffer
from ndp_device.transport import checksum, fragments, shm, sockets
from ndp_device.transport.address import Address, make_private, require_private, take
from ndp_device.transport.shm import ShmChannel

_QUEUE = 64  # of the device, per host and direction, in ZeroMQ's messages: whole ones or fragments
_MAX_JOINING = 8  # hosts that may have a half-received message in the device
_JOIN_WITHIN_NS = 10_000_000_000
_MAX_VERSIONS = 64  # of hosts, remembered from a request to its answer; one that was forgotten gets a whole message
_SPIN_SLICE_NS = 50_000  # after which a spinning device looks at its socket


class Received(NamedTuple):
    """A request as it arrived; `damage` says what is wrong with it."""

    client: bytes
    frames: Frames
    damage: str | None
    channel: ShmChannel | None = None

    def release(self) -> None:
        """The frames are not needed any more: their ring slot may be written again."""
        if self.channel is not None:
            self.channel.release()


class ZmqServer:
    """The device's end: receives frames from any client, answers one client by its name."""

    def __init__(self, address: str) -> None:
        ipc_path = Address.parse(address).ipc_path
        self._channels: dict[bytes, ShmChannel] = {}
        self._spinner = shm.Spinner(shm.DEVICE_SPIN_US)
        self._active_ns = 0
        self._versions: dict[bytes, int] = {}
        self._joining: dict[bytes, tuple[fragments.Joining, int]] = {}  # with the time it began; oldest first
        self._num_cut = 0
        self._lock: int | None = None
        if ipc_path is not None:
            make_private(ipc_path.parent)
            self._lock = take(ipc_path)
        self._socket = sockets.context().socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, _QUEUE),
            (zmq.RCVHWM, _QUEUE),
            (zmq.MAXMSGSIZE, MAX_BODY_BYTES),
            (zmq.HANDSHAKE_IVL, sockets.HANDSHAKE_MS),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(option, value)
        previous = os.umask(0o077)
        try:
            self._socket.bind(address)
            if ipc_path is not None:
                require_private(ipc_path)
        except zmq.ZMQError as error:
            self.close()
            reason = "another process listens there" if error.errno == zmq.EADDRINUSE else os.strerror(error.errno or 0)
            raise ConfigError(f"cannot listen on {address}: {reason}; choose another address") from None
        except ConfigError:
            self.close()
            raise
        finally:
            os.umask(previous)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def offer_memory(self, client: bytes) -> SlotOffer | None:
        """A segment for this client, used in both directions as soon as the client has used it once."""
        self._close_channel(client)
        if len(self._channels) >= shm.MAX_CHANNELS:
            self._forget_absent(silent_s=0.0)
        channel = ShmChannel.create() if len(self._channels) < shm.MAX_CHANNELS else None
        if channel is None:
            return None
        self._channels[client] = channel
        return channel.offer

    def receive(self, timeout_ms: int) -> Received | None:
        """The next request, or None after timeout_ms. Two frames are kept; more show as one empty frame."""
        if not self._channels:
            return self._from_socket(timeout_ms)
        received = self._from_memory()
        if received is None:
            received = (self._spin() or self._sleep(timeout_ms)) if timeout_ms else self._from_socket(0)
        return received

    def send(self, client: bytes, frames: Frames) -> None:
        """Write the checksum and send. Never blocks; a client that is gone or does not read loses its answer."""
        header, body = frames
        if not self._to_memory(client, frames, writes_checksum=True):
            if not sockets.is_cut(body, self._versions.get(client, 0)):
                header = checksum.write(header, body)
            self._to_socket(client, (header, body), writes_checksum=True)

    def with_checksum(self, client: bytes, frames: Frames) -> Frames:
        """The frames as `send` would write them, for `send_as_is`."""
        header, body = frames
        return checksum.write(header, body if self._speaking(client) is None else shm.checked_part(body)), body

    def send_as_is(self, client: bytes, frames: Frames) -> None:
        """Send frames that have their checksum, right or wrong: for failpoints."""
        if not self._to_memory(client, frames, writes_checksum=False):
            self._to_socket(client, frames)

    def close(self) -> None:
        for client in list(self._channels):
            self._close_channel(client)
        self._socket.close(linger=sockets.FLUSH_MS)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _to_memory(self, client: bytes, frames: Frames, *, writes_checksum: bool) -> bool:
        """False: the message must take the socket."""
        channel = self._speaking(client)
        if channel is None or len(frames) != 2:
            return False
        sent = self._put(client, channel, frames, writes_checksum)
        if sent is shm.Put.DOORBELL:
            self._to_socket(client, sockets.DOORBELL)
        return sent is not shm.Put.REFUSED

    def _to_socket(self, client: bytes, frames: Frames, *, writes_checksum: bool = False) -> bool:
        """False: there is no such client any more."""
        try:
            if len(frames) == 2 and sockets.is_cut(frames[1], self._versions.get(client, 0)):
                self._num_cut += 1
                for fragment in fragments.cut(self._num_cut, *frames, writes_checksum=writes_checksum):
                    sockets.send(self._socket, [client, *fragment])
            else:
                sockets.send(self._socket, [client, *frames])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return error.errno != zmq.EHOSTUNREACH
        return True

    def _from_socket(self, timeout_ms: int) -> Received | None:
        readable = int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN  # a tenth of the price of poll(0)
        if not readable and not (timeout_ms and self._wait(timeout_ms)):
            self._forget_halves()
            return None
        client = self._socket.recv()
        frames: list[codec.Buffer] = []
        while self._socket.getsockopt(zmq.RCVMORE):
            frame = self._socket.recv(copy=False)
            if len(frames) < 3:
                frames.append(sockets.content(frame))
            elif len(frames) == 3:
                frames.append(b"")
        if fragments.is_fragment(frames):
            return self._join(client, frames)
        self._joining.pop(client, None)
        if frames == sockets.DOORBELL and client in self._channels:
            return self._from_memory()
        if len(frames) == 2:
            self._note_version(client, frames[0])
        return Received(client, frames, checksum.damage(frames[0], frames[1]) if len(frames) == 2 else None)

    def _wait(self, timeout_ms: int) -> bool:
        """Sleep until a message or a doorbell; True if the socket can be read."""
        doorbells: list[tuple[Any, int]] = [(channel.doorbell, zmq.POLLIN) for channel in self._channels.values()]
        return any(
            item is self._socket for item, _ in zmq.zmq_poll([(self._socket, zmq.POLLIN), *doorbells], timeout_ms)
        )

    def _join(self, client: bytes, frames: Frames) -> Received | None:
        joining, since_ns = self._joining.pop(client, (None, 0))
        try:
            if joining is None or fragments.begins(frames):
                joining, since_ns = fragments.Joining(frames), time.monotonic_ns()
                if len(self._joining) >= _MAX_JOINING:
                    del self._joining[next(iter(self._joining))]
            elif (message := joining.add(frames)) is not None:
                self._note_version(client, message[0])
                return Received(client, message, None)
        except RemoteProtocolError as error:
            header = joining.header if joining is not None else b""
            return Received(client, (header, b""), str(error))
        self._joining[client] = joining, since_ns
        return None

    def _forget_halves(self) -> None:
        """Of hosts that went away in the middle of a message: nobody tells a ROUTER."""
        if self._joining:
            before_ns = time.monotonic_ns() - _JOIN_WITHIN_NS
            self._joining = {client: half for client, half in self._joining.items() if half[1] > before_ns}

    def _note_version(self, client: bytes, header: codec.Buffer) -> None:
        self._versions.pop(client, None)
        self._versions[client] = codec.peek_version(header)
        if len(self._versions) > _MAX_VERSIONS:
            del self._versions[next(iter(self._versions))]

    def _from_memory(self) -> Received | None:
        for client, channel in self._channels.items():
            try:
                taken = channel.take()
            except RemoteProtocolError:
                self._close_channel(client)  # its host will miss an answer and connect again
                return None
            if taken is not None:
                channel.has_spoken = True
                channel.used_ns = self._active_ns = time.monotonic_ns()
                header, body, intact = taken
                damage = None if intact else checksum.damage(header, shm.checked_part(body))
                return Received(client, (header, body), damage, channel)
        return None

    def _put(self, client: bytes, channel: ShmChannel, frames: Frames, writes_checksum: bool) -> shm.Put:
        try:
            return channel.put(frames, writes_checksum=writes_checksum)
        except RemoteProtocolError:
            self._close_channel(client)
            return shm.Put.REFUSED

    def _spin(self) -> Received | None:
        """A client that was served within the last millisecond is likely to ask again before a doorbell could ring."""
        channels = [channel for channel in self._channels.values() if channel.has_spoken]
        while channels and time.monotonic_ns() - self._active_ns < self._spinner.spin_ns and not self._spinner.is_calm:
            if self._spinner.spin(channels, _SPIN_SLICE_NS):
                return self._from_memory()
            if received := self._from_socket(0):
                return received
        return None

    def _sleep(self, timeout_ms: int) -> Received | None:
        channels = list(self._channels.values())
        received = None
        if all(channel.prepare_sleep() for channel in channels):
            received = self._from_socket(timeout_ms)
            if received is None:
                self._forget_absent(shm.PROBE_AFTER_S)
        for channel in channels:
            channel.awake()
        return received or self._from_memory()

    def _forget_absent(self, silent_s: float) -> None:
        """Free the segments of hosts that are gone: nobody tells a ROUTER, but it refuses to send to such a one."""
        now = time.monotonic_ns()
        for client, channel in list(self._channels.items()):
            if now - channel.used_ns >= silent_s * 1e9:
                channel.used_ns = now
                if not self._to_socket(client, sockets.DOORBELL):
                    self._close_channel(client)

    def _speaking(self, client: bytes) -> ShmChannel | None:
        channel = self._channels.get(client)
        return channel if channel is not None and channel.has_spoken else None

    def _close_channel(self, client: bytes) -> None:
        if channel := self._channels.pop(client, None):
            channel.close()
