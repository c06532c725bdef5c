"""A host that is connected and what it has cost; and of all of them the one that gives way where there is not room.

Peers have a rank: strangers, those that said Hello, those that have computed. The lowest rank goes first, within it the
peer that was silent longest; a host that computes is never sent away for another. Where one process has taken more than
its part of the places, it gives way to others, and gets no more. The rules take peers and a time, and answer with one
of the peers or a process: they end nothing and know neither clocks nor sockets.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable

from ndp_device.transport.connection import MAX_UNREAD_BYTES, Connection
from ndp_device.transport.shm import ShmChannel

_ASLEEP_NS = 300_000_000_000
_YOUNG_NS = 250_000_000
_KEEP_MEMORY_NS = 1_000_000_000  # that a host may take to compute for the first time before others may want its memory
_HELLO = b"\xa5hello"  # as MessagePack writes the type of a Hello, which stands first where this project wrote it


class Rank(enum.IntEnum):
    STRANGER = 0
    GREETED = 1
    COMPUTES = 2


class Peer:
    """A host that is connected, and what it has cost."""

    def __init__(self, name: bytes, connection: Connection, spent_ns: float) -> None:
        self.name, self.connection = name, connection
        self.events = 0  # of its connection that the system wakes us for
        self.rank = Rank.STRANGER
        self.process: int | None = None  # it is of; None: the system does not say
        self.computed_ns = 0
        self.was_served = False
        self.turn_ns = connection.opened_ns  # or when it was served last
        self.channel: ShmChannel | None = None
        self.ring_seen_ns = 0  # when a message in the ring was first seen; 0 = none was
        self.spent_ns = spent_ns  # the start tag of its next request (start-time fair queueing)

    @property
    def is_waiting(self) -> bool:
        """A request of it is here, and it has read enough answers for another."""
        if self.connection.unread_bytes > MAX_UNREAD_BYTES:
            return False
        return bool(self.connection.waiting) or (self.channel is not None and bool(self.channel.ring.readable()))

    def note_ring(self, now_ns: int) -> None:
        """When the request that it would send next was first seen, if it came by memory."""
        if not self.connection.waiting and not self.ring_seen_ns:
            self.ring_seen_ns = now_ns

    @property
    def place_among_strangers(self) -> tuple[bool, int]:
        """Who said Hello or says it now comes before the others; of each kind, who waits longest.

        Not those that said it before those that say it now: a few that ask without an end would keep all others out.
        """
        greets = self.rank is Rank.GREETED or (
            bool(self.connection.waiting) and _HELLO in bytes(self.connection.waiting[0].frames[0][:32])
        )
        return not greets, self.turn_ns

    @property
    def is_on_its_way(self) -> bool:
        """It may still say Hello: it has asked for nothing else."""
        return self.rank is Rank.STRANGER and not self.was_served


def others_compute(peers: Iterable[Peer], name: bytes, since_ns: int) -> bool:
    """Whether another one than the peer of this name has computed since then."""
    return any(peer.rank is Rank.COMPUTES and peer.computed_ns > since_ns for peer in peers if peer.name != name)


def to_send_away(peers: Iterable[Peer], now_ns: int, *, spares_young: bool = False) -> Peer | None:
    """For a newcomer: the peer of lowest rank that was silent longest; None: all of them compute.

    A host that computed once and was silent for minutes since gives way, too: it may be gone without a word, and
    if not it comes back when it needs the device. Who asked for other things before it said Hello goes before those
    that are still on their way to it; spares_young: they do not go at all for a quarter of a second.
    """
    candidates = [
        peer
        for peer in peers
        if (peer.rank < Rank.COMPUTES or peer.connection.heard_ns < now_ns - _ASLEEP_NS)
        and not (spares_young and peer.is_on_its_way and peer.connection.opened_ns > now_ns - _YOUNG_NS)
    ]
    return min(candidates, key=lambda peer: (peer.rank, peer.is_on_its_way, peer.connection.heard_ns), default=None)


def greedy_process(peers: Iterable[Peer], part: int) -> int | None:
    """The process that has most of the connections that never computed, if that is more than a part of them."""
    counts = Counter(peer.process for peer in peers if peer.rank < Rank.COMPUTES and peer.process is not None)
    process, count = max(counts.items(), key=lambda item: item[1], default=(None, 0))
    return process if count > part else None


def to_give_up_memory(owners: Iterable[Peer], now_ns: int) -> Peer | None:
    """Of those that have a segment; None: each computes, or has just been given it."""
    before_ns = now_ns - _KEEP_MEMORY_NS
    idle = [peer for peer in owners if peer.rank < Rank.COMPUTES and peer.connection.opened_ns < before_ns]
    return min(idle, key=lambda peer: peer.connection.heard_ns, default=None)


def greediest(peers: Iterable[Peer], least_bytes: int) -> Peer:
    """Where all together hold too much: the peer that holds most, of the lowest rank that holds more than the least."""
    holders = [peer for peer in peers if peer.connection.held_bytes > least_bytes]
    return max(holders, key=lambda peer: (-peer.rank, peer.connection.held_bytes))
