"""Receive, hand over, reply: one loop, exactly one reply per request.

The loop that computes is the loop that answers Ping, so a device that answers is a device that works.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from ndp_device.handler import Handler
from ndp_device.process import Parent
from ndp_device.transport.base import Clock, Received

if TYPE_CHECKING:
    from ndp_device.transport import ZmqServer

MAX_WAITING = 64
"""Requests of one client that may wait here. A host has 8 Execute in flight at most: who sends more is wrong."""

MAX_WAITING_BYTES = 512 << 20
"""Most bytes of waiting requests of all clients. Above it the device reads nothing more, and the transport's bounded
queues fill."""

GOES_ON_NS = 1_000_000_000
"""Time after its last request in which a host that computes is expected to continue."""

_NEWCOMERS = b""


class _Account:
    def __init__(self, spent_ns: float) -> None:
        self.spent_ns = spent_ns  # the start tag of its next request
        self.waiting: deque[Received] = deque()
        self.computed_ns = 0


class FairQueue:
    """Whose request is next: the host's that was served least (start-time fair queueing over measured time).

    A host that has computed has an account of its own. All others share one, so many newcomers together cost a host as
    much as one newcomer would. Within an account requests are served as they came.
    """

    def __init__(self) -> None:
        self._spent_ns = 0.0  # the start tag of the request that is or was being served
        self._accounts: dict[bytes, _Account] = {_NEWCOMERS: _Account(0.0)}
        self._waiting: Counter[bytes] = Counter()  # requests of each client
        self._bytes = 0

    @property
    def num_waiting(self) -> int:
        return self._waiting.total()

    @property
    def is_full(self) -> bool:
        return self._bytes > MAX_WAITING_BYTES

    def add(self, received: Received) -> bool:
        """False: too many of this client wait already."""
        client = received.client
        if self._waiting[client] >= MAX_WAITING:
            return False
        self._waiting[client] += 1
        self._bytes += _size(received)
        self._account(client).waiting.append(received)
        return True

    def next(self) -> Received | None:
        account = min(
            (account for account in self._accounts.values() if account.waiting),
            key=lambda account: account.spent_ns,
            default=None,
        )
        if account is None:
            return None
        self._spent_ns = account.spent_ns = max(account.spent_ns, self._spent_ns)
        received = account.waiting.popleft()
        self._took(received)
        return received

    def served(self, client: bytes, cost_ns: int, now_ns: int, *, computed: bool) -> None:
        """How long the request last taken was worked on, and whether it was an Execute."""
        self._account(client).spent_ns = self._spent_ns + cost_ns
        if computed:
            if client not in self._accounts:
                self._accounts[client] = self._opened(client)
            self._accounts[client].computed_ns = now_ns

    def others_compute(self, client: bytes, now_ns: int) -> bool:
        """Whether another host than this one has computed lately, and so is likely to wait for what is done now."""
        return any(
            account.computed_ns > now_ns - GOES_ON_NS
            for name, account in self._accounts.items()
            if name not in (client, _NEWCOMERS)
        )

    def forget(self, client: bytes) -> None:
        """Its connection is gone, and nobody would read its answers."""
        if self._waiting[client]:
            account = self._account(client)
            for received in account.waiting:
                if received.client == client:
                    self._took(received)
            account.waiting = deque(received for received in account.waiting if received.client != client)
        self._accounts.pop(client, None)
        self._waiting.pop(client, None)

    def _account(self, client: bytes) -> _Account:
        return self._accounts.get(client) or self._accounts[_NEWCOMERS]

    def _opened(self, client: bytes) -> _Account:
        """Open an account for this client. Its earlier requests wait there, not with the newcomers."""
        newcomers, account = self._accounts[_NEWCOMERS], _Account(self._spent_ns)
        account.waiting.extend(received for received in newcomers.waiting if received.client == client)
        newcomers.waiting = deque(received for received in newcomers.waiting if received.client != client)
        return account

    def _took(self, received: Received) -> None:
        self._waiting[received.client] -= 1
        self._bytes -= _size(received)


def _size(received: Received) -> int:
    return sum(map(len, received.frames))


_IDLE_MS = 250  # how often an idle device looks for its parent and for a signal
_SILENT_NS = 500_000_000  # nobody asked for so long: no decode is running, which would ask every few milliseconds
_FAILS_AT_MOST = 100  # one after the other, of no single peer's doing (transport/base.py): then there is no hope
_log = logging.getLogger(__name__)


class Server:
    """Serves until it is told to stop, by SIGTERM, SIGINT or the end of its parent."""

    def __init__(
        self,
        transport: ZmqServer,
        handler: Handler,
        *,
        parent: Parent | None = None,
        clock: Clock = time,
    ) -> None:
        self._clock = clock
        self._transport, self._handler = transport, handler
        self._parent = parent
        self._served_ns = clock.monotonic_ns()
        self._preparing = False
        self._queue = FairQueue()
        handler.offer_memory = transport.offer_memory
        handler.others_compute = lambda client: self._queue.others_compute(client, clock.monotonic_ns())
        transport.on_gone = self._forget
        self._stopping = False

    def run(self, announce: Callable[[], None] = lambda: None) -> None:
        """Serve until told to stop. `announce` is called once a signal would already end this in order."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        announce()
        failed = 0
        while not (self._stopping or (self._parent is not None and self._parent.is_gone)):
            try:
                received = self._wait()
                failed = 0
            except Exception:  # a mistake of this program, or a system without memory: nobody loses the device by one
                failed += 1
                if failed == _FAILS_AT_MOST:
                    raise
                _log.exception("to look for requests failed")
                continue
            if received is not None:
                self.serve(received)
        if self._parent is not None and self._parent.is_gone:
            self._parent.clean_up()
        _log.info("stopped after %d Execute requests", self._handler.num_executed)

    def _wait(self) -> Received | None:
        """For a request. After a while without one, prepare what may be asked for, step by step."""
        received = self.next_request(0 if self._preparing else _IDLE_MS)
        if received is not None:
            self._preparing = False
        else:
            is_silent = self._clock.monotonic_ns() - self._served_ns > _SILENT_NS
            self._preparing = is_silent and self._handler.prepare_ahead()
        return received

    def next_request(self, timeout_ms: int) -> Received | None:
        """Take what has arrived; of all that waits, what is to be served now."""
        queue = self._queue
        if not queue.is_full:
            for received in self._transport.receive(0 if queue.num_waiting else timeout_ms):
                if not queue.add(received):
                    self._transport.drop(
                        received.client, f"{MAX_WAITING} requests of it wait here, and it sent another"
                    )
        return queue.next()

    def serve(self, received: Received) -> None:
        """Answer one request."""
        handler, client = self._handler, received.client
        start_ns, executed = self._clock.monotonic_ns(), handler.num_executed
        handler.queue_depth = self._queue.num_waiting
        try:
            reply = handler.reply(client, received.frames, received.damage, (start_ns - received.seen_ns) // 1000)
            received.release()
            self._transport.send(client, reply)
        except Exception:  # a mistake of this program: one peer loses its connection, nobody loses the device
            _log.exception("a request could not even be refused")
            self._transport.drop(client, "what it asked could not be answered")
        now_ns = self._served_ns = self._clock.monotonic_ns()
        self._queue.served(client, now_ns - start_ns, now_ns, computed=handler.num_executed > executed)

    def _forget(self, client: bytes) -> None:
        self._queue.forget(client)
        self._handler.forget(client)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True
