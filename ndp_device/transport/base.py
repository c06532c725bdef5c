"""Interfaces of a transport for host and device, and the checksum of its messages. Knows no socket.

zmq_client.py and zmq_server.py implement the two; so does the tests' simulated network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from ndp_device.protocol import codec
from ndp_device.protocol.codec import Frames
from ndp_device.protocol.messages import SlotOffer
from ndp_device.transport import _shm
from ndp_device.transport.sender_thread import Order, SendOutcome
from ndp_device.transport.shm import Sound


class Clock(Protocol):
    """The standard library's `time` is one."""

    def monotonic(self) -> float: ...

    def monotonic_ns(self) -> int: ...

    def sleep(self, seconds: float, /) -> None: ...


class Received(NamedTuple):
    """A request as it arrived; `damage` says what is wrong with it."""

    client: bytes
    frames: Frames
    damage: str | None
    seen_ns: int  # when this device first saw it
    release: Callable[[], None] = lambda: None
    """The frames are not needed any more: their memory may be written again."""


class ServerTransport(Protocol):
    """The device's end of all connections. A client is a name that the transport makes for one connection.

    Frames come out checked, with their damage named, and go in without a checksum. Nothing here raises because of what
    a peer did: a connection that is of no use ends, and `on_gone` says so from within `receive`. Where `receive` raises
    for another reason, the next call hands over what had been read.
    """

    on_gone: Callable[[bytes], None]

    @property
    def address(self) -> str:
        """The address that hosts connect to."""
        ...

    def receive(self, timeout_ms: int) -> Sequence[Received]:
        """Requests that have arrived, at least some; none after timeout_ms. The caller decides whom to serve next."""
        ...

    def send(self, client: bytes, frames: Frames) -> None:
        """Never blocks; a client that is gone loses its answer, one that reads none loses its connection."""
        ...

    def offer_memory(self, client: bytes) -> SlotOffer | None:
        """Shared memory for this client; None where there is none."""
        ...

    def drop(self, client: bytes) -> None:
        """End the connection: its host notices at once."""
        ...

    def close(self) -> None: ...


class ClientTransport(Protocol):
    """The host's end of one connection attempt. After `receive` raised, close it and make another.

    Frames go in without a checksum and come out checked. A result of `receive` is valid until the next call of
    `receive`.
    """

    @property
    def is_ready(self) -> bool:
        """A message may be sent, as far as is known: the handshake is over."""
        ...

    @property
    def can_share_memory(self) -> bool: ...

    def attach(self, offer: SlotOffer) -> bool:
        """Use the device's shared memory from now on, if it can be had."""
        ...

    def send(self, frames: Frames) -> bool:
        """Hand the frames over without waiting. False: no connection, or its queue is full."""
        ...

    def send_execute(self, asked: Sequence[int], tensors: Sequence[NDArray[Any]]) -> bool:
        """Hand an Execute over without frames (ShmChannel.put_execute). False: it was not, and `send` may do it."""
        ...

    def send_ahead(self, order: Order, asked: Sequence[int]) -> bool:
        """Have an Execute sent as soon as its packet is there (sender.py). False: this carrier cannot. Between this
        and `sent_ahead` nothing else is asked of the transport."""
        ...

    def sent_ahead(self, outcome: SendOutcome) -> None:
        """It is over: go on from there."""
        ...

    def receive(self, timeout_s: float) -> Frames | Sound | None:
        """The next message, or None after timeout_s at most. Raises DeviceUnavailable or RemoteProtocolError."""
        ...

    def close(self) -> None: ...


DAMAGE = "the checksum of a message does not fit its bytes; it was damaged on its way"


def write_checksum(header: codec.Buffer, body: codec.Buffer) -> bytes:
    """The header with its last 4 bytes replaced by the CRC-32 of all bytes before them and of `body`.

    The codec leaves the field empty; the carrier of the frames fills it in and checks it.
    """
    written: bytes = _shm.write_checksum(header, body)
    return written


def damage_of(header: codec.Buffer, body: codec.Buffer) -> str | None:
    """None, or the sentence that says what is wrong with these bytes."""
    return None if _shm.checksum_fits(header, body) else DAMAGE


def require_intact(header: codec.Buffer, body: codec.Buffer) -> None:
    """Raise RemoteProtocolError unless the header holds the checksum of these bytes."""
    if wrong := damage_of(header, body):
        codec.refuse_damaged(header, wrong)
