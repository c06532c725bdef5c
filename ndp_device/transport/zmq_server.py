"""The device's end: any number of hosts, one request at a time, whoever was served least comes next.

Every host has one connection (connection.py). Between processes of one machine the frames may lie in shared memory
instead (shm.py); then the socket carries the doorbell that wakes a sleeper, and every message the memory cannot take.

What all peers together may cost is bounded here: connections, bytes that are held, the time of handshakes, and the
share of the device's time. Peers have a rank: strangers, those that said Hello, those that have computed. Where
there is not room for all, the lowest rank goes first, within it the one that was silent longest; a host that
computes is never sent away for another. docs/protocol.md, "Limits", lists the numbers.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ndp_device.errors import RemoteProtocolError
from ndp_device.protocol.codec import Frames
from ndp_device.protocol.messages import SlotOffer
from ndp_device.transport import checksum, shm
from ndp_device.transport.connection import (
    DOORBELL,
    MAX_UNREAD_BYTES,
    READ_AT_ONCE,
    Connection,
    ConnectionEnded,
    HandshakeTime,
    Received,
)
from ndp_device.transport.curve import CurveSession
from ndp_device.transport.keys import AllowList, DeviceKeys
from ndp_device.transport.shm import ShmChannel
from ndp_device.transport.system import ENDED, READABLE, SYSTEM, WRITABLE, DeviceSystem, Stream

MAX_PEERS = 64
MAX_HELD_BYTES = 512 << 20
"""Of all peers, before the one that holds most is sent away."""

_LITTLE_UNREAD_BYTES = 1 << 20
STRANGERS_SHARE = 10
"""While a host computes, all peers that never did get one part in this many of the device's time."""

_STRANGERS_WAIT_NS = 250_000_000  # at most, after one of them was served
_STRANGERS_LOOK_NS = 500_000  # for their connections, before they rest
_STRANGERS_LONG_LOOK_NS = 5_000_000  # where the last one was long ago, because this process had no core
_STRANGERS_CREDIT_NS = 20_000_000  # of time that was not used for their requests
_STRANGERS_REST_NS = 50_000_000  # at most; the half of a millisecond above earns 4.5
_PAUSE_NS = 1_000_000_000
_NEWCOMER_NS = 1_000_000  # is taken as served already, so that many new connections gain nothing
_SPIN_SLICE_NS = 50_000  # after which a spinning device looks at its sockets
_HEARTBEAT_S = 0.2  # how long a computation may last before another thread looks after the sockets
_ACCEPT_AT_ONCE = 4
_BACKLOG = 2 * MAX_PEERS  # so that a newcomer has a place in the queue, and its turn before it gives up (half a second)
_CHECK_NS = 50_000_000
_QUEUE_AGAIN_NS = 5_000_000  # after there was no place for a new connection
_FULL_AGAIN_NS = 100_000_000  # after the system had no descriptor for a new connection
_KEEP_MEMORY_NS = 1_000_000_000  # that a host may take to compute for the first time before others may want its memory
_ASLEEP_NS = 300_000_000_000
_YOUNG_NS = 250_000_000
_FLUSH_S = 0.5
_LAST_ANSWER_S = 0.05
_HELLO = b"\xa5hello"  # as MessagePack writes the type of a Hello, which stands first where this project wrote it
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class Rank(enum.IntEnum):
    STRANGER = 0
    GREETED = 1
    COMPUTES = 2


class _Peer:
    """A host that is connected, and what it has cost."""

    def __init__(self, name: bytes, connection: Connection, spent_ns: float) -> None:
        self.name, self.connection = name, connection
        self.events = 0  # of its connection that the system wakes us for
        self.rank = Rank.STRANGER
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


class ZmqServer:
    """The device's end: receives frames from any client, answers one client by its name."""

    def __init__(self, address: str, keys: DeviceKeys | None = None, *, system: DeviceSystem = SYSTEM) -> None:
        """keys: only hosts that have the right ones come in, and everything is encrypted."""
        self._clock = system.clock
        self._keys = keys
        self._allowed = None if keys is None else AllowList(keys, _log.warning)
        self._handshake_time = HandshakeTime()
        self.on_gone: Callable[[bytes], None] = lambda client: None  # called by `receive`
        self._gone: deque[bytes] = deque()
        self._num_waiting = 0
        self._peers: dict[bytes, _Peer] = {}
        self._by_fd: dict[int, _Peer] = {}
        self._last_name = 0
        self._spent_ns = 0.0  # the start tag of the request that is or was being served
        self._strangers_from_ns = 0
        self._taking_ns = 0  # processor time that it took to take the request of a stranger
        self._host_served_ns = 0  # one of rank COMPUTES
        self._stranger_was_last = False
        self._rest_until_ns = 0  # connections of strangers, the listener among them; 0 = they are looked after
        self._last_turns: dict[int, int] = {}  # of the same
        self._accepted_last = False
        self._strangers_looked_ns = 0
        self._resting: dict[int, int] = {}  # those that something has happened to meanwhile, and until when
        self._checked_ns = self._polled_ns = 0
        self._unparsed: dict[_Peer, None] = {}  # with bytes that were read but not looked at
        self._spinner = shm.Spinner(shm.DEVICE_SPIN_US)
        self._active_ns = 0
        self._poll = system.poller()
        self._turn = threading.RLock()
        self._looked_ns = self._clock.monotonic_ns()
        self._looks_soon = False  # the serving loop itself
        self._closed = threading.Event()
        self._listener = system.listen(address, has_keys=keys is not None, backlog=_BACKLOG)
        self._poll.register(self._listener.fileno(), READABLE)
        system.run_beside(self._heartbeat)

    # -- what the serving loop uses ------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """What hosts connect to."""
        return self._listener.address

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def receive(self, timeout_ms: int) -> Received | None:
        """The next request, or None after timeout_ms. Frames are whatever was sent, at most zmtp.MAX_FRAMES."""
        now = self._looked_ns = self._clock.monotonic_ns()
        received: Received | None = None
        # While requests come by memory, a look at the sockets before each would cost more than the request.
        hot = timeout_ms and now - self._active_ns < self._spinner.spin_ns and now - self._polled_ns < _SPIN_SLICE_NS
        if not hot or self._num_waiting:
            with self._turn:
                self._look()
                while self._gone:
                    self.on_gone(self._gone.popleft())
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
            self._host_served_ns = now
        if peer is None:
            return
        peer.spent_ns, peer.was_served, peer.turn_ns = self._spent_ns + cost_ns, True, now
        if computed:
            peer.rank, peer.computed_ns = Rank.COMPUTES, now
        elif greeted:
            peer.rank = max(peer.rank, Rank.GREETED)
        if peer.rank < Rank.COMPUTES:
            busy_ns = self._taking_ns + (cost_ns if busy_ns is None else busy_ns)
            after_ns = max(self._strangers_from_ns, now - _STRANGERS_CREDIT_NS) + busy_ns * STRANGERS_SHARE
            self._strangers_from_ns = min(after_ns, now + _STRANGERS_WAIT_NS)  # else an idle device runs up hours

    def others_compute(self, client: bytes) -> bool:
        """Whether another host than this one has computed lately, and so is likely to wait for what is done now."""
        before = self._clock.monotonic_ns() - _PAUSE_NS
        others = (peer for peer in self._peers.values() if peer.name != client)
        return any(peer.rank is Rank.COMPUTES and peer.computed_ns > before for peer in others)

    def offer_memory(self, client: bytes) -> SlotOffer | None:
        """A segment for this client, used in both directions as soon as the client has used it once."""
        with self._turn:
            peer = self._peers.get(client)
            if peer is None or self._listener.path is None:
                return None
            self._close_channel(peer)
            if not self._make_room_for_memory():
                return None
            peer.channel = ShmChannel.create()
            if peer.channel is None:
                return None
            peer.connection.has_memory = True
            self._poll.register(peer.channel.doorbell, READABLE)
            return peer.channel.offer

    def send(self, client: bytes, frames: Frames) -> None:
        """Write the checksum and send. Never blocks; a client that is gone loses its answer."""
        with self._turn:
            peer = self._peers.get(client)
            if peer is None or self._to_memory(peer, frames, writes_checksum=True):
                return
            self._do(peer, peer.connection.send, frames)
            if peer.connection.unread_bytes > _LITTLE_UNREAD_BYTES:
                self._bound_memory()  # its requests may have come by memory, where nothing is counted

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
            self._do(peer, peer.connection.send_as_is, frames)

    def drop(self, client: bytes) -> None:
        """End the connection: its host notices at once."""
        with self._turn:
            if peer := self._peers.get(client):
                self._drop(peer)

    def close(self) -> None:
        """Send what can be sent within half a second, then end every connection."""
        self._closed.set()
        with self._turn:
            deadline = self._clock.monotonic() + _FLUSH_S
            while (
                any(peer.connection.unread_bytes for peer in self._peers.values())
                and self._clock.monotonic() < deadline
            ):
                for peer in list(self._peers.values()):
                    self._do(peer, peer.connection.write)
                self._clock.sleep(0.001)
            # libzmq throws away what has arrived but was not read yet when it sees that a connection ended
            sent_s = max((peer.connection.sent_s for peer in self._peers.values()), default=0.0)
            self._clock.sleep(max(sent_s + _LAST_ANSWER_S - self._clock.monotonic(), 0.0))
            for peer in list(self._peers.values()):
                self._drop(peer)
            self._listener.close()
            self._poll.close()

    # -- which request is next -----------------------------------------------------------------------------------

    def _next(self) -> Received | None:
        """The request of the host that has the least of the device's time so far; or a stranger's, in their part.

        Strangers come in turns, those that said Hello first: to count what each has had would be of no use, since who
        comes anew has had nothing.
        """
        now = 0
        best: _Peer | None = None
        for peer in self._peers.values():
            if peer.rank is Rank.COMPUTES and peer.is_waiting:
                now = now or self._clock.monotonic_ns()
                peer.note_ring(now)
                if best is None or peer.spent_ns < best.spent_ns:
                    best = peer
        begun_ns = 0
        if len(self._peers) > 1 or best is None:
            now = now or self._clock.monotonic_ns()
            if self._is_turn_of_strangers(now, others_wait=best is not None):
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
            received = self._do(best, best.connection.take)
        self._taking_ns = self._clock.thread_time_ns() - begun_ns if self._stranger_was_last else 0
        return received

    def _is_turn_of_strangers(self, now_ns: int, *, others_wait: bool) -> bool:
        """Never twice in a row while a host that computes waits, and not before one that comes back after a pause."""
        if not others_wait:
            return self._may_strangers(now_ns)
        return now_ns >= self._strangers_from_ns and not (self._stranger_was_last or self._hosts_pause(now_ns))

    def _may_strangers(self, now_ns: int) -> bool:
        return now_ns >= self._strangers_from_ns or self._hosts_pause(now_ns)

    def _hosts_pause(self, now_ns: int) -> bool:
        """No host that computes has asked for anything lately."""
        return now_ns > self._host_served_ns + _PAUSE_NS

    def _from_memory(self, peer: _Peer, now_ns: int) -> Received | None:
        channel = peer.channel
        assert channel is not None
        try:
            taken = channel.take()
        except (RemoteProtocolError, MemoryError) as error:
            _log.warning("a host damaged its shared memory and is sent away: %s", error)
            self._drop(peer)
            return None
        if taken is None:
            return None
        seen_ns, peer.ring_seen_ns = peer.ring_seen_ns or now_ns, 0
        channel.has_spoken = True
        self._active_ns = now_ns
        header, body, intact = taken
        damage = None if intact else checksum.damage(header, shm.checked_part(body))
        return Received(peer.name, (header, body), damage, seen_ns, channel)

    def _spin(self) -> Received | None:
        """A client that was served within the last milliseconds is likely to ask again before it could ring."""
        may_strangers = self._may_strangers(self._clock.monotonic_ns())
        channels = [
            peer.channel
            for peer in self._peers.values()
            if peer.channel is not None and peer.channel.has_spoken and (may_strangers or peer.rank is Rank.COMPUTES)
        ]
        while (
            channels
            and self._clock.monotonic_ns() - self._active_ns < self._spinner.spin_ns
            and not self._spinner.is_calm
        ):
            seen = self._spinner.spin(channels, _SPIN_SLICE_NS)
            with self._turn:
                # what was seen may be a stranger's, whose turn has not come: others must not wait for that
                if not seen or self._clock.monotonic_ns() - self._polled_ns > _SPIN_SLICE_NS:
                    self._look()
                if received := self._next():
                    return received
            channels = [channel for channel in channels if not channel.is_closed]
        return None

    def _sleep(self, timeout_s: float) -> Received | None:
        with self._turn:
            may_strangers, ready = self._may_strangers(self._clock.monotonic_ns()), True
            channels = []
            for peer in self._peers.values():
                if peer.channel is not None:
                    channels.append(peer.channel)
                    is_empty = peer.channel.prepare_sleep()
                    ready = ready and (is_empty or (peer.rank < Rank.COMPUTES and not may_strangers))
            if any(self._may_parse(peer) for peer in self._unparsed):
                ready = False
            if any(peer.is_waiting for peer in self._peers.values()):  # strangers whose turn has not come
                timeout_s = min(timeout_s, max(self._strangers_from_ns - self._clock.monotonic_ns(), 0) / 1e9)
            rests = [
                *self._resting.values(),
                *([self._rest_until_ns] if self._unparsed and self._rest_until_ns else ()),
            ]
            if rests:
                timeout_s = min(timeout_s, max(min(rests) - self._clock.monotonic_ns(), 0) / 1e9)
        self._look(timeout_s if ready else 0.0)
        with self._turn:
            for channel in channels:
                channel.awake()
            return self._next()

    # -- sockets -------------------------------------------------------------------------------------------------

    def _look(self, timeout_s: float = 0.0) -> None:
        """Accept, read and write what can be without waiting longer; everything one peer can cause here is bounded."""
        if self._rest_until_ns or self._resting:
            with self._turn:
                self._end_rest(self._clock.monotonic_ns())
        events = self._poll.poll(timeout_s)
        with self._turn:
            now = self._polled_ns = self._clock.monotonic_ns()
            strangers: list[tuple[int, int]] = []
            for fd, event in events:
                peer = self._by_fd.get(fd)
                if peer is not None and (peer.rank is Rank.COMPUTES or event & ENDED):
                    self._attend(peer, event, now)
                elif peer is not None or fd == self._listener.fileno():  # else a doorbell, or a peer that has just gone
                    strangers.append((fd, event))
            unparsed = [peer for peer in self._unparsed if self._may_parse(peer)]
            for peer in unparsed:
                if peer.rank is Rank.COMPUTES:
                    self._do(peer, peer.connection.parse, now)
            parts = [(peer.connection.fileno(), 0) for peer in unparsed if peer.rank < Rank.COMPUTES]
            if strangers or parts:
                self._look_after_strangers(strangers + parts, now)
            if now > self._checked_ns + _CHECK_NS:
                self._check(now)

    def _look_after_strangers(self, happened: list[tuple[int, int]], now_ns: int) -> None:
        """Accept, read and write for peers that never computed. An event 0: what was read is to be looked at.

        While a host computes this takes half a millisecond of processor time, or a tenth of the time since the last
        look, and is then left alone for nine times as long: whatever these peers send, it gets a tenth of the time.
        """
        begun_ns = at_ns = self._clock.thread_time_ns()
        length_ns = min((now_ns - self._strangers_looked_ns) // STRANGERS_SHARE, _STRANGERS_LONG_LOOK_NS)
        is_shared = not self._hosts_pause(now_ns)
        end_ns = begun_ns + (max(length_ns, _STRANGERS_LOOK_NS) if is_shared else 1 << 62)
        if not self._rest_until_ns:
            self._strangers_looked_ns = now_ns
        late: list[int] = []
        self._last_turns[self._listener.fileno()] = 0 if (accepts := not self._accepted_last) else 1 << 62
        self._accepted_last = accepts  # every other time it comes first, else last: as many are let in as can be heard
        for fd, event in sorted(happened, key=self._order_of_turns):
            peer = self._by_fd.get(fd)
            if at_ns >= end_ns or self._rest_until_ns:
                if event:
                    late.append(fd)
                continue
            if peer is None and fd != self._listener.fileno():
                continue  # sent away for one before it
            if peer is not None:
                self._last_turns[fd] = now_ns
            if peer is None:
                self._accept(now_ns)
            elif event:
                self._attend(peer, event, now_ns)
            else:
                self._do(peer, peer.connection.parse, now_ns)
            at_ns = self._clock.thread_time_ns()
        if is_shared and not self._rest_until_ns:
            rest_ns = min((at_ns - begun_ns) * (STRANGERS_SHARE - 1), _STRANGERS_REST_NS)
            self._rest_until_ns = self._clock.monotonic_ns() + rest_ns
        for fd in late:
            if fd in self._by_fd or fd == self._listener.fileno():  # else it was sent away meanwhile
                self._let_rest(fd, self._rest_until_ns)

    def _order_of_turns(self, happened: tuple[int, int]) -> tuple[bool, int]:
        """Handshakes first, which are short and whose hosts give up soon; then whose last turn was longest ago."""
        peer = self._by_fd.get(happened[0])
        return peer is not None and peer.connection.is_ready, self._last_turns.get(happened[0], 0)

    def _may_parse(self, peer: _Peer) -> bool:
        return peer.connection.may_wait and (peer.rank is Rank.COMPUTES or not self._rest_until_ns)

    def _let_rest(self, fd: int, until_ns: int) -> None:
        """Be told nothing more of it until then."""
        if fd not in self._resting:
            self._poll.modify(fd, 0)
        self._resting[fd] = max(until_ns, self._resting.get(fd, 0))

    def _end_rest(self, now_ns: int) -> None:
        if now_ns >= self._rest_until_ns:
            self._rest_until_ns = 0
        for fd in [fd for fd, until_ns in self._resting.items() if now_ns >= until_ns]:
            del self._resting[fd]
            peer = self._by_fd.get(fd)
            if peer is not None:
                peer.events = peer.connection.wanted_events
            self._poll.modify(fd, READABLE if peer is None else peer.events)

    def _attend(self, peer: _Peer, event: int, now_ns: int) -> None:
        if event & ENDED:
            self._drop(peer)  # nobody is there to read an answer
            return
        if event & WRITABLE:
            self._do(peer, peer.connection.write)
        if event & READABLE and peer.name in self._peers:
            num_read = self._do(peer, peer.connection.read, now_ns)
            if num_read is not None and num_read > READ_AT_ONCE // 16:
                self._bound_memory()

    def _check(self, now_ns: int) -> None:
        """End what takes too long."""
        self._checked_ns = now_ns
        self._handshake_time.begin_period()
        for peer in list(self._peers.values()):
            key = peer.connection.peer_key
            if key is not None and self._allowed is not None and self._allowed.name(key) is None:
                _log.warning("a host was sent away: its key is no longer allowed")
                self._drop(peer)
            elif peer.connection.is_late(now_ns):
                self._drop(peer)

    def _accept(self, now_ns: int) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            is_full = len(self._peers) >= MAX_PEERS
            if is_full and self._to_send_away(spares_young=True) is None and self._to_send_away() is not None:
                self._let_rest(self._listener.fileno(), now_ns + _QUEUE_AGAIN_NS)
                return  # whoever has come just now is given the time to greet; others wait in the listener's queue
            try:
                connected = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor, no memory: whoever connects waits in the listener's queue
                _log.warning("no new connection can be accepted: %s", error.strerror)
                self._let_rest(self._listener.fileno(), now_ns + _FULL_AGAIN_NS)
                self._send_one_away()
                return
            if connected is None:
                continue
            if is_full and not self._send_one_away():
                _log.warning("%d hosts compute here already: another one is refused", MAX_PEERS)
                connected.close()
                continue
            try:
                self._welcome(connected)
            except MemoryError:
                _log.warning("a new connection was refused: no memory")
                connected.close()

    def _welcome(self, connected: Stream) -> None:
        self._last_name += 1
        name = b"%d" % self._last_name
        connection = Connection(name, connected, self._clock, self._new_session(), self._handshake_time)
        peer = _Peer(name, connection, self._spent_ns + _NEWCOMER_NS)
        self._peers[name] = self._by_fd[connection.fileno()] = peer
        self._poll.register(connection.fileno(), 0)
        self._do(peer, connection.greet)

    def _new_session(self) -> CurveSession | None:
        keys, allowed = self._keys, self._allowed
        if keys is None or allowed is None:
            return None
        return CurveSession(keys.secret, keys.public, lambda key: allowed.name(key) is not None)

    def _send_one_away(self) -> bool:
        """Make room for another connection; False: all of them compute."""
        peer = self._to_send_away()
        if peer is not None:
            self._drop(peer)
        return peer is not None

    def _to_send_away(self, *, spares_young: bool = False) -> _Peer | None:
        """The peer of lowest rank that was silent longest; None: all of them compute.

        A host that computed once and was silent for minutes since gives way, too: it may be gone without a word, and
        if not it comes back when it needs the device. Who asked for other things before it said Hello goes before those
        that are still on their way to it; spares_young: they do not go at all for a quarter of a second.
        """
        now = self._clock.monotonic_ns()

        def is_on_its_way(peer: _Peer) -> bool:
            return peer.rank is Rank.STRANGER and not peer.was_served

        candidates = [
            peer
            for peer in self._peers.values()
            if (peer.rank < Rank.COMPUTES or peer.connection.heard_ns < now - _ASLEEP_NS)
            and not (spares_young and is_on_its_way(peer) and peer.connection.opened_ns > now - _YOUNG_NS)
        ]
        return min(
            candidates, key=lambda peer: (peer.rank, is_on_its_way(peer), peer.connection.heard_ns), default=None
        )

    def _make_room_for_memory(self) -> bool:
        """False: every segment belongs to a host that computes, or that has just been given it."""
        owners = [peer for peer in self._peers.values() if peer.channel is not None]
        if len(owners) < shm.MAX_CHANNELS:
            return True
        before = self._clock.monotonic_ns() - _KEEP_MEMORY_NS
        idle = [peer for peer in owners if peer.rank < Rank.COMPUTES and peer.connection.opened_ns < before]
        if not idle:
            return False
        self._drop(min(idle, key=lambda peer: peer.connection.heard_ns))
        return True

    def _bound_memory(self) -> None:
        while sum(peer.connection.held_bytes for peer in self._peers.values()) > MAX_HELD_BYTES:
            least = MAX_HELD_BYTES // (4 * MAX_PEERS)
            holders = [peer for peer in self._peers.values() if peer.connection.held_bytes > least]
            greedy = max(holders, key=lambda peer: (-peer.rank, peer.connection.held_bytes))
            _log.warning("a peer that held %d MiB was sent away", greedy.connection.held_bytes >> 20)
            self._drop(greedy)

    def _to_memory(self, peer: _Peer, frames: Frames, *, writes_checksum: bool) -> bool:
        """False: the message must take the socket."""
        channel = peer.channel
        if channel is None or not channel.has_spoken or len(frames) != 2:
            return False
        try:
            sent = channel.put(frames, writes_checksum=writes_checksum)
        except RemoteProtocolError as error:
            _log.warning("a host damaged its shared memory and is sent away: %s", error)
            self._drop(peer)
            return True
        if sent is shm.Put.DOORBELL:
            self._do(peer, peer.connection.send_message, (DOORBELL,))
        return sent is not shm.Put.REFUSED

    def _do(self, peer: _Peer, act: Callable[..., _Result], *arguments: object) -> _Result | None:
        """Let the peer's connection act, then note what it waits for. One that has ended is dropped: None."""
        connection = peer.connection
        if peer.name not in self._peers:
            return None
        before = len(connection.waiting)
        result: _Result | None = None
        ended: ConnectionEnded | None = None
        try:
            result = act(*arguments)
        except ConnectionEnded as error:
            ended = error
        except Exception as error:  # no memory, or a mistake of this program: one peer's loss, not the device's
            ended = ConnectionEnded(f"a connection was ended: {error!r:.200}")
        self._num_waiting += len(connection.waiting) - before
        if ended is not None:
            if str(ended):
                _log.log(ended.level, "%s", ended)
            self._drop(peer)
        elif peer.name in self._peers:
            if connection.is_unparsed:
                self._unparsed[peer] = None
            else:
                self._unparsed.pop(peer, None)
            if (wanted := connection.wanted_events) != peer.events and connection.fileno() not in self._resting:
                peer.events = wanted
                self._poll.modify(connection.fileno(), wanted)
        return result

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.name, None) is None:
            return
        del self._by_fd[peer.connection.fileno()]
        self._resting.pop(peer.connection.fileno(), None)
        self._last_turns.pop(peer.connection.fileno(), None)
        self._close_channel(peer)
        with contextlib.suppress(OSError):
            self._poll.unregister(peer.connection.fileno())
        self._num_waiting -= len(peer.connection.waiting)
        peer.connection.close()
        self._unparsed.pop(peer, None)
        self._gone.append(peer.name)

    def _close_channel(self, peer: _Peer) -> None:
        if peer.channel is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(peer.channel.doorbell)
            peer.channel.close()
            peer.channel = None
            peer.connection.has_memory = False

    def _heartbeat(self) -> None:
        """While a computation lasts, another thread accepts, reads, writes and answers PING, as libzmq's would."""
        while not self._closed.wait(_HEARTBEAT_S):
            while self._loop_is_late():
                with contextlib.suppress(ValueError, OSError):  # closed meanwhile
                    self._poll.poll(_HEARTBEAT_S / 10)  # only to wake up: what is true now is asked under the lock
                with self._turn:
                    if self._loop_is_late():
                        self._look()

    def _loop_is_late(self) -> bool:
        late = self._clock.monotonic_ns() - self._looked_ns > _HEARTBEAT_S * 1e9
        return late and not self._looks_soon and not self._closed.is_set()
