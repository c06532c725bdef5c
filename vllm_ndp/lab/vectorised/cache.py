"""Expert caches in GPU memory, and the predictor by which they are filled ahead.

Caches: one per (group, layer) lane; all lanes take a step at once. A worth says who stays. Experts used in a step are
brought in first, as far as they fit.

The predictor of `--prefetch measured`: how often a token that chose e' in one layer chose e in the next one. It counts
tokens of requests that are not replayed. An expert's score is the mean of those chances over a row's choices in the
layer before, by router weight. A row's guess for a layer is the top_k experts of highest score; for the first layer
popularity is the score. (Published ones run later routers on earlier activations, which traces do not hold.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from vllm_ndp.lab.vectorised.batches import Batches, Loads
from vllm_ndp.planning.bitwidths import powers
from vllm_ndp.traces.trace import Trace

Worth = Callable[[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]]
"""(rows of each expert, missing ones' too; steps since its last use; layers [W]) -> [W, E], what stays first."""

_UNUSED, _IN_USE = 1e6, 1e9
"""Steps since the last use of what was never used; above any worth, because experts in use come first."""


def lru(frequency: NDArray[np.float64], since: NDArray[np.float64], layers: NDArray[np.int64]) -> NDArray[np.float64]:
    return -since


def lfu(frequency: NDArray[np.float64], since: NDArray[np.float64], layers: NDArray[np.int64]) -> NDArray[np.float64]:
    return frequency - 1e-7 * since  # ties go to the one used last


def lcp(rho: float, omega: float) -> Worth:
    """MoEpic's priority: mu * rho ** (nu / omega), mu the frequency, nu tokens since the last use."""
    each = round(rho ** (1 / omega) * 2**40) / 2**40  # processors differ below that
    faded = powers(each, int(64 * omega))
    return lambda frequency, since, _: frequency * faded[np.minimum(since, len(faded) - 1).astype(np.int64)]


CACHES: dict[str, Worth] = {"lru": lru, "lfu": lfu}


class Visits(NamedTuple):
    """Hits and predictions for each slot of a Loads [G, D, L, S]; never set for a slot with 0 rows."""

    hit: NDArray[np.bool_]
    predicted: NDArray[np.bool_]  # missing, but among the experts of highest worth before the step


def visits(
    loads: Loads,
    start: NDArray[np.bool_],
    capacity: int,
    worth: Worth,
    *,
    frequency: NDArray[np.float64] | None = None,
    predict: int = 0,
) -> Visits:
    """Run a cache over all steps.

    `start` [L, E]: experts that it holds at first. `capacity`: experts per lane. `frequency` [G, L, E]: counts to start
    from. `predict`: number of experts guessed before each step; of equal ones the lower ids.
    """
    g, steps, layers, _ = loads.rows.shape
    held = np.tile(start, (g, 1))  # [lanes, E], as all below
    counts = np.zeros(held.shape) if frequency is None else frequency.reshape(held.shape).copy()
    last = np.full(held.shape, -_UNUSED)
    hit, predicted = np.zeros((2, *loads.rows.shape), np.bool_)
    for step in range(steps):
        rows = loads.rows[:, step].reshape(len(held), -1)
        cells = np.arange(len(held))[:, None] * held.shape[1] + loads.experts[:, step].reshape(rows.shape)
        used = rows > 0
        there = held.ravel()[cells] & used
        hit[:, step] = there.reshape(hit[:, step].shape)
        which = np.flatnonzero((used & ~there).any(axis=1))
        if predict:
            guessed = np.zeros(held.shape, np.bool_)
            order = np.argsort(-worth(counts[which], step - last[which], which % layers), axis=1, kind="stable")
            guessed[which[:, None], order[:, :predict]] = True
            predicted[:, step] = (used & ~there & guessed.ravel()[cells]).reshape(hit[:, step].shape)
        last.ravel()[cells[used]] = step
        counts.ravel()[cells[used]] += rows[used]
        if capacity:
            in_use = np.zeros(held.shape, np.bool_)
            in_use.ravel()[cells[used]] = True
            worths = worth(counts[which], step - last[which], which % layers) + _IN_USE * in_use[which]
            held[which] = _kept(held[which] | in_use[which], worths, capacity)
    return Visits(hit, predicted)


def _kept(held: NDArray[np.bool_], worths: NDArray[np.float64], places: int) -> NDArray[np.bool_]:
    """Those of highest worth, as far as the places go; of equal ones the higher id leaves."""
    keys = np.where(held, worths, np.inf)
    left = held.sum(axis=1) - places
    over = np.flatnonzero(left > 0)
    while len(over):
        keys[over, held.shape[1] - 1 - keys[over, ::-1].argmin(axis=1)] = np.inf
        left[over] -= 1
        over = over[left[over] > 0]
    return keys < np.inf


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
        found = np.zeros(batches.ids.shape, np.bool_)
        for layer in range(layers):
            before = batches.ids[..., max(layer - 1, 0), :].reshape(-1, k)
            gates = batches.weights[..., max(layer - 1, 0), :].reshape(-1, k, 1)
            best = np.empty((len(before), k), np.int64)
            at_once = max(_ROWS_AT_ONCE // (k * batches.num_experts), 1)
            for start in range(0, len(before), at_once):
                part = slice(start, start + at_once)
                sums = (self.chances[layer][before[part]] * gates[part]).sum(axis=1)
                best[part] = np.argsort(-sums, axis=1, kind="stable")[:, :k]
            guessed = best.reshape(g, b, d, 1, k)
            found[..., layer, :] = (batches.ids[..., layer, :, None] == guessed).any(axis=-1)
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
