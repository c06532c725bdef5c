"""The host's end of a ZeroMQ connection: DEALER with a socket monitor; a ClientTransport (base.py).

Between processes of one machine the frames may lie in shared memory instead (shm.py); then the socket carries the
doorbell that wakes a sleeper, and every message the memory cannot take.
"""

from __future__ import annotations

import os
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from ndp_device.errors import DeviceUnavailable, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol.codec import Frames
from ndp_device.protocol.messages import MAX_BODY_BYTES, SlotOffer
from ndp_device.transport import checksum, fragments, shm
from ndp_device.transport.address import Address
from ndp_device.transport.base import require_intact
from ndp_device.transport.keys import HostKeys
from ndp_device.transport.shm import ShmChannel

_HOST_QUEUE = 16 * fragments.MAX_FRAGMENTS  # a host's largest requests and answers fit, all that may be in flight
_CONNECT_MS = 2000
_HANDSHAKE_MS = 500
_RECONNECT_MS, _RECONNECT_MAX_MS = 5, 200
_DOORBELL: list[codec.Buffer] = [b""]
_ZERO_COPY_BYTES = 256 << 10  # measured elsewhere: copying is cheaper below 64 KB, dearer above 1 MB
_REFUSALS: dict[int, tuple[str, str]] = {  # event -> (without keys, with keys)
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: (
        "",
        "the device does not allow this host's key: put its .pub file into the device's allowed/ directory",
    ),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: (
        "the device wants keys: give the file that `ndp-device keygen` made for this host (device_keys, --key)",
        "the device has no keys, and this host was told to use some: start it with --keys, or drop device_keys",
    ),
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: (
        "",  # it had no time or no room: libzmq tries again
        "the device ended the handshake: its key is another one than the one in this host's key file",
    ),
}
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_REFUSALS)
_DOORBELL_LOST_S = 0.05  # how long a host sleeps before it looks into memory without a doorbell
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


class ZmqTransport:
    """A DEALER whose monitor tells within milliseconds that the device died; libzmq's heartbeat tells that it froze.

    Without the option IMMEDIATE: with it, libzmq 4.3.5 throws away what had arrived when a connection ends, and aborts
    the process if that happens between two frames of a message. So `send` itself waits for the handshake.
    """

    def __init__(self, address: str, *, keys: HostKeys | None = None, heartbeat_ms: int = 400) -> None:
        self._is_ipc = Address.parse(address, has_keys=keys is not None).ipc_path is not None
        self._has_keys = keys is not None
        self._refusal = ""  # why the handshake failed
        self._channel: ShmChannel | None = None
        self._version = 0  # of the device, as far as it has shown
        self._joining: fragments.Joining | None = None
        self._num_cut = 0
        self._given_up = False
        self._connected = False  # the handshake is done
        self._lost = False  # the connection broke; what had arrived before is still handed out
        self._spinner = shm.Spinner(shm.HOST_SPIN_US)
        try:
            self._socket = _context().socket(zmq.DEALER)
            self._monitor = self._socket.get_monitor_socket(_EVENTS)
        except zmq.ZMQError as error:
            raise DeviceUnavailable(f"this process can have no more sockets: {error.strerror}") from None
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, _HOST_QUEUE),
            (zmq.RCVHWM, _HOST_QUEUE),
            (zmq.MAXMSGSIZE, MAX_BODY_BYTES),
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
        if keys is not None:
            self._socket.curve_publickey = z85.encode(keys.public)
            self._socket.curve_secretkey = z85.encode(keys.secret)
            self._socket.curve_serverkey = z85.encode(keys.device)
        self._polled: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN), (self._monitor, zmq.POLLIN)]
        self._socket.connect(address)

    @property
    def can_share_memory(self) -> bool:
        return self._is_ipc and shm.native is not None

    def attach(self, offer: SlotOffer) -> bool:
        channel = self._channel = ShmChannel.attach(offer)
        if channel is not None and channel.doorbell >= 0:
            self._polled.append((channel.doorbell, zmq.POLLIN))
        return channel is not None

    def send(self, frames: Frames) -> bool:
        if self._channel is not None:
            sent = self._channel.put(frames, writes_checksum=True)
            if sent is shm.Put.DONE:
                return True
            if sent is shm.Put.DOORBELL:
                self._to_socket(_DOORBELL)
                return True
        header, body = frames
        if not fragments.must_cut(body, self._version):
            return self._to_socket((checksum.write(header, body), body))
        self._num_cut += 1
        return all(
            self._to_socket(fragment) for fragment in fragments.cut(self._num_cut, header, body, writes_checksum=True)
        )

    def receive(self, timeout_s: float) -> Frames | None:
        channel = self._channel
        if channel is None:
            return self._from_socket(timeout_s)
        channel.release()
        if timeout_s <= 0:
            return self._from_memory(channel) or self._from_socket(0.0)
        if self._spinner.spin((channel,)) or not channel.prepare_sleep():
            return self._from_memory(channel)
        frames = self._from_socket(min(timeout_s, _DOORBELL_LOST_S))
        channel.awake()
        frames = frames or self._from_memory(channel)
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
        if not self._connected:
            self._watch()
        if self._lost or not self._connected:
            return False
        try:
            _send(self._socket, frames)
        except zmq.Again:
            return False
        return True

    def _from_memory(self, channel: ShmChannel) -> Frames | None:
        taken = channel.take()
        if taken is None:
            return None
        header, body, intact = taken
        if not intact:
            require_intact(header, shm.checked_part(body))
        return header, body

    def _from_socket(self, timeout_s: float) -> Frames | None:
        frames = self._receive_now()
        if frames is None and timeout_s > 0:
            ready = dict(zmq.zmq_poll(self._polled, max(round(timeout_s * 1e3), 1)))
            if self._socket in ready:
                frames = self._receive_now()
            if self._channel is not None:
                self._given_up = bool(ready.get(self._channel.doorbell, 0) & zmq.POLLERR)
        if frames is None:
            self._watch()
        if frames is None and self._refusal and not self._connected:
            raise DeviceUnavailable(self._refusal)
        if frames is None and self._lost:
            frames = self._receive_now()  # what arrived before the connection broke still counts
            if frames is None:
                raise DeviceUnavailable("the connection to the device was lost")
        if frames is None:
            return None
        if fragments.is_fragment(frames):
            return self._join(frames)
        if self._joining is not None and frames != _DOORBELL:
            raise RemoteProtocolError("the device broke off in the middle of a message")
        if len(frames) != 2:
            if frames == _DOORBELL:
                return None
            raise RemoteProtocolError(f"a message has two frames, the device sent {len(frames)}")
        require_intact(frames[0], frames[1])
        if not self._version:
            self._version = codec.peek_version(frames[0])
        return frames

    def _join(self, frames: Frames) -> Frames | None:
        if self._joining is None:
            self._joining = fragments.Joining(frames)
            return None
        message = self._joining.add(frames)
        if message is not None:
            self._joining = None
            self._version = codec.peek_version(message[0])
        return message

    def _watch(self) -> None:
        """Note what has become of the connection. A lost one stays lost, although libzmq makes another."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self._connected = self._connected or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._lost = self._lost or event == zmq.EVENT_DISCONNECTED
            if event in _REFUSALS:
                self._refusal = _REFUSALS[event][self._has_keys]

    def _receive_now(self) -> Frames | None:
        try:
            return [_content(frame) for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """One context per process, made when first needed: a forked child must not touch its parent's."""
    pid = os.getpid()
    if pid not in _contexts:
        _contexts[pid] = zmq.Context()
    return _contexts[pid]


def _send(socket: zmq.Socket[bytes], frames: Frames) -> None:
    large = len(frames[-1]) >= _ZERO_COPY_BYTES  # the codec makes a new body for each message: safe to lend
    socket.send_multipart(frames, zmq.NOBLOCK, copy=not large)


def _content(frame: zmq.Frame) -> codec.Buffer:
    """Small frames lie anywhere in libzmq's read buffer: copied, they are aligned."""
    held: codec.Buffer = frame.bytes if len(frame) < _ZERO_COPY_BYTES else frame.buffer
    return held
