"""All connections of a device: accepted, read, written and ended; what they may hold together is bounded here.

Connections of hosts that compute are looked after at once, those of others in turns and in their part of the time
(strangers.py). Knows what a connection wants (connection.py), who gives way for another (peers.py) and what memory is
shared with whom, but no request: which of those that wait is next, and what it costs, is its owner's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ndp_device.protocol.messages import SlotOffer
from ndp_device.transport import shm
from ndp_device.transport.connection import READ_AT_ONCE, Connection, ConnectionEnded, HandshakeTime
from ndp_device.transport.curve import CurveSession
from ndp_device.transport.keys import AllowList, DeviceKeys
from ndp_device.transport.peers import Peer, Rank, greediest, greedy_process, to_give_up_memory, to_send_away
from ndp_device.transport.shm import ShmChannel
from ndp_device.transport.strangers import StrangersTime
from ndp_device.transport.system import ENDED, READABLE, WRITABLE, DeviceSystem, Stream

MAX_PEERS = 64
MAX_HELD_BYTES = 512 << 20
"""Of all peers, before the one that holds most is sent away."""

_OF_ONE_PROCESS = MAX_PEERS // 4  # connections that never computed, where others want their places
_ACCEPT_AT_ONCE = 4
_REFUSE_AT_ONCE = 32
_BACKLOG = 2 * MAX_PEERS  # so that a newcomer has a place in the queue, and its turn before it gives up (half a second)
_CHECK_NS = 50_000_000
_QUEUE_AGAIN_NS = 5_000_000  # after there was no place for a new connection
_FULL_AGAIN_NS = 100_000_000  # after the system had no descriptor for a new connection
_FLUSH_S = 0.5
_LAST_ANSWER_S = 0.05
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class Connections:
    """Who is connected. `turn` is held while they are looked at or changed: a device has two threads that do."""

    def __init__(
        self,
        address: str,
        keys: DeviceKeys | None,
        strangers: StrangersTime,
        newcomer: Callable[[bytes, Connection], Peer],
        system: DeviceSystem,
    ) -> None:
        """newcomer: makes the peer of a new connection and its name."""
        self._clock, self._strangers, self._newcomer = system.clock, strangers, newcomer
        self._keys = keys
        self._allowed = None if keys is None else AllowList(keys, _log.warning)
        self._handshake_time = HandshakeTime()
        self.turn = threading.RLock()
        self.peers: dict[bytes, Peer] = {}
        self.num_waiting = 0  # requests, those in rings left out
        self.gone: deque[bytes] = deque()  # names of peers whose owner is to learn of it
        self.polled_ns = 0
        self._by_fd: dict[int, Peer] = {}
        self._last_name = 0
        self._unparsed: dict[Peer, None] = {}  # with bytes that were read but not looked at
        self._checked_ns = 0
        self._poll = system.poller()
        self._listener = system.listen(address, has_keys=keys is not None, backlog=_BACKLOG)
        self._poll.register(self._listener.fileno(), READABLE)

    @property
    def address(self) -> str:
        """What hosts connect to."""
        return self._listener.address

    # -- a look at all of them -----------------------------------------------------------------------------------

    def look(self, timeout_s: float = 0.0) -> None:
        """Accept, read and write what can be without waiting longer; everything one peer can cause here is bounded."""
        strangers = self._strangers
        if strangers.rest_until_ns or strangers.resting:
            with self.turn:
                self._end_rests(self._clock.monotonic_ns())
        events = self._poll.poll(timeout_s)
        with self.turn:
            now = self.polled_ns = self._clock.monotonic_ns()
            of_strangers: list[tuple[int, int]] = []
            for fd, event in events:
                peer = self._by_fd.get(fd)
                if peer is not None and (peer.rank is Rank.COMPUTES or event & ENDED):
                    self._attend(peer, event, now)
                elif peer is not None or fd == self._listener.fileno():  # else a doorbell, or a peer that has just gone
                    of_strangers.append((fd, event))
            if self._unparsed:
                unparsed = [peer for peer in self._unparsed if self._may_parse(peer)]
                for peer in unparsed:
                    if peer.rank is Rank.COMPUTES:
                        self.do(peer, peer.connection.parse, now)
                of_strangers += [(peer.connection.fileno(), 0) for peer in unparsed if peer.rank < Rank.COMPUTES]
            if of_strangers:
                self._look_after_strangers(of_strangers, now)
            if now > self._checked_ns + _CHECK_NS:
                self._check(now)

    def wait(self, timeout_s: float) -> None:
        """Until something may have happened; nothing is looked at."""
        self._poll.poll(timeout_s)

    @property
    def has_bytes_to_parse(self) -> bool:
        """There is something to do without any word from the system."""
        return any(self._may_parse(peer) for peer in self._unparsed)

    @property
    def looks_again_ns(self) -> int | None:
        """When connections rest no longer, so that there may be something to do; None: none rests."""
        strangers = self._strangers
        ends = [*strangers.resting.values()]
        if self._unparsed and strangers.rest_until_ns:
            ends.append(strangers.rest_until_ns)
        return min(ends, default=None)

    def _look_after_strangers(self, happened: list[tuple[int, int]], now_ns: int) -> None:
        """Accept, read and write for peers that never computed. An event 0: what was read is to be looked at.

        While a host computes this takes half a millisecond of processor time, or a tenth of the time since the last
        look, and is then left alone for nine times as long: whatever these peers send, it gets a tenth of the time.
        """
        strangers, listener = self._strangers, self._listener.fileno()
        begun_ns = at_ns = self._clock.thread_time_ns()
        length_ns = strangers.begin_look(listener, now_ns)
        late: list[int] = []
        for fd, event in sorted(happened, key=self._order_of_turns):
            peer = self._by_fd.get(fd)
            if strangers.rest_until_ns or (length_ns is not None and at_ns >= begun_ns + length_ns):
                if event:
                    late.append(fd)
                continue
            if peer is not None:
                strangers.has_turn(fd, now_ns)
                if event:
                    self._attend(peer, event, now_ns)
                else:
                    self.do(peer, peer.connection.parse, now_ns)
            elif fd == listener:
                self._accept(now_ns)
            else:
                continue  # sent away for one before it
            at_ns = self._clock.thread_time_ns()
        if length_ns is not None and not strangers.rest_until_ns:
            strangers.rest_after(at_ns - begun_ns, self._clock.monotonic_ns())
        for fd in late:
            if fd in self._by_fd or fd == listener:  # else it was sent away meanwhile
                self._let_rest(fd, strangers.rest_until_ns)

    def _order_of_turns(self, happened: tuple[int, int]) -> tuple[bool, int]:
        peer = self._by_fd.get(happened[0])
        return self._strangers.order(happened[0], is_ready=peer is not None and peer.connection.is_ready)

    def _may_parse(self, peer: Peer) -> bool:
        return peer.connection.may_wait and (peer.rank is Rank.COMPUTES or not self._strangers.rest_until_ns)

    def _let_rest(self, fd: int, until_ns: int) -> None:
        """Be told nothing more of it until then."""
        if fd not in self._strangers.resting:
            self._poll.modify(fd, 0)
        self._strangers.let_rest(fd, until_ns)

    def _end_rests(self, now_ns: int) -> None:
        for fd in self._strangers.end_rests(now_ns):
            peer = self._by_fd.get(fd)
            if peer is not None:
                peer.events = peer.connection.wanted_events
            self._poll.modify(fd, READABLE if peer is None else peer.events)

    def _attend(self, peer: Peer, event: int, now_ns: int) -> None:
        if event & ENDED:
            self.drop(peer)  # nobody is there to read an answer
            return
        if event & WRITABLE:
            self.do(peer, peer.connection.write)
        if event & READABLE and peer.name in self.peers:
            num_read = self.do(peer, peer.connection.read, now_ns)
            if num_read is not None and num_read > READ_AT_ONCE // 16:
                self.bound_memory()

    def _check(self, now_ns: int) -> None:
        """End what takes too long."""
        self._checked_ns = now_ns
        self._handshake_time.begin_period()
        for peer in list(self.peers.values()):
            key = peer.connection.peer_key
            if key is not None and self._allowed is not None and self._allowed.name(key) is None:
                _log.warning("a host was sent away: its key is no longer allowed")
                self.drop(peer)
            elif peer.connection.is_late(now_ns):
                self.drop(peer)

    # -- one of them ---------------------------------------------------------------------------------------------

    def do(self, peer: Peer, act: Callable[..., _Result], *arguments: object) -> _Result | None:
        """Let the peer's connection act, then note what it waits for. One that has ended is dropped: None."""
        connection = peer.connection
        if peer.name not in self.peers:
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
        self.num_waiting += len(connection.waiting) - before
        if ended is not None:
            if str(ended):
                _log.log(ended.level, "%s", ended)
            self.drop(peer)
        elif peer.name in self.peers:
            if connection.is_unparsed:
                self._unparsed[peer] = None
            else:
                self._unparsed.pop(peer, None)
            if (wanted := connection.wanted_events) != peer.events and (
                connection.fileno() not in self._strangers.resting
            ):
                peer.events = wanted
                self._poll.modify(connection.fileno(), wanted)
        return result

    def drop(self, peer: Peer) -> None:
        """End the connection: its host notices at once."""
        if self.peers.pop(peer.name, None) is None:
            return
        fd = peer.connection.fileno()
        del self._by_fd[fd]
        self._strangers.forget(fd)
        self._close_channel(peer)
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)
        self.num_waiting -= len(peer.connection.waiting)
        peer.connection.close()
        self._unparsed.pop(peer, None)
        self.gone.append(peer.name)

    def close(self) -> None:
        """Send what can be sent within half a second, then end every connection."""
        deadline = self._clock.monotonic() + _FLUSH_S
        while any(peer.connection.unread_bytes for peer in self.peers.values()) and self._clock.monotonic() < deadline:
            for peer in list(self.peers.values()):
                self.do(peer, peer.connection.write)
            self._clock.sleep(0.001)
        # libzmq throws away what has arrived but was not read yet when it sees that a connection ended
        sent_s = max((peer.connection.sent_s for peer in self.peers.values()), default=0.0)
        self._clock.sleep(max(sent_s + _LAST_ANSWER_S - self._clock.monotonic(), 0.0))
        for peer in list(self.peers.values()):
            self.drop(peer)
        self._listener.close()
        self._poll.close()

    # -- a new one -----------------------------------------------------------------------------------------------

    def _accept(self, now_ns: int) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            is_full = len(self.peers) >= MAX_PEERS
            greedy: int | None = None
            if is_full and self._to_send_away(spares_young=True) is None and self._to_send_away() is not None:
                # whoever has come just now is given the time to greet, but not dozens of one process
                greedy = greedy_process(self.peers.values(), _OF_ONE_PROCESS)
                if greedy is None:
                    self._let_rest(self._listener.fileno(), now_ns + _QUEUE_AGAIN_NS)
                    return  # others wait in the listener's queue
            connected = self._connected(now_ns, refused=greedy)
            if connected is None:
                return
            if is_full and not self._send_one_away(greedy):
                _log.warning("%d hosts compute here already: another one is refused", MAX_PEERS)
                connected[0].close()
                continue
            try:
                self._welcome(*connected)
            except MemoryError:
                _log.warning("a new connection was refused: no memory")
                connected[0].close()

    def _connected(self, now_ns: int, *, refused: int | None) -> tuple[Stream, int | None] | None:
        """The next that waits in the listener's queue and is not of the process that is refused; None: look later."""
        for _ in range(_REFUSE_AT_ONCE):
            try:
                connected = self._listener.accept()
            except BlockingIOError:
                return None
            except OSError as error:  # no descriptor, no memory: whoever connects waits in the listener's queue
                _log.warning("no new connection can be accepted: %s", error.strerror)
                self._let_rest(self._listener.fileno(), now_ns + _FULL_AGAIN_NS)
                self._send_one_away()
                return None
            if connected is None:
                continue
            if refused is None or connected[1] != refused:
                return connected
            connected[0].close()
        return None

    def _welcome(self, connected: Stream, process: int | None) -> None:
        self._last_name += 1
        name = b"%d" % self._last_name
        connection = Connection(name, connected, self._clock, self._new_session(), self._handshake_time)
        peer = self._newcomer(name, connection)
        peer.process = process
        self.peers[name] = self._by_fd[connection.fileno()] = peer
        self._poll.register(connection.fileno(), 0)
        self.do(peer, connection.greet)

    def _new_session(self) -> CurveSession | None:
        keys, allowed = self._keys, self._allowed
        if keys is None or allowed is None:
            return None
        return CurveSession(keys.secret, keys.public, lambda key: allowed.name(key) is not None)

    def _to_send_away(self, process: int | None = None, *, spares_young: bool = False) -> Peer | None:
        """process: only of this one."""
        peers = [peer for peer in self.peers.values() if process is None or peer.process == process]
        return to_send_away(peers, self._clock.monotonic_ns(), spares_young=spares_young)

    def _send_one_away(self, process: int | None = None) -> bool:
        """Make room for another connection; False: all of them compute."""
        peer = self._to_send_away(process)
        if peer is not None:
            self.drop(peer)
        return peer is not None

    # -- memory --------------------------------------------------------------------------------------------------

    def bound_memory(self) -> None:
        """Send peers away until all that are left hold little enough."""
        while sum(peer.connection.held_bytes for peer in self.peers.values()) > MAX_HELD_BYTES:
            greedy = greediest(self.peers.values(), MAX_HELD_BYTES // (4 * MAX_PEERS))
            _log.warning("a peer that held %d MiB was sent away", greedy.connection.held_bytes >> 20)
            self.drop(greedy)

    def share_memory(self, peer: Peer) -> SlotOffer | None:
        """A new segment for this peer; None where there is none, or no room for another."""
        if self._listener.path is None:
            return None
        self._close_channel(peer)
        if not self._make_room_for_segment():
            return None
        peer.channel = ShmChannel.create()
        if peer.channel is None:
            return None
        peer.connection.has_memory = True
        self._poll.register(peer.channel.doorbell, READABLE)
        return peer.channel.offer

    def _make_room_for_segment(self) -> bool:
        """False: every segment belongs to a host that computes, or that has just been given it."""
        owners = [peer for peer in self.peers.values() if peer.channel is not None]
        if len(owners) < shm.MAX_CHANNELS:
            return True
        peer = to_give_up_memory(owners, self._clock.monotonic_ns())
        if peer is not None:
            self.drop(peer)
        return peer is not None

    def _close_channel(self, peer: Peer) -> None:
        if peer.channel is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(peer.channel.doorbell)
            peer.channel.close()
            peer.channel = None
            peer.connection.has_memory = False
