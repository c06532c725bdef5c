"""What the host needs of a connection, and the connection that is none: a handler in the same process. No socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from ndp_device.errors import RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol.codec import Frames
from ndp_device.protocol.messages import SlotOffer
from ndp_device.transport import checksum

_MAX_REPLIES = 64


class ClientTransport(Protocol):
    """The host's end of one connection attempt. After `receive` raised, close it and make another.

    Frames go in without a checksum and come out checked. What `receive` returned is valid until the next call of it.
    """

    @property
    def is_ready(self) -> bool:
        """A message may be sent, as far as is known: the handshake is over."""
        ...

    @property
    def can_share_memory(self) -> bool: ...

    def attach(self, offer: SlotOffer) -> bool:
        """Use the device's shared memory from now on, if it can be had."""
        ...

    def send(self, frames: Frames) -> bool:
        """Hand the frames over without waiting. False: no connection, or its queue is full."""
        ...

    def receive(self, timeout_s: float) -> Frames | None:
        """The next message, or None after timeout_s at most. Raises DeviceUnavailable or RemoteProtocolError."""
        ...

    def close(self) -> None: ...


class InProcessTransport:
    """Calls `reply` where a socket would be: same frames, same checks, no other process."""

    is_ready = True
    can_share_memory = False

    def __init__(self, reply: Callable[[bytes, Frames, str | None], Frames], client: bytes = b"in-process") -> None:
        self._reply, self._client = reply, client
        self._replies: deque[Frames] = deque(maxlen=_MAX_REPLIES)

    def attach(self, offer: SlotOffer) -> bool:
        return False

    def send(self, frames: Frames) -> bool:
        header, body = frames
        request = checksum.write(header, body), body
        header, body = self._reply(self._client, request, checksum.damage(*request))
        self._arrive((checksum.write(header, body), body))
        return True

    def _arrive(self, frames: Frames) -> None:
        self._replies.append(frames)

    def receive(self, timeout_s: float) -> Frames | None:
        if not self._replies:
            return None
        frames = self._replies.popleft()
        if len(frames) != 2:
            raise RemoteProtocolError(f"a message has two frames, the device sent {len(frames)}")
        require_intact(*frames)
        return frames

    def close(self) -> None:
        self._replies.clear()


def require_intact(header: codec.Buffer, body: codec.Buffer) -> None:
    """Raise RemoteProtocolError unless the header holds the checksum of these bytes."""
    if damage := checksum.damage(header, body):
        codec.refuse_damaged(header, damage)
