"""From plans at prices to one plan within every limit: mixed from two, cut back, filled up, experts exchanged.

Each step changes the experts that cost least for what they save or gain. Does not know how prices are found.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.planning.joint_limits import SLACK, Limited
from vllm_ndp.planning.joint_problem import at, total
from vllm_ndp.planning.same_everywhere import smallest

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
