"""One plan over tiers and widths: which memory each expert lives in and how many bits it keeps there.

    least time  with  loss <= L        or        least loss  with  time <= T
    always      bytes of each memory <= what it has,  bytes that must move over the link first <= what may move

Sides run at once: a layer takes what its slowest side does (joint_sides.py), so experts of one layer depend on each
other. Small problems are tried plan by plan. In large ones every limit gets a price (Lagrange), at first those at which
sides that take turns just keep within the limits. At given prices each layer is a problem of its own and descends from
one plan to cheaper ones. Then joint_columns.py chooses within the limits which layer takes which of its plans. Another
tier never makes a plan slower, since the plans without it are among those to choose from.

    joint_problem.py   what may be chosen        joint_sides.py      the time of layers whose sides run at once
    joint_limits.py    objective and limits      joint_prices.py     the search for prices of the limits
    joint_columns.py   plans of single layers    joint_rounding.py   from plans at prices to one within every limit

Knows numbers only: prices of reads come from the caller. Does not know models, hardware or requests.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ndp_device.errors import ConfigError
from vllm_ndp.planning.joint_columns import Columns, Question, descended
from vllm_ndp.planning.joint_limits import Limited
from vllm_ndp.planning.joint_prices import PriceSearch
from vllm_ndp.planning.joint_problem import Choice, JointPlan, JointProblem
from vllm_ndp.planning.joint_rounding import exchanged, filled, mixed, within

MOST_TRIED = 1 << 16
"""Plans that are tried one by one."""
_SAMPLE = 1200
"""Experts on which the first prices are searched, about."""
_STEPS, _FIRST_STEPS = 8, 2
"""Prices of the first limit that are tried, and on all layers after a sample of them."""
_ROUNDS, _FILLS, _EXCHANGES = 2, 2, 20


def least_time(problem: JointProblem, most_loss: float) -> JointPlan:
    """The plan of least time that loses at most that much. Raises ConfigError where nothing fits."""
    return _plan(Question(problem, "time", most_loss), "loss of at most", "")


def least_loss(problem: JointProblem, most_ps: float) -> JointPlan:
    """The plan of least loss that takes at most that long. Raises ConfigError where nothing fits."""
    return _plan(Question(problem, "loss", most_ps), "time of at most", " ps")


def _plan(question: Question, what: str, unit: str) -> JointPlan:
    problem = question.problem
    c, layers, experts = problem.shape
    _require_room(problem)
    found = _tried if max(c, 2) ** (layers * experts) <= MOST_TRIED else _searched
    chosen = found(question)
    over = dict(zip(("first", *problem.budgets), question.over(chosen).tolist(), strict=True))
    first = over.pop("first")
    if any(over.values()):
        name = max(over, key=lambda each: over[each])
        raise ConfigError(
            f"no plan found within {problem.budgets[name]:.0f} bytes of {name}: it lacks {over[name]:.0f}"
        )
    if first > 0:
        raise ConfigError(
            f"no plan that fits has a {what} {question.most:g}{unit}: "
            f"the least found is {question.most + first:g}{unit}"
        )
    return JointPlan(problem, chosen, problem.time_ps(chosen), problem.lost(chosen))


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


def _tried(question: Question) -> NDArray[np.int64]:
    """Every plan, so the best one."""
    c, layers, experts = question.problem.shape
    every = np.stack([axis.ravel() for axis in np.indices((c,) * (layers * experts))], axis=1)
    return question.columns(every.reshape(-1, layers, experts)).best


def _searched(question: Question) -> NDArray[np.int64]:
    """A plan that is no worse than what the same search finds without the host or without the device."""
    problem = question.problem
    first, prices = _added_up(question)
    plans = [*(np.full(first.shape, choice) for choice in range(len(problem.choices))), first]
    tiers = {choice.tier for choice in problem.choices}
    for away in sorted(tiers - {"gpu"}):
        others = np.flatnonzero([choice.tier != away for choice in problem.choices])
        if len(others) and (part := question.only(others)).has_room:
            plans.append(others[_searched(part)])
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
