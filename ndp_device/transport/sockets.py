"""What both ends do with a ZeroMQ socket: one context per process, frames sent and read without needless copies."""

from __future__ import annotations

import os

import zmq

from ndp_device.protocol import codec
from ndp_device.protocol.codec import Frames
from ndp_device.transport import fragments

HANDSHAKE_MS = 500
FLUSH_MS = 500
DOORBELL: list[codec.Buffer] = [b""]
_ZERO_COPY_BYTES = 256 << 10  # measured elsewhere: copying is cheaper below 64 KB, dearer above 1 MB
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """One context per process, made when first needed: a forked child must not touch its parent's."""
    pid = os.getpid()
    if pid not in _contexts:
        _contexts[pid] = zmq.Context()
    return _contexts[pid]


def flush() -> None:
    """Before the process ends: wait until the last answers have left, for half a second at most."""
    if held := _contexts.pop(os.getpid(), None):
        held.destroy(linger=FLUSH_MS)


def send(socket: zmq.Socket[bytes], frames: Frames) -> None:
    large = len(frames[-1]) >= _ZERO_COPY_BYTES  # the codec makes a new body for each message: safe to lend
    socket.send_multipart(frames, zmq.NOBLOCK, copy=not large)


def is_cut(body: codec.Buffer, version: int) -> bool:
    return len(body) >= fragments.CUT_FROM_BYTES and fragments.is_understood(version)


def content(frame: zmq.Frame) -> codec.Buffer:
    """Small frames lie anywhere in libzmq's read buffer: copied, they are aligned."""
    held: codec.Buffer = frame.bytes if len(frame) < _ZERO_COPY_BYTES else frame.buffer
    return held
