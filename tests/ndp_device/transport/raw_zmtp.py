"""The bytes that wrong peers send: ZMTP 3.0 as much as tests need, its older versions, and no ZMTP at all."""

import random
import socket
from pathlib import Path

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_PROPERTIES = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity"
READY = b"\x04\x29" + _PROPERTIES + bytes(4)

WITHOUT_HANDSHAKE = {
    "ZMTP 1.0": b"\x01\x00" + b"\x02\x00A" * 200,
    "ZMTP 1.0 with a name": b"\x08\x00a name!" + b"\x02\x01A\x02\x00B" * 200,
    "ZMTP 2.0": b"\xff" + bytes(8) + b"\x7f\x01\x05" + bytes(2) + b"\x00\x01A" * 200,
    "HTTP": b"GET / HTTP/1.1\r\nHost: device\r\n\r\n" * 100,
    "TLS": bytes.fromhex("16030100f1010000ed0303") + bytes(range(256)),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(range(256)) * 4,
    "text": b"\x01\x00" + Path(__file__).read_bytes(),
    "noise": b"\x05\x00" + random.Random(0).randbytes(8000),
}
"""Peers that libzmq takes, or may take, for one of ZMTP 1 or 2, which know no handshake and no metadata."""


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


def greeted(address: str, name: bytes = b"") -> socket.socket:
    """A plain socket that may send messages: the handshake of a host without keys is over. name: as which it is known.

    libzmq takes no message that comes before its own READY has left.
    """
    connection = connected(address)
    connection.settimeout(60)
    ready = _PROPERTIES + len(name).to_bytes(4, "big") + name
    connection.sendall(GREETING + bytes([4, len(ready)]) + ready)
    said = b""
    while b"Identity" not in said:
        said += connection.recv(1)
    connection.recv(4, socket.MSG_WAITALL)
    return connection
