"""One file of tensors, by its first bytes: the header that says where each tensor lies. Safetensors and GGUF.

Knows the formats. Does not know which files make a checkpoint (headers.py), nor which tensor is what (names.py).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from ndp_device.checkpoint.gguf_files import MAGIC, MAX_HEADER_BYTES, gguf_header
from ndp_device.common.errors import ReplicaError
from ndp_device.common.strict_files import MAX_VALUES, Refused, decode_json, open_plain

_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit: the safetensors library neither writes nor reads a longer header."""
_BYTES_PER_VALUE = 6
"""A tensor's entry holds 8 values, and takes 50 bytes at least."""
_MAX_NAME = 512
_MAX_SIZE = 1 << 62
_METADATA = "__metadata__"


def tensor_header(path: Path) -> tuple[dict[str, Any], int]:
    """Entries of a file's tensors by name, and the offset of its first tensor byte. By the file's first bytes."""
    with open_file(path) as file:
        if file.read(len(MAGIC)) == MAGIC:
            file.seek(0)
            return gguf_header(file.read(MAX_HEADER_BYTES), path.name)
    return safetensors_header(path)


class _Tensor(msgspec.Struct):
    """The entry of one tensor in a header."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, le=_MAX_SIZE)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0, le=_MAX_SIZE)], Annotated[int, msgspec.Meta(le=_MAX_SIZE)]]


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and the offset of its first tensor byte.

    Every entry but `__metadata__` has a dtype, a shape and two data_offsets, each of its right type. The reader of a
    tensor (replicas/mapped.py) checks that they agree with each other and with the file.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ReplicaError(f"{path.name} is too short to be a safetensors file ({size} bytes)")
        (length,) = struct.unpack("<Q", prefix)
        if length > size - 8:
            raise ReplicaError(f"{path.name}: its header claims {length} bytes but the file has {size}")
        if length > _MAX_HEADER_BYTES:
            raise ReplicaError(f"{path.name}: its header has {length} bytes, and at most {_MAX_HEADER_BYTES} are read")
        text = file.read(length)
    try:
        header: dict[str, Any] = decode_json(text, max_values=max(MAX_VALUES, length // _BYTES_PER_VALUE))
        if not isinstance(header, dict):
            raise Refused("it must be a JSON object")
        if too_long := next((name for name in header if len(name) > _MAX_NAME), None):
            raise Refused(f"a name of {len(too_long)} characters is none of a tensor")
        msgspec.convert({name: entry for name, entry in header.items() if name != _METADATA}, dict[str, _Tensor])
        msgspec.convert(header.get(_METADATA, {}), dict[str, str])
    except (Refused, msgspec.ValidationError) as error:
        raise ReplicaError(f"{path.name}: its header cannot be read as one of tensors: {error}") from None
    return header, 8 + length


def open_file(path: Path) -> BinaryIO:
    """Raises ReplicaError where there is no such plain file."""
    try:
        return open_plain(path)
    except (OSError, Refused) as error:
        raise ReplicaError(f"{path} cannot be read: {error}") from None


def read_tensor(path: Path, first: int, last: int) -> bytes:
    """A small tensor's bytes, of which the headers say where they lie. Raises ReplicaError where they are not there."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if not 0 <= first <= last <= size:
            raise ReplicaError(f"{path.name} is damaged or truncated: a tensor lies at {first}..{last} of {size} bytes")
        file.seek(first)
        return file.read(last - first)
