"""The device's end: any number of hosts, one request at a time, whoever was served least comes next.

Every host has one connection, which speaks ZeroMQ's protocol (zmtp.py). Between processes of one machine the frames
may lie in shared memory instead (shm.py); then the socket carries the doorbell that wakes a sleeper, and every message
the memory cannot take. Of the content of frames it knows the checksum.

What a peer may cost is bounded here: connections, bytes and messages that wait, time before and within a message, and
the share of the device's time. Peers have a rank: strangers, those that said Hello, those that have computed. Where
there is not room for all, the lowest rank goes first, within it the one that was silent longest; a host that
computes is never sent away for another. docs/protocol.md, "Limits", lists the numbers.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import select
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ndp_device.errors import ConfigError, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol.codec import Buffer, Frames
from ndp_device.protocol.messages import SlotOffer
from ndp_device.transport import checksum, fragments, shm, zmtp
from ndp_device.transport.address import Address, make_private, require_private, take
from ndp_device.transport.curve import CurveSession, Unwelcome
from ndp_device.transport.keys import AllowList, DeviceKeys
from ndp_device.transport.shm import ShmChannel

MAX_PEERS = 64
MAX_WAITING = 16
"""Messages of one peer that wait here; more stay in its own queues. A host has 8 Execute in flight at most."""

MAX_WAITING_BYTES = 64 << 20
MAX_UNREAD_BYTES = 64 << 20
"""Answers a peer has not read: above this, its next requests wait; twice this ends the connection."""

MAX_HELD_BYTES = 512 << 20
"""Of all peers, before the one that holds most is sent away."""

HANDSHAKE_NS = 500_000_000
HANDSHAKES_NS = 5_000_000
"""Of every 50 ms, for the arithmetic of CURVE handshakes: peers that nobody knows yet cannot take the device's time."""

MESSAGE_NS = 10_000_000_000
"""Within which a message that has begun must be here."""

STRANGERS_SHARE = 10
"""While a host computes, all peers that never did get one part in this many of the device's time."""

_STRANGERS_WAIT_NS = 20_000_000  # at most, after one of them was served
_COMPUTED_LATELY_NS = 1_000_000_000
_NEWCOMER_NS = 1_000_000  # is taken as served already, so that many new connections gain nothing
_SPIN_SLICE_NS = 50_000  # after which a spinning device looks at its sockets
_HEARTBEAT_S = 0.2  # how long a computation may last before another thread looks after the sockets
_ACCEPT_AT_ONCE = 4
_READ_AT_ONCE = 1 << 20  # of one peer, before the others are looked at
_CHECK_NS = 50_000_000
_FULL_AGAIN_NS = 100_000_000  # after the system had no descriptor for a new connection
_KEEP_MEMORY_NS = 1_000_000_000  # that a host may take to compute for the first time before others may want its memory
_FLUSH_S = 0.5
_LAST_ANSWER_S = 0.05
_DOORBELL = b""
_CREDENTIALS = struct.Struct("3i")
_log = logging.getLogger(__name__)


class Rank(enum.IntEnum):
    STRANGER = 0
    GREETED = 1
    COMPUTES = 2


class Received(NamedTuple):
    """A request as it arrived; `damage` says what is wrong with it."""

    client: bytes
    frames: Frames
    damage: str | None
    seen_ns: int  # when this device first saw it
    channel: ShmChannel | None = None

    def release(self) -> None:
        """The frames are not needed any more: their ring slot may be written again."""
        if self.channel is not None:
            self.channel.release()


class _Peer:
    """One connection, what has arrived on it, and what has not left yet."""

    def __init__(self, name: bytes, connection: socket.socket, now_ns: int, curve: CurveSession | None) -> None:
        self.name, self.socket = name, connection
        self.reader = zmtp.Reader(curve)
        self.is_unwelcome = False  # and has been told so
        self.rank = Rank.STRANGER
        self.opened_ns = self.heard_ns = now_ns
        self.computed_ns = 0
        self.began_ns = 0  # the message that is arriving; 0 = none
        self.waiting: deque[Received] = deque()
        self.waiting_bytes = 0
        self.has_more = False  # bytes that were read but not looked at
        self.unread: deque[memoryview] = deque()
        self.unread_bytes = 0
        self.joining: fragments.Joining | None = None
        self.version = 0  # that its messages show
        self.num_cut = 0
        self.channel: ShmChannel | None = None
        self.ring_seen_ns = 0  # when a message in the ring was first seen; 0 = none was
        self.spent_ns = 0.0  # the start tag of its next request (start-time fair queueing)
        self.events = 0

    @property
    def may_wait(self) -> bool:
        """Another message of this peer may be read."""
        return len(self.waiting) < MAX_WAITING and self.waiting_bytes < MAX_WAITING_BYTES

    @property
    def held_bytes(self) -> int:
        joined = self.joining.num_joined if self.joining is not None else 0
        return self.reader.held_bytes + self.waiting_bytes + self.unread_bytes + joined

    @property
    def is_waiting(self) -> bool:
        if self.unread_bytes > MAX_UNREAD_BYTES:
            return False
        return bool(self.waiting) or (self.channel is not None and bool(self.channel.ring.readable()))


class ZmqServer:
    """The device's end: receives frames from any client, answers one client by its name."""

    def __init__(self, address: str, keys: DeviceKeys | None = None) -> None:
        """keys: only hosts that have the right ones come in, and everything is encrypted."""
        self._ipc_path = Address.parse(address, has_keys=keys is not None).ipc_path
        self._keys = keys
        self._allowed = None if keys is None else AllowList(keys, _log.warning)
        self._handshakes_left_ns = HANDSHAKES_NS
        self.on_gone: Callable[[bytes], None] = lambda client: None  # called by `receive`
        self._gone: deque[bytes] = deque()
        self._num_waiting = 0
        self._peers: dict[bytes, _Peer] = {}
        self._by_fd: dict[int, _Peer] = {}
        self._last_name = 0
        self._spent_ns = 0.0  # the start tag of the request that is or was being served
        self._strangers_from_ns = 0
        self._computed_ns = 0
        self._accepts_from_ns = 0
        self._checked_ns = self._polled_ns = 0
        self._unparsed: set[_Peer] = set()  # with bytes that were read but not looked at
        self._spinner = shm.Spinner(shm.DEVICE_SPIN_US)
        self._active_ns = 0
        self._lock: int | None = None
        self._listener: socket.socket | None = None
        self._poll = select.epoll()
        self._turn = threading.RLock()
        self._looked_ns = time.monotonic_ns()
        self._sent_s = 0.0
        self._looks_soon = False  # the serving loop itself
        self._closed = threading.Event()
        try:
            self._listen(address)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True).start()

    # -- what the serving loop uses ------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def receive(self, timeout_ms: int) -> Received | None:
        """The next request, or None after timeout_ms. Frames are whatever was sent, at most zmtp.MAX_FRAMES."""
        now = self._looked_ns = time.monotonic_ns()
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
                end_s = time.monotonic() + timeout_ms / 1e3 if received is None else 0.0
                while received is None and (left_s := end_s - time.monotonic()) > 0:
                    received = self._sleep(left_s)
            finally:
                self._looked_ns = time.monotonic_ns()
                self._looks_soon = False
        return received

    def served(self, client: bytes, cost_ns: int, *, computed: bool, greeted: bool) -> None:
        """How long the request last received took, and what it showed of its peer."""
        now = time.monotonic_ns()
        peer = self._peers.get(client)
        if computed:
            self._computed_ns = now
        if peer is None:
            return
        peer.spent_ns = self._spent_ns + cost_ns
        if computed:
            peer.rank, peer.computed_ns = Rank.COMPUTES, now
        elif greeted:
            peer.rank = max(peer.rank, Rank.GREETED)
        if peer.rank < Rank.COMPUTES:
            self._strangers_from_ns = now + min(cost_ns * (STRANGERS_SHARE - 1), _STRANGERS_WAIT_NS)

    def offer_memory(self, client: bytes) -> SlotOffer | None:
        """A segment for this client, used in both directions as soon as the client has used it once."""
        with self._turn:
            peer = self._peers.get(client)
            if peer is None or self._ipc_path is None:
                return None
            self._close_channel(peer)
            if not self._make_room_for_memory():
                return None
            peer.channel = ShmChannel.create()
            if peer.channel is None:
                return None
            self._poll.register(peer.channel.doorbell, select.EPOLLIN)
            return peer.channel.offer

    def send(self, client: bytes, frames: Frames) -> None:
        """Write the checksum and send. Never blocks; a client that is gone loses its answer."""
        with self._turn:
            peer = self._peers.get(client)
            if peer is None or self._to_memory(peer, frames, writes_checksum=True):
                return
            header, body = frames
            if fragments.must_cut(body, peer.version):
                self._to_socket_cut(peer, frames, writes_checksum=True)
            else:
                self._to_socket(peer, (checksum.write(header, body), body))

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
            if len(frames) == 2 and fragments.must_cut(frames[1], peer.version):
                self._to_socket_cut(peer, frames, writes_checksum=False)
            else:
                self._to_socket(peer, frames)

    def drop(self, client: bytes) -> None:
        """End the connection: its host notices at once."""
        with self._turn:
            if peer := self._peers.get(client):
                self._drop(peer)

    def close(self) -> None:
        """Send what can be sent within half a second, then end every connection."""
        self._closed.set()
        with self._turn:
            deadline = time.monotonic() + _FLUSH_S
            while any(peer.unread for peer in self._peers.values()) and time.monotonic() < deadline:
                for peer in list(self._peers.values()):
                    self._write(peer)
                time.sleep(0.001)
            # libzmq throws away what has arrived but was not read yet when it sees that a connection ended
            time.sleep(max(self._sent_s + _LAST_ANSWER_S - time.monotonic(), 0.0))
            for peer in list(self._peers.values()):
                self._drop(peer)
            if self._listener is not None:
                self._listener.close()
                self._listener = None
                if self._ipc_path is not None:
                    self._ipc_path.unlink(missing_ok=True)
            self._poll.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- which request is next -----------------------------------------------------------------------------------

    def _next(self) -> Received | None:
        """The request of the peer that has the least of the device's time so far."""
        now = 0
        best: _Peer | None = None
        for peer in self._peers.values():
            channel = peer.channel
            if not (peer.waiting or (channel is not None and channel.ring.readable())):
                continue
            if peer.unread_bytes > MAX_UNREAD_BYTES:
                continue
            now = now or time.monotonic_ns()
            if not peer.waiting and not peer.ring_seen_ns:
                peer.ring_seen_ns = now
            if peer.rank < Rank.COMPUTES and not self._may_strangers(now):
                continue
            if best is None or peer.spent_ns < best.spent_ns:
                best = peer
        if best is None:
            return None
        self._spent_ns = best.spent_ns = max(best.spent_ns, self._spent_ns)
        best.heard_ns = now
        received = self._from_memory(best, now) if best.channel is not None else None
        if received is None and best.waiting:
            received = best.waiting.popleft()
            self._num_waiting -= 1
            best.waiting_bytes -= _size(received.frames)
            self._update(best)
        return received

    def _may_strangers(self, now_ns: int) -> bool:
        return now_ns >= self._strangers_from_ns or now_ns > self._computed_ns + _COMPUTED_LATELY_NS

    def _from_memory(self, peer: _Peer, now_ns: int) -> Received | None:
        channel = peer.channel
        assert channel is not None
        try:
            taken = channel.take()
        except RemoteProtocolError as error:
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
        channels = [p.channel for p in self._peers.values() if p.channel is not None and p.channel.has_spoken]
        while channels and time.monotonic_ns() - self._active_ns < self._spinner.spin_ns and not self._spinner.is_calm:
            seen = self._spinner.spin(channels, _SPIN_SLICE_NS)
            with self._turn:
                if not seen:
                    self._look()
                if received := self._next():
                    return received
            channels = [channel for channel in channels if not channel.is_closed]
        return None

    def _sleep(self, timeout_s: float) -> Received | None:
        with self._turn:
            channels = [peer.channel for peer in self._peers.values() if peer.channel is not None]
            ready = all(channel.prepare_sleep() for channel in channels)
            if any(peer.may_wait for peer in self._unparsed):
                ready = False
            if any(peer.is_waiting for peer in self._peers.values()):  # strangers whose turn has not come
                timeout_s = min(timeout_s, max(self._strangers_from_ns - time.monotonic_ns(), 0) / 1e9)
        self._look(timeout_s if ready else 0.0)
        with self._turn:
            for channel in channels:
                channel.awake()
            return self._next()

    # -- sockets -------------------------------------------------------------------------------------------------

    def _listen(self, address: str) -> None:
        path = self._ipc_path
        if path is not None:
            make_private(path.parent)
            self._lock = take(path)
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(path.lstat().st_mode):
                    raise ConfigError(f"{path} is not a socket and will not be replaced; choose another address")
                path.unlink()  # of a device that was killed: the lock is ours
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host.strip("[]")
        family = socket.AF_UNIX if path is not None else socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = self._listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        previous = os.umask(0o077)
        try:
            if path is not None:
                listener.bind(str(path))
                require_private(path)
            else:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, 0 if port == "*" else int(port)))
            listener.listen(MAX_PEERS)
        except OSError as error:
            self._listener.close()
            self._listener = None
            used = error.errno == errno.EADDRINUSE
            reason = "another process listens there" if used else os.strerror(error.errno or 0)
            raise ConfigError(f"cannot listen on {address}: {reason}; choose another address") from None
        finally:
            os.umask(previous)
        self.address = address
        if path is None:
            host, port = listener.getsockname()[:2]
            self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._poll.register(listener.fileno(), select.EPOLLIN)

    def _look(self, timeout_s: float = 0.0) -> None:
        """Accept, read and write what can be without waiting longer; everything one peer can cause here is bounded."""
        events = self._poll.poll(timeout_s)
        with self._turn:
            now = self._polled_ns = time.monotonic_ns()
            for fd, event in events:
                if self._listener is not None and fd == self._listener.fileno():
                    self._accept(now)
                    continue
                peer = self._by_fd.get(fd)
                if peer is None:
                    continue  # a doorbell, or a peer that has just gone
                if event & (select.EPOLLHUP | select.EPOLLERR):
                    self._drop(peer)  # nobody is there to read an answer
                    continue
                if event & select.EPOLLOUT:
                    self._write(peer)
                if event & select.EPOLLIN and peer.name in self._peers:
                    self._read(peer, now)
            for peer in [peer for peer in self._unparsed if peer.may_wait]:
                self._parse(peer, now)
            if now > self._checked_ns + _CHECK_NS:
                self._check(now)

    def _check(self, now_ns: int) -> None:
        """End what takes too long; accept again."""
        self._checked_ns = now_ns
        self._handshakes_left_ns = HANDSHAKES_NS
        for peer in list(self._peers.values()):
            key = peer.reader.curve.peer_key if peer.reader.curve is not None else None
            if key is not None and self._allowed is not None and self._allowed.name(key) is None:
                _log.warning("a host was sent away: its key is no longer allowed")
                self._drop(peer)
                continue
            slow_to_come = not peer.reader.is_ready and now_ns - peer.opened_ns > HANDSHAKE_NS
            if slow_to_come or (peer.began_ns and now_ns - peer.began_ns > MESSAGE_NS):
                self._drop(peer)
        if self._accepts_from_ns and now_ns > self._accepts_from_ns and self._listener is not None:
            self._accepts_from_ns = 0
            self._poll.modify(self._listener.fileno(), select.EPOLLIN)

    def _accept(self, now_ns: int) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor, no memory: whoever connects waits in the listener's queue
                _log.warning("no new connection can be accepted: %s", error.strerror)
                self._accepts_from_ns = now_ns + _FULL_AGAIN_NS
                self._poll.modify(self._listener.fileno(), 0)
                self._send_one_away()
                return
            connection.setblocking(False)
            if not self._may_come(connection):
                connection.close()
            elif len(self._peers) >= MAX_PEERS and not self._send_one_away():
                _log.warning("%d hosts compute here already: another one is refused", MAX_PEERS)
                connection.close()
            else:
                self._last_name += 1
                peer = _Peer(b"%d" % self._last_name, connection, now_ns, self._new_session())
                peer.spent_ns = self._spent_ns + _NEWCOMER_NS
                self._peers[peer.name] = self._by_fd[connection.fileno()] = peer
                self._poll.register(connection.fileno(), select.EPOLLIN)
                peer.events = select.EPOLLIN
                self._to_socket_raw(peer, [peer.reader.greeting])

    def _new_session(self) -> CurveSession | None:
        keys, allowed = self._keys, self._allowed
        if keys is None or allowed is None:
            return None
        return CurveSession(keys.secret, keys.public, lambda key: allowed.name(key) is not None)

    def _may_come(self, connection: socket.socket) -> bool:
        """Over a path, only the user that runs this device and root, whatever the path's mode says."""
        if self._ipc_path is None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return True
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid in (os.geteuid(), 0):
            return True
        _log.warning("process %d of user %d was refused: this device belongs to user %d", pid, uid, os.geteuid())
        return False

    def _send_one_away(self) -> bool:
        """Make room by ending the connection of lowest rank that was silent longest; False: all of them compute."""
        candidates = [peer for peer in self._peers.values() if peer.rank < Rank.COMPUTES]
        if not candidates:
            return False
        self._drop(min(candidates, key=lambda peer: (peer.rank, peer.heard_ns)))
        return True

    def _make_room_for_memory(self) -> bool:
        """False: every segment belongs to a host that computes, or that has just been given it."""
        owners = [peer for peer in self._peers.values() if peer.channel is not None]
        if len(owners) < shm.MAX_CHANNELS:
            return True
        before = time.monotonic_ns() - _KEEP_MEMORY_NS
        idle = [peer for peer in owners if peer.rank < Rank.COMPUTES and peer.opened_ns < before]
        if not idle:
            return False
        self._drop(min(idle, key=lambda peer: peer.heard_ns))
        return True

    def _read(self, peer: _Peer, now_ns: int) -> None:
        total = 0
        while peer.may_wait and not peer.has_more and total < _READ_AT_ONCE:
            try:
                count = peer.socket.recv_into(peer.reader.buffer())
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                count = 0
            if count == 0:
                self._drop(peer)
                return
            peer.heard_ns = now_ns
            peer.reader.filled(count)
            self._parse(peer, now_ns)
            total += count
            if not peer.reader.is_long:
                break
        if total > _READ_AT_ONCE // 16:
            self._bound_memory()

    def _parse(self, peer: _Peer, now_ns: int) -> None:
        """Take the messages that are complete, as many as may wait."""
        peer.has_more = True
        shakes_hands = peer.reader.curve is not None and not peer.reader.is_ready
        if peer.is_unwelcome or (shakes_hands and self._handshakes_left_ns <= 0):
            if not peer.is_unwelcome:  # the arithmetic of handshakes may take a tenth of the time: later
                self._unparsed.add(peer)
            self._update(peer)
            return
        start_ns = time.monotonic_ns() if shakes_hands else 0
        try:
            while peer.may_wait and peer.has_more:
                message, peer.has_more = peer.reader.next()
                if message is not None:
                    self._arrived(peer, message, now_ns)
                elif peer.has_more:
                    break  # so many commands and empty frames that others come first
        except Unwelcome as error:
            _log.warning("a host was refused: %s", error)
            peer.is_unwelcome = True  # and is sent away when its time for the handshake is over, having read why
            self._unparsed.discard(peer)
            self._to_socket_raw(peer, zmtp.command_frame(error.reply))
            return
        except RemoteProtocolError as error:
            (_log.warning if shakes_hands else _log.info)("a connection was ended: %s", error)
            self._drop(peer)
            return
        finally:
            if shakes_hands:
                self._handshakes_left_ns -= time.monotonic_ns() - start_ns
        (self._unparsed.add if peer.has_more else self._unparsed.discard)(peer)
        if peer.reader.is_empty and peer.joining is None:
            peer.began_ns = 0
        elif not peer.began_ns:
            peer.began_ns = now_ns
        if peer.reader.replies:
            replies, peer.reader.replies = peer.reader.replies, bytearray()
            if peer.unread_bytes < MAX_UNREAD_BYTES:
                self._to_socket_raw(peer, [bytes(replies)])
        self._update(peer)

    def _arrived(self, peer: _Peer, message: Frames, now_ns: int) -> None:
        damage = None
        if len(message) == 1 and message[0] == _DOORBELL and peer.channel is not None:
            return  # it has done its work by waking us
        if fragments.is_fragment(message):
            try:
                if peer.joining is None or fragments.begins(message):
                    peer.joining = None
                    peer.joining = fragments.Joining(message)
                    return
                joined = peer.joining.add(message)
                if joined is None:
                    return
                message = joined
            except RemoteProtocolError as error:
                message, damage = (peer.joining.header if peer.joining is not None else b"", b""), str(error)
        elif len(message) == 2:
            damage = checksum.damage(message[0], message[1])
        peer.joining = None
        if len(message) == 2 and damage is None:
            peer.version = codec.peek_version(message[0])
        self._num_waiting += 1
        peer.waiting.append(Received(peer.name, message, damage, now_ns))
        peer.waiting_bytes += _size(message)

    def _bound_memory(self) -> None:
        while sum(peer.held_bytes for peer in self._peers.values()) > MAX_HELD_BYTES:
            holders = [peer for peer in self._peers.values() if peer.held_bytes > MAX_HELD_BYTES // (4 * MAX_PEERS)]
            greedy = max(holders, key=lambda peer: (-peer.rank, peer.held_bytes))
            _log.warning("a peer that held %d MiB was sent away", greedy.held_bytes >> 20)
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
            self._to_socket(peer, (_DOORBELL,))
        return sent is not shm.Put.REFUSED

    def _to_socket_cut(self, peer: _Peer, frames: Frames, *, writes_checksum: bool) -> None:
        peer.num_cut += 1
        for part in fragments.cut(peer.num_cut, *frames, writes_checksum=writes_checksum):
            self._to_socket(peer, part)

    def _to_socket(self, peer: _Peer, frames: Frames) -> None:
        self._to_socket_raw(peer, peer.reader.encoded(frames))

    def _to_socket_raw(self, peer: _Peer, buffers: Iterable[Buffer]) -> None:
        self._sent_s = time.monotonic()
        for buffer in buffers:
            peer.unread.append(memoryview(buffer))  # the codec makes a new body for each message: safe to keep
            peer.unread_bytes += len(buffer)
        self._write(peer)
        if peer.unread_bytes > 2 * MAX_UNREAD_BYTES:
            _log.warning("a peer that left %d MiB of answers unread was sent away", peer.unread_bytes >> 20)
            self._drop(peer)

    def _write(self, peer: _Peer) -> None:
        try:
            while peer.unread:
                sent = peer.socket.sendmsg([peer.unread[i] for i in range(min(len(peer.unread), 16))])
                peer.unread_bytes -= sent
                while sent:
                    first = peer.unread.popleft()
                    if sent < len(first):
                        peer.unread.appendleft(first[sent:])
                        break
                    sent -= len(first)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._drop(peer)
            return
        self._update(peer)

    def _update(self, peer: _Peer) -> None:
        """Ask the system for what can be used now: bytes to read if there is room, room to write if there are any."""
        reads = peer.may_wait and not peer.has_more
        wanted = (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if peer.unread else 0)
        if wanted != peer.events and peer.name in self._peers:
            peer.events = wanted
            self._poll.modify(peer.socket.fileno(), wanted)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.name, None) is None:
            return
        del self._by_fd[peer.socket.fileno()]
        self._close_channel(peer)
        with contextlib.suppress(OSError):
            self._poll.unregister(peer.socket.fileno())
        peer.socket.close()
        self._num_waiting -= len(peer.waiting)
        peer.waiting.clear()
        peer.unread.clear()
        peer.unread_bytes = 0
        self._unparsed.discard(peer)
        self._gone.append(peer.name)

    def _close_channel(self, peer: _Peer) -> None:
        if peer.channel is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(peer.channel.doorbell)
            peer.channel.close()
            peer.channel = None

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
        late = time.monotonic_ns() - self._looked_ns > _HEARTBEAT_S * 1e9
        return late and not self._looks_soon and not self._closed.is_set()


def _size(frames: Frames) -> int:
    return sum(map(len, frames))
