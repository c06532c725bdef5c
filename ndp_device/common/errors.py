"""Every error this package raises on purpose, in one tree.

Messages are one sentence: what was wanted, what came, what to change.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

_MAX_SENTENCE = 1500
UNAVAILABLE = ("down", "late", "lost", "refused", "broken")
"""Reasons for a call without a result. The device was away when the call was made, did not answer in time, or was lost
meanwhile. Or its answer was a typed error, or broke the protocol."""


def nearest(value: str, known: Iterable[str]) -> str:
    """ ": did you mean NAME?", where one of the known names is like this one; else nothing."""
    near = difflib.get_close_matches(value, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


class NdpError(Exception):
    """Root of the tree; command lines print it as one line and exit 2.

    Its message is one line of printable characters, whatever a file or a peer put into it. A name out of a file must
    neither forge a second line nor reach a terminal as control characters.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(_one_line(str(message)))


class ConfigError(NdpError):
    """A setting is unknown, out of range, or not supported together with another."""


class ReplicaError(NdpError):
    """A replica or checkpoint file cannot be trusted; the message names it."""


class TraceError(NdpError):
    """A trace file cannot be trusted or belongs to another model."""


class ProtocolError(NdpError):
    """The rules of the protocol were broken."""


class LocalProtocolError(ProtocolError):
    """We broke the rules: a bug on this side."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules: what it sent is not to be used."""


class DeviceError(NdpError):
    """The device refused a request with a typed code."""

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retryable = retryable


class DeviceUnavailable(NdpError):
    """No valid answer came from the device within the deadline. cause: one of UNAVAILABLE."""

    def __init__(self, message: str = "", *, cause: str = "lost") -> None:
        super().__init__(message)
        self.cause = cause


def _one_line(message: str) -> str:
    if len(message) > _MAX_SENTENCE:
        half = _MAX_SENTENCE // 2
        message = f"{message[:half]} […] {message[-half:]}"
    if message.isprintable():
        return message
    message = " ".join(message.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in message)


def why_unwritable(error: OSError) -> str:
    """Why a file could not be written, and what to change. Says whether room or permission is missing."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "make room there, or choose another disk" if is_full else "choose a directory you may write to"
    return f"{error.strerror}; {remedy}"
