"""An objective under limits: each expert chooses for itself, or each layer among its plans.

At given prices of the limits everyone chooses alone. The first limit is that of loss or of time, the others are bytes.
Does not know how prices are found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.planning.joint_problem import at, total

SLACK = 1e-9
"""A limit holds if it is exceeded by no more than this share: sums in another order."""


@dataclass(frozen=True)
class Limited:
    """The same for both questions: an objective, and limits of which the first one is that of loss or time."""

    objective: NDArray[np.float64]  # [C, L, E]
    takes: tuple[NDArray[np.float64], ...]  # each [C, L, E] or [C, 1, 1]
    most: tuple[float, ...]

    def freed(self) -> Limited:
        """As little as possible of what the first limit is about, within the others."""
        return Limited(self.takes[0], self.takes, (np.inf, *self.most[1:]))

    def layers(self, which: slice) -> Limited:
        """Some of the layers, with their share of every limit."""
        objective = self.objective[:, which]
        share = objective.size / self.objective.size
        takes = tuple(each if each.shape[1] == 1 else each[:, which] for each in self.takes)
        return Limited(objective, takes, tuple(most * share for most in self.most))

    def over(self, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        """[R], by how much each limit is exceeded; 0 where it holds."""
        used = np.array([total(takes, chosen) for takes in self.takes])
        most = np.array(self.most)
        return np.where(used > most * (1 + SLACK), used - most, 0.0)

    def better(self, one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the plan that exceeds bytes less, then the first limit, then that reaches more; or the first."""

        def demerits(plan: NDArray[np.int64]) -> tuple[float, float, float]:
            over = self.over(plan) / np.maximum(self.most, 1e-300)
            return float(over[1:].sum()), float(over[0]), total(self.objective, plan)

        return other if demerits(other) < demerits(one) else one

    def cheapest(self, prices: NDArray[np.float64]) -> NDArray[np.int64]:
        """Everyone's choice [L, E] at these prices [R] of the limits."""
        return np.asarray(self._values(prices).argmin(axis=0))

    def changes(self, prices: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        """[C, L, E], how much more each other choice costs at these prices."""
        values = self._values(prices)
        values -= at(values, chosen)
        return values

    def _values(self, prices: NDArray[np.float64]) -> NDArray[np.float64]:
        values = self.objective.copy()
        for price, takes in zip(prices.tolist(), self.takes, strict=True):
            if price:
                values += price * takes
        return values
