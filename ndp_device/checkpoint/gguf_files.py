"""The header of a GGUF file (llama.cpp), in the form of a safetensors header: name -> dtype, shape, data_offsets.

A tensor of floats has its safetensors dtype. A quantized one has `GGUF_` and ggml's name of its type, and its shape
ends in bytes. The package of llama.cpp knows what these stand for. Metadata is skipped: config.json beside the
file says what the model is. Format: ggml's own specification, versions 2 and 3. Written for hostile files: every count
is held against the bytes that are there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from ndp_device.common.errors import ReplicaError

MAGIC = b"GGUF"
QUANTIZED = "GGUF_"
MAX_HEADER_BYTES = 64 << 20  # 500 000 tokens and as many merges take 20 MiB
_MAX_NAME = 512
_MAX_DIMENSIONS = 4
_ALIGNMENT = b"general.alignment"

PLAIN: Mapping[int, tuple[str, int]] = {
    0: ("F32", 4), 1: ("F16", 2), 24: ("I8", 1), 25: ("I16", 2), 26: ("I32", 4), 27: ("I64", 8), 28: ("F64", 8),
    30: ("BF16", 2),
}  # fmt: skip
"""ggml's number of a type -> safetensors dtype, bytes."""
TYPES: Mapping[int, tuple[str, int, int]] = {
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""ggml's number of a type -> its name, values of a block, bytes of a block."""
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Number of a metadata type -> bytes."""
_STRING, _ARRAY, _UINT32 = 8, 9, 4


def logical_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the values, from the shape in bytes."""
    _, values, size = next(row for row in TYPES.values() if QUANTIZED + row[0] == dtype)
    return *shape[:-1], shape[-1] // size * values


def gguf_header(contents: bytes, name: str) -> tuple[dict[str, Any], int]:
    """Entries of the tensors and the offset of the first tensor byte. contents: at least the header's bytes."""
    at = _Cursor(contents, name)
    at.skip(len(MAGIC))
    version, num_tensors, num_entries = at.number("<I"), at.number("<Q"), at.number("<Q")
    if version not in (2, 3):
        raise ReplicaError(f"{name} is GGUF version {version}, and versions 2 and 3 of little-endian files are read")
    alignment = 32
    for _ in range(num_entries):
        alignment = _skip_entry(at) or alignment
    if alignment < 1 or alignment & (alignment - 1):
        raise ReplicaError(f"{name} aligns its tensors to {alignment} bytes, which is no power of two: it is damaged")
    entries: dict[str, Any] = {}
    for _ in range(num_tensors):
        tensor, entry = _entry(at)
        if tensor in entries:
            raise ReplicaError(f"{name} holds {tensor} twice: it is damaged")
        entries[tensor] = entry
    return entries, -(-at.position // alignment) * alignment


class _Cursor:
    """A place in the header, which never leaves it."""

    def __init__(self, contents: bytes, name: str) -> None:
        self._contents, self.name, self.position = contents, name, 0

    def skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self._contents):
            raise ReplicaError(
                f"{self.name}: its header ends behind the file or takes more than {MAX_HEADER_BYTES} bytes: it is "
                "damaged or truncated"
            )

    def number(self, form: str) -> int:
        first = self.position
        self.skip(struct.calcsize(form))
        (value,) = struct.unpack_from(form, self._contents, first)
        return int(value)

    def string(self) -> bytes:
        length = self.number("<Q")
        self.skip(length)
        return self._contents[self.position - length : self.position]


def _skip_entry(at: _Cursor) -> int | None:
    """Pass one entry of metadata; its value where it is the alignment."""
    key, kind = at.string(), at.number("<I")
    if key == _ALIGNMENT and kind == _UINT32:
        return at.number("<I")
    if kind != _ARRAY:
        _skip_values(at, kind, 1)
    else:
        of, count = at.number("<I"), at.number("<Q")
        _skip_values(at, of, count)
    return None


def _skip_values(at: _Cursor, kind: int, count: int) -> None:
    if kind in _SCALARS:
        return at.skip(_SCALARS[kind] * count)
    if kind != _STRING:
        raise ReplicaError(f"{at.name}: its metadata has a value of the unknown type {kind}: it is damaged")
    for _ in range(count):
        at.skip(at.number("<Q"))
    return None


def _entry(at: _Cursor) -> tuple[str, dict[str, Any]]:
    raw, num_dimensions = at.string(), at.number("<I")
    tensor = raw[:_MAX_NAME].decode(errors="replace")
    if len(raw) > _MAX_NAME or not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ReplicaError(f"{at.name}: {tensor!r} has {num_dimensions} dimensions: it is damaged")
    shape = [at.number("<Q") for _ in range(num_dimensions)][::-1]  # ggml counts from the fastest
    kind, first = at.number("<I"), at.number("<Q")
    dtype, row = _row(kind, shape[-1], tensor, at.name)
    if kind in TYPES:
        shape[-1] = row
    return tensor, {"dtype": dtype, "shape": shape, "data_offsets": [first, first + math.prod(shape[:-1]) * row]}


def _row(kind: int, columns: int, tensor: str, name: str) -> tuple[str, int]:
    """dtype, and bytes of one row."""
    if kind in PLAIN:
        dtype, size = PLAIN[kind]
        return dtype, columns * size
    if kind not in TYPES:
        raise ReplicaError(f"{name}: {tensor} is of ggml's type {kind}, which is not read: give the model in another")
    of, values, size = TYPES[kind]
    if columns % values:
        raise ReplicaError(f"{name}: {tensor} has rows of {columns}, and {of} has blocks of {values}: it is damaged")
    return QUANTIZED + of, columns // values * size
