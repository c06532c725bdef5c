"""CurveZMQ, both sides: who may come in, and the boxes that frames travel in. Pure: no socket, no file.

    HELLO -> WELCOME -> INITIATE -> READY, then every frame is a MESSAGE: a nonce that only rises, and a box

The arithmetic is libsodium's, by PyNaCl. A host proves that it knows the device's public key before anything is kept
of it, and shows its own key inside a box; a device proves that it has its secret by answering at all.
source: rfc.zeromq.org/spec/26; both sides also speak with libzmq's CURVE.
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


class _Boxes:
    """What both sides of one connection do once they share a key."""

    _SAID, _HEARD = b"", b""  # what the nonces of our boxes and of theirs begin with

    def __init__(self) -> None:
        self._sodium = load_sodium()
        self.peer_key: bytes | None = None  # known, and welcome: the handshake is done
        self._own_secret = b""  # for this connection alone
        self._shared = b""
        self._heard = self._said = 0  # nonces

    def boxed(self, flags: int, content: Buffer) -> bytes:
        """The frame that carries this one. flags: 1 = more frames follow, 2 = a command."""
        number = self._next_nonce()
        box: bytes = self._sodium.crypto_box_afternm(bytes([flags]) + bytes(content), self._SAID + number, self._shared)
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
            plain = self._sodium.crypto_box_open_afternm(frame[16:], self._HEARD + frame[8:16], self._shared)
        except Exception:
            raise RemoteProtocolError("a frame that was forged or damaged") from None
        self._heard = number
        return plain[0], plain[1:]

    def _next_nonce(self) -> bytes:
        self._said += 1
        return self._said.to_bytes(8, "big")


class CurveHost(_Boxes):
    """The side that connects, and knows whose public key it wants to meet."""

    _SAID, _HEARD = b"CurveZMQMESSAGEC", b"CurveZMQMESSAGES"

    def __init__(self, secret: bytes, public: bytes, device: bytes) -> None:
        super().__init__()
        self._secret, self._public, self._device = secret, public, device
        self._own_public = b""
        self._has_vouched = False

    def hello(self) -> bytes:
        """The first command of the handshake."""
        self._own_public, self._own_secret = self._sodium.crypto_box_keypair()
        number = self._next_nonce()
        box = self._sodium.crypto_box(bytes(64), b"CurveZMQHELLO---" + number, self._device, self._own_secret)
        return b"\x05HELLO\x01\x00" + bytes(72) + self._own_public + number + bytes(box)

    def obey(self, command: bytes) -> bytes:
        """The answer to a command of the handshake, empty where it is done. Raises RemoteProtocolError."""
        try:
            if command.startswith(b"\x07WELCOME") and not self._has_vouched:
                return self._initiate(command)
            if command.startswith(b"\x05READY") and self._has_vouched and self.peer_key is None:
                self._sodium.crypto_box_open_afternm(command[14:], b"CurveZMQREADY---" + command[6:14], self._shared)
                self._heard = int.from_bytes(command[6:14], "big")
                self.peer_key = self._device
                return b""
        except Exception:  # PyNaCl has several kinds of its own
            raise RemoteProtocolError("a device that does not have the secret of its public key") from None
        raise RemoteProtocolError("a command that has no place in this CURVE handshake")

    def _initiate(self, welcome: bytes) -> bytes:
        sodium = self._sodium
        plain = sodium.crypto_box_open(welcome[24:], b"WELCOME-" + welcome[8:24], self._device, self._own_secret)
        theirs, cookie, nonce = plain[:_KEY], plain[_KEY : _KEY + 96], os.urandom(16)
        self._shared = sodium.crypto_box_beforenm(theirs, self._own_secret)
        vouch = sodium.crypto_box(self._own_public + self._device, b"VOUCH---" + nonce, theirs, self._secret)
        metadata = b"\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
        number = self._next_nonce()
        box: bytes = sodium.crypto_box_afternm(
            self._public + nonce + vouch + metadata, b"CurveZMQINITIATE" + number, self._shared
        )
        self._has_vouched = True
        return b"\x08INITIATE" + bytes(cookie) + number + box


class CurveSession(_Boxes):
    """The side that listens: one connection's handshake, and its keys afterwards."""

    _SAID, _HEARD = b"CurveZMQMESSAGES", b"CurveZMQMESSAGEC"

    def __init__(self, secret: bytes, public: bytes, is_allowed: Callable[[bytes], bool]) -> None:
        """is_allowed: whether the host with this public key may come in."""
        super().__init__()
        self._secret, self._public, self._is_allowed = secret, public, is_allowed
        self._client = b""  # its key for this connection alone
        self._cookie = b""

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
        number = self._next_nonce()
        metadata = b"\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"
        ready: bytes = self._sodium.crypto_box_afternm(metadata, b"CurveZMQREADY---" + number, self._shared)
        return b"\x05READY" + number + ready
