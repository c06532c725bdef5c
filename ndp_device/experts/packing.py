"""Integer codes to bit planes and back. Knows bits and bytes, not scales, experts or files.

A plane holds one bit of every code of a matrix: plane 0 the most significant. Within a plane, column c of a row is
bit c % 8 of byte c // 8. The first k planes are therefore the code shifted down to k bits, and one sequential read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_BITS = 8
"""A code is one byte; replicas use 1 to 4 bits of it, or all."""


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes [N, C] below 2**bits -> planes [bits, N, C // 8]."""
    if codes.ndim != 2 or codes.dtype != np.uint8 or codes.shape[1] % 8:
        raise ValueError(f"codes must be uint8 [N, C] with C a multiple of 8, got {codes.dtype}{list(codes.shape)}")
    if not 1 <= bits <= MAX_BITS or (codes.size and int(codes.max()) >> bits):
        raise ValueError(f"codes up to {codes.max(initial=0)} do not fit in {bits} bits")
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint8)
    return np.packbits((codes >> shifts[:, None, None]) & 1, axis=-1, bitorder="little")


def unpack(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Planes [bits, N, C // 8] -> codes [N, C]."""
    codes = np.zeros((planes.shape[1], planes.shape[2] * 8), dtype=np.uint8)
    for plane in planes:
        codes = (codes << 1) | np.unpackbits(plane, axis=-1, bitorder="little")
    return codes
