"""The host's end of a ZeroMQ connection, which never waits longer than it is told: a ClientTransport (base.py).

Between processes of one machine the frames may lie in shared memory instead (shm.py); then the socket carries the
doorbell that wakes a sleeper, and every message the memory cannot take.

Everything a device can cost here is bounded: one message is read at a time, a frame and a message have their limits
(zmtp.py), and bytes that commands take are looked at for as long as the caller gave and no longer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from ndp_device.errors import DeviceUnavailable, RemoteProtocolError
from ndp_device.protocol import codec
from ndp_device.protocol.codec import Buffer, Frames
from ndp_device.protocol.messages import MAX_BODY_BYTES, SlotOffer
from ndp_device.transport import checksum, fragments, shm, zmtp
from ndp_device.transport.address import Address
from ndp_device.transport.base import require_intact
from ndp_device.transport.curve import CurveHost
from ndp_device.transport.keys import HostKeys
from ndp_device.transport.shm import ShmChannel
from ndp_device.transport.system import ENDED, READABLE, SYSTEM, WRITABLE, ForeignListener, HostSystem, Stream

MAX_UNSENT_BYTES = 8 * MAX_BODY_BYTES
"""That wait for the device to read: all requests a host may have in flight; above that it takes no more."""

_CONNECT_S = 2.0
_HANDSHAKE_S = 0.5
_TRY_AGAIN_S = 0.01  # where nobody listens: to ask costs a host 10 us
_DOORBELL: list[Buffer] = [b""]
_DOORBELL_LOST_S = 0.05  # how long a host sleeps before it looks into memory without a doorbell
_FROZEN_AFTER = 5  # heartbeats without a sign of life
_PARTS_AT_ONCE = 16
_BESIDE_S = 0.001
_MAX_UNREAD_PONGS = 64 << 10
_READS_AT_ONCE = 64  # without a whole message, before the caller looks at the clock
_NOT_ALLOWED = "the device does not allow this host's key: put its .pub file into the device's allowed/ directory"
_OTHER_MECHANISM = (
    "the device wants keys: give the file that `ndp-device keygen` made for this host (device_keys, --key)",
    "the device has no keys, and this host was told to use some: start it with --keys, or drop device_keys",
)
_OTHER_KEY = "the device ended the handshake: its key is another one than the one in this host's key file"


class ZmqTransport:
    """A DEALER. Until there was a connection it tries again and again; one that broke is lost for good.

    A device that died shows in its socket at once, one that froze in a PING without an answer. What had arrived when a
    connection ended is still handed out.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: HostKeys | None = None,
        heartbeat_ms: int = 400,
        system: HostSystem = SYSTEM,
    ) -> None:
        self._address = Address.parse(address, has_keys=keys is not None)
        self._keys, self._heartbeat_s = keys, heartbeat_ms / 1e3
        self._system, self._clock = system, system.clock
        self._channel: ShmChannel | None = None
        self._given_up = False  # the shared memory, by the device
        self._version = 0  # of the device, as far as it has shown
        self._joining: fragments.Joining | None = None
        self._num_cut = 0
        self._spinner = shm.Spinner(shm.HOST_SPIN_US)
        self._socket: Stream | None = None
        self._reader = self._new_reader()
        self._lost = False  # a connection broke that had been made, and everything that had arrived was read
        self._is_deaf = False  # it takes nothing any more
        self._opened_s = self._heard_s = self._try_again_s = 0.0
        self._pinged_s: float | None = None  # and nothing was heard since
        self._events = 0  # that are waited for
        self._out = threading.Lock()  # of what follows: a large body leaves while its host computes
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._is_sent_beside = False
        self._is_waiting = False  # and so sends what is left itself
        try:
            self._poller = system.poller()
        except OSError as error:
            raise DeviceUnavailable(f"this process can have no more sockets: {error.strerror}") from None
        self._go_on()

    @property
    def is_ready(self) -> bool:
        return self._reader.is_ready and not self._lost

    @property
    def can_share_memory(self) -> bool:
        return self._address.ipc_path is not None and shm.native is not None

    def attach(self, offer: SlotOffer) -> bool:
        channel = self._channel = ShmChannel.attach(offer)
        if channel is not None and channel.doorbell >= 0:
            self._poller.register(channel.doorbell, READABLE)
        return channel is not None

    def send(self, frames: Frames) -> bool:
        if self._channel is not None:
            sent = self._channel.put(frames, writes_checksum=True)
            if sent is shm.Put.DONE:
                return True
            if sent is shm.Put.DOORBELL:
                self._to_socket(_DOORBELL)
                return True
        header, body = frames
        if not fragments.must_cut(body, self._version):
            return self._to_socket((checksum.write(header, body), body))
        self._num_cut += 1
        return all(
            self._to_socket(fragment) for fragment in fragments.cut(self._num_cut, header, body, writes_checksum=True)
        )

    def receive(self, timeout_s: float) -> Frames | None:
        channel = self._channel
        if channel is None:
            return self._from_socket(timeout_s)
        channel.release()
        if timeout_s <= 0:
            return self._from_memory(channel) or self._from_socket(0.0)
        if self._spinner.spin((channel,)) or not channel.prepare_sleep():
            return self._from_memory(channel)
        frames = self._from_socket(min(timeout_s, _DOORBELL_LOST_S))
        channel.awake()
        frames = frames or self._from_memory(channel)
        if frames is None and self._given_up:
            raise DeviceUnavailable("the device has given up the shared memory")
        return frames

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._shut()
        self._lost = True
        self._poller.close()

    # -- messages --------------------------------------------------------------------------------------------------

    def _to_socket(self, frames: Frames) -> bool:
        if not self._reader.is_ready:
            self._go_on()
        if self._lost or self._is_deaf or not self._reader.is_ready or self._unsent_bytes > MAX_UNSENT_BYTES:
            return False
        self._write(self._reader.encoded(frames))
        return not self._is_deaf

    def _from_memory(self, channel: ShmChannel) -> Frames | None:
        taken = channel.take()
        if taken is None:
            return None
        header, body, intact = taken
        if not intact:
            require_intact(header, shm.checked_part(body))
        return header, body

    def _from_socket(self, timeout_s: float) -> Frames | None:
        frames = self._next()
        if frames is None and timeout_s > 0 and not self._lost:
            self._wait(timeout_s)
            frames = self._next()
        if frames is None:
            if self._lost:
                raise DeviceUnavailable("the connection to the device was lost")
            return None
        if fragments.is_fragment(frames):
            return self._join(frames)
        if self._joining is not None and frames != _DOORBELL:
            raise RemoteProtocolError("the device broke off in the middle of a message")
        if len(frames) != 2:
            if frames == _DOORBELL:
                return None
            raise RemoteProtocolError(f"a message has two frames, the device sent {len(frames)}")
        require_intact(frames[0], frames[1])
        if not self._version:
            self._version = codec.peek_version(frames[0])
        return frames

    def _join(self, frames: Frames) -> Frames | None:
        if self._joining is None:
            self._joining = fragments.Joining(frames)
            return None
        message = self._joining.add(frames)
        if message is not None:
            self._joining = None
            self._version = codec.peek_version(message[0])
        return message

    # -- the connection --------------------------------------------------------------------------------------------

    def _new_reader(self) -> zmtp.Reader:
        keys = self._keys
        curve = None if keys is None else CurveHost(keys.secret, keys.public, keys.device)
        return zmtp.Reader(curve, is_host=True)

    def _go_on(self) -> None:
        """As far towards a connection as it goes without waiting. Raises DeviceUnavailable where the device refuses."""
        if self._lost:
            return
        now = self._clock.monotonic()
        if self._socket is not None:
            if self._unsent:
                self._write(())
            if self._take_in() is not None:
                raise RemoteProtocolError("the device spoke before it was asked")
            has_heard = self._heard_s > self._opened_s
            limit_s = _HANDSHAKE_S if has_heard else _CONNECT_S  # who tries anew waits behind all others again
            if not self._reader.is_ready and now > self._opened_s + limit_s:
                self._shut()  # and try another: to be slow says nothing about keys
        elif now >= self._try_again_s:
            self._try_again_s = now + _TRY_AGAIN_S
            self._reader, self._opened_s, self._heard_s, self._pinged_s = self._new_reader(), now, now, None
            try:
                self._socket = self._system.connect(self._address)
            except ForeignListener as error:
                raise DeviceUnavailable(f"{self._address.text}: {error}; name a path of your own") from None
            except OSError:
                return
            self._events = READABLE
            self._poller.register(self._socket.fileno(), READABLE)
            self._write([self._reader.greeting])

    def _again(self) -> None:
        """This was no connection yet: another one is tried."""
        knew_keys = self._keys is not None and self._heard_s > self._opened_s
        self._shut()
        if knew_keys:  # it answered our greeting, and then nothing more
            raise DeviceUnavailable(_OTHER_KEY)

    def _lose(self) -> None:
        if self._reader.is_ready:
            self._lost = True
        else:
            self._again()

    def _shut(self) -> None:
        with self._out:
            connection, self._socket = self._socket, None
            self._unsent.clear()
            self._unsent_bytes = 0
        if connection is not None:
            self._poller.unregister(connection.fileno())
            connection.close()

    def _next(self) -> Frames | None:
        """The next message, if it is here."""
        if not self._reader.is_ready:
            self._go_on()
        return self._take_in() if self._reader.is_ready else None

    def _take_in(self) -> Frames | None:
        """Read until there is a message, or nothing more to read."""
        for _ in range(_READS_AT_ONCE):
            try:
                message, has_more = self._reader.next()
            except zmtp.OtherMechanism:
                raise DeviceUnavailable(_OTHER_MECHANISM[self._keys is not None]) from None
            except zmtp.GaveUp as error:
                raise DeviceUnavailable(_NOT_ALLOWED if error.reason == b"400" else str(error)) from None
            if self._reader.replies:
                replies, self._reader.replies = self._reader.replies, bytearray()
                if self._unsent_bytes < _MAX_UNREAD_PONGS or not self._reader.is_ready:
                    self._write([bytes(replies)])
            if message is not None:
                return message
            if not has_more and not self._fill():
                return None
        return None

    def _fill(self) -> bool:
        """Read what is here; False: nothing."""
        connection = self._socket
        if connection is None or self._lost:
            return False
        try:
            count = connection.recv_into(self._reader.buffer())
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            count = 0
        if count == 0:
            self._lose()
            return False
        self._heard_s, self._pinged_s = self._clock.monotonic(), None
        self._reader.filled(count)
        return True

    def _wait(self, timeout_s: float) -> None:
        """Until something may have arrived. A device that says nothing for long is asked for a sign of life."""
        now = self._clock.monotonic()
        if self._socket is None:
            if not self._lost:
                self._clock.sleep(min(timeout_s, max(self._try_again_s - now, 0.0)))
            return
        if self._reader.is_ready and now > self._heard_s + self._heartbeat_s:
            if self._pinged_s is None:
                self._pinged_s = now
                self._write([self._reader.ping()])
            elif now > self._pinged_s + _FROZEN_AFTER * self._heartbeat_s:
                self._lost = True  # everything that had arrived was read before
                return
        events = READABLE | (WRITABLE if self._unsent else 0)
        if events != self._events:
            self._events = events
            self._poller.modify(self._socket.fileno(), events)
        limit_s = self._heartbeat_s if self._reader.is_ready else _HANDSHAKE_S
        self._is_waiting = True
        ready = self._poller.poll(min(timeout_s, limit_s))
        self._is_waiting = False
        for fd, event in ready:
            if self._channel is not None and fd == self._channel.doorbell:
                self._given_up = bool(event & ENDED)
            elif event & WRITABLE:
                self._write(())

    def _write(self, buffers: Iterable[Buffer]) -> None:
        """Send what the system takes now; a large rest leaves beside what the caller does next."""
        with self._out:
            for buffer in buffers:  # the codec makes a new body for each message: safe to keep
                self._unsent.append(memoryview(buffer))
                self._unsent_bytes += len(buffer)
            is_broken = not self._flush()
            begins = bool(self._unsent) and self._reader.is_ready and not self._is_sent_beside
            self._is_sent_beside = self._is_sent_beside or begins
            if is_broken:  # what had arrived is handed out first: reading finds the end
                self._is_deaf = self._reader.is_ready
                self._unsent.clear()
                self._unsent_bytes = 0
        if begins:
            self._system.run_beside(self._send_beside)

    def _flush(self) -> bool:
        """False: the connection is broken. Under the lock."""
        connection = self._socket
        try:
            while self._unsent and connection is not None:
                sent = connection.sendmsg([self._unsent[i] for i in range(min(len(self._unsent), _PARTS_AT_ONCE))])
                self._unsent_bytes -= sent
                while sent:
                    first = self._unsent.popleft()
                    if sent < len(first):
                        self._unsent.appendleft(first[sent:])
                        break
                    sent -= len(first)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return False
        return True

    def _send_beside(self) -> None:
        """In a thread of its own, until nothing is left. Two that send would only wake each other: one waits."""
        poller = self._system.poller()
        try:
            with self._out:
                if self._socket is not None:
                    poller.register(self._socket.fileno(), WRITABLE)
            while True:
                self._clock.sleep(_BESIDE_S)
                if self._is_waiting:
                    continue
                poller.poll(_DOORBELL_LOST_S)
                with self._out:
                    if self._socket is None or not self._flush() or not self._unsent:
                        self._is_sent_beside = False
                        return
        finally:
            poller.close()
