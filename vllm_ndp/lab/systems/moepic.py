"""MoEpic (arXiv 2509.08342), a reconstruction: the top part of an expert is cached, the bottom part always fetched.

MoEpic splits an expert on its intermediate dimension: the top is the first theta of the channels. So the down
projection is a sum over both parts, and the compute of the top overlaps the fetch of the bottom. A cache of B experts'
bytes holds B / theta tops, chosen by P = mu * rho ** (nu / omega), nu counted in tokens. MoEpic predicts the experts of
the next layer from this layer's activations and orders their missing parts ahead. A hit needs 1 - theta of the expert,
a miss all of it. Theta and budget per layer: `solve`. A prompt streams what is not cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.systems.layer_ahead import pipelined_ps
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, Loads, add_up
from vllm_ndp.lab.vectorised.cache import Priority, lcp, visits
from vllm_ndp.lab.vectorised.execution import on_gpu_ps, prompts_ps, without_device
from vllm_ndp.lab.vectorised.outcome import Outcome, attention_ps

THETAS = np.round(np.arange(0.0, 1.01, 0.1), 2)
MISSES = ("wait", "prefetched")


def num_tops(budget: float, theta: float, num_experts: int) -> int:
    """How many tops the bytes of `budget` whole experts hold; theta 0 caches nothing and needs nothing."""
    return 0 if theta == 0 else min(int(budget / theta + 1e-9), num_experts)


@dataclass(frozen=True)
class MoepicLoad:
    """Average load of one decode layer."""

    used: float  # experts
    fetch_ps: float  # a whole expert over the link
    compute_ps: float  # all used experts
    attention_ps: float
    accuracy: float  # share of used experts that were predicted
    misses: str = "wait"

    def expected_ps(self, hits: NDArray[np.float64], theta: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Time of a layer's experts where all layers are alike.

        hits: how many of `used` have a cached top. With theta 0 every expert counts as a hit with an empty top.
        """
        theta = np.asarray(theta)
        hits = np.where(theta == 0, self.used, hits)
        bottoms, whole = hits * (1 - theta) * self.fetch_ps, (self.used - hits) * self.fetch_ps
        planned = bottoms if self.misses == "wait" else bottoms + whole
        early, late = self.accuracy * planned, bottoms + whole - self.accuracy * planned
        ready = theta * self.compute_ps * hits / self.used
        waiting = self.compute_ps - ready
        # Beside its own copies the layer before leaves the link its attention and what it computes after them.
        hidden = np.minimum((self.attention_ps + waiting) / np.maximum(planned, 1e-9), 1.0)
        copies = early * (1 - hidden) + late
        times: NDArray[np.float64] = np.maximum(ready, copies) + waiting
        return times


def solve(
    rates: NDArray[np.float64], budget: float, load: MoepicLoad
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the (theta [L], cache size in experts [L]) of least expected time.

    With misses that wait theta 0 is "prefetch only" and theta 1 "cache only", as in the published sweep, with an
    optimum inside. Misses that are prefetched are ordered early like bottoms. Then only bytes count, of which theta x
    hit rate(budget / theta) are saved: theta 1 never loses. The published equations are not public.

    rates [slots, L]: share of used experts that a cache of so many tops holds; budget: whole experts per layer on
    average.
    """
    num_experts, layers = rates.shape[0] - 1, rates.shape[1]
    tops = np.array([[num_tops(size, theta, num_experts) for theta in THETAS] for size in range(num_experts + 1)])
    times = load.expected_ps(rates[tops] * load.used, THETAS[:, None])  # [sizes, thetas, L]
    best = THETAS[times.argmin(axis=1)]  # [sizes, L]
    share = divide(times.min(axis=1), min(round(budget * layers), num_experts * layers))
    return best[share, np.arange(layers)], share.astype(np.float64)


def divide(times: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Shares of `total` by layer, [L], with the least sum of times [sizes, L].

    Divide and conquer over the range of layers, as published; two halves are merged by trying every division, which is
    exact.
    Between equal divisions the first layers get less.
    """
    return _Range.of(times).divided(total)


@dataclass(frozen=True)
class _Range:
    """Some layers, and the least sum of their times for every total of bytes."""

    least: NDArray[np.float64]
    halves: tuple[_Range, _Range] | None = None

    @classmethod
    def of(cls, times: NDArray[np.float64]) -> _Range:
        num_layers = times.shape[1]
        if num_layers == 1:
            return cls(times[:, 0])
        left, right = cls.of(times[:, : num_layers // 2]), cls.of(times[:, num_layers // 2 :])
        out = np.full(len(left.least) + len(right.least) - 1, np.inf)
        for given, time in enumerate(left.least.tolist()):
            here = out[given : given + len(right.least)]
            np.minimum(here, time + right.least, out=here)
        return cls(out, (left, right))

    def divided(self, total: int) -> NDArray[np.int64]:
        if self.halves is None:
            return np.array([total])
        left, right = (half.least for half in self.halves)
        first = np.arange(max(0, total - len(right) + 1), min(total, len(left) - 1) + 1)
        chosen = int(first[(left[first] + right[total - first]).argmin()])
        return np.concatenate([self.halves[0].divided(chosen), self.halves[1].divided(total - chosen)])


RHO, OMEGA = 0.25, 128.0  # published
PREFETCH_ACCURACY = 0.9  # [O] published only as "good mid-model, poor at head and tail"
_CALIBRATION_GROUPS = 8


def hit_rates(batches: Batches, place: NDArray[np.int64], priority: Priority) -> NDArray[np.float64]:
    """Share of used experts whose tops a cache holds, for each number of slots [slots, L], on the trace's first groups.

    Computed for 16 sizes, linear between them. place [L, E]: of each expert among the most popular ones.
    """
    experts = batches.num_experts
    all_loads = batches.loads
    loads = Loads(*(of[:_CALIBRATION_GROUPS] for of in (all_loads.experts, all_loads.rows, all_loads.places)))
    slots = np.unique(np.linspace(0, experts, min(experts, 16) + 1).astype(int))
    used = (loads.rows > 0).sum(axis=(0, 1, 3))
    found = [visits(loads, place < size, size, priority).hit.sum(axis=(0, 1, 3)) for size in slots.tolist()]
    rates = np.array(found) / np.maximum(used, 1)
    return np.stack([np.interp(np.arange(experts + 1), slots, of_layer) for of_layer in rates.T], axis=1)


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    _, b, _, layers, _ = batches.shape
    misses_are = options.choice("misses", MISSES)
    expected = PREFETCH_ACCURACY if options.predictor is None else options.predictor.guess(batches).accuracy
    accuracy = options.number("prefetch_accuracy", expected, 0.0, 1.0)
    gpu, fetch, rows = costs.gpu_experts_ps(b), float(costs.fetch_ps()), batches.loads.rows
    compute = add_up(gpu[rows])
    running = batches.rows > 0
    place = np.argsort(np.argsort(-options.prior.values, axis=1, kind="stable"), axis=1)  # among the most popular ones
    # nu counts tokens: a step of b requests is b of them, also after some have ended.
    priority = lcp(RHO, OMEGA / b)
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
        theta, share = solve(hit_rates(batches, place, priority), options.budget.num_hot, load)
    tops = np.array([num_tops(share[layer], theta[layer], batches.num_experts) for layer in range(layers)])
    start = place < tops[:, None]
    cached = visits(batches.loads, start, tops, priority).hit
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
    replay,
    options=("theta", "misses", "prefetch_accuracy"),
)
