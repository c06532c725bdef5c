"""Arrays of numpy's own files that others wrote: sizes before contents, numbers and strings, no pickles.

numpy allocates what a header says, and touches none of it before the bytes are there: a promise of 8 TB is refused. A
member of an .npz of 5 MB may unfold into gigabytes. Knows .npy and .npz, not what an array means.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.strict_files import Refused, open_plain, read_bytes

MAX_ARRAY_BYTES = 1 << 30
_SMALL = 64 << 20
_MAX_UNFOLDING = 32
"""A member may always unfold to _SMALL bytes, and to this many times what it takes in the file."""


def read_array(path: Path, at_most: int = MAX_ARRAY_BYTES) -> NDArray[Any]:
    """The array of a .npy file. Raises Refused or OSError."""
    return decode_array(read_bytes(path, at_most))


def decode_array(contents: bytes) -> NDArray[Any]:
    """An array from the bytes of a .npy file. Raises Refused."""
    try:
        array = np.load(io.BytesIO(contents), allow_pickle=False)
    except Exception as error:  # numpy lets many kinds out of a damaged header, SyntaxError and MemoryError among them
        raise Refused(f"it is not a .npy array: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufUS":
        raise Refused("it must be a .npy array of numbers or strings")
    if max(array.shape, default=0) > len(contents):  # of an empty one: a loop over any of its sizes must end
        raise Refused(f"it has {len(contents)} bytes and claims to be {list(array.shape)}")
    return array


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
                return {one.filename.removesuffix(".npy"): decode_array(archive.read(one)) for one in members}
        except ValueError as error:
            raise Refused(str(error)) from None
        except Exception as error:  # zipfile's, zlib's, lzma's and others have no common name
            if isinstance(error, OSError | MemoryError):
                raise
            raise Refused(f"it is not an .npz file: {error}") from None
