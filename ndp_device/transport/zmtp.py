"""ZeroMQ's protocol on the wire, both sides: bytes in, messages of frames out. Pure: no socket, no clock.

    greeting (64 bytes) | READY command | then messages, PING commands in between

libzmq is not used here because a peer must not be able to end the device: libzmq's ROUTER gives nameless peers
predictable names and aborts when another peer has taken the next one, aborts when a descriptor cannot be had, and
bounds neither the frames of a message nor the bytes that wait. The last holds for a host's DEALER as well: a device
that never ends a message would fill its host's memory. Either side also speaks with any ZeroMQ library.
source: rfc.zeromq.org/spec/37 (ZMTP 3.1) with the NULL mechanism, or with CURVE (curve.py), which boxes every frame.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ndp_device.errors import RemoteProtocolError
from ndp_device.protocol.codec import Buffer, Frames
from ndp_device.protocol.messages import MAX_BODY_BYTES
from ndp_device.transport.curve import OVERHEAD_BYTES, CurveHost, CurveSession

MAX_FRAMES = 4
"""Of one message: two or three are meant, one more is answered by a sentence, five end the connection."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE_BYTES = 10
_GREETING_BYTES = 64
_NULL, _CURVE = b"NULL".ljust(20, b"\0"), b"CURVE".ljust(20, b"\0")
_BOXED_MORE, _BOXED_COMMAND = 1, 2
_MAX_COMMAND_BYTES = 1024
_COPIED_BYTES = 64 << 10  # a longer frame is read to where it stays
_SCRATCH_BYTES = 64 << 10


def _command(name: bytes, rest: bytes) -> bytes:
    body = bytes([len(name)]) + name + rest
    return bytes((_COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


_SIGNATURE = b"\xff" + bytes(8) + b"\x7f" + bytes((3, 1))
GREETING = _SIGNATURE + _NULL + bytes(32)
CURVE_GREETING = _SIGNATURE + _CURVE + b"\x01" + bytes(31)  # as the side whose key is known
CURVE_HOST_GREETING = _SIGNATURE + _CURVE + bytes(32)
READY = _command(b"READY", _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b""))
HOST_READY = _command(b"READY", _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b""))
PING = _command(b"PING", bytes(2))  # no time to live, no context


class OtherMechanism(RemoteProtocolError):
    """One side wants keys and the other has none."""


class GaveUp(RemoteProtocolError):
    """The peer said ERROR; `reason` is what it said, such as 400 where a key is not allowed."""

    def __init__(self, reason: bytes) -> None:
        super().__init__(f"the peer gave up: {reason!r}")
        self.reason = reason


def _frame(flags: int, content: Buffer) -> Iterator[Buffer]:
    size = len(content)
    yield bytes((flags, size)) if size < 256 else bytes((flags | _LONG,)) + size.to_bytes(8, "big")
    if size:
        yield content


def command_frame(command: bytes) -> Iterator[Buffer]:
    """The bytes of a command outside any box, as in a handshake."""
    return _frame(_COMMAND, command)


def encoded(frames: Frames) -> Iterator[Buffer]:
    """The bytes of one message, without copying its frames."""
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        yield from _frame(_MORE if number < last else 0, frame)


class Reader:
    """What one peer has sent so far. Give it bytes by `buffer` and `filled`, take messages by `next`."""

    def __init__(self, curve: CurveSession | CurveHost | None = None, *, is_host: bool = False) -> None:
        """curve: keys are wanted, and who has the right ones is let in."""
        self.curve = curve
        self.greeting = GREETING if curve is None else CURVE_HOST_GREETING if is_host else CURVE_GREETING
        self._is_host = is_host
        self.replies = bytearray()  # of commands: what the peer must be sent
        self.is_ready = False
        self.max_frame_bytes = MAX_BODY_BYTES
        self._greeted = False
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._held, self._at = b"", 0  # what has arrived, and how far it was looked at
        self._frames: list[Buffer] = []  # of the message that has begun
        self._long: memoryview | None = None  # its frame that is being filled
        self._long_more = False
        self._num_filled = 0

    @property
    def held_bytes(self) -> int:
        return len(self._held) - self._at + self._num_filled + sum(map(len, self._frames))

    @property
    def is_empty(self) -> bool:
        """Nothing that has begun is unfinished."""
        return self._at == len(self._held) and not self._frames and self._long is None

    @property
    def is_long(self) -> bool:
        """A long frame is arriving: more of it is likely to be there already."""
        return self._long is not None

    def encoded(self, frames: Frames) -> Iterator[Buffer]:
        """The bytes of one message to this peer."""
        if self.curve is None:
            yield from encoded(frames)
            return
        last = len(frames) - 1
        for number, frame in enumerate(frames):
            yield from _frame(0, self.curve.boxed(_BOXED_MORE if number < last else 0, frame))

    def buffer(self) -> memoryview:
        """Where the next bytes belong."""
        return self._scratch if self._long is None else self._long[self._num_filled :]

    def filled(self, count: int) -> None:
        """The first `count` bytes of `buffer` have arrived."""
        if self._long is None:
            self._held = b"".join((memoryview(self._held)[self._at :], self._scratch[:count]))
            self._at = 0
            return
        self._num_filled += count

    def next(self, steps: int = 64) -> tuple[Frames | None, bool]:
        """(the next message or None, whether another call may pay without more bytes). Looks at `steps` frames at most.

        Raises RemoteProtocolError, after which the connection is of no use.
        """
        if self._long is not None:
            if self._num_filled < len(self._long):
                return None, False
            frame, self._long, self._num_filled = self._long.toreadonly(), None, 0
            if completed := self._take(frame, self._long_more):
                return completed, self._at < len(self._held)
        if not self._greeted and not self._greet():
            return None, False
        at, held = self._at, self._held
        message: Frames | None = None
        for _ in range(steps):
            if len(held) - at < 2:
                break
            flags, start = held[at], at + 2
            if flags & _LONG:
                start = at + 9
                if len(held) < start:
                    break
                size = int.from_bytes(held[at + 1 : start], "big")
            else:
                size = held[at + 1]
            self._check(flags, size)
            end = start + size
            if len(held) < end:
                if size <= _COPIED_BYTES:
                    break
                self._long, self._long_more = np.empty(size, np.uint8).data, bool(flags & _MORE)
                self._num_filled = len(held) - start  # memory is taken only as far as bytes arrive
                self._long[: self._num_filled] = held[start:]
                at = len(held)
                break
            at = end
            if flags & _COMMAND and not (self.curve is not None and self.is_ready):
                self._obey(held[start:end])
            elif message := self._take(held[start:end], bool(flags & _MORE)):
                break
        else:
            self._at = at
            return None, True
        self._at = at
        return message, message is not None and at < len(held)

    def _check(self, flags: int, size: int) -> None:
        if flags & ~7 or (flags & _COMMAND and flags & _MORE):
            raise RemoteProtocolError(f"a frame may have flags 0..4 and 6, got {flags}")
        room = _MAX_COMMAND_BYTES if flags & _COMMAND else self.max_frame_bytes + OVERHEAD_BYTES * bool(self.curve)
        if size > room:
            raise RemoteProtocolError(f"a frame may have {room} bytes, got {size}")
        if not flags & _COMMAND and not self.is_ready:
            raise RemoteProtocolError("a message before READY")

    def _greet(self) -> bool:
        """Look at the greeting as far as it has arrived."""
        held = self._held[:_GREETING_BYTES]  # nothing was looked at before
        if held[:1] not in (b"", b"\xff") or (len(held) >= _SIGNATURE_BYTES and not held[9] & 1):
            raise RemoteProtocolError("this is not ZeroMQ's protocol")
        if len(held) > _SIGNATURE_BYTES and held[_SIGNATURE_BYTES] < 3:
            raise RemoteProtocolError("ZMTP 3 is spoken here")
        if len(held) < _GREETING_BYTES:
            return False
        if held[12:32] != (wanted := self.greeting[12:32]):
            spoken = "keys are wanted here (CURVE)" if wanted == _CURVE else "only the NULL mechanism is spoken here"
            raise OtherMechanism(f"{spoken}, the peer speaks {held[12:32].rstrip(bytes(1))!r}")
        self._at = _GREETING_BYTES
        self._greeted = True
        if self.curve is None:
            self.replies += HOST_READY if self._is_host else READY
        elif isinstance(self.curve, CurveHost):
            self._reply(self.curve.hello())
        return True

    def _reply(self, command: bytes) -> None:
        if command:
            self.replies += b"".join(map(bytes, command_frame(command)))

    def _obey(self, command: bytes) -> None:
        name, rest = command[1 : 1 + command[0]] if command else b"", command[1 + command[0] :] if command else b""
        if self.curve is not None and not self.is_ready and not (self._is_host and name == b"ERROR"):
            self._reply(self.curve.obey(command))
            self.is_ready = self.curve.peer_key is not None
            return
        if name == b"READY":
            if self.is_ready:
                raise RemoteProtocolError("READY twice")
            self.is_ready = True
        elif name == b"PING" and self.is_ready:
            self._pong(rest[2:18])  # after the time to live comes a context of 16 bytes at most
        elif name == b"ERROR":
            raise GaveUp(rest[1:])

    def ping(self) -> bytes:
        """The bytes that ask the peer for a sign of life."""
        return self._boxed(PING)

    def _pong(self, context: bytes) -> None:
        self.replies += self._boxed(_command(b"PONG", context))

    def _boxed(self, command: bytes) -> bytes:
        if self.curve is None:
            return command
        return b"".join(map(bytes, _frame(0, self.curve.boxed(_BOXED_COMMAND, command[2:]))))

    def _take(self, frame: Buffer, more: bool) -> Frames | None:
        if self.curve is not None:
            flags, frame = self.curve.opened(frame)
            if flags & _BOXED_COMMAND:
                self._obey(bytes(frame))
                return None
            more = bool(flags & _BOXED_MORE)
        return self._add(frame, more)

    def _add(self, frame: Buffer, more: bool) -> Frames | None:
        self._frames.append(frame)
        if len(self._frames) > MAX_FRAMES or sum(map(len, self._frames)) > MAX_BODY_BYTES + (MAX_BODY_BYTES >> 4):
            raise RemoteProtocolError(f"a message may have {MAX_FRAMES} frames and one of them a body")
        if more:
            return None
        message, self._frames = self._frames, []
        return message
