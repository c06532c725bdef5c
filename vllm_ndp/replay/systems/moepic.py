"""MoEpic (arXiv 2509.08342), a reconstruction: the top part of an expert is cached, the bottom part always fetched.

An expert is split on its intermediate dimension: the top is the first theta of the channels, so that the down
projection is a sum over both parts and computing the top overlaps the fetch of the bottom. A cache of B experts' bytes
holds B / theta tops, chosen by P = mu * rho ** (nu / omega). A hit fetches 1 - theta of the expert, a miss all of it.
The published budget solver is not public in formulas; ours moves one expert's bytes between layers while that helps.
(Seed 003's text is inverted: it caches the bottom and calls the split lossy.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.replay.systems.system import ReplayOptions, System, beside_host_memory, popular_placement
from vllm_ndp.replay.vectorised.batches import Batches
from vllm_ndp.replay.vectorised.cache import lcp, visits
from vllm_ndp.replay.vectorised.execution import without_device
from vllm_ndp.replay.vectorised.loads import add_up
from vllm_ndp.replay.vectorised.outcome import Outcome, time_before
from vllm_ndp.simulation.costs import Costs

RHO, OMEGA = 0.25, 128.0  # published
PREFETCH_ACCURACY = 0.9  # [O] published only as "good mid-model, poor at head and tail"
THETAS = np.round(np.arange(0.0, 1.01, 0.1), 2)
_CALIBRATION_GROUPS = 8


def num_tops(budget: float, theta: float, num_experts: int) -> int:
    """How many tops the bytes of `budget` whole experts hold; theta 0 caches nothing and needs nothing."""
    return 0 if theta == 0 else min(int(budget / theta + 1e-9), num_experts)


def layer_ps(
    hits: NDArray[np.float64],
    misses: NDArray[np.float64],
    theta: NDArray[np.float64] | float,
    fetch_ps: float,
    compute_ps: NDArray[np.float64],
    window_ps: NDArray[np.float64] | float,
) -> NDArray[np.float64]:
    """max(compute of the tops, fetch that the window does not hide) + compute of the bottoms."""
    fetch = (hits * (1 - theta) + misses) * fetch_ps
    hidden = PREFETCH_ACCURACY * np.minimum(fetch, window_ps)
    result: NDArray[np.float64] = np.maximum(theta * compute_ps, fetch - hidden) + (1 - theta) * compute_ps
    return result


def hit_rates(batches: Batches, options: ReplayOptions) -> NDArray[np.float64]:
    """[slots, L]: share of used experts found in a cache of that many tops, on the first groups of the trace."""
    experts = batches.num_experts
    first = batches.loads.groups(slice(_CALIBRATION_GROUPS))
    used = np.maximum((first.rows > 0).sum(axis=(0, 1, 3)), 1)
    slots = np.unique(np.linspace(0, experts, min(experts, 16) + 1).astype(int))
    rates = [
        visits(first, popular_placement(options.prior, count), count, lcp(RHO, OMEGA)).hit.sum(axis=(0, 1, 3)) / used
        for count in slots.tolist()
    ]
    every = np.arange(experts + 1)
    return np.stack([np.interp(every, slots, layer) for layer in np.transpose(rates)], axis=1)


def solve(
    rates: NDArray[np.float64], budget: float, used: float, fetch_ps: float, compute_ps: float, window_ps: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(theta [L], experts' bytes [L]) of least expected time; budget is the average per layer."""
    num_experts, layers = rates.shape[0] - 1, rates.shape[1]
    tops = np.array([[num_tops(size, theta, num_experts) for theta in THETAS] for size in range(num_experts + 1)])
    hit = rates[tops] * used  # [sizes, thetas, L]
    theta = THETAS[:, None]
    times = layer_ps(hit, used - hit, theta, fetch_ps, np.full(theta.shape, compute_ps), window_ps)
    best = THETAS[times.argmin(axis=1)].T  # [L, sizes]
    time = times.min(axis=1).T
    share = np.full(layers, int(budget))
    share[: round(budget * layers) - int(budget) * layers] += 1
    while True:
        gain = time[np.arange(layers), share] - time[np.arange(layers), np.minimum(share + 1, num_experts)]
        loss = np.where(
            share > 0, time[np.arange(layers), np.maximum(share - 1, 0)] - time[np.arange(layers), share], np.inf
        )
        to, source = int(gain.argmax()), int(loss.argmin())
        if to == source or gain[to] <= loss[source] + 1e-6:
            break
        share[to] += 1
        share[source] -= 1
    return best[np.arange(layers), share], share.astype(np.float64)


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    _, b, _, layers, k = batches.shape
    gpu, fetch = costs.gpu_experts_ps(b), float(costs.fetch_ps())
    attention = float(costs.attention_ps(1, np.array([batches.kv_tokens.max()]))[0])
    window = attention + float(gpu[1]) * min(k * b, batches.num_experts)
    rows = batches.loads.rows
    used = float(add_up(rows > 0).mean())
    if "theta" in options.own:
        theta = np.full(layers, options.number("theta", 0.0, 0.0, 1.0))
        share = np.full(layers, float(options.budget.num_hot))
    else:
        rates = hit_rates(batches, options)
        theta, share = solve(rates, options.budget.num_hot, used, fetch, used * float(gpu[1]), window)
    tops = [num_tops(share[layer], theta[layer], batches.num_experts) for layer in range(layers)]
    start = np.stack([popular_placement(options.prior, count)[layer] for layer, count in enumerate(tops)])
    hit = visits(batches.loads, start, np.array(tops), lcp(RHO, OMEGA)).hit
    hits = add_up(hit).astype(np.float64)
    misses = add_up(rows > 0) - hits
    compute = add_up(gpu[rows])
    return without_device(
        "moepic",
        "theta " + "/".join(f"{value:g}" for value in np.unique(theta)),
        batches,
        costs,
        moe_ps=layer_ps(hits, misses, theta, fetch, compute, time_before(compute, batches, costs)),
        gpu_ps=compute,
        resident=np.zeros((layers, batches.num_experts), np.bool_),
        fetched_experts=float((hits * (1 - theta) + misses).sum()),
        hot_pairs=int(rows[hit].sum()),
        notes={"theta": theta.tolist(), "budget_experts": share.tolist(), "tops": tops},
    )


MOEPIC = System(
    "moepic",
    (
        "reconstruction: split on the intermediate dimension, LCP with rho 0.25 and omega 128 as published",
        "the solver's hit rates come from the first 8 groups of the same trace; prefetch accuracy 0.9 is a guess",
        "GPU memory of num_hot whole experts per layer on average",
    ),
    False,
    replay,
    beside_host_memory,
)
