"""The one reader of JSON that others wrote: sizes before contents, one grammar for every file, one sentence in refusal.

Refuses, before a reader looks at a value:

- files that are no plain files, or too large
- texts that would unfold into too many values, or too deep
- bytes that are not UTF-8, and half of a surrogate pair
- a name given twice
- numbers that are infinite, or longer than 20 digits

Knows bytes and limits. Does not know the meaning of a file, nor its reader's error. A reader turns `Refused` into its
own sentence, which names the file.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec

from ndp_device.common.strict_files import MAX_BYTES, Refused, read_bytes

__all__ = ["Refused", "decode", "read"]

MAX_VALUES = 1 << 20
"""A value takes up to 72 bytes in memory, so a text of this many stays below 100 MiB."""
_BYTES_PER_VALUE = 16
"""A larger text may hold one more for so many of its bytes, as lists of a checkpoint's tensors do by far."""
MAX_DEPTH = 64
_MAX_DIGITS = 20  # of a 64 bit integer

_T = TypeVar("_T")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_CONSTANTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@overload
def decode(raw: bytes | str, *, max_values: int | None = ..., constants: bool = ...) -> Any: ...
@overload
def decode(raw: bytes | str, kind: type[_T], *, max_values: int | None = ..., constants: bool = ...) -> _T: ...
def decode(raw: bytes | str, kind: Any = Any, *, max_values: int | None = None, constants: bool = False) -> Any:
    """A text as plain values, or as the given type, which then has fields of the types it names. Raises Refused.

    constants: NaN and Infinity are accepted, which are not JSON and stand in the config.json of some models.
    """
    raw = raw.encode(errors="surrogatepass") if isinstance(raw, str) else raw
    if raw.startswith(codecs.BOM_UTF8):
        raise Refused("it begins with a byte order mark, which JSON does not allow: save it as UTF-8 without one")
    max_values = max(MAX_VALUES, len(raw) // _BYTES_PER_VALUE) if max_values is None else max_values
    if (found := sum(raw.count(mark) for mark in (b",", b"[", b"{"))) > max_values:
        raise Refused(f"it holds {found} values, and at most {max_values} are read")
    try:
        text = raw.decode()
        value = (_WITH_CONSTANTS if constants else _STRICT).decode(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise Refused(f"it is not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise Refused("it holds half of a surrogate pair, which is no character") from None
    except RecursionError:
        raise Refused(f"it is nested deeper than {MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise Refused(f"it is not JSON: {error}") from None
    if _deeper_than(MAX_DEPTH, value):
        raise Refused(f"it is nested deeper than {MAX_DEPTH}")
    if kind is Any:
        return value
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise Refused(str(error)) from None


@overload
def read(path: Path, *, at_most: int = ..., max_values: int | None = ..., constants: bool = ...) -> Any: ...
@overload
def read(
    path: Path, kind: type[_T], *, at_most: int = ..., max_values: int | None = ..., constants: bool = ...
) -> _T: ...
def read(
    path: Path, kind: Any = Any, *, at_most: int = MAX_BYTES, max_values: int | None = None, constants: bool = False
) -> Any:
    """decode() of a file. Raises Refused or OSError."""
    return decode(read_bytes(path, at_most), kind, max_values=max_values, constants=constants)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise Refused(f"it gives {twice[:80]!r} twice")
    return values


def _whole(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise Refused(f"it holds a number of {len(digits)} digits, and at most {_MAX_DIGITS} are read")
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise Refused(f"it holds the number {digits[:80]}, which is beyond any float")
    return value


def _no_constant(name: str) -> float:
    raise Refused(f"it holds {name}, which is not JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_whole, parse_float=_real, parse_constant=_no_constant)
_WITH_CONSTANTS = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_whole, parse_float=_real, parse_constant=_CONSTANTS.__getitem__
)


def _deeper_than(limit: int, value: Any) -> bool:
    """Level by level, because a recursion would have the limit that this one exists to replace."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)
