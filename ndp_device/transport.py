"""How two frames get from one process to another. The only file that imports zmq; of their content it knows the seal.

    ZmqServer     ROUTER, in the device
    ZmqTransport  DEALER with a socket monitor, in the host; a ClientTransport

Between processes of one machine the frames may lie in shared memory instead (carrier.py); then the socket carries the
bell that wakes a sleeper, and every message the memory cannot take. Queues, message sizes and the time that a silent
peer may hold a half-open connection are bounded.
"""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from ndp_device import carrier
from ndp_device.address import Address, make_private, require_private, take
from ndp_device.carrier import Frames, SlotChannel
from ndp_device.errors import ConfigError, DeviceUnavailable, RemoteProtocolError
from ndp_device.protocol import codec, pieces
from ndp_device.protocol.messages import MAX_BODY_BYTES, SlotOffer

_ZERO_COPY_BYTES = 256 << 10  # measured elsewhere: copying is cheaper below 64 KB, dearer above 1 MB
_QUEUE = 64  # of the device, per host and direction, in ZeroMQ's messages: whole ones or pieces
_HOST_QUEUE = 16 * pieces.MAX_PIECES  # a host's largest requests and answers fit, all that may be in flight
_MAX_JOINING = 8  # hosts that may have a half-received message in the device
_JOIN_WITHIN_NS = 10_000_000_000
_MAX_VERSIONS = 64  # of hosts, remembered from a request to its answer; one that was forgotten gets a whole message
_HANDSHAKE_MS = 500
_CONNECT_MS = 2000
_FLUSH_MS = 500
_RECONNECT_MS, _RECONNECT_MAX_MS = 5, 200
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_BELL: list[codec.Buffer] = [b""]
_DONE = carrier.Put.DONE
_SPIN_SLICE_NS = 50_000  # after which a spinning device looks at its socket
_BELL_LOST_S = 0.05  # how long a host sleeps before it looks into memory without a bell
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """One context per process, made when first needed: a forked child must not touch its parent's."""
    pid = os.getpid()
    if pid not in _contexts:
        _contexts[pid] = zmq.Context()
    return _contexts[pid]


def flush() -> None:
    """Before the process ends: wait until the last answers have left, for half a second at most."""
    if context := _contexts.pop(os.getpid(), None):
        context.destroy(linger=_FLUSH_MS)


class _Unsealed(bytes):
    """The header of an answer whose checksum is made while its pieces leave."""


class Received(NamedTuple):
    """A request as it arrived; `covered` is the part of its body that its seal covers, CHECKED if it was checked."""

    client: bytes
    frames: Frames
    covered: codec.Buffer
    channel: SlotChannel | None = None

    def release(self) -> None:
        """The frames are not needed any more: their slot may be written again."""
        if self.channel is not None:
            self.channel.release()


class ZmqServer:
    """The device's end: receives frames from any client, answers one client by its name."""

    def __init__(self, address: str) -> None:
        ipc_path = Address.parse(address).ipc_path
        self._channels: dict[bytes, SlotChannel] = {}
        self._spinner = carrier.Spinner(carrier.DEVICE_SPIN_US)
        self._active_ns = 0
        self._versions: dict[bytes, int] = {}
        self._joining: dict[bytes, tuple[pieces.Joining, int]] = {}  # with the time of the first piece; oldest first
        self._num_cut = 0
        self._lock: int | None = None
        if ipc_path is not None:
            make_private(ipc_path.parent)
            self._lock = take(ipc_path)
        self._socket = _context().socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, _QUEUE),
            (zmq.RCVHWM, _QUEUE),
            (zmq.MAXMSGSIZE, MAX_BODY_BYTES),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
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

    def offer_slots(self, client: bytes) -> SlotOffer | None:
        """A segment for this client, used in both directions as soon as the client has used it once."""
        self._close_channel(client)
        if len(self._channels) >= carrier.MAX_CHANNELS:
            self._forget_absent(silent_s=0.0)
        channel = SlotChannel.create() if len(self._channels) < carrier.MAX_CHANNELS else None
        if channel is None:
            return None
        self._channels[client] = channel
        return channel.offer

    def receive(self, timeout_ms: int) -> Received | None:
        """The next request, or None after timeout_ms. Two frames are kept; more show as one empty frame."""
        if not self._channels:
            return self._from_socket(timeout_ms)
        received = self._from_slots()
        if received is None:
            received = (self._spin() or self._sleep(timeout_ms)) if timeout_ms else self._from_socket(0)
        return received

    def seal(self, client: bytes, frames: Frames) -> Frames:
        """The frames with the checksum that belongs to the way they will take."""
        header, body = frames
        if self._speaking(client) is not None:
            return codec.seal(header, carrier.covered(body)), body
        if _is_cut(body, self._versions.get(client, 0)):
            return _Unsealed(header), body
        return codec.seal(header, body), body

    def send(self, client: bytes, frames: Frames) -> None:
        """Never blocks; a client that is gone or does not read loses its answer."""
        channel = self._speaking(client)
        if channel is not None and len(frames) == 2:
            sent = self._put(client, channel, frames)
            if sent is _DONE:
                return
            if sent is carrier.Put.BELL:
                self._to_socket(client, _BELL)
                return
            if len(carrier.covered(frames[1])) < len(frames[1]):
                frames = codec.seal(*frames), frames[1]
        self._to_socket(client, frames)

    def close(self) -> None:
        for client in list(self._channels):
            self._close_channel(client)
        self._socket.close(linger=_FLUSH_MS)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _to_socket(self, client: bytes, frames: Frames) -> bool:
        """False: there is no such client any more."""
        try:
            if len(frames) == 2 and _is_cut(frames[1], self._versions.get(client, 0)):
                self._num_cut += 1
                for piece in pieces.cut(self._num_cut, *frames, seals=isinstance(frames[0], _Unsealed)):
                    _send(self._socket, [client, *piece])
            else:
                _send(self._socket, [client, *frames])
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
                frames.append(_content(frame))
            elif len(frames) == 3:
                frames.append(b"")
        if pieces.is_piece(frames):
            return self._join(client, frames)
        self._joining.pop(client, None)
        if frames == _BELL and client in self._channels:
            return self._from_slots()
        if len(frames) == 2:
            self._note_version(client, frames[0])
        return Received(client, frames, frames[-1] if frames else b"")

    def _wait(self, timeout_ms: int) -> bool:
        """Sleep until a message or a bell; True if the socket can be read."""
        bells: list[tuple[Any, int]] = [(channel.bell, zmq.POLLIN) for channel in self._channels.values()]
        return any(item is self._socket for item, _ in zmq.zmq_poll([(self._socket, zmq.POLLIN), *bells], timeout_ms))

    def _join(self, client: bytes, frames: Frames) -> Received | None:
        joining, since_ns = self._joining.pop(client, (None, 0))
        try:
            if joining is None or pieces.begins(frames):
                joining, since_ns = pieces.Joining(frames), time.monotonic_ns()
                if len(self._joining) >= _MAX_JOINING:
                    del self._joining[next(iter(self._joining))]
            elif (message := joining.add(frames)) is not None:
                self._note_version(client, message[0])
                return Received(client, message, codec.CHECKED)
        except RemoteProtocolError as error:
            header = joining.header if joining is not None else b""
            return Received(client, (header, b""), codec.Broken(str(error).encode()))
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

    def _from_slots(self) -> Received | None:
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
                return Received(client, (header, body), codec.CHECKED if intact else carrier.covered(body), channel)
        return None

    def _put(self, client: bytes, channel: SlotChannel, frames: Frames) -> carrier.Put:
        try:
            return channel.put(frames)
        except RemoteProtocolError:
            self._close_channel(client)
            return carrier.Put.REFUSED

    def _spin(self) -> Received | None:
        """A client that was served within the last millisecond is likely to ask again before a bell could ring."""
        channels = [channel for channel in self._channels.values() if channel.has_spoken]
        while channels and time.monotonic_ns() - self._active_ns < self._spinner.spin_ns and not self._spinner.is_calm:
            if self._spinner.spin(channels, _SPIN_SLICE_NS):
                return self._from_slots()
            if received := self._from_socket(0):
                return received
        return None

    def _sleep(self, timeout_ms: int) -> Received | None:
        channels = list(self._channels.values())
        received = None
        if all(channel.prepare_sleep() for channel in channels):
            received = self._from_socket(timeout_ms)
            if received is None:
                self._forget_absent(carrier.PROBE_AFTER_S)
        for channel in channels:
            channel.awake()
        return received or self._from_slots()

    def _forget_absent(self, silent_s: float) -> None:
        """Free the segments of hosts that are gone: nobody tells a ROUTER, but it refuses to send to such a one."""
        now = time.monotonic_ns()
        for client, channel in list(self._channels.items()):
            if now - channel.used_ns >= silent_s * 1e9:
                channel.used_ns = now
                if not self._to_socket(client, _BELL):
                    self._close_channel(client)

    def _speaking(self, client: bytes) -> SlotChannel | None:
        channel = self._channels.get(client)
        return channel if channel is not None and channel.has_spoken else None

    def _close_channel(self, client: bytes) -> None:
        if channel := self._channels.pop(client, None):
            channel.close()


class ZmqTransport:
    """A DEALER whose monitor tells within milliseconds that the device died; libzmq's heartbeat tells that it froze."""

    def __init__(self, address: str, *, heartbeat_ms: int = 400) -> None:
        self._is_ipc = Address.parse(address).ipc_path is not None
        self._channel: SlotChannel | None = None
        self._version = 0  # of the device, as far as it has shown
        self._joining: pieces.Joining | None = None
        self._num_cut = 0
        self._given_up = False
        self._lost = False  # the connection broke; what had arrived before is still handed out
        self._spinner = carrier.Spinner(carrier.HOST_SPIN_US)
        self._socket = _context().socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, _HOST_QUEUE),
            (zmq.RCVHWM, _HOST_QUEUE),
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
        self._polled: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN), (self._monitor, zmq.POLLIN)]
        self._socket.connect(address)

    @property
    def wants_slots(self) -> bool:
        return self._is_ipc and carrier.native is not None

    def attach(self, offer: SlotOffer) -> bool:
        channel = self._channel = SlotChannel.attach(offer)
        if channel is not None and channel.bell >= 0:
            self._polled.append((channel.bell, zmq.POLLIN))
        return channel is not None

    def send(self, frames: Frames) -> bool:
        if self._channel is not None:
            sent = self._channel.put(frames, seals=True)
            if sent is _DONE:
                return True
            if sent is carrier.Put.BELL:
                self._to_socket(_BELL)
                return True
        header, body = frames
        if not _is_cut(body, self._version):
            return self._to_socket((codec.seal(header, body), body))
        self._num_cut += 1
        return all(self._to_socket(piece) for piece in pieces.cut(self._num_cut, header, body, seals=True))

    def receive(self, timeout_s: float) -> Frames | None:
        channel = self._channel
        if channel is None:
            return self._from_socket(timeout_s)
        channel.release()
        if timeout_s <= 0:
            return self._from_slot(channel) or self._from_socket(0.0)
        if self._spinner.spin((channel,)) or not channel.prepare_sleep():
            return self._from_slot(channel)
        frames = self._from_socket(min(timeout_s, _BELL_LOST_S))
        channel.awake()
        frames = frames or self._from_slot(channel)
        if frames is None and self._given_up:
            raise DeviceUnavailable("the device has given up the shared memory")
        return frames

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _to_socket(self, frames: Frames) -> bool:
        try:
            _send(self._socket, frames)
        except zmq.Again:
            return False
        return True

    def _from_slot(self, channel: SlotChannel) -> Frames | None:
        taken = channel.take()
        if taken is None:
            return None
        header, body, intact = taken
        if not intact:
            codec.check(header, carrier.covered(body))
        return header, body

    def _from_socket(self, timeout_s: float) -> Frames | None:
        frames = self._receive_now()
        if frames is None and timeout_s > 0:
            ready = dict(zmq.zmq_poll(self._polled, max(round(timeout_s * 1e3), 1)))
            if self._socket in ready:
                frames = self._receive_now()
            if self._channel is not None:
                self._given_up = bool(ready.get(self._channel.bell, 0) & zmq.POLLERR)
        if frames is None and (self._lost or (self._monitor.poll(0) and self._is_disconnect())):
            self._lost = True
            frames = self._receive_now()  # what arrived before the connection broke still counts
            if frames is None:
                raise DeviceUnavailable("the connection to the device was lost")
        if frames is None:
            return None
        if pieces.is_piece(frames):
            return self._join(frames)
        if self._joining is not None and frames != _BELL:
            raise RemoteProtocolError("the device broke off in the middle of a message")
        if len(frames) != 2:
            if frames == _BELL:
                return None
            raise RemoteProtocolError(f"a message has two frames, the device sent {len(frames)}")
        codec.check(frames[0], frames[1])
        if not self._version:
            self._version = codec.peek_version(frames[0])
        return frames

    def _join(self, frames: Frames) -> Frames | None:
        if self._joining is None:
            self._joining = pieces.Joining(frames)
            return None
        message = self._joining.add(frames)
        if message is not None:
            self._joining = None
            self._version = codec.peek_version(message[0])
        return message

    def _is_disconnect(self) -> bool:
        return bool(parse_monitor_message(self._monitor.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED)

    def _receive_now(self) -> Frames | None:
        try:
            return [_content(frame) for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None


def _send(socket: zmq.Socket[bytes], frames: Frames) -> None:
    large = len(frames[-1]) >= _ZERO_COPY_BYTES  # the codec makes a new body for each message: safe to lend
    socket.send_multipart(frames, zmq.NOBLOCK, copy=not large)


def _is_cut(body: codec.Buffer, version: int) -> bool:
    return len(body) >= pieces.CUT_FROM_BYTES and pieces.is_understood(version)


def _content(frame: zmq.Frame) -> codec.Buffer:
    """Small frames lie anywhere in libzmq's read buffer: copied, they are aligned."""
    content: codec.Buffer = frame.bytes if len(frame) < _ZERO_COPY_BYTES else frame.buffer
    return content
