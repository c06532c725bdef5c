"""JSON objects that carry a digest of their own text: a bit that flips anywhere in one is noticed.

The digest is the field `manifest_digest`, BLAKE2b over the text in which it is written as zeros. Knows text and fields.
Does not know what a manifest means.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ndp_device.common.strict_files import MAX_BYTES, Refused, decode_json, read_bytes

_FIELD = "manifest_digest"
_SIZE = 16
_ZEROS = b"0" * 2 * _SIZE
_SEAL = re.compile(rb'"%s": "([0-9a-f]{%d})"' % (_FIELD.encode(), 2 * _SIZE))

_T = TypeVar("_T", bound=msgspec.Struct)


def encode(value: msgspec.Struct) -> bytes:
    """Its text, sealed."""
    return seal(msgspec.json.decode(msgspec.json.encode(value)))


def seal(fields: Mapping[str, Any]) -> bytes:
    """The text of these fields and of a digest, which replaces the one that they hold."""
    text = msgspec.json.format(msgspec.json.encode({**fields, _FIELD: _ZEROS.decode()}), indent=1) + b"\n"
    return _with_digest(text, _digest(text))


def read(path: Path, kind: type[_T]) -> _T:
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
