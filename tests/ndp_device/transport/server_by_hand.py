"""A ZmqServer without a program around it, whose requests a test takes one by one."""

import time
from collections import deque
from pathlib import Path

from until import until

from ndp_device import transport
from ndp_device.protocol.codec import Frames
from ndp_device.transport.address import Address
from ndp_device.transport.base import Received
from ndp_device.transport.keys import DeviceKeys
from ndp_device.transport.zmq_client import ZmqTransport
from ndp_device.transport.zmq_server import ZmqServer

PATIENCE_S = 60.0
LOOPBACK = Path("insecure-loopback")


class HandServer(ZmqServer):
    def __init__(self, address: Address, keys: DeviceKeys | None = None) -> None:
        super().__init__(address, keys)
        self._arrived: deque[Received] = deque()

    def one(self, timeout_ms: int = 0) -> Received | None:
        """The next request, or None after timeout_ms."""
        if not self._arrived:
            self._arrived.extend(self.receive(timeout_ms))
        return self._arrived.popleft() if self._arrived else None

    def until_one(self) -> Received:
        return until(lambda: self.one(50), PATIENCE_S, pause_s=0)

    def until(self, number: int) -> None:
        """Until so many peers are known."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self._peers) != number:
            assert time.monotonic() < deadline
            self._arrived.extend(self.receive(10))


def serving(directory: Path) -> HandServer:
    return HandServer(Address.parse(f"ipc://{directory}/private/device"))


def host_of(address: str, keys: Path | None = None) -> ZmqTransport:
    return transport.connect(address, LOOPBACK if keys is None and address.startswith("tcp") else keys)


def ask(server: HandServer, host: ZmqTransport, frames: Frames) -> Received:
    """What the device receives of this message."""
    deadline = time.monotonic() + PATIENCE_S
    while not host.send(frames):
        assert time.monotonic() < deadline
        server._arrived.extend(server.receive(1))
    return server.until_one()


def answer(host: ZmqTransport, seconds: float = PATIENCE_S) -> Frames:
    return until(lambda: host.receive(0.05), seconds, pause_s=0)
