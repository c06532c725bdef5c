"""The host's end of a ZeroMQ connection: a DEALER of libzmq with a monitor.

Between processes of one machine the frames may lie in shared memory instead (shm.py). Then the socket carries the
doorbell that wakes a sleeper, and every message the memory cannot take. The monitor shows a dead device within
milliseconds. The deadline of a call shows a frozen device, and TCP's keepalive a machine that is gone. Messages that
had arrived before a connection ended are still handed out.

Two options of libzmq 4.3.5 are left out because they can end the process. IMMEDIATE: when a connection ends between two
frames of a message; so `send` itself waits for the handshake. HEARTBEAT_IVL: when a connection ends while its queue is
full, the next heartbeat fails the assertion `!_io_error`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import parse_monitor_message

from ndp_device.common.errors import DeviceUnavailable, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol.codec import Frames
from ndp_device.protocol.messages import SlotOffer
from ndp_device.transport import shm, sockets
from ndp_device.transport.address import Address, is_foreign, is_foreign_at
from ndp_device.transport.base import require_intact, write_checksum
from ndp_device.transport.keys import HostKeys
from ndp_device.transport.sender_thread import Order, SendOutcome, State
from ndp_device.transport.shm import ShmChannel, Sound

_QUEUE = 80  # messages; all that may be in flight fit
_CONNECT_MS = 2000
_RECONNECT_MS, _RECONNECT_MAX_MS = 5, 20  # half of the latter passes before a device that is ready again is used
_DOORBELL_LOST_S = 0.05  # how long a host sleeps before it looks into memory without a doorbell, and rings again
_NOT_ALLOWED = "the device does not allow this host's key: put its .key file into the device's allowed/ directory"
_OTHER_MECHANISM = (
    "the device wants keys: give the file that `ndp-device keygen` made for this host (`keys` in `devices`, --key)",
    "the device has no keys, and this host was told to use some: start it with --keys, or drop them",
)
_OTHER_KEY = (
    "the device ended the handshake: the device has no keys, or its key is another one than the one in this host's "
    "device.key"
)
_REFUSALS: dict[int, tuple[str, str]] = {  # event -> (without keys, with keys); "": libzmq tries again
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: ("", _NOT_ALLOWED),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: _OTHER_MECHANISM,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: ("", _OTHER_KEY),
}
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | sum(_REFUSALS)


class ZmqTransport:
    """One connection attempt: until there was one libzmq tries again and again; one that broke is lost for good.

    After `receive` raised, close it and make another. Frames go in without a checksum and come out checked. A result of
    `receive` is valid until the next call of `receive`. The tests' simulated network does the same.
    """

    def __init__(self, address: Address, keys: HostKeys | None = None) -> None:
        self._address, self._has_keys = address, keys is not None
        self._channel: ShmChannel | None = None
        self._waits_for_memory = False  # something was asked, and nothing came back yet
        self._given_up = False  # the shared memory, by the device
        self._connected = self._lost = False
        self._listener: int | None = None  # the user behind an ipc address, as far as it is known
        self._refusal = ""  # why the handshake failed
        self._spinner = shm.Spinner(shm.HOST_SPIN_US)
        self._spun_ns = 0  # at most, by a SenderThread
        self._require_own()
        try:
            self._socket = sockets.context().socket(zmq.DEALER)
            self._monitor = self._socket.get_monitor_socket(_EVENTS)
        except zmq.ZMQError as error:
            raise DeviceUnavailable(f"this process can have no more sockets: {error.strerror}") from None
        self._end_sockets = sockets.ends_with(self, _end_sockets, self._socket, self._monitor)
        self._polled: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN), (self._monitor, zmq.POLLIN)]
        self._connect(keys)

    @property
    def is_ready(self) -> bool:
        """A message may be sent, as far as is known: the handshake is over."""
        if not self._connected:
            self._watch()
        return self._connected and not self._lost

    @property
    def can_share_memory(self) -> bool:
        return self._address.ipc_path is not None

    def attach(self, offer: SlotOffer) -> bool:
        """Use the device's shared memory from now on, if it can be had."""
        channel = self._channel = ShmChannel.attach(offer)
        if channel is not None and channel.doorbell >= 0:
            self._polled.append((channel.doorbell, zmq.POLLIN))
        return channel is not None

    def send(self, frames: Frames) -> bool:
        """Hand the frames over without waiting. False: no connection, or its queue is full."""
        if self._channel is not None and self._published(self._channel.put(frames, writes_checksum=True)):
            return True
        header, body = frames
        return self._to_socket((write_checksum(header, body), body))

    def send_execute(self, asked: Sequence[int], tensors: Sequence[NDArray[Any]]) -> bool:
        """Hand an Execute over without frames (ShmChannel.put_execute). False: it was not, and `send` may do it."""
        return self._channel is not None and self._published(self._channel.put_execute(asked, tensors))

    def send_ahead(self, order: Order, asked: Sequence[int]) -> bool:
        """Have an Execute sent as soon as its packet is there (sender_thread.py). False: this carrier cannot. Between
        this and `sent_ahead` nothing else is asked of the transport."""
        if self._channel is None:
            return False
        self._channel.release()
        self._spun_ns = self._spinner.next_ns()
        order.sender.begin(self._channel, order, asked, self._spun_ns)
        return True

    def sent_ahead(self, outcome: SendOutcome) -> None:
        """It is over: go on from there."""
        if outcome.state is State.RINGS:
            self._published(shm.Put.DOORBELL)
        elif outcome.state is State.SENT:
            self._published(shm.Put.DONE)
        elif outcome.state is State.TAKEN:
            self._waits_for_memory = False
        if outcome.lost_core:
            self._spinner.lose()
        elif outcome.in_vain:
            self._spinner.fail(self._spun_ns)

    def receive(self, timeout_s: float) -> Frames | Sound | None:
        """The next message, or None after timeout_s at most. Raises DeviceUnavailable or RemoteProtocolError."""
        channel = self._channel
        if channel is None:
            return self._from_socket(timeout_s)
        channel.release()
        if timeout_s <= 0:
            return self._from_memory(channel) or self._from_socket(0.0)
        if channel.ring.readable() or self._spinner.spin((channel,)) or not channel.ring.prepare_sleep():
            return self._from_memory(channel)
        slept_s = min(timeout_s, _DOORBELL_LOST_S)
        frames: Frames | Sound | None = self._from_socket(slept_s)
        channel.awake()
        frames = frames or self._from_memory(channel)
        if frames is None and self._given_up:
            raise DeviceUnavailable("the device has given up the shared memory")
        if frames is None and slept_s == _DOORBELL_LOST_S and self._waits_for_memory:
            if not channel.ring.is_intact():
                raise RemoteProtocolError("the shared memory was damaged: somebody wrote over this host's counters")
            self._to_socket(sockets.DOORBELL)  # so that the device looks: its doorbell or our request may be damaged
        return frames

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._lost = True
        self._end_sockets()

    # -- messages --------------------------------------------------------------------------------------------------

    def _published(self, sent: shm.Put) -> bool:
        """Ring where the device wants it. False: the message must take the socket."""
        self._waits_for_memory = True
        if sent is shm.Put.DOORBELL:
            self._to_socket(sockets.DOORBELL)
        return sent is not shm.Put.REFUSED

    def _to_socket(self, frames: Frames) -> bool:
        if not self.is_ready:
            return False
        try:
            sockets.send(self._socket, frames)
        except zmq.Again:
            return False
        return True

    def _from_memory(self, channel: ShmChannel) -> Frames | Sound | None:
        if (sound := channel.take_result()) is not None:
            self._waits_for_memory = False
            return sound
        taken = channel.take()
        if taken is None:
            return None
        self._waits_for_memory = False
        header, body, intact = taken
        if not intact:
            require_intact(header, shm.checked_part(body))
        return header, body

    def _from_socket(self, timeout_s: float) -> Frames | None:
        frames = self._receive_now()
        if frames is None and timeout_s > 0:
            self._wait(timeout_s)
            frames = self._receive_now()
        if frames is None:
            self._watch()
            frames = self._receive_now() if self._lost else None  # what arrived before it broke still counts
        if frames is None and self._lost:
            raise DeviceUnavailable("the connection to the device was lost")
        if frames is None and self._refusal and not self._connected:
            raise DeviceUnavailable(self._refusal)
        if frames is None or frames == sockets.DOORBELL:
            return None
        if len(frames) != 2:
            raise RemoteProtocolError(f"a message has two frames, the device sent {len(frames)}")
        require_intact(frames[0], frames[1])
        return frames

    def _wait(self, timeout_s: float) -> None:
        ready = dict(zmq.zmq_poll(self._polled, max(round(timeout_s * 1e3), 1)))
        if self._channel is not None:
            self._given_up = bool(ready.get(self._channel.doorbell, 0) & zmq.POLLERR)

    def _receive_now(self) -> Frames | None:
        if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None
        frames: list[codec.Buffer] = [self._socket.recv(zmq.NOBLOCK)]  # a header: to copy it is cheaper than to hold it
        while self._socket.getsockopt(zmq.RCVMORE):
            frames.append(sockets.content(self._socket.recv(copy=False)))
        return frames

    # -- the connection --------------------------------------------------------------------------------------------

    def _connect(self, keys: HostKeys | None) -> None:
        sockets.configure(self._socket, self._address.text, sent=_QUEUE, received=_QUEUE)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            self._socket.curve_serverkey = keys.device
        self._socket.connect(self._address.text)

    def _watch(self) -> None:
        """Note what has become of the connection. A lost one stays lost, although libzmq makes another."""
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            happened = parse_monitor_message(self._monitor.recv_multipart())
            event = happened["event"]
            if event == zmq.EVENT_CONNECTED:
                self._listener = None if self._address.ipc_path is None else sockets.owner_of(int(happened["value"]))
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._require_own()
                self._connected = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._lost = self._lost or self._connected
            else:
                self._refusal = _REFUSALS[event][self._has_keys]

    def _require_own(self) -> None:
        """A device sees activations and is believed its numbers: it is one of root's or of this user."""
        path = self._address.ipc_path
        if path is not None and (is_foreign_at(path) or is_foreign(self._listener)):
            raise DeviceUnavailable(
                f"{self._address.text}: another user than {os.geteuid()} listens there; name a path of your own"
            )


def _end_sockets(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=0)
