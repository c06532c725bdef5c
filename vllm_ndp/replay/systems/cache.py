"""Expert caches in GPU memory, one per (group, layer) lane, advanced step by step and vectorised over all lanes.

A priority function says who stays. Experts used in a step are brought in first, as far as they fit. Knows recency and
frequency. Does not know time or hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

NEVER = -1e6
_IN_USE = 1e9
"""Above any priority: experts in use come before all others."""


@dataclass
class LaneCache:
    """capacity experts per lane, one number or [L]; arrays are [G, L, E]."""

    cached: NDArray[np.bool_]
    capacity: int | NDArray[np.int64]
    priority: Callable[[LaneCache], NDArray[np.float64]]
    step: int = 0
    last_used: NDArray[np.float64] = field(init=False)
    frequency: NDArray[np.float64] = field(init=False)
    _places: NDArray[np.int64] = field(init=False)  # [G, L]

    def __post_init__(self) -> None:
        self.cached = self.cached.copy()
        self._places = np.broadcast_to(self.capacity, self.cached.shape[:2])
        self.last_used = np.full(self.cached.shape, NEVER)
        self.frequency = np.zeros(self.cached.shape)

    def touch(self, tokens: NDArray[np.int64], used: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """One step: who was there (hits among `used`), then recency, frequency and content move on."""
        hits = used & self.cached
        self.last_used[used] = self.step
        self.frequency += tokens
        lanes: NDArray[np.bool_] = np.any(used & ~self.cached, axis=2)
        if lanes.any() and self._places.any():
            self._bring_in(used, lanes)
        self.step += 1
        return hits

    def _bring_in(self, used: NDArray[np.bool_], lanes: NDArray[np.bool_]) -> None:
        rank = self.priority(self)[lanes]
        candidates = (self.cached | used)[lanes]
        rank = np.where(candidates, rank + _IN_USE * used[lanes], -np.inf)
        order = np.argsort(-rank, axis=1, kind="stable")
        fits = np.arange(order.shape[1]) < self._places[lanes][:, None]
        content = np.zeros_like(candidates)
        np.put_along_axis(content, order, fits, axis=1)
        self.cached[lanes] = content & candidates


def least_recently_used(cache: LaneCache) -> NDArray[np.float64]:
    return cache.last_used


def least_frequently_used(cache: LaneCache) -> NDArray[np.float64]:
    """Ties go to the one used last."""
    return cache.frequency + 1e-7 * (cache.last_used - NEVER)


def lcp(rho: float = 0.25, omega: float = 128.0) -> Callable[[LaneCache], NDArray[np.float64]]:
    """MoEpic's priority: mu * rho ** (nu / omega), mu the frequency, nu tokens since the last use."""

    def priority(cache: LaneCache) -> NDArray[np.float64]:
        since = np.minimum(cache.step - cache.last_used, 64 * omega)
        value: NDArray[np.float64] = cache.frequency * rho ** (since / omega)
        return value

    return priority


def at_random(seed: int = 0) -> Callable[[LaneCache], NDArray[np.float64]]:
    generator = np.random.default_rng(seed)
    return lambda cache: generator.random(cache.cached.shape)


CACHE_PRIORITIES: dict[str, Callable[[LaneCache], NDArray[np.float64]]] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "lcp": lcp(),
}
