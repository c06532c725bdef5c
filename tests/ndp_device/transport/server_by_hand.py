"""A ZmqServer without a program around it: hosts whose requests wait in it; and two clocks that tests own."""

from __future__ import annotations

import time
from collections.abc import Callable

from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.transport.system import System
from ndp_device.transport.zmq_client import ZmqTransport
from ndp_device.transport.zmq_server import ZmqServer

PATIENCE_S = 60.0


def connected(server: ZmqServer, number: int) -> ZmqTransport:
    """A host whose request `number` waits in the server."""
    transport = ZmqTransport(server.address)
    deadline = time.monotonic() + PATIENCE_S
    while not transport.send(codec.encode(msg.Ping(number))):
        server._connections.look(0.001)
        assert time.monotonic() < deadline
    return transport


def served_ids(server: ZmqServer, count: int, cost_ns: int, computed: Callable[[int], bool]) -> list[int]:
    """The ids of the next `count` requests, each of which is said to have taken cost_ns."""
    ids = []
    deadline = time.monotonic() + PATIENCE_S
    while len(ids) < count and time.monotonic() < deadline:
        if received := server.receive(50):
            ids.append(codec.peek_id(received.frames[0]))
            server.served(received.client, cost_ns, computed=computed(ids[-1]), greeted=True)
    return ids


class Ticking(System):
    """Every look at the clock takes a millisecond."""

    def __init__(self) -> None:
        self.clock = self  # type: ignore[assignment]
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        self.now_ns += 1_000_000
        return self.now_ns

    def thread_time_ns(self) -> int:
        return self.monotonic_ns()

    def monotonic(self) -> float:
        return self.monotonic_ns() / 1e9

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)

    def run_beside(self, work: Callable[[], None]) -> None:
        pass


class Hands:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns

    def thread_time_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns / 1e9

    def sleep(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
