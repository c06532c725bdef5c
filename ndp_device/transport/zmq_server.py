"""The device's end: a ROUTER of libzmq, and shared memory beside it (shm.py) for hosts of this machine.

Connections, handshakes, queues, sizes and CURVE are libzmq's. This file does the rest: it knows a peer by the
descriptor of its messages, to end the connection and to notice its end.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import stat
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from ndp_device.common.errors import ConfigError, RemoteProtocolError
from ndp_device.common.machine_memory import give_memory_back
from ndp_device.protocol import codec
from ndp_device.protocol.codec import Frames
from ndp_device.protocol.messages import SlotOffer
from ndp_device.transport import shm, sockets
from ndp_device.transport.address import Address, make_private, require_private, take
from ndp_device.transport.base import Received, damage_of, write_checksum
from ndp_device.transport.keys import AllowList, DeviceKeys
from ndp_device.transport.shm import ShmChannel
from ndp_device.transport.sockets import Bounds

MAX_CONNECTIONS = 256
MAX_FRAMES = 4
"""Most frames of one message. Two or three are legal, four get a sentence as answer, more end the connection."""

_IO_THREADS = 1  # with more of them ACCEPTED may come after a connection's first message: docs/log/transport.md
_RECEIVE_QUEUE = 2  # messages of one host that libzmq holds, up to 64 MiB each; with 1 a host with keys never got in
_SEND_QUEUE = 80  # messages; the answers to all that a host may have in flight
MAX_UNREAD_BYTES = 256 << 20
"""Most bytes of answers that hosts have not read, of all hosts together: above it who left most unread is sent away."""

_COUNTED_BYTES = 256 << 10  # of answers to a host, after which the next one shows by its end that they were read
_FRAME_BYTES = 64  # that libzmq takes for a frame, beside its contents
_AT_ONCE = 8  # messages, before one of them is served: who floods must not keep others waiting while it is read
_CHECK_NS = 500_000_000
_TRIMS = 2  # checks after a connection's end that give its memory back: a queue of libzmq's ends a while later
_SPIN_SLICE_NS = 50_000  # after which a spinning device looks at its socket
_FLUSH_MS = 500
_DOMAIN = b"ndp"
"""Named, libzmq ends peers of ZMTP 1 and 2, as which it takes any bytes that are no greeting. They have no handshake,
and their messages no descriptor. Without a ZAP handler the name has no other effect."""

_KEEP_MEMORY_NS = 1_000_000_000  # that a host may take to use its memory for the first time
_ASLEEP_NS = 300_000_000_000
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_log = logging.getLogger(__name__)


class _Peer:
    """A host that has sent something."""

    def __init__(self, name: bytes, fd: int, key: bytes) -> None:
        self.name, self.fd, self.key = name, fd, key
        self.channel: ShmChannel | None = None
        self.is_lent = False  # a message of the ring is being served where it lies
        self.used_ns = 0  # the ring
        self.unread: deque[tuple[zmq.MessageTracker, int]] = deque()  # answers, with the bytes up to each
        self.uncounted = 0  # bytes of answers after the last of them


class ZmqServer:
    """The device's end of all connections. A client is a name made for one connection. Not for several threads.

    Frames come out checked, with their damage named, and go in without a checksum. Nothing here raises because of what
    a peer did: a connection that is of no use ends, and `on_gone` says so from within `receive`. Where `receive` raises
    for another reason, the next call hands over what had been read. The tests' simulated network does the same.
    """

    def __init__(self, address: Address, keys: DeviceKeys | None = None) -> None:
        """keys: only hosts that have the right ones come in, and everything is encrypted."""
        self.on_gone: Callable[[bytes], None] = lambda client: None
        self._path = address.ipc_path
        self._open: dict[int, int] = {}  # descriptor -> when something was heard of it
        self._peers: dict[bytes, _Peer] = {}
        self._names: dict[int, bytes] = {}  # descriptor -> the peer behind it
        self._gone: list[bytes] = []
        self._read: list[Received] = []  # and not handed over yet: what fails afterwards loses none of them
        self._spinner = shm.Spinner(shm.DEVICE_SPIN_US)
        self._active_ns = self._looked_ns = self._checked_ns = 0
        self._unread_bytes = 0  # of answers to all peers
        self._trims = 0  # of the coming checks
        self._lock: int | None = None
        self._bounds: Bounds | None = None
        self._is_bound = False
        self._allowed = None if keys is None else AllowList(keys, _log.warning)
        sockets.allow_many_descriptors()
        # libzmq counts connections' names up from a rand() that nobody seeds, and a name twice ends the process
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).srand(secrets.randbits(32))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(_IO_THREADS)
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._authenticator = None if keys is None else ThreadAuthenticator(self._context)
        self._end_sockets = sockets.ends_with(
            self, _end_sockets, self._context, self._socket, self._monitor, self._authenticator
        )
        try:
            self._bind(address, keys)
        except BaseException:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._bounds = Bounds(self._open, self._shut)

    # -- in ------------------------------------------------------------------------------------------------------

    def receive(self, timeout_ms: int) -> list[Received]:
        """Requests that arrived, at least some; none after timeout_ms. The caller decides whom to serve next.

        While they come by memory, a look at the socket before each would cost too much.
        """
        if not self._read:  # else the last call failed after it had read them
            self._take(timeout_ms)
        arrived, self._read = self._read, []
        return arrived

    def _take(self, timeout_ms: int) -> None:
        now = time.monotonic_ns()
        self._from_rings(now)
        if now - self._looked_ns > _SPIN_SLICE_NS or now - self._active_ns > self._spinner.spin_ns:
            self._look(now)
        while self._gone:
            self.on_gone(self._gone.pop())
        if not self._read and timeout_ms:
            self._spin()
            if not self._read:
                self._sleep(timeout_ms)

    def _look(self, now_ns: int) -> None:
        """Take what the socket has, in a bounded number of messages."""
        self._looked_ns = now_ns
        self._watch()
        for _ in range(_AT_ONCE):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
            self._from_socket(now_ns)
        if now_ns - self._checked_ns > _CHECK_NS:
            self._check(now_ns)

    def _from_socket(self, now_ns: int) -> None:
        first: zmq.Frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        frames: list[codec.Buffer] = []
        while self._socket.getsockopt(zmq.RCVMORE):
            frame = self._socket.recv(copy=False)
            if len(frames) <= MAX_FRAMES:
                frames.append(sockets.content(frame))
        peer = self._peers.get(first.bytes)
        try:
            peer = peer or self._meet(first)
            if peer is None:
                self._trims = _TRIMS
                return  # its connection has ended meanwhile: nobody would read an answer
            self._open[peer.fd] = now_ns
            if len(frames) > MAX_FRAMES:
                self._end(peer, f"a message may have {MAX_FRAMES} frames")
            elif received := self._message(peer, frames, now_ns):
                self._read.append(received)
        except Exception:  # a mistake of this program, or no memory: this peer's loss, and nobody else's
            _log.exception("a message could not be looked at")
            if peer is not None:
                self._end(peer, "its message could not be looked at")

    def _message(self, peer: _Peer, frames: Frames, now_ns: int) -> Received | None:
        if frames == sockets.DOORBELL and peer.channel is not None:
            if not peer.channel.ring.is_intact():
                self._end(peer, "its shared memory was written over")
            return None
        damage = damage_of(frames[0], frames[1]) if len(frames) == 2 else None
        return Received(peer.name, frames, damage, now_ns)

    def _from_rings(self, now_ns: int) -> None:
        """Take one message of each ring: the next one of it comes when this one was served."""
        for peer in list(self._peers.values()):
            channel = peer.channel
            if channel is not None and not peer.is_lent and channel.ring.readable():
                try:
                    if (taken := channel.take()) is not None:
                        self._read.append(self._from_memory(peer, channel, taken, now_ns))
                except (RemoteProtocolError, MemoryError) as error:
                    self._end(peer, str(error))
                except Exception:
                    _log.exception("a message in shared memory could not be looked at")
                    self._end(peer, "its message could not be looked at")

    def _from_memory(self, peer: _Peer, channel: ShmChannel, taken: shm.Taken, now_ns: int) -> Received:
        header, body, intact = taken
        channel.has_spoken = peer.is_lent = True
        peer.used_ns = self._active_ns = now_ns

        def release() -> None:
            peer.is_lent = False
            channel.release()

        damage = None if intact else damage_of(header, shm.checked_part(body))
        return Received(peer.name, (header, body), damage, now_ns, release)

    # -- until there is something --------------------------------------------------------------------------------

    def _spin(self) -> None:
        """A client that was served within the last milliseconds is likely to ask again before it could ring."""
        channels = [
            peer.channel for peer in self._peers.values() if peer.channel is not None and peer.channel.has_spoken
        ]
        while channels and time.monotonic_ns() - self._active_ns < self._spinner.spin_ns and not self._spinner.is_calm:
            seen = self._spinner.spin(channels, _SPIN_SLICE_NS)
            now = time.monotonic_ns()
            if seen:
                self._from_rings(now)
            if not seen or now - self._looked_ns > _SPIN_SLICE_NS:
                self._look(now)
            if self._read or self._gone:
                break

    def _sleep(self, timeout_ms: int) -> None:
        channels = [peer.channel for peer in self._peers.values() if peer.channel is not None]
        polled: list[tuple[Any, int]] = [(self._socket, zmq.POLLIN), (self._monitor, zmq.POLLIN)]
        polled += [(channel.doorbell, zmq.POLLIN) for channel in channels]
        are_empty = [channel.ring.prepare_sleep() for channel in channels]  # all of them are to ring
        if all(are_empty):
            zmq.zmq_poll(polled, timeout_ms)
        for channel in channels:
            channel.awake()
        now = time.monotonic_ns()
        self._from_rings(now)
        self._look(now)

    # -- out -----------------------------------------------------------------------------------------------------

    def send(self, client: bytes, frames: Frames, *, writes_checksum: bool = True) -> None:
        """Never blocks; a client that is gone loses its answer, one that reads none loses its connection.

        writes_checksum: False where the frames have one, right or wrong.
        """
        peer = self._peers.get(client)
        if peer is None or self._to_memory(peer, frames, writes_checksum=writes_checksum):
            return
        if len(frames) == 2 and codec.has_fixed_head(frames[0]):  # for memory alone, which has no room now
            frames, writes_checksum = codec.encode(*codec.decode_reply(*frames)), True
        self._to_socket(peer, (write_checksum(*frames), frames[1]) if writes_checksum else frames)

    def _to_memory(self, peer: _Peer, frames: Frames, *, writes_checksum: bool) -> bool:
        """False: the message must take the socket."""
        channel = peer.channel
        if channel is None or not channel.has_spoken or len(frames) != 2:
            return False
        try:
            sent = channel.put(frames, writes_checksum=writes_checksum)
        except RemoteProtocolError as error:
            self._end(peer, str(error))
            return True
        if sent is shm.Put.DOORBELL:
            self._to_socket(peer, sockets.DOORBELL)
        return sent is not shm.Put.REFUSED

    def _to_socket(self, peer: _Peer, frames: Frames) -> None:
        size = sum(len(frame) + _FRAME_BYTES for frame in frames)
        sent: list[codec.Buffer | zmq.Frame] = [peer.name, *frames]
        tracker = None
        if peer.uncounted + size >= _COUNTED_BYTES:
            sent[-1] = tracked = zmq.Frame(frames[-1], track=True, copy=False, copy_threshold=0)
            tracker = tracked.tracker
        try:
            sockets.send(self._socket, sent)
            self._count(peer, size, tracker)
        except zmq.Again:
            self._end(peer, "it leaves its answers unread")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(peer)

    def _count(self, peer: _Peer, size: int, tracker: zmq.MessageTracker | None) -> None:
        """Count an answer. Answers leave in their order: the end of one is the end of all before it."""
        peer.uncounted += size
        if tracker is None:
            return
        peer.unread.append((tracker, peer.uncounted))
        self._unread_bytes += peer.uncounted
        peer.uncounted = 0
        if self._unread_bytes > MAX_UNREAD_BYTES:
            for other in self._peers.values():
                while other.unread and other.unread[0][0].done:
                    self._unread_bytes -= other.unread.popleft()[1]
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._end(max(self._peers.values(), key=_unread_bytes), "it leaves its answers unread")

    # -- connections ---------------------------------------------------------------------------------------------

    def drop(self, client: bytes, reason: str) -> None:
        """End the connection: its host notices at once."""
        if peer := self._peers.get(client):
            self._end(peer, reason)

    def _meet(self, frame: zmq.Frame) -> _Peer | None:
        """The peer of a first message; None: its connection has ended."""
        self._watch()  # first: its descriptor may have had another owner a moment ago
        fd = int(frame.get(zmq.SRCFD))
        if fd not in self._open:
            return None
        if former := self._peers.get(self._names.get(fd, b"")):
            self._forget(former)  # its descriptor has got another owner
        key = str(frame.get("User-Id")).encode() if self._allowed is not None else b""
        peer = self._peers[frame.bytes] = _Peer(frame.bytes, fd, key)
        self._names[fd] = peer.name
        return peer

    def _watch(self) -> None:
        """Note which connections were made and which have ended."""
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart())
            fd = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._make_room()
                self._open[fd] = time.monotonic_ns()
            else:
                self._open.pop(fd, None)
                self._trims = _TRIMS
            if peer := self._peers.get(self._names.get(fd, b"")):
                self._forget(peer)

    def _make_room(self) -> None:
        """For a new connection: of those that never said anything the one that is silent longest ends, else of all."""
        if len(self._open) >= MAX_CONNECTIONS:
            fd = min(self._open, key=lambda fd: (fd in self._names, self._open[fd]))
            _log.warning("more than %d connections: the one that was silent longest is ended", MAX_CONNECTIONS)
            self._shut(fd)

    def _check(self, now_ns: int) -> None:
        """End what takes too long, and who may not be here any more."""
        self._checked_ns = now_ns
        if self._trims:
            self._trims -= 1
            give_memory_back()
        for peer in list(self._peers.values()):
            if self._allowed is not None and self._allowed.name(peer.key) is None:
                self._end(peer, "its key is no longer allowed")

    def _end(self, peer: _Peer, reason: str) -> None:
        _log.warning("a host was sent away: %s", reason)
        self._shut(peer.fd)
        self._forget(peer)

    def _shut(self, fd: int) -> None:
        self._open.pop(fd, None)
        sockets.shut(fd)

    def _forget(self, peer: _Peer) -> None:
        if self._peers.pop(peer.name, None) is None:
            return
        if self._names.get(peer.fd) == peer.name:
            del self._names[peer.fd]
        self._unread_bytes -= _unread_bytes(peer)
        _close_channel(peer)
        self._gone.append(peer.name)

    # -- shared memory -------------------------------------------------------------------------------------------

    def offer_memory(self, client: bytes) -> SlotOffer | None:
        """Shared memory for this client; None where there is none."""
        peer = self._peers.get(client)
        if peer is None or self._path is None:
            return None
        _close_channel(peer)
        if not self._make_room_for_segment():
            return None
        peer.channel, peer.used_ns = ShmChannel.create(), time.monotonic_ns()
        return None if peer.channel is None else peer.channel.offer

    def _make_room_for_segment(self) -> bool:
        """False: every segment is used, or was given away a moment ago. A host that loses one notices and may ask
        again."""
        owners = [(peer, peer.channel.has_spoken) for peer in self._peers.values() if peer.channel is not None]
        if len(owners) < shm.MAX_CHANNELS:
            return True
        now = time.monotonic_ns()
        idle = [peer for peer, spoke in owners if now - peer.used_ns > (_ASLEEP_NS if spoke else _KEEP_MEMORY_NS)]
        if idle:
            self._end(min(idle, key=lambda peer: peer.used_ns), "others want its shared memory, which it does not use")
        return bool(idle)

    # -- the listening socket ------------------------------------------------------------------------------------

    def _bind(self, address: Address, keys: DeviceKeys | None) -> None:
        sockets.configure(self._socket, address.text, sent=_SEND_QUEUE, received=_RECEIVE_QUEUE)
        self._socket.setsockopt(zmq.BACKLOG, MAX_CONNECTIONS)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is None:  # with keys they do not come in anyway
            self._socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        elif self._authenticator is not None:
            self._authenticate(self._authenticator, keys)
        if self._path is not None:
            self._take_path(self._path)
            for user in {os.geteuid(), 0}:  # whatever the path's mode says
                self._socket.setsockopt(zmq.IPC_FILTER_UID, user)
        previous = os.umask(0o077)
        try:
            self._socket.bind(address.text.replace("tcp://localhost:", "tcp://127.0.0.1:"))
            self._is_bound = True
            if self._path is not None:
                require_private(self._path)
        except zmq.ZMQError as error:
            used = error.errno == zmq.EADDRINUSE
            reason = "another process listens there" if used else os.strerror(error.errno or 0)
            raise ConfigError(f"cannot listen on {address.text}: {reason}; choose another address") from None
        finally:
            os.umask(previous)

    def _take_path(self, path: Path) -> None:
        make_private(path.parent)
        self._lock = take(path)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(f"{path} is not a socket and will not be replaced; choose another address")

    def _authenticate(self, authenticator: ThreadAuthenticator, keys: DeviceKeys) -> None:
        """CURVE by libzmq; who may come in is asked of the list of keys, by ZAP."""
        authenticator.start()
        authenticator.configure_curve_callback("*", credentials_provider=self._allowed)
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret

    def close(self) -> None:
        """Send what can be sent within half a second, then end every connection."""
        if self._socket.closed:
            return
        for peer in self._peers.values():
            _close_channel(peer)
        if self._bounds is not None:
            self._bounds.close()
        self._end_sockets()
        if self._lock is not None:
            if self._path is not None and self._is_bound:
                self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def _unread_bytes(peer: _Peer) -> int:
    return sum(size for _, size in peer.unread)


def _close_channel(peer: _Peer) -> None:
    if peer.channel is not None:
        peer.channel.close()
        peer.channel = None
        peer.is_lent = False


def _end_sockets(
    context: zmq.Context[zmq.Socket[bytes]],
    listening: zmq.Socket[bytes],
    monitor: zmq.Socket[bytes],
    authenticator: ThreadAuthenticator | None,
) -> None:
    listening.disable_monitor()
    monitor.close(linger=0)
    listening.close(linger=_FLUSH_MS)
    if authenticator is not None:
        authenticator.stop()
    context.term()
