"""Message and tensors <-> two frames. Pure: bytes in, values out, no socket and no clock.

Whatever the bytes are, decoding either returns values that agree with messages.py or raises RemoteProtocolError.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.errors import LocalProtocolError, RemoteProtocolError
from ndp_device.protocol.messages import (
    ALIGNMENT,
    MAJOR,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    TENSORS,
    VERSION,
    AnyReply,
    Message,
    Request,
    TensorSpec,
)

Buffer = bytes | bytearray | memoryview
Tensors = dict[str, NDArray[Any]]
M = TypeVar("M", bound=Message)

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # numpy has no bfloat16: the same 16 bits as an integer
    "int32": np.dtype("<i4"),
    "uint8": np.dtype("u1"),
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CRC_BYTES = 4
_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(Request)
_REPLIES = msgspec.msgpack.Decoder(AnyReply)


class VersionMismatch(RemoteProtocolError):
    """The peer speaks another major version."""


class _Envelope(msgspec.Struct):
    """The part of a header that every version shares."""

    ndp: int = 0
    id: int = 0


_ENVELOPES = msgspec.msgpack.Decoder(_Envelope)


def encode(message: Message, tensors: Mapping[str, NDArray[Any]] | None = None) -> tuple[bytes, bytearray]:
    """The two frames of `message`. `tensors` must be what messages.TENSORS lists for its type."""
    wanted = TENSORS.get(type(message))
    body = bytearray()
    if wanted is not None:
        specs, body = _pack(type(message), wanted, tensors or {})
        message = msgspec.structs.replace(message, tensors=specs)
    elif tensors:
        raise LocalProtocolError(f"{type(message).__name__} carries no tensors, got {sorted(tensors)}")
    unsealed = _ENCODER.encode(message)[:-_CRC_BYTES]
    if len(unsealed) + _CRC_BYTES > MAX_HEADER_BYTES:
        raise LocalProtocolError(
            f"a {type(message).__name__} header may have {MAX_HEADER_BYTES} bytes, got {len(unsealed) + _CRC_BYTES}"
        )
    return unsealed + _checksum(unsealed, body), body


def decode_request(header: Buffer, body: Buffer) -> tuple[Request, Tensors]:
    return _decode(_REQUESTS, header, body)


def decode_reply(header: Buffer, body: Buffer) -> tuple[AnyReply, Tensors]:
    return _decode(_REPLIES, header, body)


def peek_id(header: Buffer) -> int:
    """The id a refused header seems to carry, 0 when it shows none."""
    if len(header) > MAX_HEADER_BYTES:
        return 0
    try:
        seen = _ENVELOPES.decode(header).id
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return 0
    return seen if 0 <= seen < 1 << 63 else 0


def _decode(decoder: msgspec.msgpack.Decoder[M], header: Buffer, body: Buffer) -> tuple[M, Tensors]:
    if not _CRC_BYTES < len(header) <= MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"a header must have 5..{MAX_HEADER_BYTES} bytes, got {len(header)}")
    if len(body) > MAX_BODY_BYTES:
        raise RemoteProtocolError(f"a body may have at most {MAX_BODY_BYTES} bytes, got {len(body)}")
    view = memoryview(header)
    if _checksum(view[:-_CRC_BYTES], body) != bytes(view[-_CRC_BYTES:]):
        _refuse_other_major(header)
        raise RemoteProtocolError("the checksum of a message does not fit its bytes; it was damaged on its way")
    try:
        message = decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        _refuse_other_major(header)
        raise RemoteProtocolError(f"a header is not a message of this protocol: {error}") from None
    if message.ndp >> 8 != MAJOR:
        _refuse_other_major(header)
    return message, _unpack(type(message), message.tensors, body)


def _refuse_other_major(header: Buffer) -> None:
    try:
        version = _ENVELOPES.decode(header).ndp
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return
    if version > 0 and version >> 8 != MAJOR:
        raise VersionMismatch(
            f"this side speaks protocol {MAJOR}.x (now {VERSION >> 8}.{VERSION & 255}), the peer "
            f"{version >> 8}.{version & 255}: install the same major version on both"
        )


def _checksum(sealed: Buffer, body: Buffer) -> bytes:
    return zlib.crc32(body, zlib.crc32(sealed)).to_bytes(_CRC_BYTES, "little")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _pack(
    kind: type[Message], wanted: dict[str, tuple[tuple[str, ...], int]], tensors: Mapping[str, NDArray[Any]]
) -> tuple[tuple[TensorSpec, ...], bytearray]:
    if tensors.keys() != wanted.keys():
        raise LocalProtocolError(f"{kind.__name__} carries {list(wanted)}, got {list(tensors)}")
    specs, offset = [], 0
    for name, (dtypes, rank) in wanted.items():
        array = tensors[name]
        dtype = _DTYPE_NAMES.get(array.dtype) or str(array.dtype)  # str() of a dtype costs 5 us: not on the way
        if dtype not in dtypes or array.ndim != rank:
            raise LocalProtocolError(
                f"tensor {name} of {kind.__name__} must be {' or '.join(dtypes)} with {rank} dimensions, "
                f"got {dtype}{list(array.shape)}"
            )
        specs.append(TensorSpec(name, dtype, array.shape, offset))
        offset = _aligned(offset + array.nbytes)
    if offset > MAX_BODY_BYTES:
        raise LocalProtocolError(f"a body may have at most {MAX_BODY_BYTES} bytes, got {offset}: send fewer rows")
    body = bytearray(offset)
    for spec in specs:
        array = tensors[spec.name]
        if array.nbytes:
            body[spec.offset : spec.offset + array.nbytes] = np.ascontiguousarray(array).data.cast("B")
    return tuple(specs), body


def _unpack(kind: type[Message], specs: tuple[TensorSpec, ...], body: Buffer) -> Tensors:
    wanted = TENSORS.get(kind, {})
    if [spec.name for spec in specs] != list(wanted):
        raise RemoteProtocolError(f"{kind.__name__} must carry tensors {list(wanted)}, got {[s.name for s in specs]}")
    tensors: Tensors = {}
    end = 0
    for spec, (dtypes, rank) in zip(specs, wanted.values(), strict=True):
        if spec.dtype not in dtypes or len(spec.shape) != rank:
            raise RemoteProtocolError(
                f"tensor {spec.name} of {kind.__name__} must be {' or '.join(dtypes)} with {rank} dimensions, "
                f"got {spec.dtype}{list(spec.shape)}"
            )
        dtype = DTYPES[spec.dtype]
        count = math.prod(spec.shape)
        start, num_bytes = end, count * dtype.itemsize
        if spec.offset != start:
            raise RemoteProtocolError(f"tensor {spec.name} must start at byte {start}, got {spec.offset}")
        end = _aligned(start + num_bytes)
        if end > len(body):
            raise RemoteProtocolError(
                f"tensor {spec.name}: {spec.dtype}{list(spec.shape)} needs a body of {end} bytes, got {len(body)}"
            )
        array = np.frombuffer(body, dtype, count, start)
        if not array.flags.aligned:
            array = array.copy()
        tensors[spec.name] = array if rank == 1 else array.reshape(spec.shape)
    if end != len(body):
        raise RemoteProtocolError(f"the tensors of {kind.__name__} take {end} bytes, but its body has {len(body)}")
    return tensors
