"""What both ends of a libzmq connection have in common: frames in and out, limits, one context of a process."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

import zmq

from ndp_device.protocol.codec import Buffer

DOORBELL: list[Buffer] = [b""]
"""The message that only says: look into the shared memory."""

HANDSHAKE_MS = 500
KEEPALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 60),
    (zmq.TCP_KEEPALIVE_INTVL, 10),
    (zmq.TCP_KEEPALIVE_CNT, 3),
    (zmq.TCP_MAXRT, 90_000),
)
"""A machine that lost its power says no goodbye: without these its connection would stay for ever."""

_ZERO_COPY_BYTES = 256 << 10  # copying is cheaper below 64 KB, dearer above 1 MB
_DESCRIPTORS = 65_536
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """One per process, made when first needed: a forked child must not touch its parent's."""
    pid = os.getpid()
    if pid not in _contexts:
        _contexts[pid] = zmq.Context()
    return _contexts[pid]


def send(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """Without waiting. A large last frame is lent, not copied: the codec makes a new body for each message."""
    large = any(len(frame) >= _ZERO_COPY_BYTES for frame in frames)
    socket.send_multipart(frames, zmq.NOBLOCK, copy=not large)


def content(frame: zmq.Frame) -> Buffer:
    """Small frames lie anywhere in libzmq's read buffer: copied, they are aligned."""
    held: Buffer = frame.bytes if len(frame) < _ZERO_COPY_BYTES else frame.buffer
    return held


def allow_many_descriptors() -> None:
    """libzmq ends the process where an ipc connection finds no descriptor: there are to be enough of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
