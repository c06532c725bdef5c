"""A large body cut into messages of its own, so that both sides and the kernel copy at the same time. Pure: no socket.

    first   Fragment | its bytes | header, its crc still 0
    then    Fragment | its bytes
    last    Fragment | its bytes | crc

A Fragment is a MessagePack array, every other message begins with a map. The fragments of one message follow one
another on one connection; whatever else arrives between them ends it. A peer is sent fragments only after it has shown,
by `ndp` of a message of its own, that it knows them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from ndp_device.common.errors import RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol.codec import Buffer, Frames
from ndp_device.protocol.messages import MAJOR, MAX_BODY_BYTES, MAX_HEADER_BYTES, Fragment
from ndp_device.transport import checksum

CUT_FROM_BYTES = 8 << 20  # measured: no gain below, see docs/protocol.md
MIN_FRAGMENT_BYTES = 256 << 10
MAX_FRAME_BYTES = 8 << 20
"""Most bytes of a frame on the socket. A body that is not cut is shorter; MAX_FRAGMENTS frames hold the longest
body."""

MAX_FRAGMENTS = 8
"""Most fragments of one message; a queue must have room for as many."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Fragment)
_FIRST_BYTE = _ENCODER.encode(Fragment(0, 0, 0))[0]


def must_cut(body: Buffer, peer_version: int) -> bool:
    """Whether this body is to leave in fragments. peer_version: that messages of the peer have shown, 0 = none yet."""
    return len(body) >= CUT_FROM_BYTES and peer_version >> 8 == MAJOR


def is_fragment(frames: Frames) -> bool:
    return bool(frames) and len(frames[0]) > 0 and frames[0][0] == _FIRST_BYTE


def begins(frames: Frames) -> bool:
    """Whether this fragment is the first one of its message."""
    return _fragment(frames).offset == 0


def cut(number: int, header: Buffer, body: Buffer, *, writes_checksum: bool) -> Iterator[list[Buffer]]:
    """The messages that carry `header` and `body`; `writes_checksum`: made while they leave."""
    whole = memoryview(body)
    before = bytes(header)[: -checksum.NUM_BYTES]
    crc = checksum.crc32(before, 0)
    size = max(MIN_FRAGMENT_BYTES, -(-len(whole) // MAX_FRAGMENTS))
    for offset in range(0, len(whole), size):
        part = whole[offset : offset + size]
        frames: list[Buffer] = [_ENCODER.encode(Fragment(number, offset, len(whole))), part]
        if writes_checksum:
            crc = checksum.crc32(part, crc)
        if offset == 0:
            frames.append(before + bytes(checksum.NUM_BYTES))
        if offset + len(part) == len(whole):
            frames.append(checksum.as_bytes(crc) if writes_checksum else bytes(header)[-checksum.NUM_BYTES :])
        yield frames


class Joining:
    """A message of which the first fragment has arrived."""

    def __init__(self, frames: Frames) -> None:
        fragment = _fragment(frames)
        if fragment.offset or len(frames) != 3:
            raise RemoteProtocolError(f"a fragment from byte {fragment.offset} on belongs to no message that has begun")
        if not CUT_FROM_BYTES <= fragment.total <= MAX_BODY_BYTES:
            raise RemoteProtocolError(
                f"a body in fragments must have {CUT_FROM_BYTES}..{MAX_BODY_BYTES} bytes, got {fragment.total}"
            )
        self.header = bytes(frames[2][: MAX_HEADER_BYTES + 1])
        if not checksum.NUM_BYTES < len(self.header) <= MAX_HEADER_BYTES:
            raise RemoteProtocolError(f"a header must have 5..{MAX_HEADER_BYTES} bytes, got {len(frames[2])}")
        self._number, self._total, self._joined = fragment.number, fragment.total, 0
        self._body = np.empty(fragment.total, np.uint8).data  # costs memory only as far as bytes arrive
        self._crc = checksum.crc32(self.header[: -checksum.NUM_BYTES], 0)
        self._copy(frames[1])

    def add(self, frames: Frames) -> tuple[bytes, memoryview] | None:
        """The message, checked, if this was its last fragment."""
        fragment = _fragment(frames)
        if (fragment.number, fragment.offset, fragment.total) != (self._number, self._joined, self._total):
            raise RemoteProtocolError(
                f"the fragment of message {self._number} from byte {self._joined} of {self._total} on was expected, "
                f"got one of message {fragment.number} from byte {fragment.offset} of {fragment.total} on"
            )
        self._copy(frames[1])
        is_last = self._joined == self._total
        if len(frames) != 2 + is_last or (is_last and len(frames[2]) != checksum.NUM_BYTES):
            raise RemoteProtocolError("the last fragment of a message, and no other, must carry its checksum")
        if not is_last:
            return None
        header = self.header[: -checksum.NUM_BYTES] + bytes(frames[2])
        if checksum.as_bytes(self._crc) != frames[2]:
            codec.refuse_damaged(header, checksum.DAMAGE)
        return header, self._body.toreadonly()

    def _copy(self, part: Buffer) -> None:
        missing = self._total - self._joined
        if not min(MIN_FRAGMENT_BYTES, missing) <= len(part) <= missing:
            raise RemoteProtocolError(
                f"a fragment must have {MIN_FRAGMENT_BYTES} bytes or more, at most the {missing} that are missing, "
                f"got {len(part)}"
            )
        self._crc = checksum.copy_into(self._body, self._joined, part, self._crc)
        self._joined += len(part)


def _fragment(frames: Frames) -> Fragment:
    try:
        fragment = _DECODER.decode(frames[0])
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise RemoteProtocolError(f"a frame is neither a header nor a fragment: {error}") from None
    if len(frames) < 2:
        raise RemoteProtocolError("a fragment without bytes")
    return fragment
