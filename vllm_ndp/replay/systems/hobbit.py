"""HOBBIT (arXiv 2411.01433): a missing expert of little weight in the mixture is fetched in low precision, or skipped.

Unimportance of the i-th choice of a token = gate weight of the choices before it: up to T1 (0.6) high precision, up to
T2 (0.9) low, beyond that skipped. Two caches, high (fp16) and low (int4), share the GPU memory of num_hot experts per
layer. Eviction priority = w1 recency + w2 frequency + w3 high-precision frequency, records reset per sequence. Later
gates evaluated on this layer's input start copies early (accuracy 96 %).
"""

from __future__ import annotations

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
from vllm_ndp.replay.vectorised.loads import add_up
from vllm_ndp.replay.vectorised.outcome import Outcome, Traffic, time_before
from vllm_ndp.simulation.costs import Costs

T1, T2 = 0.6, 0.9  # published for Mixtral-8x7B
LOW_BITS = 4
PREFETCH_ACCURACY = 0.96  # published, next layer, top-1
W_RECENCY, W_FREQUENCY, W_HIGH = 0.4, 0.3, 0.3  # [O] the paper tunes them on calibration data; they sum to 1
PRIORITY = Priority("mixed", np.array([W_RECENCY, W_FREQUENCY + W_HIGH]))

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
    high_hit, _, there = visits(loads.with_rows(high), high_start, high_slots, PRIORITY)
    wanted = (low > 0) & ~there
    low_hit = visits(loads.with_rows(np.where(wanted, low, 0)), low_start, low_slots, PRIORITY).hit
    high_misses, low_misses = add_up((high > 0) & ~high_hit), add_up(wanted & ~low_hit)
    per_expert = gpu[high] + np.where(wanted, gpu[low] * LOW_BITS / FULL_PRECISION_BITS, gpu[low])
    compute = add_up(per_expert)
    low_bytes = costs.shape.expert_bytes * LOW_BITS // FULL_PRECISION_BITS
    high_missing, low_missing = (high > 0) & ~high_hit, wanted & ~low_hit
    copies = np.where(high_missing, costs.copy_ps, costs.copy_ps * LOW_BITS / FULL_PRECISION_BITS)
    fetch = (high_misses + low_misses * LOW_BITS / FULL_PRECISION_BITS) * costs.copy_ps
    hidden = PREFETCH_ACCURACY * np.minimum(fetch, time_before(compute, batches, costs))
    layer = with_copies(per_expert, high_missing | low_missing, costs, before_ps=-hidden, copy_ps=copies)
    executed = np.broadcast_to(batches.pairs, batches.ids.shape)
    mix = [float((classes[executed] == kind).mean()) for kind in (HIGH, LOW, SKIP)]
    runs_low = (classes == LOW) & wanted.ravel()[loads.places]
    widths = np.where(runs_low, LOW_BITS, np.where(classes == SKIP, SKIPPED, 0)).astype(np.uint8)
    low_pairs = int((classes[executed] == LOW).sum())
    return without_device(
        "hobbit",
        f"T1 {t1:g} T2 {t2:g}",
        batches,
        costs,
        moe_ps=layer,
        gpu_ps=compute,
        resident=high_start,
        fetched_experts=float(high_misses.sum()) + float(low_misses.sum()) * low_bytes / costs.shape.expert_bytes,
        hot_pairs=int(high[high_hit].sum() + low[low_hit].sum() + low[(low > 0) & there].sum()),
        cold_bits=float(LOW_BITS * low_pairs),
        cold_pairs=low_pairs,
        loss=gate_loss(batches, widths, options),
        traffic=Traffic(
            hbm_bytes=costs.shape.expert_bytes
            * float((high > 0).sum() + ((low > 0) & there).sum() + wanted.sum() * LOW_BITS / FULL_PRECISION_BITS)
        ),
        notes={
            "high": mix[HIGH],
            "low": mix[LOW],
            "skipped": mix[SKIP],
            "high_slots": high_slots,
            "low_slots": low_slots,
        },
    )


HOBBIT = System(
    "hobbit",
    (
        "T1 0.6, T2 0.9 and prefetch accuracy 0.96 as published; fp16 + int4",
        "one of the num_hot fp16 places per layer holds four int4 experts instead; caches are per layer",
        "the layer-distance term of the published priority is constant inside a per-layer cache and drops out",
        "a prefetched copy hides behind the layer before; a wrong one costs nothing, which is optimistic",
    ),
    False,
    replay,
    memory,
)
