"""Files that others wrote, opened without trust: plain files only, and their size before their contents.

msgspec reads JSON: UTF-8, numbers that a program can hold, no NaN. Knows sizes. Does not know the meaning of a file,
nor its reader's error. A reader turns `Refused` into its own sentence, which names the file.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

import msgspec

MAX_BYTES = 4 << 20
"""Most bytes of a configuration or manifest. Readers of larger files (headers, indices, texts) name their own limit."""
MAX_LINE_BYTES = 32 << 20
MAX_VALUES = 1 << 20
"""A value takes up to 72 bytes in memory, so a text of this many stays below 100 MiB."""
_BYTES_PER_VALUE = 16
"""A larger text may hold one more for so many of its bytes, as lists of a checkpoint's tensors do by far."""

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
