"""Expert caches in GPU memory, one per (group, layer) lane; all lanes take a step at once.

A priority says who stays. Experts used in a step are brought in first, as far as they fit. Knows recency and
frequency. Does not know time or hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.lab.vectorised.batches import Loads
from vllm_ndp.planning.bitwidths import powers


@dataclass(frozen=True)
class Priority:
    """Which experts stay: those of highest value. `frequency` counts rows, the missing ones' too."""

    kind: str
    """lru: last use · lfu: frequency, then last use · faded: frequency x parameters[steps since the last use] ·
    expected: frequency + parameters, [L, E] · random."""
    parameters: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


LRU, LFU, RANDOM = Priority("lru"), Priority("lfu"), Priority("random")


def lcp(rho: float = 0.25, omega: float = 128.0) -> Priority:
    """MoEpic's priority: mu * rho ** (nu / omega), mu the frequency, nu tokens since the last use."""
    each = round(rho ** (1 / omega) * 2**40) / 2**40  # processors differ below that
    return Priority("faded", powers(each, int(64 * omega)))


CACHE_PRIORITIES: dict[str, Priority] = {"lru": LRU, "lfu": LFU, "lcp": lcp()}


class Visits(NamedTuple):
    """Hits and predictions for each slot of a Loads [G, D, L, S]; never set for a slot with 0 rows."""

    hit: NDArray[np.bool_]
    predicted: NDArray[np.bool_]  # missing, but among the experts of highest priority before the step


def visits(
    loads: Loads,
    start: NDArray[np.bool_],
    capacity: int | NDArray[np.int64],
    priority: Priority,
    *,
    frequency: NDArray[np.float64] | None = None,
    predict: int = 0,
) -> Visits:
    """Run a cache over all steps.

    `start`: experts that it holds at first, [G, L, E] or [L, E]. `capacity`: experts per lane, one number or [L].
    `frequency`: counts to start from. `predict`: number of experts guessed before each step.
    """
    g, steps, layers, _ = loads.rows.shape
    experts = start.shape[-1]
    lanes = _Lanes(np.broadcast_to(start, (g, layers, experts)), frequency, priority)
    places = np.tile(np.broadcast_to(np.asarray(capacity), (layers,)), g)
    hit, predicted = np.zeros((2, *loads.rows.shape), np.bool_)
    for step in range(steps):
        rows = loads.rows[:, step].reshape(g * layers, -1)
        cells = np.arange(g * layers)[:, None] * experts + loads.experts[:, step].reshape(rows.shape)
        used = rows > 0
        there = lanes.held.ravel()[cells] & used
        hit[:, step] = there.reshape(hit[:, step].shape)
        missing = used & ~there
        which = np.flatnonzero(missing.any(axis=1))
        if predict:
            guessed = lanes.highest(which, step, predict).ravel()[cells]
            predicted[:, step] = (missing & guessed).reshape(hit[:, step].shape)
        lanes.use(cells[used], rows[used], step)
        which = which[places[which] > 0]
        lanes.bring_in(which, cells[used], places[which], step)
    return Visits(hit, predicted)


_NEVER, _IN_USE = -1e6, 1e9
"""A last use before all others; above any priority, because experts in use come first."""


class _Lanes:
    """What each lane holds and remembers, [lanes, E]."""

    def __init__(self, start: NDArray[np.bool_], frequency: NDArray[np.float64] | None, priority: Priority) -> None:
        """start and frequency [G, L, E]."""
        self._shape, self._priority = start.shape, priority
        self.held = start.reshape(-1, start.shape[2]).copy()
        self._frequency = np.zeros(self.held.shape) if frequency is None else frequency.reshape(self.held.shape).copy()
        self._last = np.full(self.held.shape, _NEVER)

    def _worth(self, which: NDArray[np.int64], step: int) -> NDArray[np.float64]:
        """[W, E], the priority of each expert in these lanes."""
        (_, layers, experts), parameters = self._shape, self._priority.parameters
        frequency, last = self._frequency[which], self._last[which]
        match self._priority.kind:
            case "lru":
                return last
            case "lfu":
                worth = frequency + 1e-7 * (last - _NEVER)  # ties go to the one used last
            case "faded":
                worth = frequency * parameters[np.minimum(step - last, len(parameters) - 1).astype(np.int64)]
            case "expected":
                worth = frequency + parameters[which % layers]
            case "random":
                of_lane = _scrambled(_scrambled(which.astype(np.uint64)) ^ np.uint64(step))
                drawn = _scrambled(of_lane[:, None] ^ np.arange(experts, dtype=np.uint64)) >> np.uint64(11)
                worth = drawn.astype(np.float64)
            case kind:
                raise ValueError(f"priority must be lru, lfu, faded, expected or random, got {kind}")
        return worth

    def highest(self, which: NDArray[np.int64], step: int, count: int) -> NDArray[np.bool_]:
        """[lanes, E], the `count` of highest priority in these lanes; of equal ones the lower ids."""
        chosen = np.zeros(self.held.shape, np.bool_)
        order = np.argsort(-self._worth(which, step), axis=1, kind="stable")
        chosen[which[:, None], order[:, :count]] = True
        return chosen

    def use(self, cells: NDArray[np.int64], rows: NDArray[np.int64], step: int) -> None:
        """cells: of the flat [lanes, E], distinct."""
        self._last.ravel()[cells] = step
        self._frequency.ravel()[cells] += rows

    def bring_in(
        self, which: NDArray[np.int64], cells: NDArray[np.int64], places: NDArray[np.int64], step: int
    ) -> None:
        """Hold what is in use and those of highest priority, as far as the places [W] go; of equal ones the higher id
        leaves. cells: in use, of all lanes."""
        in_use = np.zeros(self.held.shape, np.bool_)
        in_use.ravel()[cells] = True
        in_use = in_use[which]
        held = self.held[which] | in_use
        keys = np.where(held, self._worth(which, step) + _IN_USE * in_use, np.inf)
        left = held.sum(axis=1) - places
        over = np.flatnonzero(left > 0)
        while len(over):
            keys[over, held.shape[1] - 1 - keys[over, ::-1].argmin(axis=1)] = np.inf
            left[over] -= 1
            over = over[left[over] > 0]
        self.held[which] = keys < np.inf


def _scrambled(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64, as csrc/arrays.h has it."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
