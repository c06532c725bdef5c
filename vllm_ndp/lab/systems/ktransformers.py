"""KTransformers' `frequency` placement: the experts used most, over all layers, on the GPU; all others on the CPU.

`--kt-num-gpu-experts K --kt-expert-placement-strategy frequency`: the K x L highest counts of a profile over all layers
at once. So K per layer is an average, and a skewed layer gets more. Nothing moves. CPU and GPU compute a layer side by
side. `cpu_bits` 16 (lossless) or 8 or 4, as its AMX kernels have them, `gpu_bits` 16 or 4: of narrow experts the same
memory holds more. Prompts run on both sides in the same way.
source: kt-kernel's generate_gpu_experts_masks and its test, github.com/kvcache-ai/ktransformers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs, HostCpu
from vllm_ndp.cost_model.memory import Memory
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import gate_loss, on_gpu_ps, prompts_ps, without_device
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome, Traffic, layer_factor

CPU_BITS, GPU_BITS = (FULL_PRECISION_BITS, 8, 4), (FULL_PRECISION_BITS, 4)


def most_used(frequency: NDArray[np.float64], num_experts: int) -> NDArray[np.bool_]:
    """[L, E], the num_experts highest of all layers together; of equal ones the earlier layer and lower id."""
    order = np.argsort(-frequency.ravel(), kind="stable")[:num_experts]
    hot = np.zeros(frequency.size, np.bool_)
    hot[order] = True
    return hot.reshape(frequency.shape)


def _widths(options: ReplayOptions) -> tuple[int, int]:
    """Bits on the CPU and on the GPU."""
    return options.choice("cpu_bits", CPU_BITS), options.choice("gpu_bits", GPU_BITS)


def _on_gpu(costs: Costs, options: ReplayOptions) -> int:
    """Experts of the model in the GPU memory of num_hot full-precision ones per layer."""
    shape = costs.shape
    room = shape.num_layers * min(options.budget.num_hot, shape.num_experts) * shape.expert_bytes
    return min(room // costs.replica_bytes(_widths(options)[1]), shape.num_layers * shape.num_experts)


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Bytes by place: the host keeps only the experts that are not on the GPU."""
    shape, on_gpu = costs.shape, _on_gpu(costs, options)
    away = shape.num_layers * shape.num_experts - on_gpu
    cold_bytes, hot_bytes = map(costs.replica_bytes, _widths(options))
    return Memory(gpu=on_gpu * hot_bytes, host=away * cold_bytes)


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    bits, gpu_bits = _widths(options)
    g, b, d, layers, _ = batches.shape
    cpu, cold_bytes, hot_bytes = HostCpu.of(costs), costs.replica_bytes(bits), costs.replica_bytes(gpu_bits)
    hot = most_used(options.prior.values, int(_on_gpu(costs, options) / layer_factor(batches, costs)))
    gpu = on_gpu_ps(costs, np.arange(b + 1)[:, None], hot_bytes)
    on_cpu, hop = cpu.experts_ps(costs, b, cold_bytes, cpu.memory_bytes_per_s), cpu.hops_ps(costs, b)
    moe, gpu_ps = np.zeros((2, g, d, layers))
    hits = gpu_experts = cpu_experts = crossed = 0
    for part in batches.loads.chunks():
        rows, here = batches.loads.rows[:, part], batches.loads.look_up(hot, part)
        gpu_ps[:, part] = add_up(gpu[np.where(here, rows, 0)])
        cold = np.where(here, 0, rows)
        crossing = np.minimum(add_up(cold), batches.rows[:, part, None])  # activations of a row cross once
        moe[:, part] = np.maximum(gpu_ps[:, part], add_up(on_cpu[cold]) + hop[crossing])
        hits += int(np.where(here, rows, 0).sum())
        gpu_experts += int((here & (rows > 0)).sum())
        cpu_experts += int((cold > 0).sum())
        crossed += int(crossing.sum())

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        resident = on_gpu_ps(costs, np.where(hot, counts, 0), hot_bytes)
        return np.maximum(resident, cpu.layers_ps(costs, np.where(hot, 0, counts), cold_bytes))

    pairs = int(batches.loads.rows.sum())
    by_expert = np.where(hot, gpu_bits, bits).astype(np.uint8)
    by_expert[by_expert == FULL_PRECISION_BITS] = 0
    widths = by_expert[np.arange(layers)[:, None], batches.ids]
    narrow_hits = hits if gpu_bits < FULL_PRECISION_BITS else 0
    return without_device(
        f"frequency, CPU {bits} bits" + (f", GPU {gpu_bits}" if gpu_bits < FULL_PRECISION_BITS else ""),
        batches,
        costs,
        moe_ps=moe,
        gpu_ps=gpu_ps,
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        fetched_experts=0.0,
        hot_pairs=hits,
        cold_bits=float(bits * (pairs - hits) + gpu_bits * narrow_hits),
        cold_pairs=pairs - hits + narrow_hits,
        loss=gate_loss(batches, widths.astype(np.uint8), options.loss),
        traffic=Traffic(
            hbm_bytes=gpu_experts * hot_bytes,
            host_bytes=cpu_experts * cold_bytes,
            link_bytes=crossed * 2.0 * costs.shape.hidden_size * costs.shape.dtype_bytes,
        ),
        notes={"gpu_experts_per_layer": hot.sum(axis=1).tolist()},
    )


KTRANSFORMERS = System(
    "ktransformers",
    (
        "frequency placement over all layers from the prior; static; no expert deferral (which changes the model)",
        "CPU: 20 TFLOP/s (seed 002) and 307 GB/s (8 x DDR5-4800), both reached in full, in prompts too",
        "8- and 4-bit CPU experts have our replicas' sizes and losses",
    ),
    False,
    replay,
    memory,
    options=("cpu_bits", "gpu_bits"),
)
