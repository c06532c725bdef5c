"""Stream sockets between simulated processes: bytes take time, arrive in parts, wait for room; connections break.

What transport/system.py asks of a system, over a World. Bytes of one connection never overtake each other, those of two
do. Knows processes by what they own and whom to wake, no protocol.
"""

from __future__ import annotations

import errno
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ndp_device.transport.system import ENDED, READABLE, WRITABLE, Stream

from ndp_device.protocol.codec import Buffer
from ndp_device.transport.address import Address
from simulation.world import MS, US, Program, World


class Process:
    """Whom sockets belong to. `program`: what may wait; None: `awaken` is called whenever something has arrived."""

    def __init__(self, world: World, program: Program | None = None) -> None:
        self.world, self.program = world, program
        self.awaken: Callable[[], None] = lambda: None
        self.number = next(world.numbers)
        self.offset_ns = world.rng.randrange(10**15)  # clocks have nothing in common
        self.spent_ns = 0  # since the world's time: what the process has done in this moment
        self.streams: set[SimStream] = set()

    def notify(self) -> None:
        if self.program is not None:
            self.program.wake()
        else:
            self.awaken()

    def die(self) -> None:
        """kill -9: the system closes what it had open."""
        for stream in sorted(self.streams, key=SimStream.fileno):
            stream.close()


class SimClock:
    def __init__(self, process: Process) -> None:
        self._process = process

    def monotonic_ns(self) -> int:
        process = self._process
        return process.offset_ns + process.world.now_ns + process.spent_ns

    def thread_time_ns(self) -> int:
        return self.monotonic_ns()

    def monotonic(self) -> float:
        return self.monotonic_ns() / 1e9

    def sleep(self, seconds: float, /) -> None:
        if self._process.program is not None:
            self._process.program.sleep(math.ceil(seconds * 1e9))
        else:
            self._process.spent_ns += math.ceil(seconds * 1e9)


class Network:
    """All connections, and what is wrong with them."""

    def __init__(self, world: World) -> None:
        self.world = world
        rng = world.rng
        self.latency_ns = rng.choice((20 * US, 100 * US, 1 * MS))
        self.jitter_ns = rng.choice((0, 20 * US, 300 * US, 5 * MS))
        self.capacity = rng.choice((2048, 16 << 10, 208 << 10))
        self.most_at_once = rng.choice((64, 700, 1 << 20, 1 << 20))  # bytes in one read or write
        self.says_hup = rng.random() < 0.5  # as a unix socket whose peer is gone
        self.flips = 0.0  # chance per write that a bit of it is another one when it arrives
        self.held_until_ns = 0  # a partition: what is under way arrives afterwards
        self.listener: SimListener | None = None
        self.ends: dict[int, SimStream | SimListener] = {}
        self._last_fd = 2

    def add(self, end: SimStream | SimListener) -> int:
        self._last_fd += 1
        self.ends[self._last_fd] = end
        return self._last_fd

    def arrival_ns(self, process: Process) -> int:
        """When what leaves this process now will be there."""
        world = self.world
        at_ns = world.now_ns + process.spent_ns + self.latency_ns + world.rng.randrange(self.jitter_ns + 1)
        return max(at_ns, self.held_until_ns)


class SimStream:
    def __init__(self, network: Network, process: Process) -> None:
        self._network, self.process = network, process
        self.peer: SimStream | None = None
        self._arrived = bytearray()
        self._under_way = 0  # bytes to us that have not arrived
        self._last_arrival_ns = 0
        self._ended = False  # no more will arrive
        self._was_reset = False
        self.is_closed = False
        self._fd = network.add(self)
        process.streams.add(self)

    def fileno(self) -> int:
        return self._fd

    def recv_into(self, buffer: memoryview, /) -> int:
        if self.is_closed:
            raise OSError(errno.EBADF, "closed")
        if self._was_reset:
            raise ConnectionResetError(errno.ECONNRESET, "reset")
        if not self._arrived:
            if self._ended:
                return 0
            raise BlockingIOError
        count = min(len(buffer), len(self._arrived), self._most())
        buffer[:count] = self._arrived[:count]
        del self._arrived[:count]
        if self.peer is not None and not self.peer.is_closed:
            self.peer.process.notify()  # there is room
        return count

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        peer = self.peer
        if self._was_reset or (peer is not None and peer.is_closed):
            raise BrokenPipeError(errno.EPIPE, "broken")
        if peer is None:
            raise BlockingIOError
        room = min(self._network.capacity - peer.held_bytes, self._most())
        if room <= 0:
            raise BlockingIOError
        parts, left = [], room
        for buffer in buffers:
            parts.append(bytes(buffer[:left]))
            left -= len(parts[-1])
            if not left:
                break
        data = b"".join(parts)
        self._network.world.note(b"%d" % len(data))
        rng = self._network.world.rng
        if self._network.flips and data and rng.random() < self._network.flips:
            damaged = bytearray(data)
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            data = bytes(damaged)
        peer._under_way += len(data)
        self._deliver(lambda: peer._arrive(data))
        return len(data)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._network.ends.pop(self._fd, None)
        self.process.streams.discard(self)
        if (peer := self.peer) is not None:
            self._deliver(peer._end)

    def reset(self) -> None:
        """The network forgets the connection: both ends learn it at once, and lose what has not been read."""
        for end in (self, self.peer):
            if end is not None and not end.is_closed:
                end._arrived.clear()
                end._was_reset = end._ended = True
                end.process.notify()

    @property
    def held_bytes(self) -> int:
        return len(self._arrived) + self._under_way

    def ready(self) -> int:
        events = 0
        if self._arrived or self._ended:
            events |= READABLE
        if (self._ended and self._network.says_hup) or self._was_reset:
            events |= ENDED
        peer = self.peer
        if peer is not None and (peer.is_closed or peer.held_bytes < self._network.capacity):
            events |= WRITABLE
        return events

    def _most(self) -> int:
        most = self._network.most_at_once
        return most if most < 1 << 20 and self._network.world.rng.random() < 0.5 else 1 << 20

    def _deliver(self, act: Callable[[], None]) -> None:
        """After everything that was sent before."""
        peer = self.peer
        assert peer is not None
        at_ns = peer._last_arrival_ns = max(self._network.arrival_ns(self.process), peer._last_arrival_ns)

        def arrive() -> None:
            act()

        self._network.world.after(at_ns - self._network.world.now_ns, arrive)

    def _arrive(self, data: bytes) -> None:
        self._under_way -= len(data)
        if not self.is_closed and not self._was_reset:
            self._arrived += data
            self.process.notify()

    def _end(self) -> None:
        self._ended = True
        if not self.is_closed:
            self.process.notify()


class SimListener:
    path: Path | None = None

    def __init__(self, network: Network, process: Process, address: str, backlog: int) -> None:
        self.address, self._backlog = address, backlog
        self._network, self._process = network, process
        self._queue: deque[SimStream] = deque()
        self._fd = network.add(self)
        network.listener = self

    def fileno(self) -> int:
        return self._fd

    def ready(self) -> int:
        return READABLE if self._queue else 0

    def connect(self, theirs: SimStream) -> None:
        """A connection from `theirs`. Raises BlockingIOError where too many wait."""
        if len(self._queue) >= self._backlog:
            raise BlockingIOError
        ours = SimStream(self._network, self._process)
        ours.peer, theirs.peer = theirs, ours
        at_ns = self._network.arrival_ns(theirs.process)

        def arrive() -> None:
            if ours.is_closed:
                return
            self._queue.append(ours)
            self._process.notify()

        self._network.world.after(at_ns - self._network.world.now_ns, arrive)

    def accept(self) -> tuple[Stream, int | None] | None:
        if not self._queue:
            raise BlockingIOError
        ours = self._queue.popleft()
        return ours, None if ours.peer is None else ours.peer.process.number

    def close(self) -> None:
        self._network.ends.pop(self._fd, None)
        if self._network.listener is self:
            self._network.listener = None
        for stream in self._queue:
            stream.close()


class SimPoller:
    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process
        self._masks: dict[int, int] = {}

    def register(self, fd: int, eventmask: int, /) -> None:
        assert fd in self._network.ends, "a descriptor that is not open"
        assert fd not in self._masks, "registered twice"
        self._masks[fd] = eventmask

    def modify(self, fd: int, eventmask: int, /) -> None:
        assert fd in self._masks, "was never registered"
        self._masks[fd] = eventmask

    def unregister(self, fd: int, /) -> None:
        if self._masks.pop(fd, None) is None:
            raise FileNotFoundError

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        ready = self._ready()
        if ready or not timeout or timeout <= 0 or self._process.program is None:
            return ready
        self._process.program.wait(math.ceil(timeout * 1e9))
        return self._ready()

    def close(self) -> None:
        self._masks.clear()

    def _ready(self) -> list[tuple[int, int]]:
        found = []
        for fd, mask in self._masks.items():
            end = self._network.ends.get(fd)
            if end is not None and (events := end.ready() & (mask | ENDED)):
                found.append((fd, events))
        return found


class SimSystem:
    """What one process asks of its system."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process
        self.clock = SimClock(process)

    def connect(self, address: Address) -> Stream:
        if self._network.listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        stream = SimStream(self._network, self._process)
        try:
            self._network.listener.connect(stream)
        except BaseException:
            stream.close()
            raise
        return stream

    def listen(self, address: str, *, has_keys: bool, backlog: int) -> SimListener:
        return SimListener(self._network, self._process, address, backlog)

    def poller(self) -> SimPoller:
        return SimPoller(self._network, self._process)

    def run_beside(self, work: Callable[[], None]) -> None:
        """Threads are left out: what they do beside a computation happens here when it is over."""
