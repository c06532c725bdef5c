"""What the host needs of a connection, and the connection that is none: a handler in the same process. No socket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from ndp_device.errors import RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol.messages import SlotOffer
from ndp_device.transport.shm import Frames

_MAX_REPLIES = 64


class ClientTransport(Protocol):
    """The host's end of one connection attempt. After `receive` raised, close it and make another.

    Frames go in unsealed and come out checked. What `receive` returned is valid until the next call of it.
    """

    @property
    def wants_slots(self) -> bool: ...

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

    wants_slots = False

    def __init__(self, reply: Callable[[bytes, Frames, codec.Buffer], Frames], client: bytes = b"in-process") -> None:
        self._reply, self._client = reply, client
        self._replies: deque[Frames] = deque(maxlen=_MAX_REPLIES)

    def attach(self, offer: SlotOffer) -> bool:
        return False

    def send(self, frames: Frames) -> bool:
        header, body = frames
        header, body = self._reply(self._client, (codec.seal(header, body), body), body)
        self._arrive((codec.seal(header, body), body))
        return True

    def _arrive(self, frames: Frames) -> None:
        self._replies.append(frames)

    def receive(self, timeout_s: float) -> Frames | None:
        if not self._replies:
            return None
        frames = self._replies.popleft()
        if len(frames) != 2:
            raise RemoteProtocolError(f"a message has two frames, the device sent {len(frames)}")
        codec.check(frames[0], frames[1])
        return frames

    def close(self) -> None:
        self._replies.clear()
