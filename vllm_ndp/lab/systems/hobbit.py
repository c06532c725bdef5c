"""HOBBIT (arXiv 2411.01433): a missing expert of little weight in the mixture is fetched in low precision, or skipped.

Unimportance of the i-th choice of a token = gate weight of the choices before it. Up to T1 (0.6) it gets high
precision, up to T2 (0.9) low; beyond T2 it is skipped. Two caches, high (fp16) and low (int4), each of all layers,
share the GPU memory of num_hot experts per layer. Experts guessed for the next layer are ordered while this one
computes, if that pays; a copy that has begun cannot be cancelled.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.timing.work import ceil_div
from vllm_ndp.cost_model.costs import Costs, each_ps
from vllm_ndp.cost_model.memory import Memory, all_experts_bytes
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, add_up, sums_before
from vllm_ndp.lab.vectorised.execution import SKIPPED, gate_loss, with_copies, without_device
from vllm_ndp.lab.vectorised.outcome import Cold, Outcome, Traffic, time_before

HIGH, LOW, SKIP = 0, 1, 2
T1, T2 = 0.6, 0.9  # published for Mixtral-8x7B
LOW_BITS = 4
LOW_PLACES = 1
"""Of a layer's full-precision places, those that hold low experts."""
PREFETCH_ACCURACY = 0.96  # published, next layer, top-1
USED, USED_HIGH = 0.4, 0.6
"""Weights of uses and of uses in high precision in the priority. The paper has two more, of recency and of layers until
the next use, tunes all four for the least miss penalty and does not print them. 0 for these two is best in steps of a
tenth, on the quarter of tiny-mixtral's trace that is not replayed (2026-11-22)."""


class _Cache:
    """One of the two, which all layers of a group share. Experts are layer * E + id."""

    def __init__(self, start: NDArray[np.bool_], places: int) -> None:
        self.held, self._places = set(np.flatnonzero(start).tolist()), places
        self._leaving = [(0.0, -expert) for expert in self.held]
        """A heap of (worth, expert), the one that leaves first in front; of equal ones the last."""
        heapify(self._leaving)

    def enter(self, expert: int, in_use: set[int], worth: list[float]) -> None:
        """In place of the one of lowest worth; not at all where all are in use."""
        while len(self.held) == self._places:
            if not self._leaving:
                return
            known, leaves = heappop(self._leaving)
            if -leaves not in in_use and known == worth[-leaves]:  # else it stands here anew
                self.held.discard(-leaves)
        self.held.add(expert)

    def end_layer(self, in_use: set[int], worth: list[float]) -> None:
        for expert in in_use & self.held:
            heappush(self._leaving, (worth[expert], -expert))


def visits(
    cells: NDArray[np.int64],
    need: NDArray[np.uint8],
    high: tuple[NDArray[np.bool_], int],
    low: tuple[NDArray[np.bool_], int],
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(slots that need no copy for this layer, those that run in low precision), both [G, D, L, S].

    cells and need [G, D, L, S]: layer * E + expert, and 1 for high precision, 2 low, 0 nothing. high and low: the
    experts [L, E] that a cache holds at first, its places of all layers together.

    Equation 3, less what has weight 0 here: the expert with the lowest weighted sum of its uses and of its uses in high
    precision leaves. Records are of the running sequence and common to both caches. Experts in use in a layer stay.
    """
    hit, runs_low = np.zeros((2, *cells.shape), np.bool_)
    for group, steps in enumerate(cells):
        upper, lower = _Cache(*high), _Cache(*low)
        worth = [0.0] * high[0].size
        for step, layer in np.ndindex(steps.shape[:2]):
            at = group, step, layer
            of, needs = cells[at].tolist(), need[at].tolist()
            slots = [slot for slot, needed in enumerate(needs) if needed]
            in_use = {of[slot] for slot in slots}
            for slot in slots:
                worth[of[slot]] += USED + (USED_HIGH if needs[slot] == 1 else 0.0)
            for slot in slots:
                cache = upper if needs[slot] == 1 or of[slot] in upper.held else lower
                runs_low[(*at, slot)] = cache is lower
                if of[slot] in cache.held:
                    hit[(*at, slot)] = True
                else:
                    cache.enter(of[slot], in_use, worth)
            upper.end_layer(in_use, worth)
            lower.end_layer(in_use, worth)
    return hit, runs_low


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


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Both caches share the places of num_hot experts; host memory holds every expert at both precisions."""
    low = all_experts_bytes(costs.shape) * LOW_BITS // FULL_PRECISION_BITS
    return Memory(options.gpu_memory(costs), host=all_experts_bytes(costs.shape) + low)


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    per_place = FULL_PRECISION_BITS // LOW_BITS
    places, layers = options.budget.num_hot, batches.shape[3]
    low_slots = min(places, LOW_PLACES) * per_place
    high_slots = places - ceil_div(low_slots, per_place)
    high_start = options.popular(high_slots)
    both = options.popular(min(high_slots + low_slots, batches.num_experts))
    loads = batches.loads
    classes = np.where(batches.pairs, precision_classes(batches.weights), SKIP)
    high, low = loads.count(classes == HIGH), loads.count(classes == LOW)
    # An expert that some row needs in high precision serves all rows.
    need = np.where(high > 0, 1, np.where(low > 0, 2, 0)).astype(np.uint8)
    cells = loads.experts + np.arange(layers)[:, None] * batches.num_experts
    starts = (high_start, high_slots * layers), (both & ~high_start, low_slots * layers)
    hit, low_slot = visits(cells, need, *starts)
    rows, late = high + low, (need > 0) & ~hit
    share = np.where(low_slot, LOW_BITS / FULL_PRECISION_BITS, 1.0)
    per_expert = each_ps(rows, costs.gpu_expert_ps) * share
    late_ps = np.where(late, costs.copy_ps * share, 0.0)
    compute, crossed = add_up(per_expert), add_up(late_ps)
    accuracy, wrong_ps, prefetch, orders = PREFETCH_ACCURACY, np.zeros(crossed.shape), "published", True
    window = time_before(compute, batches, costs)
    if options.predictor is not None:
        accuracy = options.predictor.accuracy(batches)
        # A right copy gains the part that the layer before hides; a wrong one that has begun goes on beyond that layer.
        usual = costs.attention_ps(1, int(batches.kv_tokens.max()))
        usual += batches.shape[4] * float(costs.resident_ps(1, 1))
        orders = accuracy * usual > (1 - accuracy) * max(costs.copy_ps - usual, 0.0)
        prefetch = f"measured, {'on' if orders else 'off'}"
        wrong_ps = np.where(crossed > 0, (1 - accuracy) * np.maximum(costs.copy_ps - window, 0.0), 0.0)
    before = wrong_ps - accuracy * np.minimum(crossed, window) if orders else 0.0
    runs_low = (classes == LOW) & loads.of_pairs(low_slot)
    widths = np.where(runs_low, LOW_BITS, np.where(classes == SKIP, SKIPPED, 0)).astype(np.uint8)
    low_pairs = int((classes == LOW).sum())
    read = float((rows > 0).sum() - low_slot.sum() * (1 - LOW_BITS / FULL_PRECISION_BITS))
    return without_device(
        f"T1 {T1:g} T2 {T2:g}, prefetch {prefetch}",
        batches,
        costs,
        options.loss,
        with_copies(per_expert, late, costs, before_ps=before, copy_ps=late_ps),
        found=int(rows[hit].sum()),
        prompts=high_start,
        fetched=float(crossed.sum()) / costs.copy_ps,
        cold=Cold(float(LOW_BITS * low_pairs), low_pairs, gate_loss(batches, widths, options.loss)),
        traffic=Traffic(hbm_bytes=costs.shape.expert_bytes * read),
    )


HOBBIT = System(
    "hobbit",
    (
        "T1 0.6 and T2 0.9 as published; fp16 + int4",
        "one of the num_hot fp16 places per layer holds four int4 experts instead; both caches are of all layers",
        "priority: .4 frequency, .6 of it in high precision, 0 recency and layers until use, tuned on "
        "requests that are not replayed, as published; the published weights are not printed",
        "prefetch measured: by chances from layer to layer in other requests, one layer ahead, only where a right "
        "guess gains more than a wrong one costs; both count at their mean",
        "prefetch published: 96 % of the copies that fit beside the layer before are hidden, wrong ones cost nothing",
    ),
    replay,
    memory,
)
