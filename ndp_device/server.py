"""Receive, hand over, reply: one loop, exactly one reply per request. Knows no message; fair_queue.py chooses the next.

The loop that computes is the loop that answers Ping, so a device that answers is a device that works.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable
from types import FrameType

from ndp_device.fair_queue import FairQueue
from ndp_device.handler import Handler
from ndp_device.idle_cores import IdleCores
from ndp_device.process import Parent
from ndp_device.protocol.codec import Frames
from ndp_device.transport.base import Clock, Received, ServerTransport

_IDLE_MS = 250  # how often an idle device looks for its parent and for a signal
_SILENT_NS = 500_000_000  # nobody asked for so long: no decode is running, which would ask every few milliseconds
_FAILS_AT_MOST = 100  # one after the other, of no single peer's doing (transport/base.py): then there is no hope
_log = logging.getLogger(__name__)


class Server:
    """Serves until it is told to stop, by SIGTERM, SIGINT, Shutdown or the end of its parent."""

    def __init__(
        self,
        transport: ServerTransport,
        handler: Handler,
        *,
        parent: Parent | None = None,
        failpoints: Callable[[Frames], Iterable[Frames]] | None = None,
        clock: Clock = time,
    ) -> None:
        self._clock = clock
        self._transport, self._handler = transport, handler
        self._parent = parent
        self._failpoints = failpoints  # of tests: what really leaves for one reply
        self._cores = IdleCores()
        self._served_ns = clock.monotonic_ns()
        self._preparing = False
        self._queue = FairQueue()
        handler.offer_memory, handler.others_compute = transport.offer_memory, self._others_compute
        transport.on_gone = self._forget
        self._stopping = False

    def run(self, announce: Callable[[], None] = lambda: None) -> None:
        """Serve until told to stop. `announce` is called once a signal would already end this in order."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        announce()
        failed = 0
        while not (self._stopping or self._handler.stopping or self._orphaned()):
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
        """For a request. After a while without one, and on idle cores, prepare what may be asked for, step by step."""
        received = self.next_request(0 if self._preparing else _IDLE_MS)
        if received is not None:
            self._preparing = False
        else:
            self._preparing = (
                self._handler.can_prepare_ahead
                and self._cores.are_idle()
                and self._clock.monotonic_ns() - self._served_ns > _SILENT_NS
                and self._handler.prepare_ahead()
            )
        return received

    def next_request(self, timeout_ms: int) -> Received | None:
        """Take what has arrived; of all that waits, what is to be served now."""
        queue = self._queue
        if not queue.is_full:
            for received in self._transport.receive(0 if queue.num_waiting else timeout_ms):
                if not queue.add(received):
                    self._transport.drop(received.client)
        return queue.next()

    def serve(self, received: Received) -> None:
        """Answer one request."""
        handler, client = self._handler, received.client
        start_ns, executed = self._clock.monotonic_ns(), handler.num_executed
        handler.queue_depth = self._queue.num_waiting
        try:
            reply = handler.reply(client, received.frames, received.damage, (start_ns - received.seen_ns) // 1000)
            received.release()
            self._send(client, reply)
        except Exception:  # a mistake of this program: one peer loses its connection, nobody loses the device
            _log.exception("a request could not even be refused")
            self._transport.drop(client)
        now_ns = self._served_ns = self._clock.monotonic_ns()
        self._queue.served(client, now_ns - start_ns, now_ns, computed=handler.num_executed > executed)

    def _send(self, client: bytes, reply: Frames) -> None:
        if self._failpoints is None:
            self._transport.send(client, reply)
            return
        for outgoing in self._failpoints(self._transport.with_checksum(client, reply)):
            self._transport.send_as_is(client, outgoing)

    def _others_compute(self, client: bytes) -> bool:
        return self._queue.others_compute(client, self._clock.monotonic_ns())

    def _forget(self, client: bytes) -> None:
        self._queue.forget(client)
        self._handler.forget(client)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _orphaned(self) -> bool:
        return self._parent is not None and self._parent.is_gone
