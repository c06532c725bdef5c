"""Order of preparation while nobody asks for anything: the widths that plans have asked for most.

Knows what plans asked for and what the store holds. Knows no client, no clock and no socket.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ReplicaError
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.replicas.store import ExpertStore

FIRST_BITS = 3
"""Before any plan. With nested replicas its components are {2} and {1}: 2 bits need nothing else, 4 bits half of it."""

_log = logging.getLogger(__name__)


class PrefetchOrder:
    """One width of every expert first, the one most plans asked for; then the others that were asked for at all."""

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
