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

    joint_problem.py   what may be chosen        joint_limits.py     objective, limits, and the bound at given prices
    joint_prices.py    the search for prices     joint_rounding.py   from plans at prices to one within every limit

Knows numbers only: prices of reads come from the caller. Does not know models, hardware or requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.errors import ConfigError
from vllm_ndp.planning.joint_limits import SLACK, Limited
from vllm_ndp.planning.joint_prices import PriceSearch
from vllm_ndp.planning.joint_problem import Choice, JointPlan, JointProblem, total
from vllm_ndp.planning.joint_rounding import exchanged, filled, mixed, within

MOST_TRIED = 1 << 16
"""Plans that are tried one by one."""
_SAMPLE = 1200
"""Experts on which prices are searched, about."""
_STEPS, _FIRST_STEPS, _LAST_STEPS = 12, 2, 5
"""Prices of the limit that are tried on the sample, then on all layers, there again if that is not near enough."""
_NEAR_THE_END = 6
_FILLS, _EXCHANGES = 4, 60
_MOST_EXCHANGED = 4096
"""Experts of a problem in which they are exchanged two by two; in larger ones no single expert matters."""
_ENOUGH = 2e-3
"""Gap below which experts are not exchanged any more."""


def least_time(problem: JointProblem, most_loss: float) -> JointPlan:
    """The plan of least time that loses at most that much. Raises ConfigError where nothing fits."""
    return _plan(problem, Limited.of(problem, problem.ps, problem.loss, most_loss), "loss of at most", "")


def least_loss(problem: JointProblem, most_ps: float) -> JointPlan:
    """The plan of least loss that takes at most that long. Raises ConfigError where nothing fits."""
    return _plan(problem, Limited.of(problem, problem.loss, problem.ps, most_ps), "time of at most", " ps")


def _plan(problem: JointProblem, limited: Limited, what: str, unit: str) -> JointPlan:
    c, layers, experts = problem.shape
    _require_room(problem)
    if max(c, 2) ** (layers * experts) <= MOST_TRIED:
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
            f"{total(limited.takes[0], chosen):g}{unit}"
        )
    reached = total(limited.objective, chosen)
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


def _tried(limited: Limited) -> NDArray[np.int64]:
    """Every plan, so the best one; of those that keep no limit the one that exceeds the first one least."""
    c, layers, experts = limited.objective.shape
    cells = layers * experts
    every = np.stack([axis.ravel() for axis in np.indices((c,) * cells)], axis=1)  # [plans, cells]

    def totals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        whole = np.broadcast_to(values, limited.objective.shape).reshape(c, cells)
        return np.asarray(whole[every, np.arange(cells)].sum(axis=1))

    used = np.stack([totals(takes) for takes in limited.takes])
    holds = used <= np.array(limited.most)[:, None] * (1 + SLACK)
    fits = holds[1:].all(axis=0)
    if not (fits & holds[0]).any():
        return np.asarray(every[np.where(fits, used[0], np.inf).argmin()].reshape(layers, experts))
    value = np.where(fits & holds[0], totals(limited.objective), np.inf)
    return np.asarray(every[value.argmin()].reshape(layers, experts))


def _priced(limited: Limited) -> tuple[NDArray[np.int64], float]:
    """(a plan, the bound of the objective)."""
    _, layers, experts = limited.objective.shape
    stride = min(max(round(layers * experts / _SAMPLE), 1), max(layers // 4, 1))
    if stride == 1:
        search = PriceSearch(limited, None)
        search.run(_STEPS)
        return _rounded(limited, search, search.bound), search.bound
    sample = PriceSearch(limited.layers(slice(stride // 2, None, stride)), None)
    sample.run(_STEPS)
    # Choices that no plan of the sample has made near its end are left out at first; the bound knows them all.
    likely = np.unique(np.concatenate([plan.ravel() for plan in sample.plans[-_NEAR_THE_END:]]))
    search = PriceSearch(limited.only(likely), sample.prices)
    search.run(_FIRST_STEPS)
    bound = limited.cheapest(search.prices)[1]
    chosen = likely[_rounded(limited.only(likely), search, bound)]
    if limited.over(chosen).any() or bound < (1 - _ENOUGH) * total(limited.objective, chosen):
        search = PriceSearch(limited, search.prices)
        search.run(_LAST_STEPS)
        bound = max(bound, search.bound)
        chosen = _rounded(limited, search, bound)
    return chosen, bound


def _rounded(limited: Limited, search: PriceSearch, bound: float) -> NDArray[np.int64]:
    """A plan within every limit, as near to the bound as it gets, from those that a search has come by."""
    chosen = within(limited, search.prices, mixed(limited, search.plans))
    if limited.over(chosen).any():
        if np.isinf(limited.most[0]):
            return chosen
        chosen, _ = _priced(limited.freed())
        if limited.over(chosen).any():
            return chosen

    def is_enough(share: float) -> bool:
        return bound >= (1 - share) * total(limited.objective, chosen)

    for _ in range(_FILLS):
        if is_enough(_ENOUGH / 2):
            return chosen
        chosen = filled(limited, search.prices, chosen)
    for _ in range(_EXCHANGES if chosen.size <= _MOST_EXCHANGED else 0):
        better = None if is_enough(_ENOUGH) else exchanged(limited, search.prices, chosen)
        if better is None:
            break
        chosen = better
    return chosen
