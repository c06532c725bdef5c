"""How long a layer takes whose sides run at once: GPU, host and device work side by side and the slowest is waited for.

    E max(a, b) = (E a + E b + E |a - b|) / 2,    E |a - b| <= sqrt((E a - E b)^2 + Var(a - b)), E a + E b

no distribution of these means and variances takes longer: a plan is not chosen for what the formula leaves out. Three
sides are folded two by two. A step picks a number of experts that is nearly fixed, so a busy GPU means an idle device.
With d = u (1 - u) of an expert's chance u, Var(sum of a_e X_e) = sum d a^2 - (sum d a)^2 / sum d. Source: Hajek, Annals
of Mathematical Statistics 35 (1964). A side away from the GPU opens one message in steps that use any expert there.

Against drawn routing (8 to 128 experts, 1 and 4 rows) the time is 1 to 6 % too long on average. The sum of the sides is
10 to 36 % too long, and the longest mean 2 to 20 % too short. Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_LEAST = 1e-9


class Side(NamedTuple):
    """Sums over the experts on one side of each layer; any shape that ends in layers, experts."""

    ps: Floats
    spread: Floats  # sum of d a^2
    lean: Floats  # sum of d a
    unused: Floats  # the chance that a step uses none of them

    def with_one(self, more: Side) -> Side:
        return Side(self.ps + more.ps, self.spread + more.spread, self.lean + more.lean, self.unused * more.unused)

    def opened(self, opening_ps: float) -> Side:
        """With its message, where it has one."""
        if not opening_ps:
            return self
        opens = 1 - self.unused
        return self._replace(
            ps=self.ps + opening_ps * opens, spread=self.spread + opening_ps * opening_ps * opens * self.unused
        )


def slowest_ps(sides: list[Side], picks: Floats) -> Floats:
    """Expected time of the slowest of some sides; picks: sum of d."""
    slowest, *others = sides
    for other in others:
        apart, lean = slowest.ps - other.ps, slowest.lean - other.lean
        variance = slowest.spread + other.spread - lean * lean / picks
        both = slowest.ps + other.ps
        width = np.minimum(np.sqrt(apart * apart + np.maximum(variance, 0.0)), both)
        ps = (both + width) / 2
        if other is others[-1]:
            return np.asarray(ps)
        weight = (1 + apart / np.maximum(width, _LEAST)) / 2
        rest = 1 - weight
        slowest = Side(
            ps,
            weight * weight * slowest.spread + rest * rest * other.spread,
            weight * slowest.lean + rest * other.lean,
            slowest.unused,
        )
    return slowest.ps


@dataclass(frozen=True)
class LayerTimes:
    """Times of one problem: of each layer under a plan, and what each change of one expert would add."""

    tiers: Sequence[str]
    """Of each choice, [C]."""
    ps: Floats  # [C, L, E], expected of one expert
    used: Floats  # [L, E], the chance of it
    openings: Mapping[str, float]
    """Of a tier's message, picoseconds."""

    @cached_property
    def _tiers(self) -> list[tuple[str, NDArray[np.int64]]]:
        """Each side with its choices, those that are waited for most first: the GPU is the last to be folded in."""
        order = [tier for tier in ("device", "host", "gpu") if tier in self.tiers]
        return [(tier, np.flatnonzero(np.array(self.tiers) == tier)) for tier in order]

    @cached_property
    def _side_of(self) -> NDArray[np.int64]:
        """[C], place in _tiers."""
        side_of = np.zeros(len(self.tiers), np.int64)
        for place, (_, which) in enumerate(self._tiers):
            side_of[which] = place
        return side_of

    @cached_property
    def _one(self) -> Side:
        """[C, L, E], what one expert is on its side."""
        ps, used = self.ps, self.used
        idle = np.maximum(1 - used, _LEAST)
        lean = ps * idle
        return Side(ps, lean * ps / np.maximum(used, _LEAST), lean, np.broadcast_to(idle, ps.shape))

    @cached_property
    def _picks(self) -> Floats:
        """[L, 1]."""
        used = self.used
        return np.asarray(np.maximum((used * (1 - used)).sum(axis=1, keepdims=True), _LEAST))

    def of(self, chosen: NDArray[np.int64]) -> Floats:
        """[..., L] of plans [..., L, E], picoseconds."""
        own = self._own(chosen)
        sides = [self._sum(own, self._side_of[chosen] == place) for place in range(len(self._tiers))]
        return np.asarray(slowest_ps(self._opened(sides), self._picks)[..., 0])

    def changes(self, chosen: NDArray[np.int64]) -> Floats:
        """[C, L, E], how much more a layer takes when one expert changes alone."""
        own, here = self._own(chosen), self._side_of[chosen]
        sides = [self._sum(own, here == place) for place in range(len(self._tiers))]
        now = slowest_ps(self._opened(sides), self._picks)
        without = [self._without(side, own, here == place) for place, side in enumerate(sides)]
        changes = np.empty(self.ps.shape)
        for place, (_, which) in enumerate(self._tiers):
            after = list(without)
            after[place] = without[place].with_one(Side(*(part[which] for part in self._one)))
            changes[which] = slowest_ps(self._opened(after), self._picks) - now
        return changes

    def _opened(self, sides: list[Side]) -> list[Side]:
        return [side.opened(self.openings.get(tier, 0.0)) for (tier, _), side in zip(self._tiers, sides, strict=True)]

    def _own(self, chosen: NDArray[np.int64]) -> Side:
        """[..., L, E]."""
        _, layers, experts = self.ps.shape
        cells = np.arange(layers)[:, None], np.arange(experts)
        return Side(*(part[(chosen, *cells)] for part in self._one))

    @staticmethod
    def _sum(own: Side, here: NDArray[np.bool_]) -> Side:
        """[..., L, 1]."""
        ps, spread, lean = (np.where(here, part, 0.0).sum(axis=-1, keepdims=True) for part in own[:3])
        return Side(ps, spread, lean, np.cumprod(np.where(here, own.unused, 1.0), axis=-1)[..., -1:])

    @staticmethod
    def _without(side: Side, own: Side, here: NDArray[np.bool_]) -> Side:
        """[L, E], as if one expert at a time were not there."""
        ps, spread, lean = (whole - np.where(here, part, 0.0) for whole, part in zip(side[:3], own[:3], strict=True))
        return Side(ps, np.maximum(spread, 0.0), lean, side.unused / np.where(here, own.unused, 1.0))
