"""MoEpic (arXiv 2509.08342), a reconstruction: the top part of an expert is cached, the bottom part always fetched.

MoEpic splits an expert on its intermediate dimension: the top is the first theta of the channels. So the down
projection is a sum over both parts, and the compute of the top overlaps the fetch of the bottom. A cache of B experts'
bytes holds B / theta tops, chosen by P = mu * rho ** (nu / omega), nu counted in tokens. MoEpic predicts the experts of
the next layer from this layer's activations and orders their missing parts ahead. A hit needs 1 - theta of the expert,
a miss all of it. Theta is the one of THETAS that is fastest on the trace. A prompt streams what is not cached.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.systems.layer_ahead import pipelined_ps
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, add_up
from vllm_ndp.lab.vectorised.cache import lcp, visits
from vllm_ndp.lab.vectorised.execution import launched, on_gpu_ps, prompts_ps, without_device
from vllm_ndp.lab.vectorised.outcome import Outcome

THETAS = np.round(np.arange(0.0, 1.01, 0.1), 2)


def num_tops(budget: float, theta: float, num_experts: int) -> int:
    """How many tops the bytes of `budget` whole experts hold; theta 0 caches nothing and needs nothing."""
    return 0 if theta == 0 else min(int(budget / theta + 1e-9), num_experts)


RHO, OMEGA = 0.25, 128.0  # published
PREFETCH_ACCURACY = 0.9  # [O] published only as "good mid-model, poor at head and tail"


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    thetas = THETAS.tolist()
    if "theta" in options.own:
        thetas = [options.number("theta", 0.0, 0.0, 1.0)]
    tried = [_split_at(theta, batches, costs, options) for theta in thetas]
    return min(tried, key=lambda outcome: float(outcome.moe_ps.sum()))


def _split_at(theta: float, batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    b, experts = batches.shape[1], batches.num_experts
    expected = PREFETCH_ACCURACY if options.predictor is None else options.predictor.guess(batches).accuracy
    accuracy = options.number("prefetch_accuracy", expected, 0.0, 1.0)
    gpu, fetch, rows = costs.gpu_experts_ps(b), float(costs.fetch_ps()), batches.loads.rows
    compute = add_up(gpu[rows])
    tops = num_tops(options.budget.num_hot, theta, experts)
    start = options.popular(tops)
    # nu counts tokens: a step of b requests is b of them, also after some have ended.
    cached = visits(batches.loads, start, tops, lcp(RHO, OMEGA / b)).hit
    hit = (cached | (theta == 0)) & (rows > 0)
    hits = add_up(hit).astype(np.float64)
    misses = add_up(rows > 0) - hits
    bottoms, whole = hits * (1 - theta) * fetch, misses * fetch
    ready = theta * add_up(np.where(hit, gpu[rows], 0.0))
    moe = pipelined_ps(
        batches,
        costs,
        early_ps=accuracy * bottoms,
        late_ps=bottoms + whole - accuracy * bottoms,
        wrong_ps=(1 - accuracy) * bottoms,
        ready_ps=ready,
        waiting_ps=compute - ready,
    )

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        touched = (counts > 0).sum(axis=1) - theta * (start & (counts > 0)).sum(axis=1)
        computed = on_gpu_ps(costs, counts, costs.shape.expert_bytes)
        times: NDArray[np.float64] = np.maximum(touched * fetch, computed)
        return times

    return without_device(
        f"theta {theta:g}",
        batches,
        costs,
        moe_ps=moe,
        gpu_ps=launched(compute, costs),
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        fetched_experts=float(((2 - accuracy) * bottoms + whole).sum() / fetch),
        hot_pairs=int(rows[cached].sum()),
        notes={"prefetch_accuracy": accuracy, "theta": theta, "tops": tops},
    )


MOEPIC = System(
    "moepic",
    (
        "reconstruction: split on the intermediate dimension, LCP with rho 0.25 and omega 128 tokens as published",
        "theta: the fastest of 0, .1, ... 1 on this trace, the same in every layer (published: solved, by layer)",
        "prefetch measured: accuracy of the chances from layer to layer in other requests; published: 0.9, a guess",
        "misses wait for their gate, which alone gives prefetch-only and cache-only as the two ends of theta",
        "a wrong prediction costs the link as much as a right one and is dropped when the gate is known",
        "GPU memory of num_hot whole experts per layer",
    ),
    replay,
    options=("theta", "prefetch_accuracy"),
)
