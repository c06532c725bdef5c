"""Files that these programs keep: where in the cache, whole or not at all, and with a digest of their own text.

A file's contents are on disk after its own fsync, its name after that of its directory: one without the other leaves an
empty file under the name, or none. The digest of a sealed JSON object is its field `manifest_digest`, BLAKE2b over the
text in which it is written as zeros: a bit that flips anywhere is noticed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from ndp_device.common.errors import ConfigError
from ndp_device.common.strict_files import MAX_BYTES, Refused, decode_json, read_bytes

# -- the cache ---------------------------------------------------------------------------------------------------------


def default_cache_dir(model_digest: str) -> Path:
    """A model's place in the cache: under $NDP_CACHE_DIR, $XDG_CACHE_HOME/vllm-ndp or ~/.cache/vllm-ndp."""
    return _base() / "replicas" / model_digest


def prices_file(key: str) -> Path:
    """Where measured prices of one machine, shape and version are kept."""
    return _base() / "prices" / f"{key}.json"


def checked_file(directory: Path) -> Path:
    """Where this machine notes which files of a directory it has found whole."""
    key = hashlib.blake2b(os.fsencode(directory.resolve()), digest_size=16).hexdigest()
    return _base() / "checked" / f"{key}.json"


def _base() -> Path:
    if chosen := os.environ.get("NDP_CACHE_DIR"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-ndp"
    except RuntimeError:
        raise ConfigError(
            f"user {os.getuid()} has no home directory on this system: set NDP_CACHE_DIR to a directory of yours"
        ) from None


# -- whole files -------------------------------------------------------------------------------------------------------


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


# -- sealed ones -------------------------------------------------------------------------------------------------------

_FIELD = "manifest_digest"
_SIZE = 16
_ZEROS = b"0" * 2 * _SIZE
_SEAL = re.compile(rb'"%s": "([0-9a-f]{%d})"' % (_FIELD.encode(), 2 * _SIZE))

_T = TypeVar("_T", bound=msgspec.Struct)


def seal(value: msgspec.Struct | Mapping[str, Any]) -> bytes:
    """The text of its fields and of a digest, which replaces the one that they hold."""
    fields = msgspec.json.decode(msgspec.json.encode(value))
    text = msgspec.json.format(msgspec.json.encode({**fields, _FIELD: _ZEROS.decode()}), indent=1) + b"\n"
    return _with_digest(text, _digest(text))


def read_sealed(path: Path, kind: type[_T]) -> _T:
    """Raises Refused or OSError."""
    text = read_bytes(path, MAX_BYTES)
    seal = _SEAL.search(text)
    if seal is not None and seal[1] != _digest(_with_digest(text, _ZEROS)):
        raise Refused("its text is not what its 'manifest_digest' says")
    value = decode_json(text, kind)
    if seal is None:
        raise Refused("it has no 'manifest_digest'")
    return value


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_SIZE).hexdigest().encode()


def _with_digest(text: bytes, digest: bytes) -> bytes:
    return _SEAL.sub(b'"%s": "%s"' % (_FIELD.encode(), digest), text, count=1)
