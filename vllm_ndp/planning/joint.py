"""One plan over tiers and widths: which memory each expert lives in and how many bits it keeps there.

    least time  with  loss <= L        or        least loss  with  time <= T
    always      bytes of each memory <= what it has,  bytes that must move over the link first <= what may move

Sides run at once: a layer takes what its slowest side does (joint_problem.py), so experts of one layer depend on each
other. Small problems are tried plan by plan. In large ones every limit gets a price (Lagrange), at first those at which
sides that take turns just keep within the limits. At given prices each layer is a problem of its own and descends from
one plan to cheaper ones. Then layers choose within the limits among all plans found, and what that costs gives the next
prices (Dantzig and Wolfe, Operations Research 8, 1960). Another tier never makes a plan slower, since the plans without
it are among those to choose from.

Here is what is asked, and of which tiers; csrc/joint.cpp searches. Knows numbers only: prices of reads come from the
caller. Does not know models, hardware or requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.joint_problem import Choice, JointPlan, JointProblem

MOST_TRIED = 1 << 16
"""Plans that are tried one by one."""
_SLACK = 1e-9
"""A limit holds if it is exceeded by no more than this share: sums in another order."""


def least_time(problem: JointProblem, most_loss: float) -> JointPlan:
    """The plan of least time that loses at most that much. Raises ConfigError where nothing fits."""
    return _plan(problem, True, most_loss, "loss of at most", "")


def least_loss(problem: JointProblem, most_ps: float) -> JointPlan:
    """The plan of least loss that takes at most that long. Raises ConfigError where nothing fits."""
    return _plan(problem, False, most_ps, "time of at most", " ps")


def _plan(problem: JointProblem, is_time_least: bool, most: float, what: str, unit: str) -> JointPlan:
    c, layers, experts = problem.shape
    _require_room(problem)
    if max(c, 2) ** (layers * experts) <= MOST_TRIED:
        chosen = np.empty((layers, experts), np.int64)
        problem.native.tried(is_time_least, most, chosen.reshape(-1))
    else:
        chosen = _searched(problem, is_time_least, most)
    used = problem.uses(chosen)
    over = {name: used[name] - budget for name, budget in problem.budgets.items() if _exceeds(used[name], budget)}
    if over:
        name = max(over, key=lambda each: over[each])
        raise ConfigError(
            f"no plan found within {problem.budgets[name]:.0f} bytes of {name}: it lacks {over[name]:.0f}"
        )
    time_ps, loss = problem.time_ps(chosen), problem.lost(chosen)
    first = loss if is_time_least else time_ps
    if _exceeds(first, most):
        raise ConfigError(f"no plan that fits has a {what} {most:g}{unit}: the least found is {first:g}{unit}")
    return JointPlan(problem, chosen, time_ps, loss)


def _exceeds(used: float, most: float) -> bool:
    return used > most * (1 + _SLACK)


def _searched(problem: JointProblem, is_time_least: bool, most: float) -> NDArray[np.int64]:
    """A plan that is no worse than what the same search finds without the host or without the device."""
    _, layers, experts = problem.shape
    known = []
    for away in sorted({choice.tier for choice in problem.choices} - {"gpu"}):
        others = np.flatnonzero([choice.tier != away for choice in problem.choices])
        if len(others) and _room(part := problem.only(others)) >= layers * experts:
            known.append(others[_searched(part, is_time_least, most)].reshape(-1))
    chosen = np.empty((layers, experts), np.int64)
    problem.native.searched(is_time_least, most, known, chosen.reshape(-1))
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
