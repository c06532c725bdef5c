"""Activations on their way to a host CPU or an expander: quantized by the range of each group, packed as bit planes.

    [T, H] -> sign and magnitude of `bits` bits, one float16 scale per row and group -> one plane per bit, each deflated

What seed 002 describes ("dynamic range quantization per token group", "bit-plane encoding", 2 to 4 times smaller) and
gives no code for. High magnitude planes are mostly zeros and shrink, low ones are noise and stay as they are. Ratio and
error are measured on activations that a model produced (benchmarks/activation_codec.py), not assumed.
Knows arrays and bytes. Does not know models, links or time.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ndp_device.errors import ConfigError

BITS = range(2, 9)
GROUP_SIZE = 64
_HEADER = struct.Struct("<IIBH")  # rows, columns, bits, group size
_PLANE = struct.Struct("<BI")  # how it is stored, bytes
_AS_IS, _DEFLATED = 0, 1
_MOST_VALUES = 1 << 28
_WHOLE_BYTES = 2  # of a value that is not packed: bfloat16


@dataclass(frozen=True)
class ActivationCodec:
    bits: int = 8
    """Sign included."""
    group_size: int = GROUP_SIZE
    """Values of a row that share a scale."""
    deflate: bool = True
    """False: planes as they are, what a link without a compressor carries."""

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"activation bits must lie in {BITS.start}..{BITS.stop - 1}, got {self.bits}")
        if not 1 <= self.group_size < 1 << 16:
            raise ConfigError(f"the group size of activations must lie in 1..65535, got {self.group_size}")

    def encode(self, activations: ArrayLike) -> bytes:
        """[T, H], finite and within float16."""
        values = np.asarray(activations, np.float32)
        if values.ndim != 2 or values.size == 0 or values.size > _MOST_VALUES:
            raise ValueError(f"activations must be [rows, columns] with 1..{_MOST_VALUES} values, got {values.shape}")
        groups = self._grouped(values)
        largest = np.abs(groups).max(axis=2)
        if not (largest <= np.finfo(np.float16).max).all():
            raise ValueError("activations must be finite and within float16")
        scales = (largest / self._top).astype(np.float16)
        steps = np.where(scales > 0, scales, 1).astype(np.float32)[..., None]
        codes = np.clip(np.rint(groups / steps), -self._top, self._top).astype(np.int16)
        codes = codes.reshape(len(values), -1)[:, : values.shape[1]]
        out = [_HEADER.pack(*values.shape, self.bits, self.group_size), scales.tobytes()]
        magnitude = np.abs(codes).astype(np.uint8)
        for plane in [codes < 0, *((magnitude >> bit) & 1 for bit in reversed(range(self.bits - 1)))]:
            plain = np.packbits(plane, axis=None).tobytes()
            packed = zlib.compress(plain, 6, -15) if self.deflate else plain
            smaller = len(packed) < len(plain)
            out += [_PLANE.pack(_DEFLATED if smaller else _AS_IS, len(packed if smaller else plain))]
            out += [packed if smaller else plain]
        return b"".join(out)

    def ratio(self, activations: ArrayLike) -> float:
        """Bytes of the message over bytes of the same values in 16 bits; below 1 where packing helps."""
        values = np.asarray(activations)
        return len(self.encode(values)) / (values.size * _WHOLE_BYTES)

    @property
    def _top(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _grouped(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """[T, groups, group size]; the last group is filled with zeros."""
        columns = -(-values.shape[1] // self.group_size) * self.group_size
        filled = np.zeros((len(values), columns), np.float32)
        filled[:, : values.shape[1]] = values
        return filled.reshape(len(values), -1, self.group_size)


def decode(message: bytes) -> NDArray[np.float32]:
    """[T, H]. Raises ValueError for bytes that `encode` cannot have written."""
    if len(message) < _HEADER.size:
        raise ValueError(f"a packed activation has at least {_HEADER.size} bytes, got {len(message)}")
    rows, columns, bits, group_size = _HEADER.unpack_from(message)
    if bits not in BITS or not rows or not columns or not group_size or rows * columns > _MOST_VALUES:
        raise ValueError(f"packed activations of {rows} x {columns} at {bits} bits in groups of {group_size}")
    groups = -(-columns // group_size)
    at = _HEADER.size + 2 * rows * groups
    if at > len(message):
        raise ValueError(f"packed activations of {rows} rows end within their scales")
    scales = np.frombuffer(message[_HEADER.size : at], np.float16).reshape(rows, groups).astype(np.float32)
    planes = np.empty((bits, rows * columns), np.uint8)
    for plane in planes:
        stored, at = _plane(message, at, -(-rows * columns // 8))
        plane[:] = np.unpackbits(np.frombuffer(stored, np.uint8), count=rows * columns)
    if at != len(message):
        raise ValueError(f"{len(message) - at} bytes after the last plane")
    magnitude = np.zeros(rows * columns, np.float32)
    for plane in planes[1:]:
        magnitude = 2 * magnitude + plane
    codes = np.where(planes[0] > 0, -magnitude, magnitude).reshape(rows, columns)
    return codes * np.repeat(scales, group_size, axis=1)[:, :columns]


def _plane(message: bytes, at: int, num_bytes: int) -> tuple[bytes, int]:
    """(a plane as it was, where the next one begins)."""
    if at + _PLANE.size > len(message):
        raise ValueError("packed activations end before their last plane")
    how, length = _PLANE.unpack_from(message, at)
    start = at + _PLANE.size
    stored = message[start : start + length]
    if how == _DEFLATED:
        inflate = zlib.decompressobj(-15)
        try:
            plain = inflate.decompress(stored, num_bytes + 1)
        except zlib.error as error:
            raise ValueError(f"a plane cannot be inflated: {error}") from None
    elif how == _AS_IS:
        plain = stored
    else:
        raise ValueError(f"a plane is stored in an unknown way, {how}")
    if len(plain) != num_bytes:
        raise ValueError(f"a plane must have {num_bytes} bytes, got {len(plain)}")
    return plain, start + length


def relative_error(original: ArrayLike, packed: ArrayLike) -> float:
    """Energy of the difference over energy of the original."""
    whole = np.asarray(original, np.float64)
    return float(((np.asarray(packed, np.float64) - whole) ** 2).sum() / (whole**2).sum())
