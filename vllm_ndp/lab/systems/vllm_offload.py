"""vLLM's own CPU offload: whole layers of experts stay in host memory and are read over the link in every step.

uva        `--cpu-offload-gb N --cpu-offload-params experts`: the kernel reads the experts it needs straight from host
           memory. Nothing is kept, nothing overlaps: a kernel that waits for the link computes nothing else.
prefetch   `--offload-group-size`: layers spread evenly; the whole of each, all its experts, is copied one layer ahead.

As many layers stay on the GPU as the memory of num_hot experts per layer holds. Source: vLLM's
model_executor/offloader/uva.py and prefetch.py. The granularity is the parameter, one tensor for all experts of a
layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory
from vllm_ndp.lab.systems.system import ReplayOptions, System, resident_layers, whole_layers
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import on_gpu_ps, prompts_ps, without_device
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome

BACKENDS = ("uva", "prefetch")


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Under prefetch, also the buffer that a copied layer lies in."""
    held = whole_layers(costs, options.budget.num_hot, costs.shape.expert_bytes)
    buffered = options.choice("offload_backend", BACKENDS) == "prefetch" and held.host > 0
    return Memory(gpu=held.gpu + buffered * costs.shape.num_experts * costs.shape.expert_bytes, host=held.host)


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    backend = options.choice("offload_backend", BACKENDS)
    _, b, _, layers, _ = batches.shape
    shape, rows = costs.shape, batches.loads.rows
    away = 1 - resident_layers(costs, options.budget.num_hot, shape.expert_bytes) / shape.num_layers
    compute, touched = add_up(costs.gpu_experts_ps(b)[rows]), add_up(rows > 0)
    fetch, layer_fetch = costs.fetch_ps(), costs.fetch_ps(shape.num_experts * shape.expert_bytes)
    if backend == "uva":
        moe = (1 - away) * compute + away * np.maximum(touched * fetch, compute)
        fetched = away * float(touched.sum())
    else:  # the copy of a layer hides behind everything since the copy before it
        attention = costs.attention_ps(1, batches.kv_tokens)[:, :, None]
        moe = np.maximum(compute, away * layer_fetch - attention)
        fetched = away * shape.num_experts * layers * int(batches.rows.astype(bool).sum())

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        here = on_gpu_ps(costs, counts, shape.expert_bytes)
        copied = (counts > 0).sum(axis=1) * fetch if backend == "uva" else np.full(len(counts), layer_fetch)
        times: NDArray[np.float64] = (1 - away) * here + away * np.maximum(here, copied)
        return times

    return without_device(
        backend,
        batches,
        costs,
        moe_ps=moe,
        gpu_ps=np.minimum(compute, moe),
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        fetched_experts=fetched,
        hot_pairs=round((1 - away) * int(rows.sum())),
        notes={"layers_in_host_memory": away * shape.num_layers},
    )


VLLM_OFFLOAD = System(
    "vllm_offload",
    (
        "only experts are offloaded (--cpu-offload-params experts); whole layers, in 16 bits; attention stays",
        "uva reads at the link's bulk rate and each expert once a step, which is optimistic for large batches",
        "prefetch copies all experts of an offloaded layer in every step, one layer ahead",
    ),
    False,
    replay,
    memory,
    options=("offload_backend",),
)
