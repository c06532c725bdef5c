"""Receive, hand over, reply: one loop, one thread, exactly one reply per request. Knows no message but the queue.

The loop that computes is the loop that answers Ping, so a device that answers is a device that works.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from ndp_device.errors import NdpError
from ndp_device.handler import Handler
from ndp_device.protocol.codec import Frames
from ndp_device.quiet_cores import QuietCores
from ndp_device.transport.zmq_server import Received, ZmqServer

MAX_QUEUE = 64
"""Requests that may wait while one is computed; the next one is told `busy`."""

_IDLE_MS = 250  # how often an idle device looks for its parent and for a signal
_SILENT_NS = 500_000_000  # nobody asked for so long: no decode is running, which would ask every few milliseconds
_LONG_NS = 1_000_000  # after serving one request for longer, the others are looked at, so that their wait is known
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger(__name__)


class Server:
    """Serves until it is told to stop, by SIGTERM, SIGINT, Shutdown or the end of its parent."""

    def __init__(
        self,
        transport: ZmqServer,
        handler: Handler,
        *,
        parent_pid: int | None = None,
        private_dir: Path | None = None,
        failpoints: Callable[[Frames], Iterable[Frames]] | None = None,
    ) -> None:
        self._transport, self._handler = transport, handler
        self._parent_pid = parent_pid
        self._private_dir = private_dir  # made for us by our parent, who removes it unless it was killed
        self._failpoints = failpoints  # of tests: what really leaves for one reply
        self._cores = QuietCores()
        self._served_ns = time.monotonic_ns()
        self._preparing = False
        self._queue: deque[tuple[Received, int]] = deque()
        handler.offer_memory = transport.offer_memory
        self._stopping = False

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        if self._parent_pid is not None:
            self._follow(self._parent_pid)
        while not (self._stopping or self._handler.stopping or self._orphaned()):
            if not self._queue:
                self._wait()
            if self._queue:
                start_ns = time.monotonic_ns()
                self._serve(*self._queue.popleft())
                if self._queue or time.monotonic_ns() - start_ns > _LONG_NS:
                    while self._accept(self._transport.receive(0)):
                        pass
        if self._orphaned():
            self._remove_private_dir()
        _log.info("stopped after %d Execute requests", self._handler.num_executed)

    def _wait(self) -> None:
        """For a request. After a while without one, and on idle cores, prepare what may be asked for, step by step."""
        if self._accept(self._transport.receive(0 if self._preparing else _IDLE_MS)):
            self._preparing = False
        else:
            self._preparing = (
                self._handler.can_prepare_ahead
                and self._cores.are_quiet()
                and time.monotonic_ns() - self._served_ns > _SILENT_NS
                and self._handler.prepare_ahead()
            )

    def _accept(self, received: Received | None) -> bool:
        """Queue a request, stamped with the time this loop first saw it."""
        if received is None:
            return False
        if len(self._queue) < MAX_QUEUE:
            self._queue.append((received, time.monotonic_ns()))
        else:
            refusal = self._handler.refuse(received.frames, "busy", f"{MAX_QUEUE} requests are waiting already")
            self._transport.send(received.client, refusal)
            received.release()
        return True

    def _serve(self, received: Received, seen_ns: int) -> None:
        self._handler.queue_depth = len(self._queue)
        client, waited_us = received.client, (time.monotonic_ns() - seen_ns) // 1000
        reply = self._handler.reply(client, received.frames, received.damage, waited_us)
        received.release()
        if self._failpoints is None:
            self._transport.send(client, reply)
        else:
            for outgoing in self._failpoints(self._transport.with_checksum(client, reply)):
                self._transport.send_as_is(client, outgoing)
        self._served_ns = time.monotonic_ns()

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _orphaned(self) -> bool:
        return self._parent_pid is not None and os.getppid() != self._parent_pid

    def _follow(self, parent_pid: int) -> None:
        """Ask the kernel for a signal when the parent ends.

        Linux sends it when the *thread* that started us ends, so it only makes us look who our parent is. It also
        ends a computation that hangs.
        """
        signal.signal(signal.SIGUSR1, self._look_for_parent)
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0):
            raise NdpError(f"cannot follow parent {parent_pid}: {os.strerror(ctypes.get_errno())}")

    def _look_for_parent(self, signum: int, frame: FrameType | None) -> None:
        if self._orphaned():
            self._remove_private_dir()
            os._exit(0)

    def _remove_private_dir(self) -> None:
        if self._private_dir is not None:
            shutil.rmtree(self._private_dir, ignore_errors=True)
