"""Message and tensors <-> two frames. Pure: bytes in, values out, no socket and no clock.

Whatever the bytes are, decoding either returns values that agree with messages.py or raises RemoteProtocolError. The
msgpack package opens a header: it compares every length with a limit and with the bytes that are there. msgspec then
gives the values their types. Knows no checksum: `crc` is a field that the transport fills in and looks at.

A layer's two messages may have a head of fixed size in place of the MessagePack header (`has_fixed_head`), which
transport/csrc/layer_messages.h defines. They are used in shared memory only.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, get_args

import msgpack
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
    Execute,
    Message,
    Request,
    Result,
    TensorSpec,
)
from ndp_device.timing.work import Timing

Buffer = bytes | bytearray | memoryview
Frames = Sequence[Buffer]
Tensors = dict[str, NDArray[Any]]

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # numpy has no bfloat16: the same 16 bits as an integer
    "int32": np.dtype("<i4"),
    "uint8": np.dtype("u1"),
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DTYPE_BY_FORMAT = {dtype.char: name for name, dtype in DTYPES.items()}
_CRC_BYTES = 4
_ENCODER = msgspec.msgpack.Encoder()
_LIMITS = {
    "max_str_len": MAX_HEADER_BYTES,
    "max_bin_len": MAX_HEADER_BYTES,
    "max_array_len": 256,
    "max_map_len": 128,
    "max_ext_len": 0,
}
_HEAD_KINDS = (1, 2)  # the first byte of an Execute's head and of a Result's: no map of MessagePack begins so
_MAX_COUNT = (1 << 63) - 1
_Kinds = dict[str, type[Message]]
_REQUESTS, _REPLIES = (
    {str(kind.__struct_config__.tag): kind for kind in get_args(kinds)} for kinds in (Request, AnyReply)
)


_shm = importlib.import_module("ndp_device.transport._shm")  # for the heads of a layer's messages


class VersionMismatch(RemoteProtocolError):
    """The peer speaks another major version."""


def encode(
    message: Message, tensors: Mapping[str, NDArray[Any]] | None = None, *, fixed_head: bool = False
) -> tuple[bytes, bytearray]:
    """The two frames of `message`, `crc` still empty; `tensors` as messages.TENSORS lists them, in that order.

    fixed_head: of a Result, where it fits.
    """
    specs, body = _pack(type(message), tensors or {})
    if fixed_head and isinstance(message, Result) and len(body) <= _shm.MAX_HEADED_BODY_BYTES:
        timing = None if message.timing is None else msgspec.structs.astuple(message.timing)
        shape = specs[0].shape
        head = _shm.result_head(VERSION, message.id, message.incarnation, message.epoch, *shape, timing)
        if head is not None:
            return head, body
    if specs:
        message = msgspec.structs.replace(message, tensors=specs)
    header = _ENCODER.encode(message)
    if len(header) > MAX_HEADER_BYTES:
        raise LocalProtocolError(
            f"a {type(message).__name__} header may have {MAX_HEADER_BYTES} bytes, got {len(header)}"
        )
    return header, body


def has_fixed_head(header: Buffer) -> bool:
    return len(header) > 0 and header[0] in _HEAD_KINDS


def described_result(described: tuple[Any, ...]) -> Result:
    """A Result of what the extension has read from its head."""
    version, number, incarnation, epoch, rows, hidden, values = described
    timing = None if values is None else Timing(*values)
    tensors = _layout(Result, (("y", "float32", (rows, hidden)),)).specs
    return Result(number, incarnation=incarnation, epoch=epoch, timing=timing, ndp=version, tensors=tensors)


def refuse_damaged(header: Buffer, damage: str) -> NoReturn:
    """Raise what a message that did not arrive whole deserves: a peer of another version may have another checksum."""
    version = None
    with contextlib.suppress(RemoteProtocolError):
        version = _fields(header).get("ndp")
    if type(version) is int and version > 0:
        _require_our_major(version)
    raise RemoteProtocolError(damage)


def decode_request(header: Buffer, body: Buffer) -> tuple[Request, Tensors]:
    return _decode(_REQUESTS, header, body)


def decode_reply(header: Buffer, body: Buffer) -> tuple[AnyReply, Tensors]:
    return _decode(_REPLIES, header, body)


def peek_id(header: Buffer) -> int:
    """The id a refused header seems to carry, 0 when it shows none."""
    with contextlib.suppress(RemoteProtocolError):
        seen = _headed(header).id if has_fixed_head(header) else _fields(header).get("id")
        if type(seen) is int and 0 <= seen <= _MAX_COUNT:
            return seen
    return 0


def _decode(kinds: _Kinds, header: Buffer, body: Buffer) -> tuple[Any, Tensors]:
    if not _CRC_BYTES < len(header) <= MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"a header must have 5..{MAX_HEADER_BYTES} bytes, got {len(header)}")
    if len(body) > MAX_BODY_BYTES:
        raise RemoteProtocolError(f"a body may have at most {MAX_BODY_BYTES} bytes, got {len(body)}")
    if has_fixed_head(header):
        message: Any = _headed(header)
        _require_our_major(message.ndp)
        if type(message) not in kinds.values():
            raise RemoteProtocolError(f"a header is not a message of this protocol: got {type(message).__name__}")
    else:
        fields = _fields(header)
        _require_our_major(fields.get("ndp"))
        tag = fields.get("type")
        if not isinstance(tag, str) or tag not in kinds:
            raise RemoteProtocolError(f"type must be one of {', '.join(kinds)}, got {tag!r:.80}")
        try:
            message = msgspec.convert(fields, kinds[tag], builtin_types=(bytes,))
        except (msgspec.ValidationError, ValueError, OverflowError) as error:
            raise RemoteProtocolError(f"a header of type {tag!r} is not as this protocol has it: {error}") from None
    return message, _unpack(type(message), message.tensors, body)


def _fields(header: Buffer) -> dict[str, Any]:
    """The map in a header, as plain values. Raises RemoteProtocolError."""
    if len(header) > MAX_HEADER_BYTES:
        raise RemoteProtocolError(f"a header must have 5..{MAX_HEADER_BYTES} bytes, got {len(header)}")
    try:
        fields = msgpack.unpackb(header, strict_map_key=True, **_LIMITS)
    except (msgpack.UnpackException, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise RemoteProtocolError(f"a header is not MessagePack: {error}") from None
    if not isinstance(fields, dict):
        raise RemoteProtocolError(f"a header must be a map, got {type(fields).__name__}")
    return fields


def _headed(header: Buffer) -> Execute | Result:
    """The message of a head of fixed size. Raises RemoteProtocolError."""
    found = _shm.read_head(header)
    if found is None:
        raise RemoteProtocolError("a header is not a message of this protocol: its head of fixed size cannot be")
    try:
        if header[0] == _HEAD_KINDS[1]:
            return described_result(found)
        version, *asked, form, rows, hidden, pairs = found
        of_pairs = ((name, kinds[0], (pairs,)) for name, (kinds, rank) in TENSORS[Execute].items() if rank == 1)
        layout = _layout(Execute, (("x", _DTYPE_BY_FORMAT.get(form, form), (rows, hidden)), *of_pairs))
        return Execute(*asked, ndp=version, tensors=layout.specs)
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from None


def _require_our_major(version: object) -> None:
    if type(version) is not int or version <= 0:
        raise RemoteProtocolError(f"a message must say which version it has, such as {VERSION}, got {version!r:.80}")
    if version >> 8 != MAJOR:
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
            f"the tensors of {kind.__name__} take {layout.num_bytes} bytes, each padded to {ALIGNMENT}, "
            f"but its body has {len(body)}"
        )
    tensors: Tensors = {}
    for spec, count in zip(specs, layout.counts, strict=True):
        array = np.frombuffer(body, DTYPES[spec.dtype], count, spec.offset)
        if not array.flags.aligned:
            array = array.copy()
        tensors[spec.name] = array if len(spec.shape) == 1 else array.reshape(spec.shape)
    return tensors
