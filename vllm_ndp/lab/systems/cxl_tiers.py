"""CXL-Expert's tiers, and how experts change them: hot in GPU memory, warm in CPU memory, cold in the expander.

"The system monitors execution time and may migrate an expert between categories if its usage changes" (seed 002), no
rule given. Ours: every so many steps of a group two experts of a layer change places if the saving exceeds the copy.
The saving is the time that the exchange would have saved since the last look. The first look is at the end of the
prompts, by their counts. So tiers keep their sizes, and the two copies cross in opposite directions at once. Knows how
often experts were used and what a use and a copy cost. Does not know traces or hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HOT, WARM, COLD = 0, 1, 2


@dataclass(frozen=True)
class TierCosts:
    """Times in ps: use_ps of one use in each tier, the others of one move of an expert to a higher tier."""

    use_ps: tuple[float, float, float]
    warm_to_hot_ps: float
    cold_to_hot_ps: float
    cold_to_warm_ps: float


@dataclass(frozen=True)
class Moves:
    """Experts that one look moved, and the time of the moves; [G, L] each."""

    to_gpu: NDArray[np.int64]
    to_cpu: NDArray[np.int64]
    took_ps: NDArray[np.float64]

    @classmethod
    def none(cls, groups: int, layers: int) -> Moves:
        none = np.zeros((groups, layers), np.int64)
        return cls(none, none, none.astype(np.float64))


def retiered(tiers: NDArray[np.uint8], uses: NDArray[np.float64], costs: TierCosts) -> tuple[NDArray[np.uint8], Moves]:
    """tiers and uses [G, L, E] -> (tiers from now on, what moved). uses: steps since the last look that used each."""
    hot, warm, cold = costs.use_ps
    below = np.array([0.0, warm - hot, cold - hot])
    copies = np.array([np.inf, costs.warm_to_hot_ps, costs.cold_to_hot_ps])
    after, first = _exchanged(tiers, uses, tiers == HOT, tiers != HOT, below, copies)
    up = np.array([0.0, 0.0, cold - warm])
    copies = np.array([np.inf, np.inf, costs.cold_to_warm_ps])
    after, second = _exchanged(after, uses, after == WARM, after == COLD, up, copies)
    # The expander's copies go to the CPU's memory or through it: one way, one after the other. The link is another.
    from_warm, from_cold = (((tiers == tier) & first).sum(axis=2) for tier in (WARM, COLD))
    to_cpu = second.sum(axis=2)
    link = from_warm * costs.warm_to_hot_ps + from_cold * costs.cold_to_hot_ps
    expander = (from_cold + to_cpu) * costs.cold_to_warm_ps
    return after, Moves(from_warm + from_cold, to_cpu, np.maximum(link, expander))


def _exchanged(
    tiers: NDArray[np.uint8],
    uses: NDArray[np.float64],
    inside: NDArray[np.bool_],
    outside: NDArray[np.bool_],
    saves_ps: NDArray[np.float64],
    copy_ps: NDArray[np.float64],
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Exchange the most valuable expert outside for the least used one inside, while that is worth the copy.

    Returns (tiers, experts that came in). By tier: saves_ps is the extra time of a use there over a use inside, and
    copy_ps the time to bring an expert in.
    """
    pairs = int(min(inside.sum(axis=2).max(), outside.sum(axis=2).max()))
    came = np.zeros(tiers.shape, np.bool_)
    if pairs == 0:
        return tiers, came
    value = np.where(outside, uses * saves_ps[tiers] - np.where(outside, copy_ps[tiers], 0.0), -np.inf)
    coming = np.argsort(-value, axis=2, kind="stable")[..., :pairs]
    leaving = np.argsort(np.where(inside, uses, np.inf), axis=2, kind="stable")[..., :pairs]
    both = np.take_along_axis(outside, coming, 2) & np.take_along_axis(inside, leaving, 2)
    from_tier = np.take_along_axis(tiers, coming, 2)
    costs_ps = np.where(both, np.take_along_axis(uses, leaving, 2), 0.0) * saves_ps[from_tier]
    swaps = both & (np.take_along_axis(value, coming, 2) > costs_ps)
    to_tier = np.take_along_axis(tiers, leaving, 2)
    after = tiers.copy()
    np.put_along_axis(after, coming, np.where(swaps, to_tier, from_tier), 2)
    np.put_along_axis(after, leaving, np.where(swaps, from_tier, to_tier), 2)
    np.put_along_axis(came, coming, swaps, 2)
    return after, came
