"""A large body cut into messages of its own, so that both sides and the kernel copy at the same time. Pure: no socket.

    first   Piece | its bytes | header, its crc still 0
    then    Piece | its bytes
    last    Piece | its bytes | crc

A Piece is a MessagePack array, every other message begins with a map. The pieces of one message follow one another on
one connection; whatever else arrives between them ends it. Since version 1.1: a peer is sent pieces only after it has
shown, by `ndp` of a message of its own, that it knows them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from isal.isal_zlib import crc32

from ndp_device.errors import RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol.codec import Buffer
from ndp_device.protocol.messages import MAJOR, MAX_BODY_BYTES, MAX_HEADER_BYTES, Piece

SINCE = MAJOR << 8 | 1
CUT_FROM_BYTES = 8 << 20  # measured: no gain below, see docs/protocol.md
MIN_PIECE_BYTES = 256 << 10
MAX_PIECES = 8
"""Of one message: what a queue must have room for."""

_CRC_BYTES = 4
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Piece)
_FIRST_BYTE = _ENCODER.encode(Piece(0, 0, 0))[0]


def is_understood(version: int) -> bool:
    """Whether who writes messages of this version can join pieces."""
    return version >> 8 == MAJOR and version >= SINCE


def is_piece(frames: Sequence[Buffer]) -> bool:
    return bool(frames) and len(frames[0]) > 0 and frames[0][0] == _FIRST_BYTE


def begins(frames: Sequence[Buffer]) -> bool:
    """Whether this piece is the first one of its message."""
    return _piece(frames).offset == 0


def cut(number: int, header: Buffer, body: Buffer, *, seals: bool) -> Iterator[list[Buffer]]:
    """The messages that carry `header` and `body`; `seals`: their checksum is made while they leave."""
    whole = memoryview(body)
    unsealed = bytes(header)[:-_CRC_BYTES]
    crc = crc32(unsealed)
    size = max(MIN_PIECE_BYTES, -(-len(whole) // MAX_PIECES))
    for offset in range(0, len(whole), size):
        part = whole[offset : offset + size]
        frames: list[Buffer] = [_ENCODER.encode(Piece(number, offset, len(whole))), part]
        if seals:
            crc = _crc32(part, crc)
        if offset == 0:
            frames.append(unsealed + bytes(_CRC_BYTES))
        if offset + len(part) == len(whole):
            frames.append(crc.to_bytes(_CRC_BYTES, "little") if seals else bytes(header)[-_CRC_BYTES:])
        yield frames


class Joining:
    """A message of which the first piece has arrived."""

    def __init__(self, frames: Sequence[Buffer]) -> None:
        piece = _piece(frames)
        if piece.offset or len(frames) != 3:
            raise RemoteProtocolError(f"a piece from byte {piece.offset} on belongs to no message that has begun")
        if not CUT_FROM_BYTES <= piece.total <= MAX_BODY_BYTES:
            raise RemoteProtocolError(
                f"a body in pieces must have {CUT_FROM_BYTES}..{MAX_BODY_BYTES} bytes, got {piece.total}"
            )
        self.header = bytes(frames[2][: MAX_HEADER_BYTES + 1])
        if not _CRC_BYTES < len(self.header) <= MAX_HEADER_BYTES:
            raise RemoteProtocolError(f"a header must have 5..{MAX_HEADER_BYTES} bytes, got {len(frames[2])}")
        self._number, self._total, self._joined = piece.number, piece.total, 0
        self._body = np.empty(piece.total, np.uint8).data  # costs memory only as far as bytes arrive
        self._crc = crc32(self.header[:-_CRC_BYTES])
        self._copy(frames[1])

    def add(self, frames: Sequence[Buffer]) -> tuple[bytes, memoryview] | None:
        """The message, checked, if this was its last piece."""
        piece = _piece(frames)
        if (piece.number, piece.offset, piece.total) != (self._number, self._joined, self._total):
            raise RemoteProtocolError(
                f"the piece of message {self._number} from byte {self._joined} of {self._total} on was expected, "
                f"got one of message {piece.number} from byte {piece.offset} of {piece.total} on"
            )
        self._copy(frames[1])
        is_last = self._joined == self._total
        if len(frames) != 2 + is_last or (is_last and len(frames[2]) != _CRC_BYTES):
            raise RemoteProtocolError("the last piece of a message, and no other, must carry its checksum")
        if not is_last:
            return None
        header = self.header[:-_CRC_BYTES] + bytes(frames[2])
        if self._crc.to_bytes(_CRC_BYTES, "little") != frames[2]:
            codec.refuse_damaged(header)
        return header, self._body.toreadonly()

    def _copy(self, part: Buffer) -> None:
        missing = self._total - self._joined
        if not min(MIN_PIECE_BYTES, missing) <= len(part) <= missing:
            raise RemoteProtocolError(
                f"a piece must have {MIN_PIECE_BYTES} bytes or more and no more than the {missing} that are missing, "
                f"got {len(part)}"
            )
        self._crc = _copy_into(self._body, self._joined, part, self._crc)
        self._joined += len(part)


def _piece(frames: Sequence[Buffer]) -> Piece:
    try:
        piece = _DECODER.decode(frames[0])
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise RemoteProtocolError(f"a frame is neither a header nor a piece: {error}") from None
    if len(frames) < 2:
        raise RemoteProtocolError("a piece without bytes")
    return piece


def _copy_in_python(target: memoryview, offset: int, part: Buffer, crc: int) -> int:
    target[offset : offset + len(part)] = part
    return crc32(target[offset : offset + len(part)], crc)


_crc32: Callable[[Buffer, int], int] = crc32
_copy_into: Callable[[memoryview, int, Buffer, int], int] = _copy_in_python
with contextlib.suppress(ImportError):  # not built: two passes instead of one
    _native = importlib.import_module("ndp_device.transport._shm")
    _crc32, _copy_into = _native.crc32, _native.copy_into
