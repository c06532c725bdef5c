"""Expert caches in GPU memory, one per (group, layer) lane, advanced by csrc/lanes.cpp.

A priority says who stays. Experts used in a step are brought in first, as far as they fit. Knows recency and
frequency. Does not know time or hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.lab._lanes import visit
from vllm_ndp.lab.vectorised.batches import Loads
from vllm_ndp.planning.same_everywhere import powers


@dataclass(frozen=True)
class Priority:
    """Which experts stay: those of highest value. `frequency` counts rows, the missing ones' too."""

    kind: str
    """lru: last use · lfu: frequency, then last use · faded: frequency x parameters[steps since the last use] ·
    expected: frequency + parameters, [L, E] · random."""
    parameters: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


LRU, LFU, RANDOM = Priority("lru"), Priority("lfu"), Priority("random")


def lcp(rho: float = 0.25, omega: float = 128.0) -> Priority:
    """MoEpic's priority: mu * rho ** (nu / omega), mu the frequency, nu tokens since the last use."""
    each = round(rho ** (1 / omega) * 2**40) / 2**40  # processors differ below that
    return Priority("faded", powers(np.array(each), int(64 * omega)))


CACHE_PRIORITIES: dict[str, Priority] = {"lru": LRU, "lfu": LFU, "lcp": lcp()}


class Visits(NamedTuple):
    """Hits and predictions for each slot of a Loads [G, D, L, S]; never set for a slot with 0 rows."""

    hit: NDArray[np.bool_]
    predicted: NDArray[np.bool_]  # missing, but among the experts of highest priority before the step


def visits(
    loads: Loads,
    start: NDArray[np.bool_],
    capacity: int | NDArray[np.int64],
    priority: Priority,
    *,
    frequency: NDArray[np.float64] | None = None,
    predict: int = 0,
) -> Visits:
    """Run a cache over all steps.

    `start`: experts that it holds at first, [G, L, E] or [L, E]. `capacity`: experts per lane, one number or [L].
    `frequency`: counts to start from. `predict`: number of experts guessed before each step.
    """
    g, _, layers, _ = loads.rows.shape
    shape = (g, layers, start.shape[-1])
    flags = np.zeros(loads.rows.shape, np.uint8)
    visit(
        loads.experts,
        loads.rows,
        np.broadcast_to(start, shape).copy(),
        np.zeros(shape) if frequency is None else frequency,
        np.broadcast_to(np.asarray(capacity, np.int64), (layers,)).copy(),
        priority.kind,
        priority.parameters.ravel(),
        predict,
        flags,
    )
    return Visits(*((flags & bit) > 0 for bit in (1, 2)))
