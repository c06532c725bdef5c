"""The search for prices at which every limit of a joint problem just holds.

Prices of bytes settle inside each price of the first limit; each is the root of a falling function. Does not know how
the plans at these prices become one within every limit (joint_rounding.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.planning.joint_limits import Limited
from vllm_ndp.planning.joint_problem import total
from vllm_ndp.planning.same_everywhere import exp, log

_INNER_STEPS = 8
"""Prices of bytes that are tried at each price of the first limit."""
_CLOSE = 2e-3
"""A budget's price is right when its logarithm is off by no more."""


class PriceSearch:
    """Prices at which every limit just holds: that of loss or time outside, those of bytes inside."""

    def __init__(self, limited: Limited, prices: NDArray[np.float64] | None) -> None:
        self._limited = limited
        spread = float(np.ptp(limited.objective, axis=0).mean())
        self._scales = [spread / max(float(np.ptp(takes, axis=0).mean()), 1e-300) for takes in limited.takes]
        self._most = [log(max(most, 1e-300)) for most in limited.most]
        self._is_near = prices is not None
        self.prices = np.zeros(len(limited.most)) if prices is None else prices.copy()
        self.plans: list[NDArray[np.int64]] = []
        """The plan at each price of the first limit."""

    def run(self, steps: int) -> None:
        """Try so many prices of the first limit, each nearer to the price at which the limit just holds."""
        if not self._is_near or not self.prices[0]:
            self.prices[0] = 0.0
            self.plans.append(self._settle_bytes())
            if self._over(0, self.plans[-1]) <= 0:
                return
        root = _Root(self.prices[0] or self._scales[0], 1.05 if self._is_near else 16.0)
        for _ in range(steps):
            self.prices[0] = root.price
            self.plans.append(self._settle_bytes())
            root.learn(self._over(0, self.plans[-1]))
            if root.is_found:
                break
        self.prices[0] = root.nearest
        if not root.is_found:
            self.plans.append(self._settle_bytes())

    def _settle_bytes(self) -> NDArray[np.int64]:
        """Prices of bytes at which every budget just holds, and the plan at them."""
        chosen = self._limited.cheapest(self.prices)
        for r in range(1, len(self.prices)):
            over, known = self._over(r, chosen), bool(self.prices[r])
            if over <= 0 and not known:
                continue
            root = _Root(self.prices[r] or self._scales[r], 1.2 if known else 16.0)
            if known:
                root.learn(over)
            for _ in range(_INNER_STEPS if known else 2 * _INNER_STEPS):
                if known and root.is_found:
                    break
                self.prices[r], known = root.price, True
                chosen = self._limited.cheapest(self.prices)
                root.learn(self._over(r, chosen))
            if root.nearest < 1e-6 * self._scales[r]:
                self.prices[r] = 0.0
        return chosen

    def _over(self, r: int, chosen: NDArray[np.int64]) -> float:
        """log of what is used over what there is: falls as the price of it rises."""
        used = total(self._limited.takes[r], chosen)
        return log(max(used, 1e-300)) - self._most[r]


class _Root:
    """Where a falling function of a price crosses 0: a bracket that widens, then secants in logs, kept inside it."""

    def __init__(self, guess: float, width: float) -> None:
        self.price = self.nearest = guess
        self.is_found = False
        self._width = width
        self._least = np.inf
        self._low: tuple[float, float] | None = None  # (log price, value > 0)
        self._high: tuple[float, float] | None = None  # value <= 0

    def learn(self, value: float) -> None:
        """The function at `price`; sets the next price."""
        if abs(value) < self._least:
            self._least, self.nearest = abs(value), self.price
        self.is_found = self._least < _CLOSE
        point = log(max(self.price, 1e-300)), value
        if value > 0:
            self._low = point
        else:
            self._high = point
        if self._low is None or self._high is None:
            self.price *= self._width if value > 0 else 1 / self._width
            self._width *= self._width
            return
        (a, fa), (b, fb) = self._low, self._high
        share = min(max(fa / (fa - fb), 0.1), 0.9) if fa - fb < 50 else 0.5
        self.price = exp(a + share * (b - a))
