"""Plans that follow decode: once another subject is noticed, experts change places beside decode, a few at a time.

    see        after a step          what its decode rows chose goes to the watch (drift.py)
    advance    before the next one   who is hot from now on, and how many experts begin to be copied

A copy runs beside decode, so an exchange is in force as many steps after its order as the copy takes. Until then the
expert runs where it did. Which steps change a plan follows from routing alone, never from a clock: all ranks of an
engine and every replay agree. Knows placements. Does not know requests, bits or times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.planning.drift import DriftRules, DriftWatch
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Placement, limit_moves

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class FollowRules:
    """How a run follows decode."""

    drift: DriftRules = field(default_factory=DriftRules)
    prior: ImportanceScore | None = field(default=None, repr=False)
    """Popularity over all requests, if it is known."""
    copies: Callable[[int], float] = lambda rows: 1.0
    """The migration budget: how many experts can be copied beside one decode step with so many rows."""


class Follower:
    """The plan of some requests, as long as no other prompt ends."""

    def __init__(
        self,
        rules: FollowRules,
        placement: Placement,
        scores: Sequence[ImportanceScore],
        place: Callable[[ImportanceScore], Placement],
    ) -> None:
        """placement: made from these scores, at least one. place: who would be hot by another score."""
        score = ImportanceScore.from_weights(np.mean([each.values for each in scores], axis=0))
        self._rules, self._place = rules, place
        self._watch = DriftWatch(rules.drift, placement.hot, score, rules.prior)
        self._num_hot = placement.num_hot
        self._rows = 1
        self._ordered: NDArray[np.bool_] | None = None
        self._steps_left = 0

    @property
    def wanted(self) -> ImportanceScore | None:
        """The score that decode shows by now; None as long as decode goes on as planned."""
        return self._watch.wanted

    def see(self, ids: NDArray[np.int64]) -> None:
        """ids [T, L, k]: what the decode rows of one step chose, in the order of the batch."""
        if len(ids):
            self._rows = len(ids)
            self._watch.see(ids)

    def advance(self, hot: NDArray[np.bool_], max_moves: int | None) -> tuple[NDArray[np.bool_] | None, int]:
        """hot [L, E]: in force. Return (who is hot from this step on, None: the same; experts that begin to be copied).

        max_moves: at most so many at once.
        """
        arrived = None
        if self._ordered is not None:
            self._steps_left -= 1
            if self._steps_left > 0:
                return None, 0
            arrived, self._ordered = self._ordered, None
            hot = arrived
        if (wanted := self.wanted) is None:
            return arrived, 0
        placement, copies = self._place(wanted), self._rules.copies(self._rows)
        if not np.array_equal(placement.num_hot, self._num_hot):  # a policy of another package may want fewer
            return arrived, 0
        most = max(int(copies), 1)
        ordered = limit_moves(hot, placement, wanted.values, most if max_moves is None else min(most, max_moves)).hot
        begun = int((ordered & ~hot).sum())
        if begun:
            self._ordered, self._steps_left = ordered, max(math.ceil(begun / copies), 1)
        return arrived, begun


def exchanged(values: NDArray[T], before: NDArray[np.bool_], after: NDArray[np.bool_]) -> NDArray[T]:
    """Bits [L, E], or who is warm, after an exchange. Experts that leave GPU memory take over the values of those that
    come to their layer, lower ids first. So every layer spends what it did. Hot experts have 0."""
    swapped = values.copy()
    swapped[before & ~after] = values[after & ~before]
    swapped[after] = 0
    return swapped
