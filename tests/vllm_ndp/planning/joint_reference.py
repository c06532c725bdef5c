"""The search of a joint plan the slow way, in numpy: csrc/joint.cpp gives the same to the bit, function by function.

Times of layers whose sides run at once; an objective under limits; prices of the limits; from plans at prices to one
within every limit; plans of single layers and their best mixture; the search itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.planning.joint_problem import JointProblem, at, total
from vllm_ndp.planning.same_everywhere import exp, log, smallest

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


_INNER_STEPS = 8
"""Prices of bytes that are tried at each price of the first limit."""
_CLOSE = 2e-3
"""A budget's price is right when its logarithm is off by no more."""


class PriceSearch:
    """Prices at which every limit just holds: that of loss or time outside, those of bytes inside."""

    def __init__(self, limited: Limited, prices: NDArray[np.float64] | None) -> None:
        self._limited = limited
        spread = float(np.ptp(limited.objective, axis=0).mean())
        self._scales = [spread / max(float(np.ptp(takes, axis=0).mean()), 1e-300) for takes in limited.takes]
        self._most = [log(max(most, 1e-300)) for most in limited.most]
        self._is_near = prices is not None
        self.prices = np.zeros(len(limited.most)) if prices is None else prices.copy()
        self.plans: list[NDArray[np.int64]] = []
        """The plan at each price of the first limit."""

    def run(self, steps: int) -> None:
        """Try so many prices of the first limit, each nearer to the price at which the limit just holds."""
        if not self._is_near or not self.prices[0]:
            self.prices[0] = 0.0
            self.plans.append(self._settle_bytes())
            if self._over(0, self.plans[-1]) <= 0:
                return
        root = _Root(self.prices[0] or self._scales[0], 1.05 if self._is_near else 16.0)
        for _ in range(steps):
            self.prices[0] = root.price
            self.plans.append(self._settle_bytes())
            root.learn(self._over(0, self.plans[-1]))
            if root.is_found:
                break
        self.prices[0] = root.nearest
        if not root.is_found:
            self.plans.append(self._settle_bytes())

    def _settle_bytes(self) -> NDArray[np.int64]:
        """Prices of bytes at which every budget just holds, and the plan at them."""
        chosen = self._limited.cheapest(self.prices)
        for r in range(1, len(self.prices)):
            over, known = self._over(r, chosen), bool(self.prices[r])
            if over <= 0 and not known:
                continue
            root = _Root(self.prices[r] or self._scales[r], 1.2 if known else 16.0)
            if known:
                root.learn(over)
            for _ in range(_INNER_STEPS if known else 2 * _INNER_STEPS):
                if known and root.is_found:
                    break
                self.prices[r], known = root.price, True
                chosen = self._limited.cheapest(self.prices)
                root.learn(self._over(r, chosen))
            if root.nearest < 1e-6 * self._scales[r]:
                self.prices[r] = 0.0
        return chosen

    def _over(self, r: int, chosen: NDArray[np.int64]) -> float:
        """log of what is used over what there is: falls as the price of it rises."""
        used = total(self._limited.takes[r], chosen)
        return log(max(used, 1e-300)) - self._most[r]


class _Root:
    """Where a falling function of a price crosses 0: a bracket that widens, then secants in logs, kept inside it."""

    def __init__(self, guess: float, width: float) -> None:
        self.price = self.nearest = guess
        self.is_found = False
        self._width = width
        self._least = np.inf
        self._low: tuple[float, float] | None = None  # (log price, value > 0)
        self._high: tuple[float, float] | None = None  # value <= 0

    def learn(self, value: float) -> None:
        """The function at `price`; sets the next price."""
        if abs(value) < self._least:
            self._least, self.nearest = abs(value), self.price
        self.is_found = self._least < _CLOSE
        point = log(max(self.price, 1e-300)), value
        if value > 0:
            self._low = point
        else:
            self._high = point
        if self._low is None or self._high is None:
            self.price *= self._width if value > 0 else 1 / self._width
            self._width *= self._width
            return
        (a, fa), (b, fb) = self._low, self._high
        share = min(max(fa / (fa - fb), 0.1), 0.9) if fa - fb < 50 else 0.5
        self.price = exp(a + share * (b - a))


_FULL = 1e-3
"""The share of a limit that may be left over."""
_REPAIRS, _EXCHANGED = 12, 200


def mixed(limited: Limited, plans: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Mix two plans on both sides of the first limit: as many experts as possible from the bolder one."""
    used = np.array([total(limited.takes[0], plan) for plan in plans])
    holds = used <= limited.most[0]
    if holds.all() or not holds.any():
        return plans[-1]
    careful = plans[int(np.where(holds, used, -np.inf).argmax())]
    bold = plans[int(np.where(holds, np.inf, used).argmin())]
    other = np.flatnonzero(careful != bold)
    steps = np.cumsum(at(limited.takes[0], bold).ravel()[other] - at(limited.takes[0], careful).ravel()[other])
    room = limited.most[0] - total(limited.takes[0], careful)
    possible = np.flatnonzero(steps <= room)
    mixed = careful.copy()
    if len(possible):
        taken = other[: possible[-1] + 1]
        mixed.flat[taken] = bold.flat[taken]
    return mixed


def within(limited: Limited, prices: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the plan with as few changes as it needs to keep within every limit, as far as that succeeds. Changes that
    cost least for what they save come first."""
    prices = prices.copy()
    for _ in range(_REPAIRS):
        over = limited.over(chosen)
        if not over.any():
            return chosen
        r = int((over[1:] / np.maximum(limited.most[1:], 1.0)).argmax()) + 1 if over[1:].any() else 0
        saved = at(limited.takes[r], chosen) - limited.takes[r]
        cost = np.maximum(limited.changes(prices, chosen), 0.0)
        cost[_adds_to_what_is_full(limited, chosen, (0, r))] = np.inf
        order, best, gains = _by_ratio(cost, np.broadcast_to(saved, cost.shape))
        if not len(order):
            break
        count = int(np.searchsorted(np.cumsum(gains), over[r] * (1 - 1e-12))) + 1
        chosen = chosen.copy()
        chosen.flat[order[:count]] = best[:count]
        prices[r] = prices[r] * 1.5 + 1e-12  # the next change should not undo this one
    return chosen


def filled(limited: Limited, prices: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """The plan with what the limits leave over spent: the changes that gain most for what they use, as many as fit."""
    gain = at(limited.objective, chosen) - limited.objective
    cost = np.maximum(limited.changes(prices, chosen), 0.0)
    cost[_adds_to_what_is_full(limited, chosen)] = np.inf
    order, best, _ = _by_ratio(cost, gain)
    fits = np.ones(len(order), np.bool_)
    for takes, most in zip(limited.takes, limited.most, strict=True):
        whole = np.broadcast_to(takes, limited.objective.shape).reshape(len(takes), -1)
        more = whole[best, order] - at(takes, chosen).ravel()[order]
        fits &= np.cumsum(more) <= most * (1 + SLACK) - total(takes, chosen)
    possible = np.flatnonzero(fits)
    if not len(possible):
        return chosen
    count = possible[-1] + 1
    filled = chosen.copy()
    filled.flat[order[:count]] = best[:count]
    return filled


def exchanged(limited: Limited, prices: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The plan with one or two experts changed so that the objective falls most within every limit; None: none does.

    Only the changes that cost least at the prices are paired."""
    change = limited.changes(prices, chosen).ravel()
    count = min(_EXCHANGED, change.size)
    near = smallest(np.abs(change), count)
    choice, cell = np.divmod(near, chosen.size)
    near = near[choice != chosen.ravel()[cell]]
    choice, cell = np.divmod(near, chosen.size)

    def more(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Amount that each change adds; 0 for no change, last."""
        whole = np.broadcast_to(values, limited.objective.shape).reshape(len(values), -1)
        return np.append(whole[choice, cell] - whole[chosen.ravel()[cell], cell], 0.0)

    gain = more(limited.objective)
    both = gain[:, None] + gain[None]
    same = np.append(cell, -1)
    both[same[:, None] == same[None]] = np.inf
    for takes, most in zip(limited.takes, limited.most, strict=True):
        adds = more(takes)
        both[adds[:, None] + adds[None] > most * (1 + SLACK) - total(takes, chosen)] = np.inf
    first, second = divmod(int(both.argmin()), len(gain))
    if not both[first, second] < -1e-9 * abs(total(limited.objective, chosen)):
        return None
    after = chosen.copy()
    for one in (first, second):
        if one < len(near):
            after.flat[cell[one]] = choice[one]
    return after


def _adds_to_what_is_full(limited: Limited, chosen: NDArray[np.int64], but: tuple[int, ...] = ()) -> NDArray[np.bool_]:
    """[C, L, E], the changes that would take more of a limit that is used up."""
    adds = np.zeros(limited.objective.shape, np.bool_)
    for r, (takes, most) in enumerate(zip(limited.takes, limited.most, strict=True)):
        if r not in but and total(takes, chosen) >= most * (1 - _FULL):
            adds |= takes > at(takes, chosen)
    return adds


def _by_ratio(
    cost: NDArray[np.float64], gain: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """(experts, their best other choices, the gains), from the least cost per gain up. Experts that gain nothing are
    not in it. `cost` and `gain` [C, L, E]."""
    with np.errstate(over="ignore"):  # next to no gain: as good as none
        ratio = cost / np.maximum(gain, 1e-300)
    ratio[gain <= 0] = np.inf
    best = ratio.argmin(axis=0)
    least = at(ratio, best).ravel()
    able = np.flatnonzero(np.isfinite(least))
    order = able[np.argsort(least[able], kind="stable")]
    return order, best.ravel()[order], at(gain, best).ravel()[order]


_MOST_DESCENTS = 12
_LEAST_LIMIT = 1e-300
"""A share of a limit of 0 is large."""
_FIRST_SHARE = 4
"""Denominator of the share of a layer's experts that change in the first step of a descent."""


@dataclass(frozen=True)
class Question:
    """The least time at a loss of at most `most`, or the least loss in a time of at most that."""

    problem: JointProblem
    least: str
    most: float

    def limited(self, time: NDArray[np.float64], loss: NDArray[np.float64], *takes: NDArray[np.float64]) -> Limited:
        """As an objective under limits, whatever chooses: experts or layers."""
        objective, first = (time, loss) if self.least == "time" else (loss, time)
        return Limited(objective, (first, *takes), (self.most, *self.problem.budgets.values()))

    @property
    def has_room(self) -> bool:
        """Whether the memories hold every expert at the narrowest."""
        problem, room = self.problem, 0.0
        for tier in {choice.tier for choice in problem.choices}:
            least = min(choice.held_bytes for choice in problem.choices if choice.tier == tier)
            room += problem.budgets[tier] // least if tier in problem.budgets else np.inf
        return bool(room >= problem.ps[0].size)

    def only(self, which: NDArray[np.int64]) -> Question:
        """The question with some of the choices."""
        return replace(self, problem=self.problem.only(which))

    def apart(self, prices: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """(the price of a picosecond, [C, L, E] all else that an expert costs) at prices [R] of the limits."""
        problem, first = self.problem, float(prices[0])
        time, loss = (1.0, first) if self.least == "time" else (first, 1.0)
        costs = loss * problem.loss + time * problem.moving
        for price, takes in zip(prices[1:].tolist(), problem.takes.values(), strict=True):
            costs += price * takes
        return time, costs

    def over(self, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        """[R], by how much a plan [L, E] exceeds each limit; 0 where it holds."""
        return self.columns(chosen[None]).layers.over(np.zeros((len(chosen), 1), np.int64))

    def columns(self, plans: NDArray[np.int64], times: NDArray[np.float64] | None = None) -> Columns:
        """Plans [K, L, E] as what each layer may choose among; times [K, L] of layers, if they are known."""
        problem = self.problem

        def whole(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.asarray(at(values, plans).sum(axis=2, keepdims=True))

        if times is None:
            times = np.concatenate([times_of(problem).of(some) for some in in_parts(plans, plans[0].size)])
        time = times[..., None] + whole(problem.moving)
        return Columns(
            plans, self.limited(time, whole(problem.loss), *(whole(takes) for takes in problem.takes.values()))
        )


@dataclass(frozen=True)
class Columns:
    """Plans that layers choose among, each layer for itself."""

    plans: NDArray[np.int64]  # [K, L, E]
    layers: Limited  # [K, L, 1], what a layer takes under each plan

    def and_more(self, more: Columns) -> Columns:
        takes = tuple(np.concatenate(pair) for pair in zip(self.layers.takes, more.layers.takes, strict=True))
        objective = np.concatenate([self.layers.objective, more.layers.objective])
        return Columns(np.concatenate([self.plans, more.plans]), replace(self.layers, objective=objective, takes=takes))

    @property
    def best(self) -> NDArray[np.int64]:
        """The plan [L, E] that exceeds the memories least, then the first limit, then that reaches most."""
        whole = self.layers
        used = np.stack([takes[:, :, 0].sum(axis=1) for takes in whole.takes])
        most = np.array(whole.most)[:, None]
        over = np.where(used > most * (1 + SLACK), used - most, 0.0) / np.maximum(most, _LEAST_LIMIT)
        order = np.lexsort((whole.objective[:, :, 0].sum(axis=1), over[0], over[1:].sum(axis=0)))
        return np.asarray(self.plans[order[0]])

    def mixture(self, which: NDArray[np.int64]) -> NDArray[np.int64]:
        """[L, E] of the plans [L] that layers take."""
        return np.asarray(self.plans[which, np.arange(len(which))])


def descended(question: Question, prices: NDArray[np.float64], chosen: NDArray[np.int64]) -> Columns:
    """Plans of ever less cost at these prices, from one on; each layer by itself, at first many experts at a time.

    No layer is looked at again before it has changed."""
    times, found = times_of(question.problem), [chosen]
    time_price, apart = question.apart(prices)
    layers_ps = [times.of(chosen)]
    now = time_price * layers_ps[0] + at(apart, chosen).sum(axis=1)
    many = np.full((len(chosen), 1), max(chosen.shape[1] // _FIRST_SHARE, 1))
    ranks = np.arange(chosen.shape[1])
    best, least = np.zeros(chosen.shape, np.int64), np.zeros(chosen.shape)
    stale = np.ones(len(chosen), np.bool_)
    for _ in range(_MOST_DESCENTS):
        if stale.any():
            here, costs = chosen[stale], apart[:, stale]
            changes = time_price * times.rows(stale).changes(here) + (costs - at(costs, here))
            best[stale] = changes.argmin(axis=0)
            least[stale] = at(changes, best[stale])
        taken = np.zeros(chosen.shape, np.bool_)
        np.put_along_axis(taken, np.argsort(least, axis=1, kind="stable"), ranks < many, axis=1)
        after = np.where(taken & (least < 0), best, chosen)
        changed, ps = (after != chosen).any(axis=1), layers_ps[-1].copy()
        if changed.any():
            ps[changed] = times.rows(changed).of(after[changed])
        then = time_price * ps + at(apart, after).sum(axis=1)
        stale = better = then < now - 1e-12 * np.abs(now)
        if better.any():
            chosen, now = np.where(better[:, None], after, chosen), np.where(better, then, now)
            found.append(chosen)
            layers_ps.append(np.where(better, ps, layers_ps[-1]))
        many = np.where(better[:, None], many, many // 2)
        if not many.any():
            break
    return question.columns(np.array(found)[1:], np.array(layers_ps)[1:])


_SAMPLE = 1200
"""Experts on which the first prices are searched, about."""
_STEPS, _FIRST_STEPS = 8, 2
"""Prices of the first limit that are tried, and on all layers after a sample of them."""
_ROUNDS, _FILLS, _EXCHANGES = 2, 2, 20


def tried(question: Question) -> NDArray[np.int64]:
    """Every plan, so the best one."""
    c, layers, experts = question.problem.shape
    every = np.stack([axis.ravel() for axis in np.indices((c,) * (layers * experts))], axis=1)
    return question.columns(every.reshape(-1, layers, experts)).best


def times_of(problem: JointProblem) -> LayerTimes:
    return LayerTimes([c.tier for c in problem.choices], problem.ps, problem.used, problem.openings)


def searched(question: Question) -> NDArray[np.int64]:
    """A plan that is no worse than what the same search finds without the host or without the device."""
    problem = question.problem
    first, prices = _added_up(question)
    plans = [*(np.full(first.shape, choice) for choice in range(len(problem.choices))), first]
    tiers = {choice.tier for choice in problem.choices}
    for away in sorted(tiers - {"gpu"}):
        others = np.flatnonzero([choice.tier != away for choice in problem.choices])
        if len(others) and (part := question.only(others)).has_room:
            plans.append(others[searched(part)])
    columns = question.columns(np.stack(plans))
    chosen = columns.best
    for turn in range(_ROUNDS if len(tiers) > 1 else 1):
        if len(tiers) > 1:
            columns = columns.and_more(descended(question, prices, chosen))
        chosen, prices = _mixture(columns.and_more(question.columns(chosen[None])), turn == _ROUNDS - 1)
    return chosen


def _mixture(columns: Columns, is_last: bool) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(the plan whose layers are each one plan's, and no worse than the last; prices of the limits)."""
    plans, layers = columns.plans, columns.layers
    search = PriceSearch(layers, None)
    search.run(_STEPS)
    which = np.full((plans.shape[1], 1), len(plans) - 1)
    which = layers.better(which, within(layers, search.prices, mixed(layers, search.plans)))
    for _ in range(_FILLS):
        which = filled(layers, search.prices, which)
    for _ in range(_EXCHANGES if is_last else 0):
        better = exchanged(layers, search.prices, which)
        if better is None:
            break
        which = better
    return columns.mixture(which[:, 0]), search.prices


def _added_up(question: Question) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(a plan, prices of the limits), for sides that take turns."""
    chosen, prices = _in_turns(question)
    if question.least == "time":
        return chosen, prices
    # A time that sides may take at once is longer if they take turns.
    problem = question.problem
    longer = problem.turns_ps(chosen) / max(problem.time_ps(chosen), 1e-300)
    return _in_turns(replace(question, most=question.most * longer))


def _in_turns(question: Question) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    problem = question.problem
    limited = question.limited(problem.turns, problem.loss, *problem.takes.values())
    for each in (limited, limited.freed()):
        search = _priced(each)
        chosen = within(each, search.prices, mixed(each, search.plans))
        if not limited.over(chosen).any():
            break
    return chosen, search.prices


def _priced(limited: Limited) -> PriceSearch:
    """Find prices on a sample of the layers, then on all."""
    _, layers, experts = limited.objective.shape
    stride = min(max(round(layers * experts / _SAMPLE), 1), max(layers // 4, 1))
    sample = PriceSearch(limited.layers(slice(stride // 2, None, stride)), None)
    sample.run(_STEPS)
    if stride == 1:
        return sample
    search = PriceSearch(limited, sample.prices)
    search.run(_FIRST_STEPS)
    return search
