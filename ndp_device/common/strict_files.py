"""Files that others wrote, opened without trust: plain files only, and their size before their contents.

msgspec reads JSON: UTF-8, numbers that a program can hold, no NaN. numpy reads its own files: numbers and strings, no
pickles. It allocates what a header says, and touches none of it before the bytes are there: a promise of 8 TB is
refused. A member of an .npz of 5 MB may unfold into gigabytes. A reader turns `Refused` into its own sentence, which
names the file.
"""

from __future__ import annotations

import io
import json
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 4 << 20
"""Most bytes of a configuration or manifest. Readers of larger files (headers, indices, texts) name their own limit."""
MAX_LINE_BYTES = 32 << 20
MAX_VALUES = 1 << 20
"""A value takes up to 72 bytes in memory, so a text of this many stays below 100 MiB."""
_BYTES_PER_VALUE = 16
"""A larger text may hold one more for so many of its bytes, as lists of a checkpoint's tensors do by far."""
MAX_ARRAY_BYTES = 1 << 30
_SMALL = 64 << 20
_MAX_UNFOLDING = 32
"""A member may always unfold to _SMALL bytes, and to this many times what it takes in the file."""

_T = TypeVar("_T")


class Refused(ValueError):
    """Why a file or text is not read: the rest of a sentence that begins with its name."""


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading. Raises Refused or OSError; a pipe or device of this name is not waited for."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a NUL in the path
        raise Refused(str(error)) from None
    file = open(handle, "rb")  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise Refused("it is not a plain file")
    return file


def read_bytes(path: Path, at_most: int = MAX_BYTES) -> bytes:
    """The contents of a plain file. Raises Refused or OSError."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > at_most:
            raise Refused(f"it has {size} bytes, and at most {at_most} are read")
        contents = file.read(size + 1)
    if len(contents) > size:
        raise Refused("it grows while it is read")
    return contents


def read_lines(path: Path, at_most: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """The lines of a plain file of any size, each of at most so many bytes. Raises Refused or OSError."""
    with open_plain(path) as file:
        while line := file.readline(at_most + 1):
            if len(line) > at_most:
                raise Refused(f"one of its lines has more than {at_most} bytes")
            yield line


@overload
def decode_json(raw: bytes, *, max_values: int | None = ..., constants: bool = ...) -> Any: ...
@overload
def decode_json(raw: bytes, kind: type[_T], *, max_values: int | None = ..., constants: bool = ...) -> _T: ...
def decode_json(raw: bytes, kind: Any = Any, *, max_values: int | None = None, constants: bool = False) -> Any:
    """A text as plain values, or as the given type, which then has fields of the types it names. Raises Refused.

    constants: NaN and Infinity are accepted, which are not JSON and stand in the config.json of some models.
    """
    max_values = max(MAX_VALUES, len(raw) // _BYTES_PER_VALUE) if max_values is None else max_values
    if (found := sum(raw.count(mark) for mark in (b",", b"[", b"{"))) > max_values:
        raise Refused(f"it holds {found} values, and at most {max_values} are read")
    try:
        if constants and (b"NaN" in raw or b"Infinity" in raw):
            return msgspec.convert(json.loads(raw), kind)
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Refused(str(error)) from None
    except RecursionError:
        raise Refused("it is nested too deep") from None


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
