"""A layer's message by a thread that never holds the interpreter's lock: it waits for a packet, sends, takes a reply.

    host      begin | launches ................................ end: waits for no more than that the message has left
    thread          | packet there? find pairs, send, answer there? take it

The thread stops where it cannot go on by itself, and the caller goes on from there (`State`). Between begin and end the
shared memory is the thread's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ndp_device.protocol import codec
from ndp_device.protocol.messages import VERSION, Result
from ndp_device.transport import _shm
from ndp_device.transport.shm import DEVICE_SPIN_US, ShmChannel, Spinner

_LOOK_NS = 100_000_000


class State(enum.IntEnum):
    """How far a layer came without Python."""

    LEFT = 0  # its pairs are not found
    NOTHING = 1  # no pair goes to the device
    FOUND = 2  # the message did not go this way
    RINGS = 3  # it was published, and its reader sleeps until the socket rings
    SENT = 4
    TAKEN = 5  # the answer is here


class Places(NamedTuple):
    """Addresses and sizes of a packet for T rows; csrc/shm.cpp has the same order."""

    word: int  # u32; 1: the rest is there
    ids: int  # i32 [T, k]
    weights: int  # f32 [T, k]
    x: int  # [T, H]
    sums: int  # f32 [T, H], for the answer
    format: str  # of x, as codec.DTYPES names it
    row_bytes: int
    rows: int
    hidden: int


class Order(NamedTuple):
    """A packet that will be there, and which pairs of it leave. Its memory must outlive the layer."""

    sender: SenderThread
    places: Places
    finder: Any  # csrc/find_pairs.h
    layer: int  # as the finder counts


class SendOutcome(NamedTuple):
    state: State
    sent_s: float  # on the monotonic clock, from RINGS on
    lost_core: bool  # while the thread looked for the answer
    in_vain: bool  # it looked for as long as it was told
    reply: Result | None  # TAKEN; its sums lie in the order's memory


class SenderThread:
    """One thread, for one layer at a time."""

    def __init__(self) -> None:
        self._native = _shm.SenderThread(VERSION)
        self._idle_ns = Spinner(DEVICE_SPIN_US).spin_ns  # outlasts the gap between two layers
        self._held: tuple[ShmChannel, Any] | None = None

    def begin(self, channel: ShmChannel, order: Order, asked: Sequence[int], spin_ns: int) -> None:
        """asked: as in ShmChannel.put_execute. spin_ns: how long the thread looks for the answer. 0: others want its
        core, so that it sleeps as soon as the layer is over."""
        idle_ns = self._idle_ns if spin_ns else 0
        self._held = channel, order.finder  # for the thread
        self._native.begin(channel.ring, order.finder, order.places, order.layer, asked, spin_ns, idle_ns)

    def end(self, require_packet: Callable[[], object]) -> SendOutcome:
        """Wait until the message has left, or will not. require_packet: is called, again and again, where the packet
        takes long; it raises where none will come."""
        while (found := self._native.end(_LOOK_NS)) is None:
            require_packet()
        state, sent_ns, lost, in_vain, described = found
        reply = None if described is None else codec.described_result(described)
        return SendOutcome(State(state), sent_ns / 1e9, lost, in_vain, reply)

    def cancel(self) -> bool:
        """Give up a layer whose packet may never come. Whether its message has left."""
        return bool(self._native.cancel())
