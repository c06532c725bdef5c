"""What to prepare while nobody asks for anything: the widths that plans have asked for most.

Knows what plans asked for and what the store holds. Knows no client, no clock and no socket.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from ndp_device.errors import ReplicaError
from ndp_device.replicas.store import ExpertStore
from ndp_device.widths import FULL_PRECISION_BITS

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

    @property
    def is_done(self) -> bool:
        """There is nothing to prepare until another plan is noted."""
        return not self._changed

    def note(self, bits: int, experts: NDArray[np.bool_]) -> None:
        """A plan uses these [L, E] at this width."""
        if bits in self._widths:
            self._asked[self._widths.index(bits)] += experts
            self._changed = True

    def give_up(self, layer: int, expert: int, bits: int) -> None:
        """It cannot be prepared."""
        self._hopeless[self._widths.index(bits), layer, expert] = True

    def next(self) -> tuple[int, int, int] | None:
        """(layer, expert, bits), or None when all is there or the next one would not fit."""
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
        missing = ~np.stack([self._store.prepared(bits) for bits in self._widths]) & ~self._hopeless
        asked = self._asked.any(0)
        best = np.where(asked, self._asked.argmax(0), self._usual())
        is_best = np.arange(len(self._widths))[:, None, None] == best
        for wanted, count in (
            (missing & is_best, self._asked.sum(0)[None]),
            (missing & (self._asked > 0), self._asked),
        ):
            if wanted.any():
                width, layer, expert = np.unravel_index(np.where(wanted, count, -1).argmax(), wanted.shape)
                return int(layer), int(expert), self._widths[int(width)]
        return None

    def _usual(self) -> int:
        """Index of the width that is asked for most anywhere."""
        overall = self._asked.sum((1, 2))
        if overall.any():
            return int(overall.argmax())
        return max((i for i, bits in enumerate(self._widths) if bits <= FIRST_BITS), default=0)
