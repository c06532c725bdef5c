"""What both ends of a transport share: a clock, a request as it arrived, the checksum of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from ndp_device.protocol import codec
from ndp_device.protocol.codec import Frames
from ndp_device.transport import _shm


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


DAMAGE = "the checksum of a message does not fit its bytes: it was damaged on its way, or `crc` is not its last field"


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
