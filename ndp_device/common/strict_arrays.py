"""Arrays of numpy's own files that others wrote: what a header promises is compared with the bytes before any is read.

numpy allocates what a header says: a file of 200 bytes may ask for 8 TB. A member of an .npz of 5 MB may unfold into
gigabytes. Knows .npy and .npz, not what an array means. No pickles.
"""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ndp_device.common.strict_files import Refused, open_plain, read_bytes

MAX_ARRAY_BYTES = 1 << 30
_HEADER_BYTES = 10_000  # numpy's own limit for a header it is willing to parse
_EMPTY = 1 << 16  # what the other sizes of an empty array may come to: a loop over one of them must end
_SMALL = 64 << 20
_MAX_UNFOLDING = 32
"""A member may always unfold to _SMALL bytes, and to this many times what it takes in the file."""


def read_array(path: Path, at_most: int = MAX_ARRAY_BYTES) -> NDArray[Any]:
    """The array of a .npy file. Raises Refused or OSError."""
    return decode_array(read_bytes(path, at_most))


def decode_array(contents: bytes) -> NDArray[Any]:
    """An array from the bytes of a .npy file. Raises Refused."""
    return _array(io.BytesIO(contents), len(contents))


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Every array of an .npz file, together at most MAX_ARRAY_BYTES. Raises Refused or OSError."""
    with open_plain(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                for member in members:
                    if member.file_size > max(_SMALL, _MAX_UNFOLDING * member.compress_size):
                        raise Refused(
                            f"{member.filename} unfolds from {member.compress_size} to {member.file_size} bytes"
                        )
                if (total := sum(member.file_size for member in members)) > MAX_ARRAY_BYTES:
                    raise Refused(f"its arrays take {total} bytes, and at most {MAX_ARRAY_BYTES} are read")
                return {member.filename.removesuffix(".npy"): _member(archive, member) for member in members}
        except ValueError as error:
            raise Refused(str(error)) from None
        except Exception as error:  # zipfile's, zlib's, lzma's and others have no common name
            if isinstance(error, OSError | MemoryError):
                raise
            raise Refused(f"it is not an .npz file: {error}") from None


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        return _array(file, member.file_size)  # type: ignore[arg-type]


def _array(file: BinaryIO, size: int) -> NDArray[Any]:
    try:
        version = npy.read_magic(file)  # type: ignore[no-untyped-call]
        if version not in ((1, 0), (2, 0)):
            raise Refused(f"it is a .npy file of version {version}, and 1.0 and 2.0 are read")
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read_header(file, _HEADER_BYTES)  # type: ignore[no-untyped-call,call-arg]
    except Refused:
        raise
    except Exception as error:  # numpy lets many kinds out of a damaged header, SyntaxError and TypeError among them
        raise Refused(f"it is not a .npy array: {error}") from None
    if dtype.hasobject:
        raise Refused("it holds Python objects, which are not read")
    if dtype.kind not in "biufUS" or dtype.names is not None:
        raise Refused(f"it holds values of type {dtype}, and numbers and strings are read")
    if any(not isinstance(length, int) or length < 0 for length in shape):
        raise Refused(f"its shape {shape} is none")
    wanted = math.prod(shape) * dtype.itemsize
    if math.prod(max(length, 1) for length in shape) > max(size, _EMPTY):
        raise Refused(f"it is empty and claims to be {list(shape)}" if not wanted else _promise(shape, dtype, size))
    if len(shape) > 32 or wanted > size:
        raise Refused(_promise(shape, dtype, size))
    contents = file.read(wanted)
    if len(contents) < wanted:
        raise Refused(_promise(shape, dtype, len(contents)))
    if not wanted:
        return np.empty(shape, dtype)
    if dtype.kind == "U":
        _refuse_no_characters(np.frombuffer(contents, np.dtype("u4").newbyteorder(dtype.byteorder)))
    flat = np.frombuffer(contents, dtype)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def _refuse_no_characters(points: NDArray[np.uint32]) -> None:
    if ((points > 0x10FFFF) | ((points >= 0xD800) & (points < 0xE000))).any():
        raise Refused("it holds strings of numbers that are no characters")


def _promise(shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> str:
    return f"its header promises {math.prod(shape) * dtype.itemsize} bytes of {dtype} {list(shape)}, there are {size}"
