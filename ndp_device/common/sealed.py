"""JSON objects that carry a digest of their own text: a bit that flips anywhere in one is noticed.

The digest is the field `manifest_digest`, BLAKE2b over the text in which it is written as zeros. Objects from before it
open as they are, with one word about it. Knows text and fields. Does not know what a manifest means.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ndp_device.common import strict_json
from ndp_device.common.strict_files import MAX_BYTES, Refused, read_bytes

_FIELD = "manifest_digest"
_SIZE = 16
_ZEROS = b"0" * 2 * _SIZE
_SEAL = re.compile(rb'"%s": "([0-9a-f]{%d})"' % (_FIELD.encode(), 2 * _SIZE))
_log = logging.getLogger(__name__)

_T = TypeVar("_T", bound=msgspec.Struct)


def encode(value: msgspec.Struct) -> bytes:
    """Its text, sealed."""
    return seal(msgspec.json.decode(msgspec.json.encode(value)))


def seal(fields: Mapping[str, Any]) -> bytes:
    """The text of these fields and of a digest, which replaces the one that they hold."""
    text = msgspec.json.format(msgspec.json.encode({**fields, _FIELD: _ZEROS.decode()}), indent=1) + b"\n"
    return _with_digest(text, _digest(text))


def read(path: Path, kind: type[_T]) -> _T:
    """Raises Refused or OSError. Without a digest the fields must be those of `kind`: a damaged name is none."""
    text = read_bytes(path, MAX_BYTES)
    if (seal := _SEAL.search(text)) is not None:
        if seal[1] != _digest(_with_digest(text, _ZEROS)):
            raise Refused("its text is not what its 'manifest_digest' says")
        return strict_json.decode(text, kind)
    fields = strict_json.decode(text)
    if isinstance(fields, dict) and (unknown := sorted(set(fields) - set(kind.__struct_fields__))):
        raise Refused(f"it has an unknown field {unknown[0]!r}")
    value = strict_json.decode(text, kind)
    _say_once(path)
    return value


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_SIZE).hexdigest().encode()


def _with_digest(text: bytes, digest: bytes) -> bytes:
    return _SEAL.sub(b'"%s": "%s"' % (_FIELD.encode(), digest), text, count=1)


@lru_cache(maxsize=64)
def _say_once(path: Path) -> None:
    _log.warning("%s is from before manifests had a digest of their own: damage in it may go unnoticed", path)
