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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_LEAST = 1e-9
_IN_CACHE = 4096
"""Numbers of an array beside which others have room in a processor's cache."""


def in_parts(values: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Values [K, ...], split so that as many arrays of `size` numbers stay in a processor's cache."""
    return np.array_split(values, min(-(-len(values) * size // _IN_CACHE), len(values)))


class Side(NamedTuple):
    """Sums over the experts on one side of each layer; any shape that ends in layers, experts."""

    ps: Floats
    spread: Floats  # sum of d a^2
    lean: Floats  # sum of d a
    unused: Floats  # the chance that a step uses none of them, where that opens no message anything

    def with_one(self, more: Side, opening_ps: float) -> Side:
        unused = self.unused * more.unused if opening_ps else self.unused
        return Side(self.ps + more.ps, self.spread + more.spread, self.lean + more.lean, unused)

    def opened(self, opening_ps: float) -> Side:
        """The side with its message, if it has one."""
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
    """Tier of each choice, [C]."""
    ps: Floats  # [C, L, E], expected of one expert
    used: Floats  # [L, E], the chance of it
    openings: Mapping[str, float]
    """Time of a tier's message, picoseconds."""

    def rows(self, which: NDArray[np.bool_]) -> LayerTimes:
        """Times of some of the layers; no layer depends on another."""
        return self if which.all() else replace(self, ps=self.ps[:, which], used=self.used[which])

    @cached_property
    def _tiers(self) -> list[tuple[float, NDArray[np.int64]]]:
        """(opening, choices) of each side, those that are waited for most first: the GPU is folded in last."""
        order = [tier for tier in ("device", "host", "gpu") if tier in self.tiers]
        return [(self.openings.get(tier, 0.0), np.flatnonzero(np.array(self.tiers) == tier)) for tier in order]

    @cached_property
    def _side_of(self) -> NDArray[np.int64]:
        """[C], place in _tiers."""
        side_of = np.zeros(len(self.tiers), np.int64)
        for place, (_, which) in enumerate(self._tiers):
            side_of[which] = place
        return side_of

    @cached_property
    def _idle(self) -> Floats:
        """[L, E], the chance that a step does not use an expert."""
        return np.maximum(1 - self.used, _LEAST)

    @cached_property
    def _busy(self) -> Floats:
        """[L, E]."""
        return np.maximum(self.used, _LEAST)

    @cached_property
    def _picks(self) -> Floats:
        """[L, 1]."""
        used = self.used
        return np.asarray(np.maximum((used * (1 - used)).sum(axis=1, keepdims=True), _LEAST))

    def _experts(self, ps: Floats) -> Side:
        """Return what experts of these times [..., L, E] are on a side."""
        lean = ps * self._idle
        return Side(ps, lean * ps / self._busy, lean, self._idle)

    def of(self, chosen: NDArray[np.int64]) -> Floats:
        """[..., L] of plans [..., L, E], picoseconds."""
        sides = [self._sum(side, opening) for side, (opening, _) in zip(self._sides(chosen), self._tiers, strict=True)]
        return np.asarray(slowest_ps(self._opened(sides), self._picks)[..., 0])

    def changes(self, chosen: NDArray[np.int64]) -> Floats:
        """[C, L, E], how much more a layer takes when one expert changes alone."""
        parts = self._sides(chosen)
        sides = [self._sum(side, opening) for side, (opening, _) in zip(parts, self._tiers, strict=True)]
        now = slowest_ps(self._opened(sides), self._picks)
        without = [_without(whole, part) for whole, part in zip(sides, parts, strict=True)]
        opened = self._opened(without)
        changes = np.empty(self.ps.shape)
        for place, (opening, which) in enumerate(self._tiers):
            after = list(opened)
            for some in in_parts(which, chosen.size):
                after[place] = without[place].with_one(self._experts(self.ps[some]), opening).opened(opening)
                changes[some] = slowest_ps(after, self._picks) - now
        return changes

    def _opened(self, sides: list[Side]) -> list[Side]:
        return [side.opened(opening) for (opening, _), side in zip(self._tiers, sides, strict=True)]

    def _sides(self, chosen: NDArray[np.int64]) -> list[Side]:
        """[..., L, E] of each tier: its experts, and nothing in the places of the others."""
        size = self.used.size
        own = self._experts(self.ps.take(chosen * size + np.arange(size).reshape(self.used.shape)))
        where, sides = self._side_of[chosen], []
        for place, (opening, _) in enumerate(self._tiers):
            here = where == place
            unused = np.where(here, own.unused, 1.0) if opening else own.unused
            ps, spread, lean = (np.where(here, part, 0.0) for part in own[:3])
            sides.append(Side(ps, spread, lean, unused))
        return sides

    @staticmethod
    def _sum(side: Side, opening: float) -> Side:
        """[..., L, 1]. Without a message nobody asks for `unused`."""
        ps, spread, lean = (part.sum(axis=-1, keepdims=True) for part in side[:3])
        unused = np.asarray(np.cumprod(side.unused, axis=-1)) if opening else side.unused
        return Side(ps, spread, lean, unused[..., -1:])


def _without(whole: Side, parts: Side) -> Side:
    """[L, E], the side as if one expert at a time were not there."""
    ps, spread, lean = (every - part for every, part in zip(whole[:3], parts[:3], strict=True))
    return Side(ps, np.maximum(spread, 0.0), lean, whole.unused / parts.unused)
