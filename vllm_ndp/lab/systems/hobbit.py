"""HOBBIT (arXiv 2411.01433): a missing expert of little weight in the mixture is fetched in low precision, or skipped.

Unimportance of the i-th choice of a token = gate weight of the choices before it. Up to T1 (0.6) it gets high
precision, up to T2 (0.9) low; beyond T2 it is skipped. Two caches, high (fp16) and low (int4), share the GPU memory of
num_hot experts per layer. Each cache spans all layers. Experts
guessed for the next layer are ordered while this one computes; a copy that has begun cannot be cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.timing.units import ceil_div
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory, all_experts_bytes
from vllm_ndp.lab._lanes import two_caches
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, Loads, add_up, sums_before
from vllm_ndp.lab.vectorised.execution import SKIPPED, gate_loss, launched, with_copies, without_device
from vllm_ndp.lab.vectorised.outcome import Cold, Outcome, Traffic, time_before
from vllm_ndp.lab.vectorised.prediction import Guess

HIGH, LOW, SKIP = 0, 1, 2
_HIT, _EARLY, _LATE, _LOW = 1, 2, 4, 8
NO_GUESS = 255


@dataclass(frozen=True)
class HobbitVisits:
    """Hits and copies of the two caches on a trace, by slot [G, D, L, S]; `ordered` by guess [G, D, L, S']."""

    hit: NDArray[np.bool_]  # there, without a copy for this layer
    early: NDArray[np.bool_]  # ordered before the layer's own gate
    late: NDArray[np.bool_]  # missing, and ordered then
    low: NDArray[np.bool_]  # runs in low precision
    guess: NDArray[np.uint8]  # which guess brought it early, or NO_GUESS
    ordered: NDArray[np.uint8]  # 1: ordered ahead whole, 2: narrow, 0: not


def visits(
    experts: NDArray[np.int64],
    need: NDArray[np.uint8],
    guessed: NDArray[np.int64],
    guessed_as: NDArray[np.uint8],
    high: tuple[NDArray[np.bool_], int],
    low: tuple[NDArray[np.bool_], int],
) -> HobbitVisits:
    """experts and need [G, D, L, S], guessed and guessed_as [G, D, L, S'] in the order of their copies: 1 is high
    precision, 2 low, 0 nothing. high and low: the experts [L, E] that a cache holds at first, its places of all layers
    together.

    Equation 3, less what has weight 0 here: the expert with the lowest weighted sum of its uses and of its uses in high
    precision leaves. Records are of the running sequence and common to both caches. Experts guessed for a layer, or in
    use in it, stay. Advanced step by step by csrc/lanes.cpp.
    """
    flags, order = np.zeros(experts.shape, np.uint8), np.full(experts.shape, NO_GUESS, np.uint8)
    ordered = np.zeros(guessed.shape, np.uint8)
    caches = high[0], low[0], high[1], low[1]
    two_caches(experts, need, guessed, guessed_as, *caches, WEIGHTS, flags, order, ordered)
    hit, early, late, runs_low = ((flags & bit) > 0 for bit in (_HIT, _EARLY, _LATE, _LOW))
    return HobbitVisits(hit, early, late, runs_low, order, ordered)


def precision_classes(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """[..., k] of HIGH, LOW, SKIP from gate weights in any order of choices."""
    order = np.argsort(-weights, axis=-1, kind="stable")
    before = sums_before(np.take_along_axis(weights, order, -1).astype(np.float64))
    share = before[..., :-1] / np.maximum(before[..., -1:], 1e-12)
    classes = np.empty(weights.shape, np.uint8)
    np.put_along_axis(
        classes, order, np.where(share <= T1, HIGH, np.where(share <= T2, LOW, SKIP)).astype(np.uint8), -1
    )
    return classes


T1, T2 = 0.6, 0.9  # published for Mixtral-8x7B
LOW_BITS = 4
PREFETCH_ACCURACY = 0.96  # published, next layer, top-1
WEIGHTS = np.array([0.4, 0.6])
"""Weights of uses and of uses in high precision in the priority. The paper has two more, of recency and of layers until
the next use, tunes all four for the least miss penalty and does not print them. 0 for these two is best in steps of a
tenth, on the quarter of tiny-mixtral's trace that is not replayed (2026-11-22)."""


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Both caches share the places of num_hot experts; host memory holds every expert at both precisions."""
    low = all_experts_bytes(costs.shape) * LOW_BITS // FULL_PRECISION_BITS
    return Memory(options.gpu_memory(costs), host=all_experts_bytes(costs.shape) + low)


class _Predicted(NamedTuple):
    """Guessed experts of each layer [G, D, L, S'], in the order of their copies."""

    experts: NDArray[np.int64]
    kind: NDArray[np.uint8]  # 1 high precision, 2 low, 0 nothing

    @classmethod
    def of(cls, guess: Guess | None, batches: Batches) -> _Predicted:
        g, b, d, layers, _ = batches.shape
        if guess is None:
            return cls(np.zeros((g, d, layers, 0), np.int64), np.zeros((g, d, layers, 0), np.uint8))
        expected = np.where(batches.pairs, precision_classes(guess.weights), SKIP)
        if b == 1:  # best first already
            return cls(np.ascontiguousarray(guess.ids[:, 0]), _KIND[expected[:, 0]])
        loads = Loads.of(guess.ids, batches.valid, batches.num_experts)
        above, below = loads.count(expected == HIGH) > 0, loads.count(expected == LOW) > 0
        order = np.argsort(
            -loads.total(guess.weights, np.broadcast_to(batches.pairs, guess.ids.shape)), axis=3, kind="stable"
        )
        kind = np.where(above, 1, np.where(below, 2, 0)).astype(np.uint8)
        return cls(*(np.ascontiguousarray(np.take_along_axis(of, order, axis=3)) for of in (loads.experts, kind)))


_KIND = np.array([1, 2, 0], np.uint8)
"""HIGH, LOW, SKIP as what the caches are asked for."""


class _Link(NamedTuple):
    """Link time that copies ordered ahead leave for the layer itself."""

    rest_ps: NDArray[np.float64]  # [G, D, L, S], of a used expert's early copy once the gate is known
    busy_ps: NDArray[np.float64]  # [G, D, L], of a wrong copy that has begun
    crossed_ps: NDArray[np.float64]  # [G, D, L], all that the link carries of them
    wrong: int


def _carried(seen: HobbitVisits, window_ps: NDArray[np.float64], costs: Costs) -> _Link:
    """Ordered copies cross one after the other from the gate of the layer before on.

    At this layer's gate a copy that has begun goes on, also a wrong one. Right copies that have not begun follow, wrong
    ones are dropped.
    """
    g, d, layers, guesses = seen.ordered.shape
    size = np.array([0.0, costs.copy_ps, costs.copy_ps * LOW_BITS / FULL_PRECISION_BITS])[seen.ordered]
    right = np.zeros(size.shape, np.bool_)
    cells = np.broadcast_to(np.arange(g * d * layers).reshape(g, d, layers, 1), seen.guess.shape)
    places = (cells * guesses + seen.guess)[seen.early]
    right.ravel()[places] = True
    ends = np.cumsum(size, axis=3)
    window = np.maximum(window_ps - costs.copy_opening_ps, 0.0)[..., None]
    begun = (size > 0) & (ends - size < window)
    left = np.where(begun, np.clip(ends - window, 0.0, size), size)
    rest = np.zeros(seen.guess.shape)
    rest[seen.early] = left.ravel()[places]
    busy = add_up(np.where(begun & ~right, left, 0.0))
    return _Link(rest, busy, add_up(np.where(begun | right, size, 0.0)), int(((size > 0) & ~right).sum()))


def _pays(accuracy: float, batches: Batches, costs: Costs) -> bool:
    """Whether ordering ahead is worth it.

    A right copy gains the part that the layer before hides; a wrong one that has begun goes on beyond that layer.
    """
    before = float(costs.attention_ps(1, np.array([batches.kv_tokens.max()]))[0])
    window = before + float(costs.resident_ps(batches.shape[4], batches.shape[4]))
    return accuracy * window > (1 - accuracy) * max(costs.copy_ps - window, 0.0)


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    per_place = FULL_PRECISION_BITS // LOW_BITS
    places, layers = options.budget.num_hot, batches.shape[3]
    low_slots = options.whole("low_slots", min(places, 1) * per_place, 0, places * per_place)
    high_slots = places - ceil_div(low_slots, per_place)
    high_start = options.popular(high_slots)
    both = options.popular(min(high_slots + low_slots, batches.num_experts))
    loads, gpu = batches.loads, costs.gpu_experts_ps(batches.shape[1])
    classes = np.where(batches.pairs, precision_classes(batches.weights), SKIP)
    high, low = loads.count(classes == HIGH), loads.count(classes == LOW)
    # An expert that some row needs in high precision serves all rows.
    need = np.where(high > 0, 1, np.where(low > 0, 2, 0)).astype(np.uint8)
    guess = None if options.predictor is None else options.predictor.guess(batches)
    orders = options.choice("ahead", ("auto", "on", "off"))
    if guess is not None and orders == "auto":
        orders = "on" if _pays(guess.accuracy, batches, costs) else "off"
    ahead = _Predicted.of(guess if orders == "on" else None, batches)
    seen = visits(
        loads.experts,
        need,
        ahead.experts,
        ahead.kind,
        (high_start, high_slots * layers),
        (both & ~high_start, low_slots * layers),
    )
    rows = high + low
    per_expert = gpu[rows] * np.where(seen.low, LOW_BITS / FULL_PRECISION_BITS, 1.0)
    compute = launched(add_up(per_expert), costs)
    late_ps = np.where(seen.late, costs.copy_ps * np.where(seen.low, LOW_BITS / FULL_PRECISION_BITS, 1.0), 0.0)
    window, missed_ps = time_before(compute, batches, costs), float(late_ps.sum())
    if guess is None:
        hidden = PREFETCH_ACCURACY * np.minimum(add_up(late_ps), window)
        layer = with_copies(per_expert, seen.late, costs, before_ps=-hidden, copy_ps=late_ps)
        crossed, wrong = add_up(late_ps), 0
    elif orders != "on":
        layer = with_copies(per_expert, seen.late, costs, copy_ps=late_ps)
        crossed, wrong = add_up(late_ps), 0
    else:
        link = _carried(seen, window, costs)
        each = late_ps + link.rest_ps
        layer = with_copies(per_expert, each > 0, costs, before_ps=link.busy_ps, copy_ps=each)
        crossed, wrong, missed_ps = add_up(late_ps) + link.crossed_ps, link.wrong, missed_ps + float(link.rest_ps.sum())
    read = float((rows > 0).sum() - seen.low.sum() * (1 - LOW_BITS / FULL_PRECISION_BITS))
    executed = np.broadcast_to(batches.pairs, batches.ids.shape)
    mix = np.bincount(classes[executed], minlength=3) / max(int(executed.sum()), 1)
    runs_low = (classes == LOW) & seen.low.ravel()[loads.places]
    widths = np.where(runs_low, LOW_BITS, np.where(classes == SKIP, SKIPPED, 0)).astype(np.uint8)
    low_pairs = int((classes[executed] == LOW).sum())
    return without_device(
        f"T1 {T1:g} T2 {T2:g}, prefetch {'published' if guess is None else 'measured, ' + orders}",
        batches,
        costs,
        moe_ps=layer,
        gpu_ps=compute,
        resident=high_start,
        fetched_experts=float(crossed.sum()) / costs.copy_ps,
        hot_pairs=int(rows[seen.hit].sum()),
        cold=Cold(float(LOW_BITS * low_pairs), low_pairs, gate_loss(batches, widths, options.loss)),
        traffic=Traffic(hbm_bytes=costs.shape.expert_bytes * read),
        notes={
            "high": float(mix[HIGH]),
            "low": float(mix[LOW]),
            "skipped": float(mix[SKIP]),
            "high_slots": high_slots,
            "low_slots": low_slots,
            "prefetch_accuracy": PREFETCH_ACCURACY if guess is None else guess.accuracy,
            "prefetch_top1_accuracy": PREFETCH_ACCURACY if guess is None else guess.top1_accuracy,
            "wrong_copies": float(wrong),
            "orders_ahead": orders == "on",
            "miss_penalty": missed_ps / costs.copy_ps,
        },
    )


HOBBIT = System(
    "hobbit",
    (
        "T1 0.6 and T2 0.9 as published; fp16 + int4",
        "one of the num_hot fp16 places per layer holds four int4 experts instead; both caches are of all layers",
        "priority: .4 frequency, .6 of it in high precision, 0 recency and layers until use, tuned on "
        "requests that are not replayed, as published; the published weights are not printed",
        "prefetch measured: by chances from layer to layer in other requests, one layer ahead; a copy that has begun "
        "ends, also a wrong one; ahead=auto: only where a right guess gains more than a wrong one costs",
        "prefetch published: 96 % of the copies that fit beside the layer before are hidden, wrong ones cost nothing",
    ),
    replay,
    memory,
    options=("low_slots", "ahead"),
)
