"""Whether decode still routes as its plan assumed, judged from its own routing alone; and what to plan from if not.

Beside the hot set in force a watch keeps rivals, each made of nothing but tokens already seen:

    follows   the plan's own score, and decode's counts on top, fading
    turned    the prior (or nothing), and decode's last counts: the prompt forgotten
    prior     what is popular anyway

Every token is a bet. A rival wins its share of the token's choices, less that of the hot set in force, and its capital
grows by that. Where no rival is better the capital is a supermartingale. So the mean of all reaches N by chance at most
once in N tokens on average. Source: Ville's inequality, restarted at 1 as in CUSUM (e-detectors, arXiv 2203.03532). At
N the change counts as noticed. No assumption about the routing, none that tokens are independent, no look ahead. The
bound is a worst case: on steady routing thousands of tokens pass without an alarm.

Knows counts and placements. Does not know requests, costs or how experts move.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.errors import ConfigError
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.placement import top_experts
from vllm_ndp.planning.same_everywhere import exp

_BETS = (0.15, 0.4, 0.9)
"""Shares of the capital that are staked, side by side: small ones find small gains, large ones large gains soon."""


@dataclass(frozen=True)
class DriftRules:
    """When a change counts as noticed."""

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
        self._rules = rules
        self._num_hot = int(hot.sum(axis=1).max())
        self._layers = np.arange(len(hot))[:, None]
        self._base = {"follows": score.values, "turned": np.zeros(hot.shape) if prior is None else prior.values}
        self._counts = {name: np.zeros(hot.shape) for name in self._base}
        self._fixed = {} if prior is None else {"prior": prior.values}
        self._names = (*self._base, *self._fixed)
        self._planned = hot
        self._seen = 0
        self.noticed = 0
        """How often a rival has taken over."""
        self.aims_at: str | None = None
        """The rival that has; None: the plan stands."""
        self._capital = {name: np.ones(len(_BETS)) for name in self._names}
        self._renew()

    def see(self, ids: NDArray[np.int64]) -> bool:
        """ids [T, L, k]: what the rows of one decode step chose. True if `wanted` has changed since."""
        rules, (tokens, _, top_k) = self._rules, ids.shape
        if not tokens:
            return False
        here = self._aim[self._layers, ids].mean(axis=(1, 2))
        for name, rival in self._rivals.items():
            won = rival[self._layers, ids].mean(axis=(1, 2)) - here
            grown = np.prod(1 + np.array(_BETS)[:, None] * won, axis=1)
            self._capital[name] = np.maximum(self._capital[name], 1.0) * grown
        for name, memory in (("follows", rules.memory), ("turned", rules.short_memory)):
            counts = self._counts[name]
            counts *= exp(-tokens / memory)
            np.add.at(counts, (np.broadcast_to(self._layers, ids.shape), ids), 1 / top_k)
        before, self._seen = self._seen, self._seen + tokens
        best = max(self._names, key=lambda name: float(self._capital[name].mean()))
        has_noticed = np.mean(list(self._capital.values())) >= rules.once_in
        if has_noticed:
            self.aims_at, self.noticed = best, self.noticed + 1
            self._capital = {name: np.ones(len(_BETS)) for name in self._names}
        if not has_noticed and before // rules.renew == self._seen // rules.renew:
            return False
        self._renew()
        return self.aims_at is not None

    @property
    def wanted(self) -> ImportanceScore | None:
        """The score to plan from, once a change was noticed; it follows decode from then on."""
        return None if self.aims_at is None else ImportanceScore.from_weights(self._weights(self.aims_at))

    def _weights(self, name: str) -> NDArray[np.float64]:
        if name in self._fixed:
            return self._fixed[name]
        return self._rules.own_tokens * self._base[name] + self._counts[name]

    def _renew(self) -> None:
        """Renew the rivals from all tokens so far, and with them what is aimed at."""
        self._rivals = {name: top_experts(self._weights(name), self._num_hot).hot for name in self._names}
        self._aim = self._planned if self.aims_at is None else self._rivals[self.aims_at]
