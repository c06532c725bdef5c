"""HOBBIT (arXiv 2411.01433): a missing expert of little weight in the mixture is fetched in low precision, or skipped.

Unimportance of the i-th choice of a token = gate weight of the choices before it: up to T1 (0.6) high precision, up to
T2 (0.9) low, beyond that skipped. Two caches, high (fp16) and low (int4), share the GPU memory of num_hot experts per
layer. Eviction priority = w1 recency + w2 frequency + w3 high-precision frequency, records reset per sequence. Later
gates evaluated on this layer's input start copies early (accuracy 96 %).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.timing.units import ceil_div
from ndp_device.widths import FULL_PRECISION_BITS
from vllm_ndp.replay.systems.context_aware import gate_loss
from vllm_ndp.replay.systems.system import (
    Memory,
    ReplayOptions,
    System,
    all_experts_bytes,
    popular_placement,
    slots_bytes,
)
from vllm_ndp.replay.vectorised.batches import Batches
from vllm_ndp.replay.vectorised.cache import Priority, visits
from vllm_ndp.replay.vectorised.execution import SKIPPED, with_copies, without_device
from vllm_ndp.replay.vectorised.loads import Loads, add_up
from vllm_ndp.replay.vectorised.outcome import Outcome, Traffic, time_before
from vllm_ndp.replay.vectorised.prediction import Ahead
from vllm_ndp.simulation.costs import Costs

T1, T2 = 0.6, 0.9  # published for Mixtral-8x7B
LOW_BITS = 4
PREFETCH_ACCURACY = 0.96  # published, next layer, top-1
W_RECENCY, W_FREQUENCY, W_HIGH = 0.4, 0.3, 0.3  # [O] the paper tunes them on calibration data; they sum to 1
PRIORITY = Priority("mixed", np.array([W_RECENCY, W_FREQUENCY + W_HIGH]))

_IN_TURNS = Priority("mixed", np.array([W_RECENCY, 2 * (W_FREQUENCY + W_HIGH)]))
"""The same where every step of decode is two of the cache."""

HIGH, LOW, SKIP = 0, 1, 2


def precision_classes(weights: NDArray[np.float32], t1: float = T1, t2: float = T2) -> NDArray[np.uint8]:
    """[..., k] of HIGH, LOW, SKIP from gate weights in any order of choices."""
    gates = [weights[..., choice].astype(np.float64) for choice in range(weights.shape[-1])]
    before = np.zeros(weights.shape)
    for i, own in enumerate(gates):
        for j, other in enumerate(gates):
            if j != i:  # of equal gates the first choice comes first
                before[..., i] += np.where(other >= own if j < i else other > own, other, 0.0)
    before /= np.maximum(sum(gates), 1e-12)[..., None]
    classes: NDArray[np.uint8] = np.where(before <= t1, HIGH, np.where(before <= t2, LOW, SKIP)).astype(np.uint8)
    return classes


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Both caches share the places of num_hot experts; host memory holds every expert at both precisions."""
    low = all_experts_bytes(costs.shape) * LOW_BITS // FULL_PRECISION_BITS
    return Memory(gpu=slots_bytes(costs.shape, options.budget.num_hot), host=all_experts_bytes(costs.shape) + low)


class _Caches(NamedTuple):
    """What both caches make of a trace, by slot [G, D, L, S]."""

    hit: NDArray[np.bool_]  # found in either cache, at the layer's own gate
    early: NDArray[np.bool_]  # missing, and ordered before that
    late: NDArray[np.bool_]  # missing, and ordered then
    low: NDArray[np.bool_]  # runs in low precision
    wrong_high: NDArray[np.int64]  # [G, D, L], copies ordered before that nobody uses
    wrong_low: NDArray[np.int64]


_Cache = tuple[NDArray[np.bool_], int]
"""(what it holds at first [L, E], places)."""


def _published(loads: Loads, high: NDArray[np.int64], low: NDArray[np.int64], upper: _Cache, lower: _Cache) -> _Caches:
    """Nothing is ordered ahead: the published accuracy hides part of the time instead."""
    high_hit, _, there = visits(loads.with_rows(high), *upper, PRIORITY)
    wanted = (low > 0) & ~there
    low_hit = visits(loads.with_rows(np.where(wanted, low, 0)), *lower, PRIORITY).hit
    missing = ((high > 0) & ~high_hit) | (wanted & ~low_hit)
    none = np.zeros(high.shape[:3], np.int64)
    hit = ((high > 0) | (low > 0)) & ~missing
    return _Caches(hit, np.zeros_like(missing), missing, wanted, none, none)


def _predicted(
    loads: Loads,
    high: NDArray[np.int64],
    low: NDArray[np.int64],
    guessed: Loads,
    expected: NDArray[np.uint8],
    num_experts: int,
    upper: _Cache,
    lower: _Cache,
) -> _Caches:
    """Guessed experts are brought in before each layer, in the precision that their guessed weights call for; they take
    places of others, whether they are used or not."""
    slots = loads.rows.shape[3]
    above, below = guessed.count(expected == HIGH) > 0, guessed.count(expected == LOW) > 0
    ahead = Ahead.of(loads, high, guessed, above)
    seen = visits(ahead.loads, *upper, _IN_TURNS)
    early, late, wrong_high = ahead.split(seen.hit, num_experts, slots)
    wanted = (low > 0) & ~seen.kept[:, 1::2, :, :slots]
    ahead = Ahead.of(loads, np.where(wanted, low, 0), guessed, below & ~above)
    early_low, late_low, wrong_low = ahead.split(visits(ahead.loads, *lower, _IN_TURNS).hit, num_experts, slots)
    early, late = early | early_low, late | late_low
    hit = ((high > 0) | (low > 0)) & ~early & ~late
    return _Caches(hit, early, late, wanted, wrong_high, wrong_low)


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    t1 = options.number("t1", T1, 0.0, 1.0)
    t2 = options.number("t2", max(T2, t1), t1, 1.0)
    per_place = FULL_PRECISION_BITS // LOW_BITS
    places = options.budget.num_hot
    low_slots = options.whole("low_slots", min(places, 1) * per_place, 0, places * per_place)
    high_slots = places - ceil_div(low_slots, per_place)
    high_start = popular_placement(options.prior, high_slots)
    both = popular_placement(options.prior, min(high_slots + low_slots, batches.num_experts))
    low_start = both & ~high_start
    loads, gpu = batches.loads, costs.gpu_experts_ps(batches.shape[1])
    classes = np.where(batches.pairs, precision_classes(batches.weights, t1, t2), SKIP)
    high, low = loads.count(classes == HIGH), loads.count(classes == LOW)
    low[high > 0] = 0  # an expert that some row needs in high precision serves all rows
    if options.predictor is None:
        caches = _published(loads, high, low, (high_start, high_slots), (low_start, low_slots))
    else:
        guess = options.predictor.guess(batches)
        guessed = Loads.of(guess.ids, batches.valid, batches.num_experts)
        expected = np.where(batches.pairs, precision_classes(guess.weights, t1, t2), SKIP)
        caches = _predicted(
            loads, high, low, guessed, expected, batches.num_experts, (high_start, high_slots), (low_start, low_slots)
        )
    per_expert = gpu[high] + np.where(caches.low, gpu[low] * LOW_BITS / FULL_PRECISION_BITS, gpu[low])
    compute = add_up(per_expert)
    low_ps = costs.copy_ps * LOW_BITS / FULL_PRECISION_BITS
    each = np.where(high > 0, costs.copy_ps, low_ps)
    window = time_before(compute, batches, costs)
    early, late = add_up(np.where(caches.early, each, 0.0)), add_up(np.where(caches.late, each, 0.0))
    wrong = caches.wrong_high * costs.copy_ps + caches.wrong_low * low_ps
    if options.predictor is None:
        hidden = PREFETCH_ACCURACY * np.minimum(late, window)
        layer = with_copies(per_expert, caches.late, costs, before_ps=-hidden, copy_ps=each)
        carried = np.zeros(wrong.shape)
    else:  # what has not crossed the link when the layer's gate is known: right copies go on, wrong ones are dropped
        ordered = early + wrong
        carried = np.minimum(window, ordered) / np.where(ordered > 0, ordered, 1.0)
        rest = np.where(caches.early, (1 - carried)[..., None], 1.0) * each
        layer = with_copies(per_expert, caches.late | (caches.early & (rest > 0)), costs, copy_ps=rest)
    crossed = float((early + late + carried * wrong).sum()) / costs.copy_ps  # whole experts
    read = float(((high > 0) | ((low > 0) & ~caches.low)).sum() + caches.low.sum() * LOW_BITS / FULL_PRECISION_BITS)
    executed = np.broadcast_to(batches.pairs, batches.ids.shape)
    mix = [float((classes[executed] == kind).mean()) for kind in (HIGH, LOW, SKIP)]
    runs_low = (classes == LOW) & caches.low.ravel()[loads.places]
    widths = np.where(runs_low, LOW_BITS, np.where(classes == SKIP, SKIPPED, 0)).astype(np.uint8)
    low_pairs = int((classes[executed] == LOW).sum())
    return without_device(
        "hobbit",
        f"T1 {t1:g} T2 {t2:g}, prefetch {'published' if options.predictor is None else 'measured'}",
        batches,
        costs,
        moe_ps=layer,
        gpu_ps=compute,
        resident=high_start,
        fetched_experts=crossed,
        hot_pairs=int((high + low)[caches.hit].sum()),
        cold_bits=float(LOW_BITS * low_pairs),
        cold_pairs=low_pairs,
        loss=gate_loss(batches, widths, options),
        traffic=Traffic(hbm_bytes=costs.shape.expert_bytes * read),
        notes={
            "high": mix[HIGH],
            "low": mix[LOW],
            "skipped": mix[SKIP],
            "high_slots": high_slots,
            "low_slots": low_slots,
            "prefetch_accuracy": PREFETCH_ACCURACY if options.predictor is None else guess.accuracy,
            "prefetch_top1_accuracy": PREFETCH_ACCURACY if options.predictor is None else guess.top1_accuracy,
            "wrong_copies": float(caches.wrong_high.sum() + caches.wrong_low.sum()),
        },
    )


HOBBIT = System(
    "hobbit",
    (
        "T1 0.6 and T2 0.9 as published; fp16 + int4",
        "one of the num_hot fp16 places per layer holds four int4 experts instead; caches are per layer",
        "the layer-distance term of the published priority is constant inside a per-layer cache and drops out",
        "prefetch measured: by chances from layer to layer in other requests; a wrong copy costs link time and a place",
        "prefetch published: 96 % of the copies that fit beside the layer before are hidden, wrong ones cost nothing",
    ),
    False,
    replay,
    memory,
)
