"""Plans of single layers, and the best mixture of them that keeps every limit.

At given prices of the limits each layer is a problem of its own, sides that run at once included. It descends from one
plan to a cheaper one, some experts at a time; what it comes by is kept. Which layer takes which of its plans is a
problem of few choices under the same limits, and its prices are the next ones. Source: Dantzig and Wolfe,
Operations Research 8 (1960). Does not know how prices are found (joint_prices.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.planning.joint_limits import SLACK, Limited
from vllm_ndp.planning.joint_problem import JointProblem, at
from vllm_ndp.planning.joint_sides import in_parts

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
            times = np.concatenate([problem.times.of(some) for some in in_parts(plans, plans[0].size)])
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
    times, found = question.problem.times, [chosen]
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
