"""A device's experts, whole or in parts: one shard for each part that sessions ask for, all from the same files.

When its last session ends, a shard stays until a session asks for another part. So a host that lost its connection
finds its experts still prepared. Knows stores. Knows no session and no client.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import DeviceError, ReplicaError
from ndp_device.common.widths import FULL_PRECISION_BITS, WIDTHS
from ndp_device.experts.part import WHOLE, Part
from ndp_device.protocol import messages as msg
from ndp_device.replicas import format as replica_format
from ndp_device.replicas.store import ExpertStore

FIRST_BITS = 3
"""Before any plan. With nested replicas its components are {2} and {1}: 2 bits need nothing else, 4 bits half of it."""

_log = logging.getLogger(__name__)


class PrefetchOrder:
    """Order of preparation while nobody asks for anything.

    One width of every expert first, the one most plans asked for; then the others that were asked for at all.
    """

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._widths = sorted(store.widths - {FULL_PRECISION_BITS})
        shape = (len(self._widths), store.shape.num_layers, store.shape.num_experts)
        self._asked = np.zeros(shape, np.int64)
        self._hopeless = np.zeros(shape, np.bool_)
        self._changed = bool(self._widths)
        self._queue: list[tuple[int, int, int]] = []  # the next one last; may name what is there by now

    @property
    def is_done(self) -> bool:
        """There is nothing to prepare until another plan is noted."""
        return not self._changed

    def note(self, bits: int, experts: NDArray[np.bool_]) -> None:
        """A plan uses these [L, E] at this width."""
        if bits in self._widths:
            self._asked[self._widths.index(bits)] += experts
            self._changed = True
            self._queue.clear()

    def give_up(self, layer: int, expert: int, bits: int) -> None:
        """Note that an expert cannot be prepared."""
        self._hopeless[self._widths.index(bits), layer, expert] = True

    def next(self) -> tuple[int, int, int] | None:
        """(layer, expert, bits), or None when all is there or the next one would not fit. Each is named once, and
        again when a plan was noted or all others are there."""
        while self._changed and (key := self._first_missing()) is not None:
            try:
                if self._store.has_room(*key):
                    return key
                break
            except ReplicaError as error:
                _log.warning("expert %d of layer %d cannot be prepared: %s", key[1], key[0], error)
                self.give_up(*key)
        self._changed = False
        return None

    def _first_missing(self) -> tuple[int, int, int] | None:
        while True:
            if not self._queue:
                self._queue = self._in_order()
                if not self._queue:
                    return None
            width, layer, expert = self._queue.pop()
            bits = self._widths[width]
            if not (self._store.prepared(bits)[layer, expert] or self._hopeless[width, layer, expert]):
                return layer, expert, bits

    def _in_order(self) -> list[tuple[int, int, int]]:
        """(width, layer, expert) of all that is missing, the first to prepare last: ordered once for thousands."""
        missing = ~np.stack([self._store.prepared(bits) for bits in self._widths]) & ~self._hopeless
        asked = self._asked.any(0)
        best = np.where(asked, self._asked.argmax(0), self._usual())
        is_best = missing & (np.arange(len(self._widths))[:, None, None] == best)
        rest = missing & (self._asked > 0) & ~is_best
        order: list[int] = []
        for wanted, count in ((is_best, np.broadcast_to(self._asked.sum(0), missing.shape)), (rest, self._asked)):
            places = np.flatnonzero(wanted)
            order += places[np.argsort(-count[wanted], kind="stable")].tolist()
        cells = np.stack(np.unravel_index(order[::-1], missing.shape), axis=1).tolist() if order else []
        return [(width, layer, expert) for width, layer, expert in cells]

    def _usual(self) -> int:
        """Index of the width that is asked for most anywhere."""
        overall = self._asked.sum((1, 2))
        if overall.any():
            return int(overall.argmax())
        return max((i for i, bits in enumerate(self._widths) if bits <= FIRST_BITS), default=0)


MAX_PARTS = 8
"""Most different parts at a time: each of n parts takes 1/n of the memory of whole experts."""


@dataclass(frozen=True, eq=False)
class ShardStore:
    """One part of every expert, and what a device says of it in the handshake."""

    store: ExpertStore
    served: msg.Served
    prefetch_order: PrefetchOrder | None  # None: what no plan has asked for is not prepared

    @classmethod
    def of(cls, store: ExpertStore, *, prepares_ahead: bool) -> ShardStore:
        return cls(store, served_by(store), PrefetchOrder(store) if prepares_ahead else None)


class ShardStores:
    """`files` is what all of them are made from; nothing is prepared there."""

    def __init__(self, store: ExpertStore, *, prepares_ahead: bool) -> None:
        self.files, self._prepares_ahead = store.of_part(WHOLE), prepares_ahead
        whole = ShardStore.of(store, prepares_ahead=prepares_ahead)
        self._shards, self.served = {WHOLE: whole}, whole.served

    def __iter__(self) -> Iterator[ShardStore]:
        return iter(self._shards.values())

    def take(self, part: Part, in_use: Collection[Part]) -> ShardStore:
        """The shard that serves a session about this part; in_use: the parts of the other sessions. Raises ConfigError
        where experts cannot be cut so, DeviceError where there are too many parts."""
        if part not in self._shards:
            if len(wanted := {part, *in_use}) > MAX_PARTS:
                raise DeviceError(
                    "busy", f"{len(wanted)} different parts of experts are more than the {MAX_PARTS} served"
                )
            made = ShardStore.of(self.files.of_part(part), prepares_ahead=self._prepares_ahead)
            self._shards = {one: shard for one, shard in self._shards.items() if one in in_use} | {part: made}
        return self._shards[part]


def served_by(store: ExpertStore) -> msg.Served:
    """Description of a device with these experts in the handshake."""
    shape, files = store.shape, store.replicas
    absent = [bits for bits in WIDTHS if bits not in store.widths]
    return msg.Served(
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        widths=tuple(msg.ServedWidth(bits, store.expert_bytes(0, 0, bits)) for bits in sorted(store.widths)),
        group_size=store.group_size,
        container="" if files is None else files.manifest.container,
        format="" if files is None else f"{replica_format.FORMAT} {replica_format.VERSION}",
        replica_digest="" if files is None else files.manifest.digest,
        loss_digest="" if files is None else files.loss_digest,
        missing=shape.num_layers * shape.num_experts * len(absent),
        first_missing=(0, 0, absent[0]) if absent else None,
        part=msgspec.UNSET if store.part == WHOLE else (store.part.index, store.part.count),
    )
