"""Message and tensors <-> two frames. Pure: bytes in, values out, no socket and no clock.

Whatever the bytes are, decoding either returns values that agree with messages.py or raises RemoteProtocolError.
Knows no checksum: `crc` is a field that the transport fills in and looks at.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import LocalProtocolError, RemoteProtocolError
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
Frames = Sequence[Buffer]
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
    """The two frames of `message`, `crc` still empty; `tensors` as messages.TENSORS lists them, in that order."""
    specs, body = _pack(type(message), tensors or {})
    if specs:
        message = msgspec.structs.replace(message, tensors=specs)
    header = _ENCODER.encode(message)
    if len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(
            f"a {type(message).__name__} header may have {MAX_HEADER_BYTES} bytes, got {len(header)}"
        )
    return header, body


def refuse_damaged(header: Buffer, damage: str) -> NoReturn:
    """Raise what a message that did not arrive whole deserves: a peer of another version may have another checksum."""
    _refuse_other_major(header)
    raise RemoteProtocolError(damage)


def decode_request(header: Buffer, body: Buffer) -> tuple[Request, Tensors]:
    return _decode(_REQUESTS, header, body)


def decode_reply(header: Buffer, body: Buffer) -> tuple[AnyReply, Tensors]:
    return _decode(_REPLIES, header, body)


def peek_id(header: Buffer) -> int:
    """The id a refused header seems to carry, 0 when it shows none."""
    seen = _peek(header).id
    return seen if 0 <= seen < 1 << 63 else 0


def peek_version(header: Buffer) -> int:
    """The version that wrote a header, as far as one can see without checking it; 0 when it shows none."""
    return _peek(header).ndp


def _peek(header: Buffer) -> _Envelope:
    if len(header) <= MAX_HEADER_BYTES:
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
            return _ENVELOPES.decode(header)
    return _Envelope()


def _decode(decoder: msgspec.msgpack.Decoder[M], header: Buffer, body: Buffer) -> tuple[M, Tensors]:
    if not _CRC_BYTES < len(header) <= MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"a header must have 5..{MAX_HEADER_BYTES} bytes, got {len(header)}")
    if len(body) > MAX_BODY_BYTES:
        raise RemoteProtocolError(f"a body may have at most {MAX_BODY_BYTES} bytes, got {len(body)}")
    try:
        message = decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        _refuse_other_major(header)
        raise RemoteProtocolError(f"a header is not a message of this protocol: {error}") from None
    version = peek_version(header)  # not message.ndp, which is ours where the peer says nothing
    if version >> 8 != MAJOR:
        _refuse_other_major(header)
        raise RemoteProtocolError(f"a message must say which version it has, such as {VERSION}, got {version}")
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


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class _Layout:
    """How the tensors of one message lie in its body."""

    specs: tuple[TensorSpec, ...]
    counts: tuple[int, ...]
    num_bytes: int


@lru_cache(maxsize=256)  # 3 KiB each; a model asks with a handful of shapes, thousands of times a second
def _layout(kind: type[Message], described: tuple[tuple[str, str, tuple[int, ...]], ...]) -> _Layout:
    """Raises ValueError unless (name, dtype, shape) of each tensor are what messages.TENSORS lists for `kind`."""
    wanted = TENSORS.get(kind, {})
    names = [name for name, _, _ in described]
    if names != list(wanted):
        raise ValueError(f"{kind.__name__} must carry tensors {list(wanted)}, got {names}")
    specs, counts, offset = [], [], 0
    for (name, dtype, shape), (dtypes, rank) in zip(described, wanted.values(), strict=True):
        if max(shape, default=0) > MAX_BODY_BYTES:  # beside a dimension of 0 it would take no bytes
            raise ValueError(
                f"tensor {name} of {kind.__name__} may have at most {MAX_BODY_BYTES} in a row, got {list(shape)}"
            )
        if dtype not in dtypes or len(shape) != rank:
            raise ValueError(
                f"tensor {name} of {kind.__name__} must be {' or '.join(dtypes)} with {rank} dimensions, "
                f"got {dtype}{list(shape)}"
            )
        specs.append(TensorSpec(name, dtype, shape, offset))
        counts.append(math.prod(shape))
        offset = _aligned(offset + counts[-1] * DTYPES[dtype].itemsize)
    if offset > MAX_BODY_BYTES:
        raise ValueError(f"a body may have at most {MAX_BODY_BYTES} bytes, got {offset}: send fewer rows")
    return _Layout(tuple(specs), tuple(counts), offset)


def _pack(kind: type[Message], tensors: Mapping[str, NDArray[Any]]) -> tuple[tuple[TensorSpec, ...], bytearray]:
    # str() of a dtype costs 5 us: only for the sentence of an error
    described = tuple((n, _DTYPE_NAMES.get(a.dtype) or str(a.dtype), a.shape) for n, a in tensors.items())
    try:
        layout = _layout(kind, described)
    except ValueError as error:
        raise LocalProtocolError(str(error)) from None
    body = bytearray(layout.num_bytes)
    for spec, array in zip(layout.specs, tensors.values(), strict=True):
        if array.size:
            body[spec.offset : spec.offset + array.nbytes] = np.ascontiguousarray(array).data.cast("B")
    return layout.specs, body


@lru_cache(maxsize=256)
def _claimed_layout(kind: type[Message], specs: tuple[TensorSpec, ...]) -> _Layout:
    """Raises RemoteProtocolError unless the tensors lie as a sender of this protocol lays them."""
    try:
        layout = _layout(kind, tuple((spec.name, spec.dtype, spec.shape) for spec in specs))
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from None
    if layout.specs != specs:
        wanted, got = ([spec.offset for spec in where] for where in (layout.specs, specs))
        raise RemoteProtocolError(f"the tensors of {kind.__name__} must start at bytes {wanted}, got {got}")
    return layout


def _unpack(kind: type[Message], specs: tuple[TensorSpec, ...], body: Buffer) -> Tensors:
    layout = _claimed_layout(kind, specs)
    if layout.num_bytes != len(body):
        raise RemoteProtocolError(
            f"the tensors of {kind.__name__} take {layout.num_bytes} bytes, but its body has {len(body)}"
        )
    tensors: Tensors = {}
    for spec, count in zip(specs, layout.counts, strict=True):
        array = np.frombuffer(body, DTYPES[spec.dtype], count, spec.offset)
        if not array.flags.aligned:
            array = array.copy()
        tensors[spec.name] = array if len(spec.shape) == 1 else array.reshape(spec.shape)
    return tensors
