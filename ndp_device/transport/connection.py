"""One host's connection to a device: bytes in, requests out; answers in, bytes out. Everything it may hold is bounded.

It speaks ZeroMQ's protocol (zmtp.py), joins what was cut, and checks checksums. It knows no other connection, and not
when it is served. What it cannot go on after is raised as ConnectionEnded: its owner closes it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ndp_device.errors import RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol.codec import Buffer, Frames
from ndp_device.transport import checksum, fragments, zmtp
from ndp_device.transport.curve import CurveSession, Unwelcome
from ndp_device.transport.shm import ShmChannel
from ndp_device.transport.system import READABLE, WRITABLE, Clock, Stream

MAX_WAITING = 16
"""Messages of one peer that wait here; more stay in its own queues. A host has 8 Execute in flight at most."""

MAX_WAITING_BYTES = 64 << 20
MAX_UNREAD_BYTES = 64 << 20
"""Answers a peer has not read: above this, its next requests wait; twice this ends the connection."""

HANDSHAKE_NS = 500_000_000
HANDSHAKES_NS = 5_000_000
"""Of every 50 ms, for the arithmetic of CURVE handshakes: peers that nobody knows yet cannot take the device's time."""

MESSAGE_NS = 10_000_000_000
"""Within which a message that has begun must be here."""

READ_AT_ONCE = 1 << 20
"""Bytes of one peer, before the others are looked at."""

_CHECKED_LATER_BYTES = 1 << 20
"""To check a longer body takes milliseconds: that is done in the turn of its host, and charged to it."""

_NOT_LOOKED_AT = "not looked at yet"

DOORBELL = b""
"""The message that only says: look into the shared memory."""

_log = logging.getLogger(__name__)


class ConnectionEnded(Exception):
    """No more can come of this connection. `level`: how loud the log says why; without a reason it is silent."""

    def __init__(self, reason: str = "", level: int = logging.WARNING) -> None:
        super().__init__(reason)
        self.level = level


class Received(NamedTuple):
    """A request as it arrived; `damage` says what is wrong with it."""

    client: bytes
    frames: Frames
    damage: str | None
    seen_ns: int  # when this device first saw it
    channel: ShmChannel | None = None

    def release(self) -> None:
        """The frames are not needed any more: their ring slot may be written again."""
        if self.channel is not None:
            self.channel.release()


class HandshakeTime:
    """What all handshakes together may still take of the device's time in this period."""

    def __init__(self) -> None:
        self.left_ns = HANDSHAKES_NS

    def begin_period(self) -> None:
        self.left_ns = HANDSHAKES_NS


class Connection:
    """One connection, what has arrived on it, and what has not left yet."""

    def __init__(
        self,
        client: bytes,
        connected: Stream,
        clock: Clock,
        curve: CurveSession | None,
        handshake_time: HandshakeTime,
    ) -> None:
        """client: its name in `Received`; curve: the keys that are wanted, None = none; connected: does not block."""
        self._client, self._socket, self._handshake_time = client, connected, handshake_time
        self._clock = clock
        self._reader = zmtp.Reader(curve)
        self.opened_ns = self.heard_ns = clock.monotonic_ns()
        self.waiting: deque[Received] = deque()
        self._waiting_bytes = 0
        self._has_more = False  # bytes that were read but not looked at
        self._is_unwelcome = False  # and has been told so
        self._began_ns = 0  # the message that is arriving; 0 = none
        self.joining: fragments.Joining | None = None
        self.has_memory = False  # shared with the host: an empty message is its doorbell
        self._version = 0  # that its messages show
        self._num_cut = 0
        self._unread: deque[memoryview] = deque()
        self.unread_bytes = 0
        self.sent_s = 0.0

    @property
    def may_wait(self) -> bool:
        """Another message may be read."""
        return len(self.waiting) < MAX_WAITING and self._waiting_bytes < MAX_WAITING_BYTES

    @property
    def is_ready(self) -> bool:
        """Its handshake is over."""
        return self._reader.is_ready

    @property
    def is_unparsed(self) -> bool:
        """Bytes were read whose turn has not come."""
        return self._has_more and not self._is_unwelcome

    @property
    def held_bytes(self) -> int:
        joined = self.joining.num_joined if self.joining is not None else 0
        return self._reader.held_bytes + self._waiting_bytes + self.unread_bytes + joined

    @property
    def wanted_events(self) -> int:
        """What the system should wake us for: bytes to read if there is room, room to write if there are any."""
        reads = self.may_wait and not self._has_more
        return (READABLE if reads else 0) | (WRITABLE if self._unread else 0)

    @property
    def peer_key(self) -> bytes | None:
        """The host's public key, once its handshake has shown it."""
        return self._reader.curve.peer_key if self._reader.curve is not None else None

    def is_late(self, now_ns: int) -> bool:
        """The handshake, or the message that has begun, takes too long."""
        slow_to_come = not self._reader.is_ready and now_ns - self.opened_ns > HANDSHAKE_NS
        is_due = bool(self._began_ns and now_ns - self._began_ns > MESSAGE_NS)
        return slow_to_come or (is_due and self.may_wait)  # else it is we who do not read

    def fileno(self) -> int:
        return self._socket.fileno()

    def take(self) -> Received:
        """The request that waited longest."""
        could_wait, received = self.may_wait, self.waiting.popleft()
        self._waiting_bytes -= _size(received.frames)
        if self._began_ns and not could_wait:
            self._began_ns = self._clock.monotonic_ns()
        frames = received.frames
        if received.damage == _NOT_LOOKED_AT:
            received = received._replace(damage=checksum.damage(frames[0], frames[1]))
        if len(frames) == 2 and received.damage is None:
            self._version = codec.peek_version(frames[0])
        return received

    def close(self) -> None:
        """End it, whatever waits."""
        self._socket.close()
        self.waiting.clear()
        self._unread.clear()
        self.unread_bytes = 0

    # -- in ------------------------------------------------------------------------------------------------------

    def read(self, now_ns: int) -> int:
        """Take what has arrived, as far as it may wait. Returns the number of bytes."""
        total = 0
        while self.may_wait and not self._has_more and total < READ_AT_ONCE:
            try:
                count = self._socket.recv_into(self._reader.buffer())
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                count = 0
            if count == 0:
                raise ConnectionEnded
            self.heard_ns = now_ns
            self._reader.filled(count)
            self.parse(now_ns)
            total += count
            if not self._reader.is_long:
                break
        return total

    def parse(self, now_ns: int) -> None:
        """Take the messages that are complete, as many as may wait."""
        self._has_more = True
        shakes_hands = self._reader.curve is not None and not self._reader.is_ready
        if self._is_unwelcome or (shakes_hands and self._handshake_time.left_ns <= 0):
            return
        start_ns = self._clock.monotonic_ns() if shakes_hands else 0
        try:
            while self.may_wait and self._has_more:
                message, self._has_more = self._reader.next()
                if message is not None:
                    self._arrived(message, now_ns)
                elif self._has_more:
                    break  # so many commands and empty frames that others come first
        except Unwelcome as error:
            _log.warning("a host was refused: %s", error)
            self._is_unwelcome = True  # and is sent away when its time for the handshake is over, having read why
            self._send(zmtp.command_frame(error.reply))
            return
        except RemoteProtocolError as error:
            level = logging.WARNING if shakes_hands else logging.INFO
            raise ConnectionEnded(f"a connection was ended: {error}", level) from None
        finally:
            if shakes_hands:
                self._handshake_time.left_ns -= self._clock.monotonic_ns() - start_ns
        if self._reader.is_empty and self.joining is None:
            self._began_ns = 0
        elif not self._began_ns:
            self._began_ns = now_ns
        if self._reader.replies:
            replies, self._reader.replies = self._reader.replies, bytearray()
            if self.unread_bytes < MAX_UNREAD_BYTES:
                self._send([bytes(replies)])

    def _arrived(self, message: Frames, now_ns: int) -> None:
        damage = None
        if len(message) == 1 and message[0] == DOORBELL and self.has_memory:
            return  # it has done its work by waking us
        if fragments.is_fragment(message):
            try:
                if self.joining is None or fragments.begins(message):
                    self.joining = None
                    self.joining = fragments.Joining(message)
                    return
                joined = self.joining.add(message)
                if joined is None:
                    return
                message = joined
            except RemoteProtocolError as error:
                message, damage = (self.joining.header if self.joining is not None else b"", b""), str(error)
        elif len(message) == 2 and len(message[1]) > _CHECKED_LATER_BYTES:
            damage = _NOT_LOOKED_AT
        elif len(message) == 2:
            damage = checksum.damage(message[0], message[1])
        self.joining = None
        self.waiting.append(Received(self._client, message, damage, now_ns))
        self._waiting_bytes += _size(message)
        self._began_ns = 0  # what follows it in the same bytes begins now

    # -- out -----------------------------------------------------------------------------------------------------

    def greet(self) -> None:
        """Send the first bytes."""
        self._send([self._reader.greeting])

    def send(self, frames: Frames) -> None:
        """Write the checksum and send, in parts where the message is long. Never blocks."""
        header, body = frames
        if fragments.must_cut(body, self._version):
            self._send_cut(frames, writes_checksum=True)
        else:
            self.send_message((checksum.write(header, body), body))

    def send_as_is(self, frames: Frames) -> None:
        """Send frames that have their checksum, right or wrong."""
        if len(frames) == 2 and fragments.must_cut(frames[1], self._version):
            self._send_cut(frames, writes_checksum=False)
        else:
            self.send_message(frames)

    def send_message(self, frames: Frames) -> None:
        """Send exactly these frames as one message."""
        self._send(self._reader.encoded(frames))

    def write(self) -> None:
        """Send what the system takes of what has not left yet."""
        try:
            while self._unread:
                sent = self._socket.sendmsg([self._unread[i] for i in range(min(len(self._unread), 16))])
                self.unread_bytes -= sent
                while sent:
                    first = self._unread.popleft()
                    if sent < len(first):
                        self._unread.appendleft(first[sent:])
                        break
                    sent -= len(first)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            raise ConnectionEnded from None

    def _send_cut(self, frames: Frames, *, writes_checksum: bool) -> None:
        self._num_cut += 1
        for part in fragments.cut(self._num_cut, *frames, writes_checksum=writes_checksum):
            self.send_message(part)

    def _send(self, buffers: Iterable[Buffer]) -> None:
        self.sent_s = self._clock.monotonic()
        for buffer in buffers:
            self._unread.append(memoryview(buffer))  # the codec makes a new body for each message: safe to keep
            self.unread_bytes += len(buffer)
        self.write()
        if self.unread_bytes > 2 * MAX_UNREAD_BYTES:
            raise ConnectionEnded(f"a peer that left {self.unread_bytes >> 20} MiB of answers unread was sent away")


def _size(frames: Frames) -> int:
    return sum(map(len, frames))
