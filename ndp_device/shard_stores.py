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

from ndp_device.common.errors import DeviceError
from ndp_device.common.widths import FULL_PRECISION_BITS, WIDTHS
from ndp_device.experts.expert import WHOLE, Part
from ndp_device.protocol import messages as msg
from ndp_device.replicas import format as replica_format
from ndp_device.replicas.store import ExpertStore

FIRST_BITS = 3
"""Before any plan. With nested replicas its components are {2} and {1}: 2 bits need nothing else, 4 bits half of it."""

_log = logging.getLogger(__name__)


def prepared_ahead(store: ExpertStore) -> Iterator[None]:
    """Prepare what no plan has asked for yet, an expert a step: all at FIRST_BITS, until the next one has no room.

    Nobody asked for this work, so nobody may lose the device by it.
    """
    widths = sorted(store.widths - {FULL_PRECISION_BITS})
    bits = max((width for width in widths if width <= FIRST_BITS), default=min(widths, default=0))
    for layer, expert in np.ndindex(store.shape.num_layers, store.shape.num_experts) if widths else ():
        if store.prepared(bits)[layer, expert]:
            continue
        try:
            if not store.has_room(layer, expert, bits):
                return
            store.prepare_ahead(layer, expert, bits)
        except Exception as error:
            _log.warning("expert %d of layer %d cannot be prepared at %d bits: %s", expert, layer, bits, error)
        yield


MAX_PARTS = 8
"""Most different parts at a time: each of n parts takes 1/n of the memory of whole experts."""


@dataclass(frozen=True, eq=False)
class ShardStore:
    """One part of every expert, and what a device says of it in the handshake."""

    store: ExpertStore
    served: msg.Served
    ahead: Iterator[None]  # see prepared_ahead

    @classmethod
    def of(cls, store: ExpertStore) -> ShardStore:
        return cls(store, served_by(store), prepared_ahead(store))


class ShardStores:
    """`files` is what all of them are made from; nothing is prepared there."""

    def __init__(self, store: ExpertStore) -> None:
        self.files, whole = store.of_part(WHOLE), ShardStore.of(store)
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
            made = ShardStore.of(self.files.of_part(part))
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
