"""The bytes of ZMTP 3.0 that wrong peers send: a greeting, READY, messages of frames, as much as tests need."""

from __future__ import annotations

import socket
from pathlib import Path

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"


def message(*frames: bytes) -> bytes:
    """One message."""
    last = len(frames) - 1
    return b"".join(
        bytes([(number < last) | (2 if len(frame) > 255 else 0)])
        + len(frame).to_bytes(8 if len(frame) > 255 else 1, "big")
        + frame
        for number, frame in enumerate(frames)
    )


def connected(address: str) -> socket.socket:
    """A plain socket at the address, ipc:// or tcp://."""
    kind, where = address.split("://")
    if kind == "tcp":
        host, _, port = where.rpartition(":")
        return socket.create_connection((host, int(port)))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(Path(where)))
    return connection


def greeted(address: str) -> socket.socket:
    """A plain socket that may send messages: the handshake of a host without keys is over.

    libzmq takes no message that comes before its own READY has left.
    """
    connection = connected(address)
    connection.settimeout(60)
    connection.sendall(GREETING + READY)
    said = b""
    while b"Identity" not in said:
        said += connection.recv(1)
    connection.recv(4, socket.MSG_WAITALL)
    return connection
