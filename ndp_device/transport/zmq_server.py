"""The device's end: any number of hosts, one request at a time, whoever was served least comes next.

Every host has one connection (connections.py). Between processes of one machine the frames may lie in shared memory
instead (shm.py); then the socket carries the doorbell that wakes a sleeper, and every message the memory cannot take.

Knows which of the requests that wait is next, and when to spin, to sleep and to look at sockets. What all peers
together may cost is bounded elsewhere: connections and held bytes in connections.py, time in strangers.py, the order
in which peers give way in peers.py. docs/protocol.md, "Limits", lists the numbers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from ndp_device.errors import RemoteProtocolError
from ndp_device.protocol.codec import Frames
from ndp_device.protocol.messages import SlotOffer
from ndp_device.transport import checksum, shm
from ndp_device.transport.connection import DOORBELL, Connection, Received
from ndp_device.transport.connections import Connections
from ndp_device.transport.keys import DeviceKeys
from ndp_device.transport.peers import Peer, Rank, others_compute
from ndp_device.transport.strangers import PAUSE_NS, StrangersTime
from ndp_device.transport.system import SYSTEM, DeviceSystem

_LITTLE_UNREAD_BYTES = 1 << 20
_NEWCOMER_NS = 1_000_000  # is taken as served already, so that many new connections gain nothing
_SPIN_SLICE_NS = 50_000  # after which a spinning device looks at its sockets
_HEARTBEAT_S = 0.2  # how long a computation may last before another thread looks after the sockets
_log = logging.getLogger(__name__)


class ZmqServer:
    """The device's end: receives frames from any client, answers one client by its name."""

    def __init__(self, address: str, keys: DeviceKeys | None = None, *, system: DeviceSystem = SYSTEM) -> None:
        """keys: only hosts that have the right ones come in, and everything is encrypted."""
        self._clock = system.clock
        self.on_gone: Callable[[bytes], None] = lambda client: None  # called by `receive`
        self._spent_ns = 0.0  # the start tag of the request that is or was being served
        self._taking_ns = 0  # processor time that it took to take the request of a stranger
        self._stranger_was_last = False
        self._spinner = shm.Spinner(shm.DEVICE_SPIN_US)
        self._active_ns = 0
        self._looked_ns = self._clock.monotonic_ns()
        self._looks_soon = False  # the serving loop itself
        self._closed = threading.Event()
        self._strangers = StrangersTime()
        self._connections = Connections(address, keys, self._strangers, self._newcomer, system)
        self._peers, self._turn = self._connections.peers, self._connections.turn
        system.run_beside(self._heartbeat)

    def _newcomer(self, name: bytes, connection: Connection) -> Peer:
        return Peer(name, connection, self._spent_ns + _NEWCOMER_NS)

    # -- what the serving loop uses ------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """What hosts connect to."""
        return self._connections.address

    @property
    def num_waiting(self) -> int:
        return self._connections.num_waiting

    def receive(self, timeout_ms: int) -> Received | None:
        """The next request, or None after timeout_ms. Frames are whatever was sent, at most zmtp.MAX_FRAMES."""
        connections = self._connections
        now = self._looked_ns = self._clock.monotonic_ns()
        received: Received | None = None
        # While requests come by memory, a look at the sockets before each would cost more than the request.
        hot = (
            timeout_ms
            and now - self._active_ns < self._spinner.spin_ns
            and now - connections.polled_ns < _SPIN_SLICE_NS
        )
        if not hot or connections.num_waiting:
            with self._turn:
                connections.look()
                while connections.gone:
                    self.on_gone(connections.gone.popleft())
                received = self._next()
        if received is None and timeout_ms:
            self._looks_soon = True
            try:
                received = self._spin()
                end_s = self._clock.monotonic() + timeout_ms / 1e3 if received is None else 0.0
                while received is None and (left_s := end_s - self._clock.monotonic()) > 0:
                    received = self._sleep(left_s)
            finally:
                self._looked_ns = self._clock.monotonic_ns()
                self._looks_soon = False
        return received

    def served(self, client: bytes, cost_ns: int, *, computed: bool, greeted: bool, busy_ns: int | None = None) -> None:
        """How long the request last received took, and what it showed of its peer.

        busy_ns: of processor time, None = all of it. A stranger is charged for that: on a machine that others use, too,
        time on the wall would keep newcomers out for as long as it is busy.
        """
        now = self._clock.monotonic_ns()
        peer = self._peers.get(client)
        if computed or (peer is not None and peer.rank is Rank.COMPUTES):
            self._strangers.host_served_ns = now
        if peer is None:
            return
        peer.spent_ns, peer.was_served, peer.turn_ns = self._spent_ns + cost_ns, True, now
        if computed:
            peer.rank, peer.computed_ns = Rank.COMPUTES, now
        elif greeted:
            peer.rank = max(peer.rank, Rank.GREETED)
        if peer.rank < Rank.COMPUTES:
            self._strangers.charge(self._taking_ns + (cost_ns if busy_ns is None else busy_ns), now)

    def others_compute(self, client: bytes) -> bool:
        """Whether another host than this one has computed lately, and so is likely to wait for what is done now."""
        return others_compute(self._peers.values(), client, self._clock.monotonic_ns() - PAUSE_NS)

    def offer_memory(self, client: bytes) -> SlotOffer | None:
        """A segment for this client, used in both directions as soon as the client has used it once."""
        with self._turn:
            peer = self._peers.get(client)
            return None if peer is None else self._connections.share_memory(peer)

    def send(self, client: bytes, frames: Frames) -> None:
        """Write the checksum and send. Never blocks; a client that is gone loses its answer."""
        with self._turn:
            peer = self._peers.get(client)
            if peer is None or self._to_memory(peer, frames, writes_checksum=True):
                return
            self._connections.do(peer, peer.connection.send, frames)
            if peer.connection.unread_bytes > _LITTLE_UNREAD_BYTES:
                self._connections.bound_memory()  # its requests may have come by memory, where nothing is counted

    def with_checksum(self, client: bytes, frames: Frames) -> Frames:
        """The frames as `send` would write them, for `send_as_is`."""
        header, body = frames
        peer = self._peers.get(client)
        in_memory = peer is not None and peer.channel is not None and peer.channel.has_spoken
        return checksum.write(header, shm.checked_part(body) if in_memory else body), body

    def send_as_is(self, client: bytes, frames: Frames) -> None:
        """Send frames that have their checksum, right or wrong: for failpoints."""
        with self._turn:
            peer = self._peers.get(client)
            if peer is None or self._to_memory(peer, frames, writes_checksum=False):
                return
            self._connections.do(peer, peer.connection.send_as_is, frames)

    def drop(self, client: bytes) -> None:
        """End the connection: its host notices at once."""
        with self._turn:
            if peer := self._peers.get(client):
                self._connections.drop(peer)

    def close(self) -> None:
        """Send what can be sent within half a second, then end every connection."""
        self._closed.set()
        with self._turn:
            self._connections.close()

    # -- which request is next -----------------------------------------------------------------------------------

    def _next(self) -> Received | None:
        """The request of the host that has the least of the device's time so far; or a stranger's, in their part.

        Strangers come in turns, those that said Hello first: to count what each has had would be of no use, since who
        comes anew has had nothing.
        """
        now = 0
        best: Peer | None = None
        for peer in self._peers.values():
            if peer.rank is Rank.COMPUTES and peer.is_waiting:
                now = now or self._clock.monotonic_ns()
                peer.note_ring(now)
                if best is None or peer.spent_ns < best.spent_ns:
                    best = peer
        begun_ns = 0
        if len(self._peers) > 1 or best is None:
            now = now or self._clock.monotonic_ns()
            were_last = self._stranger_was_last
            if self._strangers.have_the_turn(now, others_wait=best is not None, were_last=were_last):
                begun_ns = self._clock.thread_time_ns()
                strangers = [peer for peer in self._peers.values() if peer.rank < Rank.COMPUTES and peer.is_waiting]
                if strangers:
                    best = min(strangers, key=lambda peer: peer.place_among_strangers)
                    best.note_ring(now)
        if best is None:
            return None
        self._stranger_was_last = best.rank < Rank.COMPUTES
        self._spent_ns = best.spent_ns = max(best.spent_ns, self._spent_ns)
        best.connection.heard_ns = now
        received = self._from_memory(best, now) if best.channel is not None else None
        if received is None and best.connection.waiting:
            received = self._connections.do(best, best.connection.take)
        self._taking_ns = self._clock.thread_time_ns() - begun_ns if self._stranger_was_last else 0
        return received

    def _from_memory(self, peer: Peer, now_ns: int) -> Received | None:
        channel = peer.channel
        assert channel is not None
        try:
            taken = channel.take()
        except (RemoteProtocolError, MemoryError) as error:
            _log.warning("a host damaged its shared memory and is sent away: %s", error)
            self._connections.drop(peer)
            return None
        if taken is None:
            return None
        seen_ns, peer.ring_seen_ns = peer.ring_seen_ns or now_ns, 0
        channel.has_spoken = True
        self._active_ns = now_ns
        header, body, intact = taken
        damage = None if intact else checksum.damage(header, shm.checked_part(body))
        return Received(peer.name, (header, body), damage, seen_ns, channel)

    def _to_memory(self, peer: Peer, frames: Frames, *, writes_checksum: bool) -> bool:
        """False: the message must take the socket."""
        channel = peer.channel
        if channel is None or not channel.has_spoken or len(frames) != 2:
            return False
        try:
            sent = channel.put(frames, writes_checksum=writes_checksum)
        except RemoteProtocolError as error:
            _log.warning("a host damaged its shared memory and is sent away: %s", error)
            self._connections.drop(peer)
            return True
        if sent is shm.Put.DOORBELL:
            self._connections.do(peer, peer.connection.send_message, (DOORBELL,))
        return sent is not shm.Put.REFUSED

    # -- until there is one --------------------------------------------------------------------------------------

    def _spin(self) -> Received | None:
        """A client that was served within the last milliseconds is likely to ask again before it could ring."""
        channels = [
            peer.channel
            for peer in self._peers.values()
            if peer.channel is not None
            and peer.channel.has_spoken
            and (peer.rank is Rank.COMPUTES or self._strangers.may_be_served(self._clock.monotonic_ns()))
        ]
        while (
            channels
            and self._clock.monotonic_ns() - self._active_ns < self._spinner.spin_ns
            and not self._spinner.is_calm
        ):
            seen = self._spinner.spin(channels, _SPIN_SLICE_NS)
            with self._turn:
                # what was seen may be a stranger's, whose turn has not come: others must not wait for that
                if not seen or self._clock.monotonic_ns() - self._connections.polled_ns > _SPIN_SLICE_NS:
                    self._connections.look()
                if received := self._next():
                    return received
            channels = [channel for channel in channels if not channel.is_closed]
        return None

    def _sleep(self, timeout_s: float) -> Received | None:
        connections, strangers = self._connections, self._strangers
        with self._turn:
            may_strangers, ready = strangers.may_be_served(self._clock.monotonic_ns()), True
            channels = []
            for peer in self._peers.values():
                if peer.channel is not None:
                    channels.append(peer.channel)
                    is_empty = peer.channel.prepare_sleep()
                    ready = ready and (is_empty or (peer.rank < Rank.COMPUTES and not may_strangers))
            if connections.has_bytes_to_parse:
                ready = False
            if any(peer.is_waiting for peer in self._peers.values()):  # strangers whose turn has not come
                timeout_s = min(timeout_s, max(strangers.serves_from_ns - self._clock.monotonic_ns(), 0) / 1e9)
            if (again_ns := connections.looks_again_ns) is not None:
                timeout_s = min(timeout_s, max(again_ns - self._clock.monotonic_ns(), 0) / 1e9)
        connections.look(timeout_s if ready else 0.0)
        with self._turn:
            for channel in channels:
                channel.awake()
            return self._next()

    # -- beside a computation ------------------------------------------------------------------------------------

    def _heartbeat(self) -> None:
        """While a computation lasts, another thread accepts, reads, writes and answers PING, as libzmq's would."""
        while not self._closed.wait(_HEARTBEAT_S):
            while self._loop_is_late():
                with contextlib.suppress(ValueError, OSError):  # closed meanwhile
                    self._connections.wait(_HEARTBEAT_S / 10)  # only to wake up: what is true is asked under the lock
                with self._turn:
                    if self._loop_is_late():
                        self._connections.look()

    def _loop_is_late(self) -> bool:
        late = self._clock.monotonic_ns() - self._looked_ns > _HEARTBEAT_S * 1e9
        return late and not self._looks_soon and not self._closed.is_set()
