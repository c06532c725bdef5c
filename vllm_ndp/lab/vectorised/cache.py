"""Expert caches in GPU memory, and the predictor by which they are filled ahead.

Caches: one per (group, layer) lane; all lanes take a step at once. A priority says who stays. Experts used in a step
are brought in first, as far as they fit.

The predictor of `--prefetch measured`: how often a token that chose e' in one layer chose e in the next one. It counts
tokens of requests that are not replayed. An expert's score is the mean of those chances over a row's choices in the
layer before, by router weight. A row's guess for a layer is the top_k experts of highest score; for the first layer
popularity is the score. (Published ones run later routers on earlier activations, which traces do not hold.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from vllm_ndp.lab.vectorised.batches import Batches, Loads
from vllm_ndp.planning.bitwidths import powers
from vllm_ndp.traces.trace import Trace


@dataclass(frozen=True)
class Priority:
    """Which experts stay: those of highest value. `frequency` counts rows, the missing ones' too."""

    kind: str
    """lru: last use · lfu: frequency, then last use · faded: frequency x parameters[steps since the last use] ·
    expected: frequency + parameters, [L, E]."""
    parameters: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


LRU, LFU = Priority("lru"), Priority("lfu")


def lcp(rho: float, omega: float) -> Priority:
    """MoEpic's priority: mu * rho ** (nu / omega), mu the frequency, nu tokens since the last use."""
    each = round(rho ** (1 / omega) * 2**40) / 2**40  # processors differ below that
    return Priority("faded", powers(each, int(64 * omega)))


CACHE_PRIORITIES: dict[str, Priority] = {"lru": LRU, "lfu": LFU}


class Visits(NamedTuple):
    """Hits and predictions for each slot of a Loads [G, D, L, S]; never set for a slot with 0 rows."""

    hit: NDArray[np.bool_]
    predicted: NDArray[np.bool_]  # missing, but among the experts of highest priority before the step


def visits(
    loads: Loads,
    start: NDArray[np.bool_],
    capacity: int,
    priority: Priority,
    *,
    frequency: NDArray[np.float64] | None = None,
    predict: int = 0,
) -> Visits:
    """Run a cache over all steps.

    `start` [L, E]: experts that it holds at first. `capacity`: experts per lane. `frequency`: counts to start from.
    `predict`: number of experts guessed before each step.
    """
    g, steps, layers, _ = loads.rows.shape
    experts = start.shape[-1]
    lanes = _Lanes(np.broadcast_to(start, (g, layers, experts)), frequency, priority)
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
        if capacity:
            lanes.bring_in(which, cells[used], capacity, step)
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
        layers, parameters = self._shape[1], self._priority.parameters
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
            case kind:
                raise ValueError(f"priority must be lru, lfu, faded or expected, got {kind}")
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

    def bring_in(self, which: NDArray[np.int64], cells: NDArray[np.int64], places: int, step: int) -> None:
        """Hold what is in use and those of highest priority, as far as the places go; of equal ones the higher id
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


# -- the next layer's experts ------------------------------------------------------------------------------------------

_ROWS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class NextLayer:
    """P(expert of this layer | an expert of the layer before)."""

    chances: NDArray[np.float64]  # [L, E, E], rows sum to 1; of the first layer all rows are its popularity

    @classmethod
    def learned(cls, trace: Trace, rows: NDArray[np.bool_] | None = None) -> NextLayer:
        """From all tokens of a trace, or some; each next choice also counts as one token of its layer's popularity."""
        ids = (trace.ids if rows is None else trace.ids[rows]).astype(np.int64)
        num_experts, (tokens, layers, k) = trace.provenance.num_experts, ids.shape
        if tokens == 0:
            raise ConfigError("a predictor needs tokens to learn from: record prompts, or take --prefetch published")
        chances = np.empty((layers, num_experts, num_experts))
        for layer in range(layers):
            popularity = np.bincount(ids[:, layer].ravel(), minlength=num_experts) / (tokens * k)
            counts = np.broadcast_to(popularity, (num_experts, num_experts))
            if layer:
                pairs = ids[:, layer - 1, :, None] * num_experts + ids[:, layer, None, :]
                seen = np.bincount(pairs.ravel(), minlength=num_experts**2)
                counts = counts + seen.reshape(num_experts, num_experts)
            chances[layer] = counts / counts.sum(axis=1, keepdims=True)
        return cls(chances)

    def accuracy(self, batches: Batches) -> float:
        """Share of decode choices that were among the guessed ones."""
        g, b, d, layers, k = batches.shape
        ids = np.zeros(batches.ids.shape, np.int64)  # best first
        for layer in range(layers):
            before = batches.ids[..., max(layer - 1, 0), :].reshape(-1, k)
            gates = batches.weights[..., max(layer - 1, 0), :].reshape(-1, k, 1)
            best = np.empty((len(before), k), np.int64)
            at_once = max(_ROWS_AT_ONCE // (k * batches.num_experts), 1)
            for start in range(0, len(before), at_once):
                part = slice(start, start + at_once)
                sums = (self.chances[layer][before[part]] * gates[part]).sum(axis=1)
                best[part] = np.argsort(-sums, axis=1, kind="stable")[:, :k]
            ids[..., layer, :] = best.reshape(g, b, d, k)
        found = (batches.ids[..., :, None] == ids[..., None, :]).any(axis=-1)
        return float(found[np.broadcast_to(batches.pairs, found.shape)].mean())


MOST_PREDICTED = 20_000


def found_ahead(trace: Trace) -> dict[str, float]:
    """Share of decode choices among the k experts predicted from the layer before, learned from every other request.

    Measured on the first tokens of each request, as many as take a moment. Empty where there are fewer than 2 requests
    or no decode.
    """
    requests = [r for r, s in enumerate(trace.sequences[:64]) if len(s.decode_ids)]
    if len(requests) < 2:
        return {}
    found = NextLayer.learned(trace.select(requests[::2])).accuracy(
        Batches.of(trace.select(requests[1::2])).first_steps(max(MOST_PREDICTED // len(requests), 1))
    )
    chance = trace.provenance.top_k / trace.provenance.num_experts
    return {"next_layer": found, "chance": chance}
