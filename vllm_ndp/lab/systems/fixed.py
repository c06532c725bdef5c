"""Experts stay where they are: all of them in GPU memory, at one width or two, or whole layers there.

All within the memory of num_hot full-precision experts per layer.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs, each_case, each_ps
from vllm_ndp.cost_model.memory import Memory
from vllm_ndp.lab.systems.system import WEIGHT_BITS, ReplayOptions, System, TooFewPlaces
from vllm_ndp.lab.vectorised.batches import Batches, add_up
from vllm_ndp.lab.vectorised.execution import (
    cold_at,
    here_ps,
    launched,
    on_gpu_ps,
    streamed_ps,
    without_device,
)
from vllm_ndp.lab.vectorised.outcome import Cold, Outcome, Traffic
from vllm_ndp.planning.plan import highest


def chosen_bits(costs: Costs, options: ReplayOptions) -> int:
    """The width that the options name; raises TooFewPlaces where the GPU memory is too small for it."""
    bits = options.choice("weight_bits", WEIGHT_BITS, WEIGHT_BITS[-1])
    need = costs.shape.num_experts * costs.replica_bytes(bits)
    have = options.budget.num_hot * costs.shape.expert_bytes
    if need > have:
        raise TooFewPlaces(
            f"all {costs.shape.num_experts} experts of a layer at {bits} bits take {need / 1e9:.3f} GB, "
            f"{options.budget.num_hot} hot ones leave room for {have / 1e9:.3f} GB"
        )
    return bits


def quantized_memory(costs: Costs, options: ReplayOptions) -> Memory:
    shape = costs.shape
    return Memory(gpu=shape.num_layers * shape.num_experts * costs.replica_bytes(chosen_bits(costs, options)))


def quantized(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """The usual alternative: every expert in GPU memory, all at one width."""
    bits = chosen_bits(costs, options)
    rows, expert_bytes = batches.loads.rows, costs.replica_bytes(bits)
    moe, prompts = here_ps(costs, rows, expert_bytes), partial(on_gpu_ps, costs, expert_bytes)
    return without_device(f"{bits} bits", batches, costs, options.loss, moe, found=rows > 0, prompts=prompts, bits=bits)


QUANTIZED = System(
    "quantized",
    (
        "all experts in GPU memory at one width, with a float16 scale and offset per group as replicas have; no device",
        "dequantising is free beside the read (weight-only kernels at small batches); multiplied in 16 bits",
        "loss at 8 bits is extrapolated from 4 bits at 4.4x per bit",
    ),
    quantized,
    quantized_memory,
    options=("weight_bits",),
)


PRIOR_TOKENS = 16.0


def dynaexq_widths(costs: Costs, options: ReplayOptions) -> tuple[int, int, int]:
    """(high, low, how many experts per layer at high). 16 over 4 if all fit at 4 bits, else 4 over 2."""
    shape, room = costs.shape, options.budget.num_hot * costs.shape.expert_bytes
    all_at_four = shape.num_experts * costs.replica_bytes(4) <= room
    high, low = (FULL_PRECISION_BITS, 4) if all_at_four else (4, 2)
    spare = room - shape.num_experts * costs.replica_bytes(low)
    if spare < 0:
        raise TooFewPlaces(
            f"all {shape.num_experts} experts of a layer at {low} bits do not fit in the memory of "
            f"{options.budget.num_hot} full-precision ones: {-spare} bytes are missing"
        )
    return high, low, min(spare // (costs.replica_bytes(high) - costs.replica_bytes(low)), shape.num_experts)


def dynaexq_memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Narrow and wide experts on the GPU; the host keeps the wide ones to promote from."""
    high, low, num_high = dynaexq_widths(costs, options)
    shape = costs.shape
    layer = num_high * costs.replica_bytes(high) + (shape.num_experts - num_high) * costs.replica_bytes(low)
    return Memory(gpu=shape.num_layers * layer, host=shape.num_layers * shape.num_experts * costs.replica_bytes(high))


def dynaexq(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """DynaExq (arXiv 2511.15015): a low width for all, a high one for as many of the hottest as memory leaves.

    The closest rival of context-aware bits on a device: the same idea inside GPU memory.
    """
    high, low, num_high = dynaexq_widths(costs, options)
    g, _, _, layers, k = batches.shape
    heat = batches.prompt_counts + PRIOR_TOKENS * k * options.prior.values
    rows, is_wide = batches.loads.rows, batches.loads.look_up(highest(heat, num_high))
    high_bytes, low_bytes = costs.replica_bytes(high), costs.replica_bytes(low)
    wide, narrow = (each_ps(rows, partial(costs.gpu_expert_ps, num_bytes=size)) for size in (high_bytes, low_bytes))
    return without_device(
        f"{high} over {low} bits, {num_high} high",
        batches,
        costs,
        options.loss,
        launched(add_up(np.where(is_wide, wide, narrow)), costs, low_bytes),
        found=is_wide,
        prompts=partial(on_gpu_ps, costs, low_bytes),
        fetched=float(g * layers * num_high * high_bytes / costs.shape.expert_bytes),
        bits=np.where(is_wide, high, low),
    )


DYNAEXQ = System(
    "dynaexq",
    (
        "hot set per group from a prior worth 16 tokens and the prompts; published: a long window, updated in decode",
        "promotions are copied beside compute and never waited for; prompts run at the low width",
        "widths and losses are our replicas'",
    ),
    dynaexq,
    dynaexq_memory,
)


# -- whole layers of experts on the GPU, as many as fit ----------------------------------------------------------------


def whole_layers(costs: Costs, options: ReplayOptions, expert_bytes: int) -> Memory:
    """As many of the model's layers on the GPU as fit, with experts of that size; the others on the host."""
    shape = costs.shape
    resident, layer_bytes = options.held(costs, expert_bytes) // shape.num_experts, shape.num_experts * expert_bytes
    return Memory(gpu=resident * layer_bytes, host=(shape.num_layers - resident) * layer_bytes)


def llama_cpp(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """llama.cpp with `--n-cpu-moe N`: the experts of N layers are computed by the CPU, those of the others by the GPU.

    Of prompts the weights of CPU layers are copied to the GPU, as llama.cpp does from 32 rows on, or the CPU is faster.
    """
    bits, shape, rows = options.choice("gguf_bits", WEIGHT_BITS), costs.shape, batches.loads.rows
    expert_bytes = costs.replica_bytes(bits)
    away = 1 - options.held(costs, expert_bytes) // shape.num_experts / shape.num_layers
    on_cpu = add_up(costs.cpu_experts_ps(rows, expert_bytes))
    on_cpu += each_ps(batches.rows, costs.hop_ps)[:, :, None]

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        copied, computed = streamed_ps(costs, expert_bytes, counts), costs.cpu_layers_ps(counts, expert_bytes)
        times: NDArray[np.float64] = (1 - away) * on_gpu_ps(costs, expert_bytes, counts)
        return times + away * np.minimum(copied, computed)

    pairs, read = int(rows.sum()), float((rows > 0).sum()) * expert_bytes
    cold = Cold(float(bits * away * pairs), round(away * pairs))
    if bits < FULL_PRECISION_BITS:
        cold = cold_at(batches, bits, options.loss)
    return without_device(
        f"{bits} bits",
        batches,
        costs,
        options.loss,
        (1 - away) * here_ps(costs, rows, expert_bytes) + away * on_cpu,
        found=round((1 - away) * pairs),
        prompts=layers_ps,
        cold=cold,
        traffic=Traffic(
            hbm_bytes=(1 - away) * read,
            host_bytes=away * read,
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
    lambda costs, options: whole_layers(costs, options, costs.replica_bytes(options.choice("gguf_bits", WEIGHT_BITS))),
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
    shape, rows = costs.shape, batches.loads.rows
    away = 1 - options.held(costs, shape.expert_bytes) // shape.num_experts / shape.num_layers
    compute, touched = here_ps(costs, rows), add_up(rows > 0)
    layer_fetch = costs.fetch_ps(shape.num_experts * shape.expert_bytes)
    if backend == "uva":
        moe = (1 - away) * compute + away * np.maximum(touched * costs.fetch_ps(), compute)
        fetched = away * float(touched.sum())
    else:  # the copy of a layer hides behind everything since the copy before it
        attention = each_case(np.ones_like(batches.rows), batches.kv_tokens, costs.attention_ps)[:, :, None]
        moe = np.maximum(compute, away * layer_fetch - attention)
        fetched = away * shape.num_experts * batches.shape[3] * int(batches.rows.astype(bool).sum())

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        here = on_gpu_ps(costs, shape.expert_bytes, counts)
        copied = streamed_ps(costs, shape.expert_bytes, counts) if backend == "uva" else np.maximum(here, layer_fetch)
        times: NDArray[np.float64] = (1 - away) * here + away * copied
        return times

    found = round((1 - away) * int(rows.sum()))
    return without_device(backend, batches, costs, options.loss, moe, found=found, prompts=layers_ps, fetched=fetched)


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
