"""HOBBIT's two caches (arXiv 2411.01433, equation 3): one for whole experts, one for narrow ones, each for all layers.

The expert with the lowest weighted sum of four shares leaves. The shares: last use / tokens, uses / tokens, uses in
high precision / tokens, and 1 - layers until its next possible use / layers. Records are of the running sequence and
common to both caches. Experts guessed for a layer, or in use in it, stay. Advanced step by step by csrc/lanes.cpp.
Knows precisions and places. Does not know times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.lab._lanes import precisions, two_caches

HIGH, LOW, SKIP = 0, 1, 2
_HIT, _EARLY, _LATE, _LOW = 1, 2, 4, 8
NO_GUESS = 255


class Weights(NamedTuple):
    """Weights of the four shares in an expert's priority."""

    recency: float
    frequency: float
    high_precision: float
    layer: float


@dataclass(frozen=True)
class Cache:
    holds: NDArray[np.bool_]  # [L, E], at first
    places: int  # of all layers together


@dataclass(frozen=True)
class HobbitVisits:
    """Hits and copies of the two caches on a trace, by slot [G, D, L, S]; `ordered` by guess [G, D, L, S']."""

    hit: NDArray[np.bool_]  # there, without a copy for this layer
    early: NDArray[np.bool_]  # ordered before the layer's own gate
    late: NDArray[np.bool_]  # missing, and ordered then
    low: NDArray[np.bool_]  # runs in low precision
    guess: NDArray[np.uint8]  # which guess brought it early, or NO_GUESS
    ordered: NDArray[np.uint8]  # 1: ordered ahead whole, 2: narrow, 0: not


def visits(
    experts: NDArray[np.int64],
    need: NDArray[np.uint8],
    guessed: NDArray[np.int64],
    guessed_as: NDArray[np.uint8],
    high: Cache,
    low: Cache,
    weights: Weights,
) -> HobbitVisits:
    """experts and need [G, D, L, S], guessed and guessed_as [G, D, L, S'] in the order of their copies: 1 is high
    precision, 2 low, 0 nothing."""
    flags, order = np.zeros(experts.shape, np.uint8), np.full(experts.shape, NO_GUESS, np.uint8)
    ordered = np.zeros(guessed.shape, np.uint8)
    shares = np.array(weights, np.float64)
    two_caches(
        experts,
        need,
        guessed,
        guessed_as,
        high.holds,
        low.holds,
        high.places,
        low.places,
        shares,
        flags,
        order,
        ordered,
    )
    hit, early, late, runs_low = ((flags & bit) > 0 for bit in (_HIT, _EARLY, _LATE, _LOW))
    return HobbitVisits(hit, early, late, runs_low, order, ordered)


def precision_classes(weights: NDArray[np.float32], t1: float, t2: float) -> NDArray[np.uint8]:
    """[..., k] of HIGH, LOW, SKIP from gate weights in any order of choices."""
    classes = np.empty(weights.shape, np.uint8)
    k = weights.shape[-1]
    precisions(np.ascontiguousarray(weights, np.float32).reshape(-1, k), t1, t2, classes.reshape(-1, k))
    return classes
