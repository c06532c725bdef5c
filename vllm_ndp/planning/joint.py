"""One plan over tiers and widths: which memory each expert lives in and how many bits it keeps there.

    least time  with  loss <= L        or        least loss  with  time <= T
    always      bytes of each memory <= what it has,  bytes that must move over the link first <= what may move

Sides run at once: a layer takes what its slowest side does (below), so its experts depend on each
other. Small problems are tried plan by plan. In large ones every limit gets a price (Lagrange), at first those at which
sides that take turns just keep within the limits. At given prices each layer is a problem of its own and descends from
one plan to cheaper ones. Then layers choose within the limits among all plans found, and what that costs gives the next
prices (Dantzig and Wolfe, Operations Research 8, 1960). Another tier never makes a plan slower, since the plans without
it are among those to choose from.

Here is what is asked, and of which tiers; csrc/joint.cpp searches. The choices [C] of each expert:  time and loss in
one step,  bytes held in its tier,  bytes over the link to get there.

GPU, host and device work side by side, and the slowest is waited for. The time of a plan is that of the slowest side of
each layer, and of what moves:

    E max(a, b) = (E a + E b + E |a - b|) / 2,    E |a - b| <= sqrt((E a - E b)^2 + Var(a - b)), E a + E b

no distribution of these means and variances takes longer: a plan is not chosen for what the formula leaves out. Three
sides are folded two by two, in that of the three orders which gives the least: for the third, experts count as picked
one by one, and the slower of the two as varying like their sum. So the time grows with each side's, and no plan gets
slower by faster hardware. A step picks a number of experts that is nearly fixed, so a busy GPU means an idle device.
With d = u (1 - u) of an expert's chance u, Var(sum of a_e X_e) = sum d a^2 - (sum d a)^2 / sum d. Source: Hajek, Annals
of Mathematical Statistics 35 (1964). A side away from the GPU opens one message in steps that use any expert there.

Against drawn routing (8 to 128 experts, 1 and 4 rows) the time is 2 to 10 % too long on average.
The sum of the sides is 10 to 36 % too long, and the longest mean 2 to 20 % too short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning import _joint
from vllm_ndp.planning.stats import frozen_array

_FOLDED = ("device", "host", "gpu")
"""Sides of a layer."""


@dataclass(frozen=True)
class Choice:
    """A tier and a width that an expert may have, and the memory that it takes there."""

    tier: str
    bits: int
    held_bytes: int
    """Bytes in the memory of its tier."""

    def __str__(self) -> str:
        return f"{self.bits} bits on the {self.tier}"


@dataclass(frozen=True)
class JointProblem:
    """Choices for each expert, C of them, and their costs."""

    choices: tuple[Choice, ...]
    ps: NDArray[np.float64]  # [C, L, E], expected in one step on the side of the choice
    loss: NDArray[np.float64]  # [C, L, E], expected in one step
    budgets: Mapping[str, float]
    """Tier -> bytes of its memory; a tier without a budget is not limited."""
    moved: NDArray[np.float64]
    """[C, L, E], bytes over the link before an expert is there at that width, 0 where it is."""
    move_ps: float
    """Time that a moved byte adds to each step."""
    used: NDArray[np.float64]  # [L, E]
    """The chance that a step uses an expert."""
    openings: NDArray[np.float64]  # [C]
    """Picoseconds of a layer's message or launch in steps that use any expert of the choice; of those of one tier the
    longest is paid."""

    def __post_init__(self) -> None:
        for name in ("ps", "loss", "used", "openings", "moved"):
            object.__setattr__(self, name, frozen_array(getattr(self, name), np.float64))
        for what, values in (("price", self.ps), ("loss", self.loss)):
            bad = (~np.isfinite(values) | (values < 0)).any(axis=(1, 2))
            if bad.any():
                named = self.choices[int(bad.argmax())]
                raise ConfigError(f"{named} has no {what} for some experts: measure it first, or leave it out")
        for name, budget in self.budgets.items():
            if not budget >= 0:
                raise ConfigError(f"the budget of {name} bytes must be at least 0, got {budget}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """C, L, E."""
        c, layers, experts = self.ps.shape
        return c, layers, experts

    @cached_property
    def takes(self) -> dict[str, NDArray[np.float64]]:
        """Tier with a budget -> bytes of each choice, [C, 1, 1]."""
        return {
            tier: np.array([c.held_bytes if c.tier == tier else 0 for c in self.choices], np.float64)[:, None, None]
            for tier in self.budgets
        }

    def only(self, which: NDArray[np.int64]) -> JointProblem:
        """The problem with some of the choices."""
        choices = tuple(self.choices[choice] for choice in which)
        parts = {name: getattr(self, name)[which] for name in ("ps", "loss", "openings", "moved")}
        return replace(self, choices=choices, **parts)

    @cached_property
    def native(self) -> _joint.Problem:
        """The same in C++, which times and searches plans."""
        tiers = [choice.tier for choice in self.choices]
        sides = [tier for tier in _FOLDED if tier in tiers]
        return _joint.Problem(
            np.array([sides.index(tier) for tier in tiers]),
            self.openings.tolist(),
            self.ps,
            self.loss,
            self.moving,
            self.turns,
            self.used,
            [takes.ravel() for takes in self.takes.values()],
            list(self.budgets.values()),
        )

    @cached_property
    def moving(self) -> NDArray[np.float64]:
        """[C, L, E], picoseconds that moving to a choice adds to each step."""
        return self.moved * self.move_ps

    @cached_property
    def turns(self) -> NDArray[np.float64]:
        """[C, L, E], picoseconds that a step would take if sides took turns: messages are shared by half of those
        who use them."""
        reads = np.maximum(self.used.sum(axis=1, keepdims=True) / 2, 1.0)
        return np.asarray(self.ps + self.moving + self.openings[:, None, None] * (self.used / reads))

    def time_ps(self, chosen: NDArray[np.int64]) -> float:
        """Time of all layers, in one step."""
        times = np.empty((1, len(chosen)))
        self.native.times(chosen.reshape(1, -1), times)
        return float((times[0] + at(self.moving, chosen).sum(axis=1)).sum())

    def lost(self, chosen: NDArray[np.int64]) -> float:
        return total(self.loss, chosen)

    def uses(self, chosen: NDArray[np.int64]) -> dict[str, float]:
        """Bytes in every memory that has a budget."""
        return {name: total(takes, chosen) for name, takes in self.takes.items()}

    def moved_bytes(self, chosen: NDArray[np.int64]) -> float:
        """Bytes over the link before the plan is in force."""
        return total(self.moved, chosen)


@dataclass(frozen=True)
class JointPlan:
    """One plan and what it takes."""

    problem: JointProblem
    chosen: NDArray[np.int64]  # [L, E], index into the problem's choices
    time_ps: float
    loss: float

    @cached_property
    def least_ps(self) -> float:
        """No plan within the memories that loses as little takes less. Decides nothing: it is only printed.

        A layer takes at least any weighted mean of its sides. A message's 1 - prod(1 - u) is at least the sum of its
        users' chances times (1 - exp(-S)) / S, with S of all experts. With weights and with prices of the limits every
        expert chooses alone, and the sum is a bound (Lagrange); subgradients raise it, with steps by Polyak (1969).
        """
        given, layers = self.problem, self.chosen.shape[0]
        tiers = sorted({choice.tier for choice in given.choices})
        side = np.array([tiers.index(choice.tier) for choice in given.choices])
        reads = np.maximum(given.used.sum(axis=1, keepdims=True), 1e-30)
        ps = given.ps + given.openings[:, None, None] * (given.used * -np.expm1(-reads) / reads)
        limits = [(given.loss, self.loss), *((given.takes[tier], most) for tier, most in given.budgets.items())]
        units = np.array([self.time_ps / most if most else 1.0 for _, most in limits])
        weights, prices = np.full((len(tiers), layers), 1 / len(tiers)), np.zeros(len(limits))
        best, pace, since = 0.0, 1.0, 0
        for _ in range(_RAISED):
            costs = ps * weights[side][:, :, None] + given.moving
            for price, (values, _) in zip(prices * units, limits, strict=True):
                costs = costs + price * values
            chosen = costs.argmin(axis=0)
            found = at(costs, chosen).sum() - prices @ (units * [most for _, most in limits])
            since = 0 if found > best * (1 + 1e-6) else since + 1
            best, pace = max(best, float(found)), pace if since % 8 != 7 else pace / 2
            over = units * [total(values, chosen) - most for values, most in limits]
            took = at(ps, chosen)
            waits = np.stack([np.where(side[chosen] == s, took, 0.0).sum(axis=1) for s in range(len(tiers))])
            waits -= waits.mean(axis=0)
            step = pace * (self.time_ps - found) / max(over @ over + layers * (waits**2).sum(), 1e-30)
            prices = np.maximum(prices + step * over, 0.0)
            weights = np.maximum(weights + step * layers * waits, 0.0)
            weights /= weights.sum(axis=0)
        return best


def total(values: NDArray[np.float64], chosen: NDArray[np.int64]) -> float:
    if values.shape[1:] == (1, 1):
        return float((np.bincount(chosen.ravel(), minlength=len(values)) * values[:, 0, 0]).sum())
    return float(at(values, chosen).sum())


def at(values: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.float64]:
    """values [C, L, E] of each expert's choice [..., L, E]."""
    size = values[0].size
    return np.asarray(values.take(chosen * size + np.arange(size).reshape(values.shape[1:])))


_RAISED = 100
"""Steps in which a bound is raised; three times as many raise it by .5 % at most."""
MOST_TRIED = 1 << 20
"""Plans that are tried one by one."""
_SLACK = 1e-9
"""A limit holds if it is exceeded by no more than this share: sums in another order."""


def least_time(problem: JointProblem, most_loss: float) -> JointPlan:
    """The plan of least time that loses at most that much. Raises ConfigError where nothing fits."""
    c, layers, experts = problem.shape
    _require_room(problem)
    if max(c, 2) ** (layers * experts) <= MOST_TRIED:
        chosen = np.empty((layers, experts), np.int64)
        problem.native.tried(most_loss, chosen.reshape(-1))
    else:
        chosen = _searched(problem, most_loss)
    used = problem.uses(chosen)
    over = {name: used[name] - budget for name, budget in problem.budgets.items() if _exceeds(used[name], budget)}
    if over:
        name = max(over, key=lambda each: over[each])
        raise ConfigError(
            f"no plan found within {problem.budgets[name]:.0f} bytes of {name}: it lacks {over[name]:.0f}"
        )
    time_ps, loss = problem.time_ps(chosen), problem.lost(chosen)
    if _exceeds(loss, most_loss):
        raise ConfigError(f"no plan that fits has a loss of at most {most_loss:g}: the least found is {loss:g}")
    return JointPlan(problem, chosen, time_ps, loss)


def _exceeds(used: float, most: float) -> bool:
    return used > most * (1 + _SLACK)


def _searched(problem: JointProblem, most_loss: float) -> NDArray[np.int64]:
    """A plan that is no worse than what the same search finds without the host or without the device."""
    _, layers, experts = problem.shape
    known = []
    for away in sorted({choice.tier for choice in problem.choices} - {"gpu"}):
        others = np.flatnonzero([choice.tier != away for choice in problem.choices])
        if len(others) and _room(part := problem.only(others)) >= layers * experts:
            known.append(others[_searched(part, most_loss)].reshape(-1))
    chosen = np.empty((layers, experts), np.int64)
    problem.native.searched(most_loss, known, chosen.reshape(-1))
    return chosen


def _narrowest(problem: JointProblem) -> dict[str, Choice]:
    """Tier -> its choice of fewest bytes."""
    narrowest: dict[str, Choice] = {}
    for choice in problem.choices:
        if choice.tier not in narrowest or choice.held_bytes < narrowest[choice.tier].held_bytes:
            narrowest[choice.tier] = choice
    return narrowest


def _room(problem: JointProblem) -> float:
    """How many experts the memories hold at the narrowest."""
    budgets = problem.budgets
    return sum(
        budgets[tier] // choice.held_bytes if tier in budgets else np.inf
        for tier, choice in _narrowest(problem).items()
    )


def _require_room(problem: JointProblem) -> None:
    """Raises ConfigError if the memories cannot hold every expert, however narrow, and says what could."""
    cells, room = problem.ps[0].size, _room(problem)
    if room < cells:
        narrowest = _narrowest(problem)
        have = ", ".join(f"{problem.budgets[tier]:.0f} bytes for experts on the {tier}" for tier in narrowest)
        need = " or ".join(f"{cells * choice.held_bytes} bytes for {choice}" for choice in narrowest.values())
        raise ConfigError(
            f"no plan fits: {have} hold {room:.0f} of {cells} experts at the narrowest; all of them take {need}"
        )
