"""MoEpic's cache configuration: a VRAM budget and a split theta per layer, of least expected time. A reconstruction.

    time(theta, budget) of one layer = max(ready compute, copies that nothing hides) + compute that waits for them

    misses wait         bottoms of cached experts are fetched early, a missing expert when its gate has chosen it:
                        theta 0 is "prefetch only", theta 1 "cache only", as in the published sweep; an optimum inside
    misses prefetched   missing experts are ordered early like bottoms. Then only bytes count, of which theta x hit
                        rate(budget / theta) are saved: more with theta for any concave hit rate, theta 1 never loses

Budgets: divide and conquer over the range of layers, as published; two halves are merged by trying every division of
their bytes, which is exact. The published equations are not public. Knows hit rates and times, no trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

THETAS = np.round(np.arange(0.0, 1.01, 0.1), 2)
MISSES = ("wait", "prefetched")


def num_tops(budget: float, theta: float, num_experts: int) -> int:
    """How many tops the bytes of `budget` whole experts hold; theta 0 caches nothing and needs nothing."""
    return 0 if theta == 0 else min(int(budget / theta + 1e-9), num_experts)


@dataclass(frozen=True)
class MoepicLoad:
    """Average load of one decode layer."""

    used: float  # experts
    fetch_ps: float  # a whole expert over the link
    compute_ps: float  # all used experts
    attention_ps: float
    accuracy: float  # share of used experts that were predicted
    misses: str = "wait"

    def expected_ps(self, hits: NDArray[np.float64], theta: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Time of a layer's experts where all layers are alike.

        hits: how many of `used` have a cached top. With theta 0 every expert counts as a hit with an empty top.
        """
        theta = np.asarray(theta)
        hits = np.where(theta == 0, self.used, hits)
        bottoms, whole = hits * (1 - theta) * self.fetch_ps, (self.used - hits) * self.fetch_ps
        planned = bottoms if self.misses == "wait" else bottoms + whole
        early, late = self.accuracy * planned, bottoms + whole - self.accuracy * planned
        ready = theta * self.compute_ps * hits / self.used
        waiting = self.compute_ps - ready
        # Beside its own copies the layer before leaves the link its attention and what it computes after them.
        hidden = np.minimum((self.attention_ps + waiting) / np.maximum(planned, 1e-9), 1.0)
        copies = early * (1 - hidden) + late
        times: NDArray[np.float64] = np.maximum(ready, copies) + waiting
        return times


def solve(
    rates: NDArray[np.float64], budget: float, load: MoepicLoad
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the (theta [L], cache size in experts [L]) of least expected time.

    rates [slots, L]: share of used experts that a cache of so many tops holds; budget: whole experts per layer on
    average.
    """
    num_experts, layers = rates.shape[0] - 1, rates.shape[1]
    tops = np.array([[num_tops(size, theta, num_experts) for theta in THETAS] for size in range(num_experts + 1)])
    times = load.expected_ps(rates[tops] * load.used, THETAS[:, None])  # [sizes, thetas, L]
    best = THETAS[times.argmin(axis=1)]  # [sizes, L]
    share = divide(times.min(axis=1), min(round(budget * layers), num_experts * layers))
    return best[share, np.arange(layers)], share.astype(np.float64)


def divide(times: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Shares of `total` by layer, [L], with the least sum of times [sizes, L].

    Between equal divisions the first layers get less.
    """
    return _Range.of(times).divided(total)


@dataclass(frozen=True)
class _Range:
    """Some layers, and the least sum of their times for every total of bytes."""

    least: NDArray[np.float64]
    halves: tuple[_Range, _Range] | None = None

    @classmethod
    def of(cls, times: NDArray[np.float64]) -> _Range:
        num_layers = times.shape[1]
        if num_layers == 1:
            return cls(times[:, 0])
        left, right = cls.of(times[:, : num_layers // 2]), cls.of(times[:, num_layers // 2 :])
        out = np.full(len(left.least) + len(right.least) - 1, np.inf)
        for given, time in enumerate(left.least.tolist()):
            here = out[given : given + len(right.least)]
            np.minimum(here, time + right.least, out=here)
        return cls(out, (left, right))

    def divided(self, total: int) -> NDArray[np.int64]:
        if self.halves is None:
            return np.array([total])
        left, right = (half.least for half in self.halves)
        first = np.arange(max(0, total - len(right) + 1), min(total, len(left) - 1) + 1)
        chosen = int(first[(left[first] + right[total - first]).argmin()])
        return np.concatenate([self.halves[0].divided(chosen), self.halves[1].divided(total - chosen)])
