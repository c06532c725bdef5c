"""Connections between simulated processes: messages take time, may be damaged, wait for room; connections break.

Both ends of a transport (transport/base.py) over a World, in the place of libzmq, which keeps messages of one
connection in order and whole. Knows processes by what they own and whom to wake, and of messages the checksum.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from ndp_device.common.errors import DeviceUnavailable
from ndp_device.protocol.codec import Frames
from ndp_device.protocol.messages import SlotOffer
from ndp_device.transport.base import Received, damage_of, require_intact, write_checksum
from simulation.world import MS, US, Program, World

_QUEUE = 80  # messages that a host leaves unread, before its connection ends
_AT_ONCE = 16
_TRY_AGAIN_NS = 5 * MS


class Process:
    """Whom connections belong to. `program`: what may wait; None: `awaken` is called when something has arrived."""

    def __init__(self, world: World, program: Program | None = None) -> None:
        self.world, self.program = world, program
        self.awaken: Callable[[], None] = lambda: None
        self.offset_ns = world.rng.randrange(10**15)  # clocks have nothing in common
        self.spent_ns = 0  # since the world's time: what the process has done in this moment
        self.links: dict[Link, None] = {}

    def notify(self) -> None:
        if self.program is not None:
            self.program.wake()
        else:
            self.awaken()

    def die(self) -> None:
        """kill -9: the system closes what it had open."""
        for link in list(self.links):
            link.end()


class SimClock:
    def __init__(self, process: Process) -> None:
        self._process = process

    def monotonic_ns(self) -> int:
        process = self._process
        return process.offset_ns + process.world.now_ns + process.spent_ns

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
        self.flips = 0.0  # chance per message that a bit of it is another one when it arrives
        self.held_until_ns = 0  # a partition: what is under way arrives afterwards
        self.listener: SimServer | None = None
        self.links: dict[Link, None] = {}

    def arrival_ns(self, process: Process) -> int:
        """When what leaves this process now will be there."""
        world = self.world
        at_ns = world.now_ns + process.spent_ns + self.latency_ns + world.rng.randrange(self.jitter_ns + 1)
        return max(at_ns, self.held_until_ns)

    def damaged(self, frames: Frames) -> Frames:
        rng = self.world.rng
        copies = [bytearray(frame) for frame in frames]
        if self.flips and rng.random() < self.flips:
            frame = rng.choice([frame for frame in copies if frame])
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        return [bytes(frame) for frame in copies]


class Link:
    """One end of a connection."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self.process = network, process
        self.other: Link | None = None
        self.arrived: deque[Frames] = deque()
        self.is_open = True
        self._last_arrival_ns = 0
        process.links[self] = network.links[self] = None

    def send(self, frames: Frames) -> bool:
        other = self.other
        if other is None or len(other.arrived) >= _QUEUE:
            return False
        frames = self._network.damaged(frames)
        self._network.world.note(b"%d" % sum(map(len, frames)))
        self.deliver(lambda: other.arrive(frames))
        return True

    def arrive(self, frames: Frames) -> None:
        if self.is_open:
            self.arrived.append(frames)
            self.process.notify()

    def deliver(self, act: Callable[[], None]) -> None:
        """After everything that was sent before."""
        at_ns = self._last_arrival_ns = max(self._network.arrival_ns(self.process), self._last_arrival_ns)
        self._network.world.after(at_ns - self._network.world.now_ns, act)

    def end(self) -> None:
        """Close it; the other side learns it later."""
        if self.is_open:
            self._forget()
            if self.other is not None:
                self.deliver(self.other.lose)

    def lose(self) -> None:
        """It broke: what had arrived may still be read."""
        self._forget()
        self.process.notify()

    def _forget(self) -> None:
        self.is_open = False
        self.process.links.pop(self, None)
        self._network.links.pop(self, None)


class SimTransport:
    """The host's end: until there was a connection it tries again and again; one that broke is lost for good."""

    can_share_memory = False

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process
        self._link: Link | None = None
        self._is_ready = False
        self._try_again_ns = 0

    @property
    def is_ready(self) -> bool:
        now = self._network.world.now_ns
        if self._link is not None and not self._link.is_open and not self._is_ready:
            self._link = None
        if self._link is None and now >= self._try_again_ns:
            self._try_again_ns = now + _TRY_AGAIN_NS
            self._connect()
        return self._is_ready and self._link is not None and self._link.is_open

    def attach(self, offer: SlotOffer) -> bool:
        return False

    def send(self, frames: Frames) -> bool:
        header, body = frames
        return self.is_ready and self._link is not None and self._link.send((write_checksum(header, body), body))

    def send_execute(self, asked: object, tensors: object) -> bool:
        return False

    def send_ahead(self, order: object, asked: object) -> bool:
        return False

    def sent_ahead(self, crossed: object) -> None: ...

    def receive(self, timeout_s: float) -> Frames | None:
        frames = self._next()
        if frames is None and timeout_s > 0 and self._process.program is not None:
            self._process.program.wait(math.ceil(timeout_s * 1e9))
            frames = self._next()
        return frames

    def close(self) -> None:
        if self._link is not None:
            self._link.end()

    def _next(self) -> Frames | None:
        link = self._link
        if not self.is_ready and self._is_ready and link is not None and not link.arrived:
            raise DeviceUnavailable("the connection to the device was lost")
        if link is None or not link.arrived:
            return None
        frames = link.arrived.popleft()
        require_intact(frames[0], frames[1])
        return frames

    def _connect(self) -> None:
        listener = self._network.listener
        if listener is None:
            return
        ours = self._link = Link(self._network, self._process)

        def accept() -> None:
            if ours.is_open and listener is self._network.listener:
                theirs = listener.accept(ours)
                theirs.deliver(ready)
            else:
                ours.lose()

        def ready() -> None:
            self._is_ready = self._is_ready or (ours is self._link and ours.is_open)
            self._process.notify()

        ours.deliver(accept)


class SimServer:
    """The device's end."""

    address = "simulated"

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process
        self.on_gone: Callable[[bytes], None] = lambda client: None
        self.passing: Callable[[Frames], Iterable[Frames]] = lambda reply: [reply]
        """What really leaves for one reply."""
        self.links: dict[bytes, Link] = {}
        self._last = 0
        network.listener = self

    @property
    def has_arrived(self) -> bool:
        return any(link.arrived or not link.is_open for link in self.links.values())

    def accept(self, theirs: Link) -> Link:
        ours = Link(self._network, self._process)
        ours.other, theirs.other = theirs, ours
        self._last += 1
        self.links[b"%d" % self._last] = ours
        return ours

    def receive(self, timeout_ms: int) -> list[Received]:
        now_ns = SimClock(self._process).monotonic_ns()
        for client, link in list(self.links.items()):
            if not link.is_open:
                del self.links[client]
                self.on_gone(client)
        arrived = []
        for client, link in self.links.items():
            while link.arrived and len(arrived) < _AT_ONCE:
                frames = link.arrived.popleft()
                damage = damage_of(frames[0], frames[1]) if len(frames) == 2 else None
                arrived.append(Received(client, frames, damage, now_ns))
        return arrived

    def send(self, client: bytes, frames: Frames) -> None:
        for outgoing in self.passing((write_checksum(*frames), frames[1])):
            link = self.links.get(client)
            if link is not None and link.is_open and not link.send(outgoing):
                self.drop(client, "it reads too slowly")

    def offer_memory(self, client: bytes) -> SlotOffer | None:
        return None

    def drop(self, client: bytes, reason: str) -> None:
        if (link := self.links.get(client)) is not None:
            link.end()

    def close(self) -> None:
        self._process.die()
        if self._network.listener is self:
            self._network.listener = None


def connecting(network: Network, process: Process) -> Callable[[str, Path | None], SimTransport]:
    """What a DeviceClient calls to connect."""
    return lambda address, keys: SimTransport(network, process)
