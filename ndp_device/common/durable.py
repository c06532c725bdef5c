"""Files that are whole and on disk under their name, or not there at all, whenever the machine stops.

A file's contents are on disk after its own fsync, its name after that of its directory: one without the other leaves an
empty file under the name, or none.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def written(path: Path, *, aside: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends. `path` holds all of it or what it held.

    aside: its name until then, in the same directory. mode: its permissions, under the umask. Raises OSError, and
    leaves nothing aside.
    """
    try:
        with open(aside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make it and its parents where they are not there yet. mode: its own permissions, under the umask."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(mode, exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """A file's contents, or the names in a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
