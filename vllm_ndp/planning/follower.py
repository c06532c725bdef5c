"""Plans that follow decode: once another subject is noticed, experts change places beside decode, a few at a time.

    see        after a step          what its decode rows chose goes to the watch
    advance    before the next one   who is hot from now on, and how many experts begin to be copied

A copy runs beside decode, so an exchange is in force as many steps after its order as the copy takes. Until then the
expert runs where it did. Which steps change a plan follows from routing alone, never from a clock: all ranks of an
engine and every replay agree.

Whether decode still routes as its plan assumed is judged from its own routing alone. Beside the hot set in force a
watch keeps rivals, each made of nothing but tokens already seen:

    follows   the plan's own score, and decode's counts on top, fading
    turned    the prior (or nothing), and decode's last counts: the prompt forgotten
    prior     what is popular anyway

Every token is a bet. A rival wins its share of the token's choices, less that of the hot set in force, and its capital
grows by that. Where no rival is better the capital is a supermartingale. So the mean of all reaches N by chance at most
once in N tokens on average. Source: Ville's inequality, restarted at 1 as in CUSUM (e-detectors, arXiv 2203.03532). At
N the change counts as noticed. No assumption about the routing, none that tokens are independent, no look ahead. The
bound is a worst case: on steady routing thousands of tokens pass without an alarm.

Knows counts and placements. Does not know requests, bits, times or how experts move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Placement, highest, limit_moves
from vllm_ndp.planning.same_everywhere import exp

_BETS = (0.15, 0.4, 0.9)
"""Shares of the capital that are staked, side by side: small ones find small gains, large ones large gains soon."""
_STAKES = np.array(_BETS)[:, None]
_BOTH = np.arange(2)[:, None, None, None]


@lru_cache
def _fading(tokens: int, memories: tuple[float, ...]) -> NDArray[np.float64]:
    """[R, 1, 1], what is left of counts after so many tokens."""
    return np.array([exp(-tokens / memory) for memory in memories])[:, None, None]


@dataclass(frozen=True)
class DriftRules:
    """Rules by which decode notices a change of subject."""

    once_in: float = 20.0
    """Tokens between two false alarms, on average, at least."""
    memory: float = 128.0
    """Tokens in which the counts of `follows` fade to 1/e."""
    short_memory: float = 32.0
    """The same of `turned`."""
    own_tokens: float = 48.0
    """How many tokens the plan's score, and the prior, are worth beside decode's counts."""
    renew: int = 8
    """Tokens after which new rivals are made."""

    def __post_init__(self) -> None:
        if not self.once_in > 1 or min(self.memory, self.short_memory, self.renew) < 1 or self.own_tokens < 0:
            raise ConfigError(f"impossible rules for noticing drift: {self}")


class DriftWatch:
    """One batch of requests under one plan."""

    def __init__(
        self, rules: DriftRules, hot: NDArray[np.bool_], score: ImportanceScore, prior: ImportanceScore | None = None
    ) -> None:
        """hot [L, E]: as planned from that score."""
        self._num_hot = int(hot.sum(axis=1).max())
        self._layers = np.arange(len(hot))[:, None]
        own = rules.own_tokens * score.values
        fixed = [] if prior is None else [prior.values]
        turned = np.zeros(hot.shape) if prior is None else rules.own_tokens * prior.values
        self._names = ("follows", "turned", "prior")[: 2 + len(fixed)]
        self._base = np.stack([own, turned, *fixed])  # [R, L, E], of each rival
        self._counts = np.zeros((2, *hot.shape))  # decode's, of the rivals that follow it
        self._memories, self._renewed_after = (rules.memory, rules.short_memory), rules.renew
        self._once_in = rules.once_in
        self._planned = hot
        self._seen = 0
        self.noticed = 0
        """How often a rival has taken over."""
        self.aims_at: str | None = None
        """The rival that has; None: the plan stands."""
        self._capital = np.ones((len(self._names), len(_BETS)))
        self._renew()

    def see(self, ids: NDArray[np.int64]) -> bool:
        """ids [T, L, k]: what the rows of one decode step chose. True if `wanted` has changed since."""
        tokens, layers, top_k = ids.shape
        if not tokens:
            return False
        hits = self._hot[:, self._layers, ids].sum(axis=(2, 3), dtype=np.int64) / (layers * top_k)  # [R + 1, T]
        grown = np.prod(1 + _STAKES * (hits[1:] - hits[0])[:, None], axis=2)
        self._capital = np.maximum(self._capital, 1.0) * grown
        self._counts *= _fading(tokens, self._memories)
        np.add.at(self._counts, (_BOTH, self._layers, ids), 1 / top_k)
        before, self._seen = self._seen, self._seen + tokens
        has_noticed = self._capital.mean() >= self._once_in
        if has_noticed:
            self.aims_at = self._names[int(self._capital.mean(axis=1).argmax())]
            self.noticed += 1
            self._capital = np.ones(self._capital.shape)
        if not has_noticed and before // self._renewed_after == self._seen // self._renewed_after:
            return False
        self._renew()
        return self.aims_at is not None

    @property
    def wanted(self) -> ImportanceScore | None:
        """The score to plan from, once a change was noticed; it follows decode from then on."""
        if self.aims_at is None:
            return None
        return ImportanceScore.from_weights(self._weights[self._names.index(self.aims_at)])

    @property
    def _weights(self) -> NDArray[np.float64]:
        """[R, L, E], what each rival counts."""
        weights = self._base.copy()
        weights[:2] += self._counts
        return weights

    def _renew(self) -> None:
        """Renew the rivals from all tokens so far, and with them what is aimed at."""
        weights = self._weights
        rivals = highest(weights, self._num_hot)
        aim = self._planned if self.aims_at is None else rivals[self._names.index(self.aims_at)]
        self._hot = np.concatenate([aim[None], rivals])  # [R + 1, L, E], what is aimed at first


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

    def advance(self, hot: NDArray[np.bool_]) -> tuple[NDArray[np.bool_] | None, int]:
        """hot [L, E]: in force. Return (who is hot from this step on, None: the same; experts that begin a copy)."""
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
        ordered = limit_moves(hot, placement, wanted.values, max(int(copies), 1)).hot
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
