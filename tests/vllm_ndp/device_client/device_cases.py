"""A device of the bundled model in full precision, and calls whose right answers are known beforehand."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from caller import Call, random_calls
from failpoints import Failpoint, Failpoints
from numpy.typing import NDArray
from paths import MODEL

from ndp_device.common.errors import RemoteProtocolError
from ndp_device.handler import Handler
from ndp_device.kernels.native import NativeKernel
from ndp_device.protocol.codec import Frames
from ndp_device.replicas.store import ExpertStore
from ndp_device.transport.base import damage_of, require_intact, write_checksum


def make_calls(count: int = 16) -> list[Call]:
    """Of the bundled model; with the answers."""
    kernel = NativeKernel()
    return random_calls(ExpertStore(MODEL, None, kernel=kernel), kernel, count, seed=7)


def make_handler() -> Handler:
    return Handler.of_files(MODEL)


def full_plan() -> NDArray[np.uint8]:
    """Every expert in full precision: bit 4 of a plan's mask."""
    return np.full((4, 8), 1 << 4, np.uint8)


def failing(kind: str) -> Failpoints:
    return Failpoints([Failpoint(kind, 1.0, 0)], seed=0)


def honest(reply: Frames) -> tuple[Frames, ...]:
    return (reply,)


class FaultyDevice:
    """Connections to a handler in this process whose replies pass through `fault`, a callable like Failpoints."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.reachable = True
        self.num_connections = 0
        self.fault: Any = honest

    def connect(self, address: str, keys: Path | None) -> FaultyTransport:
        self.num_connections += 1
        return FaultyTransport(self, b"%d" % self.num_connections)


class FaultyTransport:
    """Asks the handler where a socket would: same frames, same checks, no other process."""

    is_ready = True
    can_share_memory = False

    def __init__(self, device: FaultyDevice, client: bytes) -> None:
        self._device, self._client = device, client
        self._replies: deque[Frames] = deque(maxlen=64)

    def attach(self, offer: object) -> bool:
        return False

    def send(self, frames: Frames) -> bool:
        if not self._device.reachable:
            return False
        header, body = frames
        request = write_checksum(header, body), body
        header, body = self._device.handler.reply(self._client, request, damage_of(*request))
        self._replies.extend(self._device.fault((write_checksum(header, body), body)))
        return True

    def send_execute(self, asked: object, tensors: object) -> bool:
        return False

    def send_ahead(self, order: object, asked: object) -> bool:
        return False

    def sent_ahead(self, crossed: object) -> None: ...

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
