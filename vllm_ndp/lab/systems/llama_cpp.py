"""llama.cpp with `--n-cpu-moe N`: the experts of N layers are computed by the CPU, those of the others by the GPU.

Static and whole layers, one width for all (`gguf_bits`: 16, 8, 4, 3, 2): as many layers on the GPU as the memory of
num_hot full-precision experts per layer holds. Decode: a layer's experts run on one side, nothing overlaps. Prompts:
weights of CPU layers are copied to the GPU and used there, as llama.cpp does from 32 rows on, or the CPU is faster.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs, HostCpu
from vllm_ndp.cost_model.memory import Memory
from vllm_ndp.lab.systems.quantized import WEIGHT_BITS
from vllm_ndp.lab.systems.system import ReplayOptions, System, resident_layers, whole_layers
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import gate_loss, on_gpu_ps, prompts_ps, without_device
from vllm_ndp.lab.vectorised.loads import add_up
from vllm_ndp.lab.vectorised.outcome import Outcome, Traffic


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    return whole_layers(costs, options.budget.num_hot, costs.replica_bytes(options.choice("gguf_bits", WEIGHT_BITS)))


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    bits = options.choice("gguf_bits", WEIGHT_BITS)
    _, b, _, _, _ = batches.shape
    cpu, shape, rows = HostCpu.of(costs), costs.shape, batches.loads.rows
    expert_bytes = costs.replica_bytes(bits)
    away = 1 - resident_layers(costs, options.budget.num_hot, expert_bytes) / shape.num_layers
    gpu = on_gpu_ps(costs, np.arange(b + 1)[:, None], expert_bytes)
    on_gpu = add_up(gpu[rows])
    on_cpu = add_up(cpu.experts_ps(costs, b, expert_bytes, cpu.memory_bytes_per_s)[rows])
    on_cpu += cpu.hops_ps(costs, b)[batches.rows][:, :, None]
    fetch = costs.fetch_ps(expert_bytes)

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        here = on_gpu_ps(costs, counts, expert_bytes)
        copied = np.maximum((counts > 0).sum(axis=1) * fetch, here)
        computed = cpu.layers_ps(costs, counts, expert_bytes)
        times: NDArray[np.float64] = (1 - away) * here + away * np.minimum(copied, computed)
        return times

    pairs, used = int(rows.sum()), float((rows > 0).sum())
    quantized = bits < FULL_PRECISION_BITS
    widths = np.full(batches.ids.shape, bits if quantized else 0, np.uint8)
    return without_device(
        f"{bits} bits",
        batches,
        costs,
        moe_ps=(1 - away) * on_gpu + away * on_cpu,
        gpu_ps=(1 - away) * on_gpu,
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        fetched_experts=0.0,
        hot_pairs=round((1 - away) * pairs),
        cold_bits=float(bits * pairs) if quantized else float(bits * away * pairs),
        cold_pairs=pairs if quantized else round(away * pairs),
        loss=gate_loss(batches, widths, options.loss),
        traffic=Traffic(
            hbm_bytes=(1 - away) * used * expert_bytes,
            host_bytes=away * used * expert_bytes,
            link_bytes=away * pairs / shape.top_k * 2 * shape.hidden_size * shape.dtype_bytes,
        ),
        notes={"layers_on_cpu": away * shape.num_layers},
    )


LLAMA_CPP = System(
    "llama_cpp",
    (
        "--n-cpu-moe: whole layers of experts, static, one width for all; a layer runs on one side, nothing overlaps",
        "CPU: 20 TFLOP/s (seed 002) and 307 GB/s (8 x DDR5-4800), both reached in full",
        "widths are those of our replicas, scales included; GGUF's own mixtures differ by some tenths of a bit",
    ),
    False,
    replay,
    memory,
    options=("gguf_bits",),
)
