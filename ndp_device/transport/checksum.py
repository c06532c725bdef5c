"""The checksum of a message: the last 4 bytes of frame 0, CRC-32 of all bytes before them and of frame 1.

The codec leaves the field empty; the carrier of the frames fills it in and checks it. Knows bytes only. C++ where the
extension is built (csrc/crc32.h), zlib elsewhere: the same values.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from zlib import crc32 as crc32_in_python

from ndp_device.protocol.codec import Buffer

NUM_BYTES = 4
DAMAGE = "the checksum of a message does not fit its bytes; it was damaged on its way"


def write_in_python(header: Buffer, body: Buffer) -> bytes:
    """The header with its last bytes replaced by the checksum of the rest of it and of `body`."""
    before = bytes(header)[:-NUM_BYTES]
    return before + as_bytes(crc32_in_python(body, crc32_in_python(before)))


def fits_in_python(header: Buffer, body: Buffer) -> bool:
    """Whether `write` of the same bytes made this header."""
    return len(header) >= NUM_BYTES and write_in_python(header, body) == header


def copy_into_in_python(target: memoryview, offset: int, part: Buffer, crc: int) -> int:
    """Copy `part` to `target` from `offset` on; returns its CRC-32, continued from `crc`."""
    target[offset : offset + len(part)] = part
    return crc32_in_python(target[offset : offset + len(part)], crc)


def as_bytes(crc: int) -> bytes:
    return crc.to_bytes(NUM_BYTES, "little")


def damage(header: Buffer, body: Buffer) -> str | None:
    """None, or the sentence that says what is wrong with these bytes."""
    return None if fits(header, body) else DAMAGE


crc32: Callable[[Buffer, int], int] = crc32_in_python
write: Callable[[Buffer, Buffer], bytes] = write_in_python
fits: Callable[[Buffer, Buffer], bool] = fits_in_python
copy_into: Callable[[memoryview, int, Buffer, int], int] = copy_into_in_python
with contextlib.suppress(ImportError):  # not built: the same values, slower
    _native = importlib.import_module("ndp_device.transport._shm")
    crc32, copy_into = _native.crc32, _native.copy_into
    write, fits = _native.write_checksum, _native.checksum_fits
