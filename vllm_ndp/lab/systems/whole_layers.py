"""Whole layers of experts on the GPU, as many as fit in the memory of num_hot experts per layer: llama.cpp and vLLM."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory
from vllm_ndp.lab.systems.quantized import WEIGHT_BITS
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, add_up
from vllm_ndp.lab.vectorised.execution import cold_at, launched, on_gpu_ps, prompts_ps, without_device
from vllm_ndp.lab.vectorised.outcome import Cold, Outcome, Traffic


def resident_layers(costs: Costs, options: ReplayOptions, expert_bytes: int) -> int:
    """How many layers of the model keep all their experts, of that size each, in GPU memory."""
    return min(options.room(costs) // (expert_bytes * costs.shape.num_experts), costs.shape.num_layers)


def whole_layers(costs: Costs, options: ReplayOptions, expert_bytes: int) -> Memory:
    """Memory of those layers on the GPU, and of the others on the host."""
    resident, layer_bytes = resident_layers(costs, options, expert_bytes), costs.shape.num_experts * expert_bytes
    return Memory(gpu=resident * layer_bytes, host=(costs.shape.num_layers - resident) * layer_bytes)


def llama_cpp_memory(costs: Costs, options: ReplayOptions) -> Memory:
    return whole_layers(costs, options, costs.replica_bytes(options.choice("gguf_bits", WEIGHT_BITS)))


def llama_cpp(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """llama.cpp with `--n-cpu-moe N`: the experts of N layers are computed by the CPU, those of the others by the GPU.

    Of prompts the weights of CPU layers are copied to the GPU, as llama.cpp does from 32 rows on, or the CPU is faster.
    """
    bits = options.choice("gguf_bits", WEIGHT_BITS)
    _, b, _, _, _ = batches.shape
    shape, rows = costs.shape, batches.loads.rows
    expert_bytes = costs.replica_bytes(bits)
    away = 1 - resident_layers(costs, options, expert_bytes) / shape.num_layers
    on_gpu = launched(add_up(costs.gpu_experts_ps(b, expert_bytes)[rows]), costs, expert_bytes)
    on_cpu = add_up(costs.cpu_experts_ps(np.arange(b + 1), expert_bytes)[rows])
    on_cpu += costs.hops_ps(b)[batches.rows][:, :, None]
    fetch = costs.fetch_ps(expert_bytes)

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        here = on_gpu_ps(costs, counts, expert_bytes)
        copied = np.maximum((counts > 0).sum(axis=1) * fetch, here)
        computed = costs.cpu_layers_ps(counts, expert_bytes)
        times: NDArray[np.float64] = (1 - away) * here + away * np.minimum(copied, computed)
        return times

    pairs, used = int(rows.sum()), float((rows > 0).sum())
    cold = Cold(float(bits * away * pairs), round(away * pairs))
    if bits < FULL_PRECISION_BITS:
        cold = cold_at(batches, bits, options.loss)
    return without_device(
        f"{bits} bits",
        batches,
        costs,
        moe_ps=(1 - away) * on_gpu + away * on_cpu,
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        hot_pairs=round((1 - away) * pairs),
        cold=cold,
        traffic=Traffic(
            hbm_bytes=(1 - away) * used * expert_bytes,
            host_bytes=away * used * expert_bytes,
            link_bytes=away * pairs / shape.top_k * 2 * shape.hidden_size * shape.dtype_bytes,
        ),
    )


LLAMA_CPP = System(
    "llama_cpp",
    (
        "--n-cpu-moe: whole layers of experts, static, one width for all; a layer runs on one side, nothing overlaps",
        "CPU: 20 TFLOP/s (CXL-Expert's description) and 85 % of 307 GB/s (8 x DDR5-4800)",
        "widths are those of our replicas, scales included; GGUF's own mixtures differ by some tenths of a bit",
    ),
    llama_cpp,
    llama_cpp_memory,
    options=("gguf_bits",),
)


BACKENDS = ("uva", "prefetch")


def vllm_offload_memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Under prefetch, also the buffer that a copied layer lies in."""
    held = whole_layers(costs, options, costs.shape.expert_bytes)
    buffered = options.choice("offload_backend", BACKENDS) == "prefetch" and held.host > 0
    return Memory(gpu=held.gpu + buffered * costs.shape.num_experts * costs.shape.expert_bytes, host=held.host)


def vllm_offload(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """vLLM's own CPU offload: whole layers of experts stay in host memory and are read over the link in every step.

    uva        `--cpu-offload-gb N --cpu-offload-params experts`: the kernel reads the experts it needs straight from
               host memory. Nothing is kept, nothing overlaps: a kernel that waits for the link computes nothing else.
    prefetch   `--offload-group-size`: layers spread evenly; all experts of each are copied one layer ahead.

    Source: vLLM's model_executor/offloader/uva.py and prefetch.py. The granularity is the parameter, one tensor for all
    experts of a layer.
    """
    backend = options.choice("offload_backend", BACKENDS)
    _, b, _, layers, _ = batches.shape
    shape, rows = costs.shape, batches.loads.rows
    away = 1 - resident_layers(costs, options, shape.expert_bytes) / shape.num_layers
    compute, touched = launched(add_up(costs.gpu_experts_ps(b)[rows]), costs), add_up(rows > 0)
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
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        fetched_experts=fetched,
        hot_pairs=round((1 - away) * int(rows.sum())),
    )


VLLM_OFFLOAD = System(
    "vllm_offload",
    (
        "only experts are offloaded (--cpu-offload-params experts); whole layers, in 16 bits; attention stays",
        "uva reads at the link's bulk rate and each expert once a step, which is optimistic for large batches",
        "prefetch copies all experts of an offloaded layer in every step, one layer ahead",
    ),
    vllm_offload,
    vllm_offload_memory,
    options=("offload_backend",),
)
