"""MoEpic (arXiv 2509.08342), a reconstruction: the top part of an expert is cached, the bottom part always fetched.

MoEpic splits an expert on its intermediate dimension: the top is the first theta of the channels. So the down
projection is a sum over both parts, and the compute of the top overlaps the fetch of the bottom. A cache of B experts'
bytes holds B / theta tops, chosen by P = mu * rho ** (nu / omega), nu counted in tokens. MoEpic predicts the experts of
the next layer from this layer's activations and orders their missing parts ahead. A hit needs 1 - theta of the expert,
a miss all of it. Theta and budget per layer: moepic_solver.py. A prompt streams what is not cached. (Seed 003's text is
inverted: it caches the bottom and calls the split lossy.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.systems.moepic_solver import MISSES, MoepicLoad, num_tops, solve
from vllm_ndp.lab.systems.pipeline import pipelined_ps
from vllm_ndp.lab.systems.system import ReplayOptions, System, beside_host_memory
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.cache import depths, lcp
from vllm_ndp.lab.vectorised.execution import on_gpu_ps, prompts_ps, without_device
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome, attention_ps

RHO, OMEGA = 0.25, 128.0  # published
PREFETCH_ACCURACY = 0.9  # [O] published only as "good mid-model, poor at head and tail"
_CALIBRATION_GROUPS = 8


def hit_rates(batches: Batches, depth: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Share of used experts whose tops a cache holds, for each number of slots [slots, L], on the trace's first groups.

    Computed for 16 sizes, linear between them. depth: of each used expert (see `depths`).
    """
    experts, layers = batches.num_experts, batches.shape[3]
    first, rows = depth[:_CALIBRATION_GROUPS], batches.loads.rows[:_CALIBRATION_GROUPS]
    slots = np.unique(np.linspace(0, experts, min(experts, 16) + 1).astype(int))
    every = np.arange(experts + 1)
    rates = []
    for layer in range(layers):
        found = np.bincount(first[:, :, layer][rows[:, :, layer] > 0], minlength=experts)
        within = np.concatenate([[0], found.cumsum()])
        rates.append(np.interp(every, slots, within[slots] / max(int(within[-1]), 1)))
    return np.stack(rates, axis=1)


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    _, b, _, layers, _ = batches.shape
    misses_are = options.choice("misses", MISSES)
    expected = PREFETCH_ACCURACY if options.predictor is None else options.predictor.guess(batches).accuracy
    accuracy = options.number("prefetch_accuracy", expected, 0.0, 1.0)
    gpu, fetch, rows = costs.gpu_experts_ps(b), float(costs.fetch_ps()), batches.loads.rows
    compute = add_up(gpu[rows])
    running = batches.rows > 0
    order = np.argsort(-options.prior.values, axis=1, kind="stable")  # the most popular experts first
    # nu counts tokens: a step of b requests is b of them, also after some have ended.
    depth = depths(batches.loads, order, lcp(RHO, OMEGA / b))
    if "theta" in options.own:
        theta = np.full(layers, options.number("theta", 0.0, 0.0, 1.0))
        share = np.full(layers, float(options.budget.num_hot))
    else:
        load = MoepicLoad(
            used=float(add_up(rows > 0)[running].mean()),
            fetch_ps=fetch,
            compute_ps=float(compute[running].mean()),
            attention_ps=float(attention_ps(batches, costs)[running].mean()),
            accuracy=accuracy,
            misses=misses_are,
        )
        theta, share = solve(hit_rates(batches, depth), options.budget.num_hot, load)
    tops = np.array([num_tops(share[layer], theta[layer], batches.num_experts) for layer in range(layers)])
    start = np.argsort(order, axis=1) < tops[:, None]  # an expert's place among the most popular ones
    cached = depth < tops[:, None]
    hit = (cached | (theta == 0)[:, None]) & (rows > 0)
    hits = add_up(hit).astype(np.float64)
    misses = add_up(rows > 0) - hits
    bottoms, whole = hits * (1 - theta) * fetch, misses * fetch
    planned = bottoms if misses_are == "wait" else bottoms + whole
    ready = theta * add_up(np.where(hit, gpu[rows], 0.0))
    moe = pipelined_ps(
        batches,
        costs,
        early_ps=accuracy * planned,
        late_ps=bottoms + whole - accuracy * planned,
        wrong_ps=(1 - accuracy) * planned,
        ready_ps=ready,
        waiting_ps=compute - ready,
    )

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        touched = (counts > 0).sum(axis=1) - theta * (start & (counts > 0)).sum(axis=1)
        computed = on_gpu_ps(costs, counts, costs.shape.expert_bytes)
        times: NDArray[np.float64] = np.maximum(touched * fetch, computed)
        return times

    return without_device(
        "theta " + "/".join(f"{value:g}" for value in np.unique(theta)) + f", misses {misses_are}",
        batches,
        costs,
        moe_ps=moe,
        gpu_ps=compute,
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        fetched_experts=float(((2 - accuracy) * planned + (bottoms + whole - planned)).sum() / fetch),
        hot_pairs=int(rows[cached].sum()),
        notes={
            "prefetch_accuracy": accuracy,
            "theta": theta.tolist(),
            "budget_experts": share.tolist(),
            "tops": tops.tolist(),
        },
    )


MOEPIC = System(
    "moepic",
    (
        "reconstruction: split on the intermediate dimension, LCP with rho 0.25 and omega 128 tokens as published",
        "the solver's hit rates come from the first 8 groups of the same trace",
        "prefetch measured: accuracy of the chances from layer to layer in other requests; published: 0.9, a guess",
        "misses wait for their gate, which alone gives prefetch-only and cache-only as the two ends of theta",
        "a wrong prediction costs the link as much as a right one and is dropped when the gate is known",
        "GPU memory of num_hot whole experts per layer on average",
    ),
    False,
    replay,
    beside_host_memory,
    options=("theta", "misses", "prefetch_accuracy"),
)
