"""One plan over tiers and widths: which memory each expert lives in and how many bits it keeps there.

    least time  with  loss <= L        or        least loss  with  time <= T
    always      bytes of each memory <= what it has,  bytes that must move over the link first <= what may move

Time is what all experts are expected to take in a step, added up whichever side they run on. Where a step uses few
experts one side mostly waits for the other, and plans made for sides that always overlap came out slower
(docs/log/planning.md, "tiers and widths"); what runs together at run time is a gain on top.

Small problems are tried choice by choice. In large ones every limit gets a price (Lagrange): at given prices each
expert chooses for itself, and the least sum of all it costs is a bound that no plan beats. Prices are searched on a
sample of the layers, then on all; the plan that they give is cut back, filled up and exchanged expert by expert until
every limit holds. `JointPlan.gap` says how far it may be from the best. The paper's plan (16 bits on the GPU, 1-4 on
the device), all experts quantized in GPU memory, and all of them cold are points of the same space.

Knows numbers only: prices of reads come from the caller. Does not know models, hardware or requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ndp_device.errors import ConfigError
from vllm_ndp.planning.stats import frozen_array

TIERS = ("gpu", "host", "device")
JOINT_WIDTHS = (16, 8, 4, 3, 2, 1)
RESOURCES = (*TIERS, "link")
"""Bytes of the three memories, and bytes that must move over the link before the plan is in force."""

MOST_TRIED = 1 << 16
"""Plans that are tried one by one."""
_SAMPLE = 1200
"""Experts on which prices are searched, about."""
_STEPS, _FIRST_STEPS, _LAST_STEPS, _INNER_STEPS = 12, 2, 5, 8
"""Prices of the limit that are tried on the sample, then on all layers, there again if that is not near enough; and
prices of bytes at each."""
_NEAR_THE_END = 6
_CLOSE = 2e-3
"""A budget's price is right when its logarithm is off by no more."""
_FULL = 1e-3
"""The share of a limit that may be left over."""
_REPAIRS, _FILLS, _EXCHANGES, _EXCHANGED = 12, 4, 60, 600
_MOST_EXCHANGED = 4096
"""Experts of a problem in which they are exchanged two by two; in larger ones no single expert matters."""
_ENOUGH = 2e-3
"""Gap below which experts are not exchanged any more."""
_SLACK = 1e-9
"""A limit holds if it is exceeded by no more than this share: sums in another order."""


@dataclass(frozen=True)
class Choice:
    """A tier and a width that an expert may have, and what that takes."""

    tier: str
    bits: int
    held_bytes: int
    """In the memory of its tier."""

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise ConfigError(f"an expert lives in one of the tiers {', '.join(TIERS)}, got {self.tier!r}")
        if self.bits not in JOINT_WIDTHS:
            raise ConfigError(f"an expert has one of {list(JOINT_WIDTHS)} bits, got {self.bits}")
        if self.held_bytes <= 0:
            raise ConfigError(f"an expert of {self} must hold some bytes, got {self.held_bytes}")

    def __str__(self) -> str:
        return f"{self.bits} bits on the {self.tier}"


@dataclass(frozen=True)
class JointProblem:
    """What may be chosen, C choices for each expert, and what it costs."""

    choices: tuple[Choice, ...]
    ps: NDArray[np.float64]  # [C, L, E], expected in one step
    loss: NDArray[np.float64]  # [C, L, E], expected in one step
    budgets: Mapping[str, float]
    """Of RESOURCES; what is not named is not limited."""
    moved: NDArray[np.float64] | None = None
    """[C, L, E], bytes over the link before an expert is there at that width, 0 where it is; None: nothing moves."""

    def __post_init__(self) -> None:
        if not self.choices:
            raise ConfigError("a joint plan needs at least one tier and width to choose: none is available")
        for name in ("ps", "loss", *(["moved"] if self.moved is not None else [])):
            object.__setattr__(self, name, frozen_array(getattr(self, name), np.float64))
        shape = (len(self.choices), *self.ps.shape[1:])
        moved = self.ps if self.moved is None else self.moved
        if self.ps.ndim != 3 or 0 in shape or not self.ps.shape == self.loss.shape == moved.shape == shape:
            raise ValueError(f"times, losses and moves must be {list(shape)}, got {list(self.ps.shape)}")
        for what, values in (("price", self.ps), ("loss", self.loss)):
            bad = (~np.isfinite(values) | (values < 0)).any(axis=(1, 2))
            if bad.any():
                named = self.choices[int(bad.argmax())]
                raise ConfigError(f"{named} has no {what} for some experts: measure it first, or leave it out")
        for name, budget in self.budgets.items():
            if name not in RESOURCES:
                raise ConfigError(f"a budget is for one of {', '.join(RESOURCES)}, got {name!r}")
            if not budget >= 0:
                raise ConfigError(f"the budget of {name} bytes must be at least 0, got {budget}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """C, L, E."""
        c, layers, experts = self.ps.shape
        return c, layers, experts

    @cached_property
    def takes(self) -> dict[str, NDArray[np.float64]]:
        """Resource with a budget -> bytes of each choice, [C, 1, 1] or [C, L, E]."""
        takes = {
            tier: np.array([c.held_bytes if c.tier == tier else 0 for c in self.choices], np.float64)[:, None, None]
            for tier in TIERS
        }
        takes["link"] = np.zeros((len(self.choices), 1, 1)) if self.moved is None else self.moved
        return {name: takes[name] for name in self.budgets}

    def layers(self, which: slice) -> JointProblem:
        """Some of the layers, with their share of every budget."""
        share = self.ps[0, which].size / self.ps[0].size
        return replace(
            self,
            ps=self.ps[:, which],
            loss=self.loss[:, which],
            budgets={name: budget * share for name, budget in self.budgets.items()},
            moved=None if self.moved is None else self.moved[:, which],
        )

    def time_ps(self, chosen: NDArray[np.int64]) -> float:
        """Of all layers, in one step."""
        return _total(self.ps, chosen)

    def lost(self, chosen: NDArray[np.int64]) -> float:
        return _total(self.loss, chosen)

    def uses(self, chosen: NDArray[np.int64]) -> dict[str, float]:
        """Bytes of every resource that has a budget."""
        return {name: _total(takes, chosen) for name, takes in self.takes.items()}

    def moved_bytes(self, chosen: NDArray[np.int64]) -> float:
        """Over the link before the plan is in force."""
        return 0.0 if self.moved is None else _total(self.moved, chosen)


def _total(values: NDArray[np.float64], chosen: NDArray[np.int64]) -> float:
    if values.shape[1:] == (1, 1):
        return float(np.bincount(chosen.ravel(), minlength=len(values)) @ values[:, 0, 0])
    return float(_at(values, chosen).sum())


def _at(values: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.float64]:
    """values [C, L, E] or [C, 1, 1] of each expert's choice [L, E]."""
    if values.shape[1:] == (1, 1):
        return np.asarray(values[:, 0, 0][chosen])
    return values.take(chosen * chosen.size + np.arange(chosen.size).reshape(chosen.shape))


@dataclass(frozen=True)
class JointPlan:
    """One plan, what it takes, and the bound of what was asked to be least."""

    problem: JointProblem
    chosen: NDArray[np.int64]  # [L, E], index into the problem's choices
    time_ps: float
    loss: float
    bound: float
    """No plan within the limits has less time (or less loss, where that was asked for)."""
    reached: float

    @property
    def gap(self) -> float:
        """The share of what was reached by which the best plan may be better."""
        return max(1 - self.bound / self.reached, 0.0) if self.reached > 0 else 0.0

    @property
    def bits(self) -> NDArray[np.uint8]:
        """[L, E]."""
        widths: NDArray[np.uint8] = np.array([c.bits for c in self.problem.choices], np.uint8)[self.chosen]
        return widths

    def is_on(self, tier: str) -> NDArray[np.bool_]:
        """[L, E]."""
        here: NDArray[np.bool_] = np.array([c.tier == tier for c in self.problem.choices])[self.chosen]
        return here


def least_time(problem: JointProblem, most_loss: float) -> JointPlan:
    """The plan of least time that loses at most that much. Raises ConfigError where nothing fits."""
    return _plan(problem, _Limited.of(problem, problem.ps, problem.loss, most_loss), "loss of at most", "")


def least_loss(problem: JointProblem, most_ps: float) -> JointPlan:
    """The plan of least loss that takes at most that long. Raises ConfigError where nothing fits."""
    return _plan(problem, _Limited.of(problem, problem.loss, problem.ps, most_ps), "time of at most", " ps")


@dataclass(frozen=True)
class _Limited:
    """The same for both questions: an objective, and limits of which the first one is that of loss or time."""

    objective: NDArray[np.float64]  # [C, L, E]
    takes: tuple[NDArray[np.float64], ...]  # each [C, L, E] or [C, 1, 1]
    most: tuple[float, ...]

    @classmethod
    def of(
        cls, problem: JointProblem, objective: NDArray[np.float64], limited: NDArray[np.float64], most: float
    ) -> _Limited:
        return cls(objective, (limited, *problem.takes.values()), (most, *problem.budgets.values()))

    def freed(self) -> _Limited:
        """As little as possible of what the first limit is about, within the others."""
        return _Limited(self.takes[0], self.takes, (np.inf, *self.most[1:]))

    def only(self, which: NDArray[np.int64]) -> _Limited:
        """With some of the choices."""
        return _Limited(self.objective[which], tuple(takes[which] for takes in self.takes), self.most)

    def layers(self, which: slice) -> _Limited:
        """Some of the layers, with their share of every limit."""
        objective = self.objective[:, which]
        share = objective.size / self.objective.size
        takes = tuple(each if each.shape[1] == 1 else each[:, which] for each in self.takes)
        return _Limited(objective, takes, tuple(most * share for most in self.most))

    def over(self, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        """[R], by how much each limit is exceeded; 0 where it holds."""
        used = np.array([_total(takes, chosen) for takes in self.takes])
        most = np.array(self.most)
        return np.where(used > most * (1 + _SLACK), used - most, 0.0)

    def cheapest(self, prices: NDArray[np.float64]) -> tuple[NDArray[np.int64], float]:
        """(each expert's choice [L, E] at these prices [R] of the limits, the bound that they prove)."""
        values = self._values(prices)
        worth = sum(price * most for price, most in zip(prices.tolist(), self.most, strict=True) if price)
        return values.argmin(axis=0), float(values.min(axis=0).sum()) - worth

    def changes(self, prices: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        """[C, L, E], how much more each other choice costs at these prices."""
        values = self._values(prices)
        values -= _at(values, chosen)
        return values

    def _values(self, prices: NDArray[np.float64]) -> NDArray[np.float64]:
        values = self.objective.copy()
        for price, takes in zip(prices.tolist(), self.takes, strict=True):
            if price:
                values += price * takes
        return values


def _plan(problem: JointProblem, limited: _Limited, what: str, unit: str) -> JointPlan:
    c, layers, experts = problem.shape
    _require_room(problem)
    if layers * experts * np.log2(max(c, 2)) <= np.log2(MOST_TRIED):
        chosen, bound = _tried(limited), np.inf
    else:
        chosen, bound = _priced(limited)
    if over := {name: over for name, over in zip(problem.budgets, limited.over(chosen)[1:], strict=True) if over > 0}:
        name = max(over, key=lambda each: over[each])
        raise ConfigError(
            f"no plan found within {problem.budgets[name]:.0f} bytes of {name}: it lacks {over[name]:.0f}"
        )
    if limited.over(chosen)[0] > 0:
        raise ConfigError(
            f"no plan that fits has a {what} {limited.most[0]:g}{unit}: the least found is "
            f"{_total(limited.takes[0], chosen):g}{unit}"
        )
    reached = _total(limited.objective, chosen)
    bound = min(max(bound, 0.0), reached)
    return JointPlan(problem, chosen, problem.time_ps(chosen), problem.lost(chosen), bound, reached)


def _require_room(problem: JointProblem) -> None:
    """Raises ConfigError if the memories cannot hold every expert, however narrow, and says what could."""
    cells, room = problem.ps[0].size, 0.0
    narrowest: dict[str, Choice] = {}
    for choice in problem.choices:
        if choice.tier not in narrowest or choice.held_bytes < narrowest[choice.tier].held_bytes:
            narrowest[choice.tier] = choice
    for tier, choice in narrowest.items():
        if tier not in problem.budgets:
            return
        room += problem.budgets[tier] // choice.held_bytes
    if room < cells:
        have = ", ".join(f"{problem.budgets[tier]:.0f} bytes for experts on the {tier}" for tier in narrowest)
        need = " or ".join(f"{cells * choice.held_bytes} bytes for {choice}" for choice in narrowest.values())
        raise ConfigError(
            f"no plan fits: {have} hold {room:.0f} of {cells} experts at the narrowest; all of them take {need}"
        )


def _tried(limited: _Limited) -> NDArray[np.int64]:
    """Every plan, so the best one; of those that keep no limit the one that exceeds the first one least."""
    c, layers, experts = limited.objective.shape
    cells = layers * experts
    every = np.stack([axis.ravel() for axis in np.indices((c,) * cells)], axis=1)  # [plans, cells]

    def totals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        whole = np.broadcast_to(values, limited.objective.shape).reshape(c, cells)
        return np.asarray(whole[every, np.arange(cells)].sum(axis=1))

    used = np.stack([totals(takes) for takes in limited.takes])
    holds = used <= np.array(limited.most)[:, None] * (1 + _SLACK)
    fits = holds[1:].all(axis=0)
    if not (fits & holds[0]).any():
        return np.asarray(every[np.where(fits, used[0], np.inf).argmin()].reshape(layers, experts))
    value = np.where(fits & holds[0], totals(limited.objective), np.inf)
    return np.asarray(every[value.argmin()].reshape(layers, experts))


def _priced(limited: _Limited) -> tuple[NDArray[np.int64], float]:
    """(a plan, the bound of the objective)."""
    _, layers, experts = limited.objective.shape
    stride = min(max(round(layers * experts / _SAMPLE), 1), max(layers // 4, 1))
    if stride == 1:
        search = _Search(limited, None)
        search.run(_STEPS)
        return _rounded(limited, search, search.bound), search.bound
    sample = _Search(limited.layers(slice(stride // 2, None, stride)), None)
    sample.run(_STEPS)
    # Choices that no plan of the sample has made near its end are left out at first; the bound knows them all.
    likely = np.unique(np.concatenate([plan.ravel() for plan in sample.plans[-_NEAR_THE_END:]]))
    search = _Search(limited.only(likely), sample.prices)
    search.run(_FIRST_STEPS)
    bound = limited.cheapest(search.prices)[1]
    chosen = likely[_rounded(limited.only(likely), search, bound)]
    if limited.over(chosen).any() or bound < (1 - _ENOUGH) * _total(limited.objective, chosen):
        search = _Search(limited, search.prices)
        search.run(_LAST_STEPS)
        bound = max(bound, search.bound)
        chosen = _rounded(limited, search, bound)
    return chosen, bound


def _rounded(limited: _Limited, search: _Search, bound: float) -> NDArray[np.int64]:
    """A plan within every limit, as near to the bound as it gets, from those that a search has come by."""
    chosen = _within(limited, search.prices, _mixed(limited, search.plans))
    if limited.over(chosen).any():
        if np.isinf(limited.most[0]):
            return chosen
        chosen, _ = _priced(limited.freed())
        if limited.over(chosen).any():
            return chosen

    def is_enough(share: float) -> bool:
        return bound >= (1 - share) * _total(limited.objective, chosen)

    for _ in range(_FILLS):
        if is_enough(_ENOUGH / 2):
            return chosen
        chosen = _filled(limited, search.prices, chosen)
    for _ in range(_EXCHANGES if chosen.size <= _MOST_EXCHANGED else 0):
        exchanged = None if is_enough(_ENOUGH) else _exchanged(limited, search.prices, chosen)
        if exchanged is None:
            break
        chosen = exchanged
    return chosen


class _Search:
    """Prices at which every limit just holds: that of loss or time outside, those of bytes inside."""

    def __init__(self, limited: _Limited, prices: NDArray[np.float64] | None) -> None:
        self._limited = limited
        spread = float(np.ptp(limited.objective, axis=0).mean())
        self._scales = [spread / max(float(np.ptp(takes, axis=0).mean()), 1e-300) for takes in limited.takes]
        self._is_near = prices is not None
        self.prices = np.zeros(len(limited.most)) if prices is None else prices.copy()
        self.plans: list[NDArray[np.int64]] = []
        """The plan at each price of the first limit."""
        self.bound = -np.inf
        """The best of those that prices have proved."""

    def run(self, steps: int) -> None:
        """So many prices of the first limit, each nearer to where it just holds."""
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
        chosen = self._cheapest()
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
                chosen = self._cheapest()
                root.learn(self._over(r, chosen))
            if root.nearest < 1e-6 * self._scales[r]:
                self.prices[r] = 0.0
        return chosen

    def _cheapest(self) -> NDArray[np.int64]:
        chosen, bound = self._limited.cheapest(self.prices)
        self.bound = max(self.bound, bound)
        return chosen

    def _over(self, r: int, chosen: NDArray[np.int64]) -> float:
        """log of what is used over what there is: falls as the price of it rises."""
        used, most = _total(self._limited.takes[r], chosen), self._limited.most[r]
        return float(np.log(max(used, 1e-300)) - np.log(max(most, 1e-300)))


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
        point = float(np.log(max(self.price, 1e-300))), value
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
        self.price = float(np.exp(a + share * (b - a)))


def _mixed(limited: _Limited, plans: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Of two plans on both sides of the first limit: as many experts as possible from the bolder one."""
    used = np.array([_total(limited.takes[0], plan) for plan in plans])
    holds = used <= limited.most[0]
    if holds.all() or not holds.any():
        return plans[-1]
    careful = plans[int(np.where(holds, used, -np.inf).argmax())]
    bold = plans[int(np.where(holds, np.inf, used).argmin())]
    other = np.flatnonzero(careful != bold)
    steps = np.cumsum(_at(limited.takes[0], bold).ravel()[other] - _at(limited.takes[0], careful).ravel()[other])
    room = limited.most[0] - _total(limited.takes[0], careful)
    possible = np.flatnonzero(steps <= room)
    mixed = careful.copy()
    if len(possible):
        taken = other[: possible[-1] + 1]
        mixed.flat[taken] = bold.flat[taken]
    return mixed


def _within(limited: _Limited, prices: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """The plan with as few changes as it needs to keep within every limit, those first that cost least for what they
    save; as far as that succeeds."""
    prices = prices.copy()
    for _ in range(_REPAIRS):
        over = limited.over(chosen)
        if not over.any():
            return chosen
        r = int((over[1:] / np.maximum(limited.most[1:], 1.0)).argmax()) + 1 if over[1:].any() else 0
        saved = _at(limited.takes[r], chosen) - limited.takes[r]
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


def _filled(limited: _Limited, prices: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """The plan with what the limits leave over spent: the changes that gain most for what they use, as many as fit."""
    gain = _at(limited.objective, chosen) - limited.objective
    cost = np.maximum(limited.changes(prices, chosen), 0.0)
    cost[_adds_to_what_is_full(limited, chosen)] = np.inf
    order, best, _ = _by_ratio(cost, gain)
    fits = np.ones(len(order), np.bool_)
    for takes, most in zip(limited.takes, limited.most, strict=True):
        whole = np.broadcast_to(takes, limited.objective.shape).reshape(len(takes), -1)
        more = whole[best, order] - _at(takes, chosen).ravel()[order]
        fits &= np.cumsum(more) <= most * (1 + _SLACK) - _total(takes, chosen)
    possible = np.flatnonzero(fits)
    if not len(possible):
        return chosen
    count = possible[-1] + 1
    filled = chosen.copy()
    filled.flat[order[:count]] = best[:count]
    return filled


def _adds_to_what_is_full(limited: _Limited, chosen: NDArray[np.int64], but: tuple[int, ...] = ()) -> NDArray[np.bool_]:
    """[C, L, E], the changes that would take more of a limit that is used up."""
    adds = np.zeros(limited.objective.shape, np.bool_)
    for r, (takes, most) in enumerate(zip(limited.takes, limited.most, strict=True)):
        if r not in but and _total(takes, chosen) >= most * (1 - _FULL):
            adds |= takes > _at(takes, chosen)
    return adds


def _exchanged(limited: _Limited, prices: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The plan with one or two experts changed so that the objective falls most within every limit; None: none does.

    Only the changes that cost least at the prices are paired."""
    change = limited.changes(prices, chosen).ravel()
    count = min(_EXCHANGED, change.size)
    near = np.argpartition(np.abs(change), count - 1)[:count]
    choice, cell = np.divmod(near, chosen.size)
    near = near[choice != chosen.ravel()[cell]]
    choice, cell = np.divmod(near, chosen.size)

    def more(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """What each change adds; and none, last."""
        whole = np.broadcast_to(values, limited.objective.shape).reshape(len(values), -1)
        return np.append(whole[choice, cell] - whole[chosen.ravel()[cell], cell], 0.0)

    gain = more(limited.objective)
    both = gain[:, None] + gain[None]
    same = np.append(cell, -1)
    both[same[:, None] == same[None]] = np.inf
    for takes, most in zip(limited.takes, limited.most, strict=True):
        adds = more(takes)
        both[adds[:, None] + adds[None] > most * (1 + _SLACK) - _total(takes, chosen)] = np.inf
    first, second = divmod(int(both.argmin()), len(gain))
    if not both[first, second] < -1e-9 * abs(_total(limited.objective, chosen)):
        return None
    after = chosen.copy()
    for one in (first, second):
        if one < len(near):
            after.flat[cell[one]] = choice[one]
    return after


def _by_ratio(
    cost: NDArray[np.float64], gain: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """(experts, their best other choices, the gains), from the least cost per gain up; those that gain nothing are not
    in it. cost and gain [C, L, E]."""
    with np.errstate(over="ignore"):  # next to no gain: as good as none
        ratio = cost / np.maximum(gain, 1e-300)
    ratio[gain <= 0] = np.inf
    best = ratio.argmin(axis=0)
    least = _at(ratio, best).ravel()
    able = np.flatnonzero(np.isfinite(least))
    order = able[np.argsort(least[able], kind="stable")]
    return order, best.ravel()[order], _at(gain, best).ravel()[order]
