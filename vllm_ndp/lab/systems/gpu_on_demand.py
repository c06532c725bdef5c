"""GPU only: experts live in host memory and come over the link when they are chosen, some of them a layer ahead.

`pipelined_ps`: a link carries each byte once. A layer's copies are early or late. Early ones are ordered at the gate of
the layer before, whose activations predict them. Late ones are known only at the layer's own gate, and then go first on
the link. Wrong predictions keep the link busy as well; what has not begun when the gate is known is dropped. Compute
that needs no copy (`ready`) runs while copies arrive, the rest after the last one.

Between two layers lie attention and shared experts. The first layer of a step has no layer before: all its copies are
late. A trace with fewer layers than the model repeats each of its layers, and only the first of all is such a one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs, each_ps
from vllm_ndp.cost_model.memory import Memory, all_experts_bytes, slots_bytes
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, add_up
from vllm_ndp.lab.vectorised.cache import CACHES, lcp, lru, visits
from vllm_ndp.lab.vectorised.execution import Prompts, launched, on_gpu_ps, shared_ps, with_copies, without_device
from vllm_ndp.lab.vectorised.outcome import Outcome, attention_ps, time_before


def _cache(options: ReplayOptions) -> tuple[str, int]:
    """(kind, experts per layer that it holds)."""
    kind = options.choice("cache", ("none", *CACHES))
    return kind, 0 if kind == "none" else options.budget.num_hot


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    return Memory(gpu=slots_bytes(costs.shape, _cache(options)[1]), host=all_experts_bytes(costs.shape))


def gpu_on_demand(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    kind, capacity = _cache(options)
    start, rows = options.popular(capacity), batches.loads.rows
    hit = visits(batches.loads, start, capacity, CACHES.get(kind, lru)).hit
    missing = (rows > 0) & ~hit
    moe = with_copies(each_ps(rows, costs.gpu_expert_ps), missing, costs)
    policy, fetched = "no cache" if kind == "none" else kind, int(missing.sum())
    return without_device(policy, batches, costs, options.loss, moe, found=hit, prompts=start, fetched=fetched)


GPU_ON_DEMAND = System(
    "gpu_on_demand",
    (
        "host memory keeps up with the link; copies are pipelined with GPU compute",
        "a cache starts every group with the most popular experts",
    ),
    gpu_on_demand,
    memory,
    options=("cache",),
)


PRIOR_TOKENS = 16.0  # [O] how many tokens the earlier sequences are worth


def moe_infinity(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """MoE-Infinity (arXiv 2401.14361): a GPU cache that follows the running sequence, whose prompt belongs to it.

    Priority and prediction of an expert: how often this sequence chose it so far, on top of what earlier ones did.
    """
    _, b, _, _, k = batches.shape
    places, earlier = options.budget.num_hot, PRIOR_TOKENS * k * options.prior.values
    start = options.popular(places)
    hit, predicted = visits(
        batches.loads,
        start,
        places,
        lambda frequency, _, layers: frequency + earlier[layers],
        frequency=batches.prompt_counts,
        predict=k * b,
    )
    rows = batches.loads.rows
    compute = each_ps(rows, costs.gpu_expert_ps)
    missing, early = (rows > 0) & ~hit, add_up(predicted)
    lightest = np.where(predicted, compute, np.inf).min(axis=3)
    # The link begins with what was predicted while the layer before runs, and goes on with what was not.
    ahead = np.where(early > 0, costs.copy_opening_ps + early * costs.copy_ps, 0.0)
    late = np.maximum(ahead - time_before(launched(add_up(compute), costs), batches, costs), 0)
    copied = with_copies(compute, missing & ~predicted, costs, before_ps=late)
    moe, fetched = np.maximum(copied, late + np.where(early > 0, lightest, 0.0)), int(missing.sum())
    return without_device(
        "activation-aware", batches, costs, options.loss, moe, found=hit, prompts=start, fetched=fetched
    )


MOE_INFINITY = System(
    "moe_infinity",
    (
        "the sequence's own activation counts plus a prior worth 16 tokens decide eviction and prefetch",
        "a predicted copy begins with the layer before; copies do not disturb compute",
    ),
    moe_infinity,
)


# -- copies for the next layer while this one computes -----------------------------------------------------------------


Copies = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""Early, late and wrong ones, [G, D, L] in experts."""


def pipelined_ps(
    batches: Batches,
    costs: Costs,
    copies: Copies,
    ready_ps: NDArray[np.float64],
    waiting_ps: NDArray[np.float64],
) -> NDArray[np.float64]:
    """[G, D, L], what the experts of each layer take; all arguments [G, D, L]. The GPU's launch passes while copies
    arrive.

    Raises ValueError for a trace with more layers than the model.
    """
    attention = attention_ps(batches, costs) + costs.overhead_ps + shared_ps(batches, costs)[:, :, 0]
    early_ps, late_ps, wrong_ps = (of * float(costs.fetch_ps()) for of in copies)
    layers, ready_ps = ready_ps.shape[2], launched(ready_ps + waiting_ps, costs) - waiting_ps
    if layers > costs.shape.num_layers:
        raise ValueError(f"a trace with {layers} layers cannot stand for a model with {costs.shape.num_layers}")
    repeats = np.bincount(np.arange(costs.shape.num_layers) * layers // costs.shape.num_layers, minlength=layers)
    took = np.zeros(ready_ps.shape)
    gate = np.zeros(attention.shape)  # when the gate of the layer is known
    free = np.zeros(attention.shape)  # when the link has carried all that earlier layers needed
    for place, layer in enumerate(np.repeat(np.arange(layers), repeats).tolist()):
        right, wrong, late = early_ps[:, :, layer], wrong_ps[:, :, layer], late_ps[:, :, layer]
        if place == 0:
            missing = right + late
        else:
            ordered = right + wrong
            carried = np.minimum(gate - free, ordered) / np.where(ordered > 0, ordered, 1.0)
            missing = right * (1 - carried) + late
        free = gate + missing
        done = np.maximum(gate + ready_ps[:, :, layer], free) + waiting_ps[:, :, layer]
        took[:, :, layer] += done - gate
        gate = done + attention
    return took / repeats


def _ahead(
    policy: str,
    batches: Batches,
    costs: Costs,
    options: ReplayOptions,
    copies: Copies,
    here: NDArray[np.bool_],
    prompts: Prompts,
    *,
    share: float = 1.0,
) -> Outcome:
    """here: slots whose expert, or a share of it, needs no copy."""
    each = each_ps(batches.loads.rows, costs.gpu_expert_ps)
    ready = share * add_up(np.where(here, each, 0.0))
    moe, fetched = pipelined_ps(batches, costs, copies, ready, add_up(each) - ready), float(np.sum(copies))
    return without_device(policy, batches, costs, options.loss, moe, found=here, prompts=prompts, fetched=fetched)


def klotski(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """Klotski (arXiv 2502.06888): while one layer computes, the link brings the hot experts of the next.

    As many as a token chooses, beside those that stay. The others follow when their gates are known, and compute last.
    """
    loads, k = batches.loads, batches.shape[4]
    places = min(options.budget.num_hot, batches.num_experts)
    resident = options.popular(places)
    ahead = options.popular(min(places + k, batches.num_experts)) & ~resident
    used = loads.rows > 0
    here, early = loads.look_up(resident) & used, loads.look_up(ahead) & used
    right, late = add_up(early), add_up(used & ~here & ~early)
    wrong = np.where((batches.rows > 0)[:, :, None], ahead.sum(axis=1) - right, 0)
    return _ahead("hot experts ahead", batches, costs, options, (right, late, wrong), here, resident)


KLOTSKI = System(
    "klotski",
    (
        "a group is the published n batches together; its planner's choice of n is the batch size you give",
        "hot experts by static popularity instead of the published correlation of layers",
        "what was ordered ahead and not chosen is dropped when the gate is known",
    ),
    klotski,
)


def pregated(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """Pre-gated MoE (arXiv 2308.12066, ISCA 2024): gates choose a layer ahead, so every copy is early and right."""
    places = options.budget.num_hot
    start = options.popular(places)
    hit = visits(batches.loads, start, places, lru).hit
    copies = add_up((batches.loads.rows > 0) & ~hit)
    nothing = np.zeros(copies.shape)
    return _ahead("gates a layer ahead", batches, costs, options, (copies, nothing, nothing), hit, start)


PREGATED = System(
    "pregated",
    (
        "needs a model fine-tuned to choose a layer ahead: the trace's routing stands in, its loss is not counted",
        "places of num_hot experts hold the ones used last (the published system frees them after use)",
        "the first layer of a step has no gate before it: its copies wait",
    ),
    pregated,
)


THETAS = np.round(np.arange(0.0, 1.01, 0.1), 2)
RHO, OMEGA = 0.25, 128.0  # published
PREFETCH_ACCURACY = 0.9  # [O] published only as "good mid-model, poor at head and tail"


def moepic(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """MoEpic (arXiv 2509.08342), a reconstruction: the top part of an expert is cached, the bottom part always fetched.

    The top is the first theta of the intermediate channels. So the down projection is a sum over both parts, and the
    compute of the top overlaps the fetch of the bottom. A cache of B experts' bytes holds B / theta tops, chosen by
    P = mu * rho ** (nu / omega). A hit needs 1 - theta of the expert, ordered a layer ahead if it is predicted; a miss
    all of it. A prompt streams what is not cached.
    """
    tried = [split_at(theta, batches, costs, options) for theta in THETAS.tolist()]
    return min(tried, key=lambda outcome: float(outcome.moe_ps.sum()))


def split_at(theta: float, batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    rows, experts = batches.loads.rows, batches.num_experts
    accuracy = PREFETCH_ACCURACY if options.predictor is None else options.predictor.accuracy(batches)
    tops = 0 if theta == 0 else min(int(options.budget.num_hot / theta + 1e-9), experts)  # 0 caches nothing
    start = options.popular(tops)
    # nu counts tokens: a step of b requests is b of them, also after some have ended.
    cached = visits(batches.loads, start, tops, lcp(RHO, OMEGA / batches.shape[1])).hit
    hits = add_up((cached | (theta == 0)) & (rows > 0)).astype(np.float64)
    bottoms, whole = hits * (1 - theta), add_up(rows > 0) - hits

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        touched = (counts > 0).sum(axis=1) - theta * (start & (counts > 0)).sum(axis=1)
        computed = on_gpu_ps(costs, costs.shape.expert_bytes, counts)
        times: NDArray[np.float64] = np.maximum(touched * costs.fetch_ps(), computed)
        return times

    copies = accuracy * bottoms, bottoms + whole - accuracy * bottoms, (1 - accuracy) * bottoms
    return _ahead(f"theta {theta:g}", batches, costs, options, copies, cached, layers_ps, share=theta)


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
    moepic,
)
