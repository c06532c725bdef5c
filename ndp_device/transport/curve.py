"""CurveZMQ as the side that listens: who may come in, and the boxes that frames travel in. Pure: no socket, no file.

    HELLO -> WELCOME -> INITIATE -> READY, then every frame is a MESSAGE: a nonce that only rises, and a box

The arithmetic is libsodium's, by PyNaCl. A peer proves that it knows this device's public key before anything is kept
of it, and shows its own key inside a box. source: rfc.zeromq.org/spec/26; hosts use libzmq's CURVE.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ndp_device.errors import ConfigError, RemoteProtocolError
from ndp_device.protocol.codec import Buffer

OVERHEAD_BYTES = 33
"""Of a frame: the word MESSAGE with its length, a nonce, a flag, and what makes forgery impossible."""

_KEY = 32
_HELLO_BYTES = 200
_NOT_ALLOWED = b"400"  # libzmq tells its user that the key was not accepted


def load_sodium() -> Any:
    """PyNaCl's bindings, asked for only where keys are used."""
    try:
        from nacl import bindings
    except ImportError:
        raise ConfigError("keys need PyNaCl, which is not installed: pip install pynacl") from None
    return bindings


class Unwelcome(RemoteProtocolError):
    """The peer's key is not on the list; `reply` tells it so."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.reply = b"\x05ERROR" + bytes([len(_NOT_ALLOWED)]) + _NOT_ALLOWED


class CurveSession:
    """One connection's handshake, and its keys afterwards."""

    def __init__(self, secret: bytes, public: bytes, is_allowed: Callable[[bytes], bool]) -> None:
        """is_allowed: whether the host with this public key may come in."""
        self._sodium = load_sodium()
        self._secret, self._public, self._is_allowed = secret, public, is_allowed
        self.peer_key: bytes | None = None  # known and allowed: the handshake is done
        self._client = b""  # its key for this connection alone
        self._own_secret = self._cookie = b""
        self._shared = b""
        self._heard = self._said = 0  # nonces

    def obey(self, command: bytes) -> bytes:
        """The answer to a command of the handshake. Raises RemoteProtocolError or Unwelcome."""
        try:
            if command.startswith(b"\x05HELLO") and not self._client:
                return self._welcome(command)
            if command.startswith(b"\x08INITIATE") and self._client and self.peer_key is None:
                return self._ready(command)
        except (TypeError, ValueError, RuntimeError) as error:  # PyNaCl's CryptoError is a ValueError or no kind of one
            raise RemoteProtocolError(f"a CURVE handshake that is none: {error}") from None
        except Exception as error:
            if isinstance(error, RemoteProtocolError):
                raise
            raise RemoteProtocolError("a host that does not know this device's public key") from None
        raise RemoteProtocolError("a command that has no place in this CURVE handshake")

    def boxed(self, flags: int, content: Buffer) -> bytes:
        """The frame that carries this one. flags: 1 = more frames follow, 2 = a command."""
        self._said += 1
        number = self._said.to_bytes(8, "big")
        nonce = b"CurveZMQMESSAGES" + number
        box: bytes = self._sodium.crypto_box_afternm(bytes([flags]) + bytes(content), nonce, self._shared)
        return b"\x07MESSAGE" + number + box

    def opened(self, frame: Buffer) -> tuple[int, bytes]:
        """(flags, content) of a frame that arrived."""
        frame = bytes(frame)
        if len(frame) < OVERHEAD_BYTES or not frame.startswith(b"\x07MESSAGE"):
            raise RemoteProtocolError("a frame outside its box")
        number = int.from_bytes(frame[8:16], "big")
        if number <= self._heard:
            raise RemoteProtocolError("a frame that was sent before")
        try:
            plain = self._sodium.crypto_box_open_afternm(frame[16:], b"CurveZMQMESSAGEC" + frame[8:16], self._shared)
        except Exception:
            raise RemoteProtocolError("a frame that was forged or damaged") from None
        self._heard = number
        return plain[0], plain[1:]

    def _welcome(self, hello: bytes) -> bytes:
        if len(hello) != _HELLO_BYTES or hello[6:8] != b"\x01\x00":
            raise RemoteProtocolError("a HELLO of another version of CURVE")
        client, number, box = hello[80:112], hello[112:120], hello[120:]
        self._heard = int.from_bytes(number, "big")
        shared = self._sodium.crypto_box_beforenm(client, self._secret)
        if self._sodium.crypto_box_open_afternm(box, b"CurveZMQHELLO---" + number, shared) != bytes(64):
            raise RemoteProtocolError("a HELLO that is not empty")
        own, self._own_secret = self._sodium.crypto_box_keypair()
        self._client, self._cookie, nonce = client, os.urandom(96), os.urandom(16)  # kept here: it need say nothing
        welcome: bytes = self._sodium.crypto_box_afternm(own + self._cookie, b"WELCOME-" + nonce, shared)
        return b"\x07WELCOME" + nonce + welcome

    def _ready(self, initiate: bytes) -> bytes:
        cookie, number, box = initiate[9:105], initiate[105:113], initiate[113:]
        if cookie != self._cookie or int.from_bytes(number, "big") <= self._heard:
            raise RemoteProtocolError("an INITIATE of another handshake")
        self._heard = int.from_bytes(number, "big")
        self._shared = self._sodium.crypto_box_beforenm(self._client, self._own_secret)
        plain = self._sodium.crypto_box_open_afternm(box, b"CurveZMQINITIATE" + number, self._shared)
        key, nonce, vouch = plain[:_KEY], plain[_KEY : _KEY + 16], plain[_KEY + 16 : _KEY + 96]
        vouched = self._sodium.crypto_box_open(vouch, b"VOUCH---" + nonce, key, self._own_secret)
        if vouched != self._client + self._public:
            raise RemoteProtocolError("an INITIATE that vouches for another connection")
        if not self._is_allowed(key):
            raise Unwelcome("its key is not on the list of allowed hosts")
        self.peer_key = key
        self._said += 1
        number = self._said.to_bytes(8, "big")
        metadata = b"\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"
        ready: bytes = self._sodium.crypto_box_afternm(metadata, b"CurveZMQREADY---" + number, self._shared)
        return b"\x05READY" + number + ready
