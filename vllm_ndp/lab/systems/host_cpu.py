"""Popular experts on the GPU, others computed by the host's CPU: Fiddler, DAOP and KTransformers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs, each_ps
from vllm_ndp.cost_model.memory import Memory, all_experts_bytes
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, add_up
from vllm_ndp.lab.vectorised.execution import (
    LOSS_OF_SKIPPING,
    here_ps,
    on_gpu_ps,
    with_copies,
    without_device,
)
from vllm_ndp.lab.vectorised.outcome import Cold, Outcome, Traffic, layer_factor, time_before
from vllm_ndp.planning.plan import highest


def fiddler_memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Popular experts never leave the GPU: host memory holds the others."""
    return Memory(options.gpu_memory(costs), host=all_experts_bytes(costs.shape) - options.room(costs))


def fiddler(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """Fiddler (arXiv 2402.07033): popular experts on the GPU, a missing one on the CPU or copied, the faster of both.

    Weights cross the link only when many rows share them.
    """
    fetch, resident = costs.fetch_ps(), options.popular(options.budget.num_hot)

    def layers(rows: NDArray[np.int64], here: NDArray[np.bool_]) -> tuple[NDArray[Any], ...]:
        """(time of a layer [...], which experts are copied, which the host computes, both [..., S]): of decode and of
        a prompt."""
        gpu = each_ps(rows, costs.gpu_expert_ps)
        host = each_ps(rows, costs.hop_ps) + costs.cpu_experts_ps(rows, costs.shape.expert_bytes)
        away = (rows > 0) & ~here
        on_host = away & (host <= fetch + gpu)
        gpu, copied = np.where(on_host, 0.0, gpu), away & ~on_host
        times = np.maximum(with_copies(gpu, copied, costs), add_up(np.where(on_host, host, 0.0)))
        return times, copied, on_host

    rows, here = batches.loads.rows, batches.loads.look_up(resident)
    moe, copied, on_host = layers(rows, here)
    return without_device(
        "static",
        batches,
        costs,
        options.loss,
        moe,
        found=here,
        prompts=lambda counts: layers(counts, resident)[0],
        fetched=int(copied.sum()),
        on_host=on_host,
        crossing=int(rows[on_host].sum()),
    )


FIDDLER = System(
    "fiddler",
    (
        "CPU: 20 TFLOP/s (CXL-Expert's description), 307 GB/s (8 x DDR5-4800); fp16 weights on both sides",
        "CPU and GPU run side by side, in prompts too: each expert where its rows are done sooner",
    ),
    fiddler,
    fiddler_memory,
)


ACCURACY = 0.9  # [O] of predicting the next layer's experts, as for MoEpic


def daop(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """DAOP (arXiv 2501.10375): per-sequence hot experts on the GPU, and cold ones computed by the CPU a layer ahead.

    The CPU predicts them from this layer's activations, while this layer runs. For a cold expert that was not predicted
    the published graceful degradation takes the best expert that is there.
    """
    hot, loads = highest(batches.prompt_counts, options.budget.num_hot), batches.loads
    here = loads.look_up(hot)
    on_gpu = here_ps(costs, np.where(here, loads.rows, 0))
    cold = np.where(here, 0, loads.rows)
    hops = np.where(add_up(cold) > 0, each_ps(batches.rows, costs.hop_ps)[..., None], 0)
    busy = ACCURACY * (add_up(costs.cpu_experts_ps(cold, costs.shape.expert_bytes)) + hops)
    late = np.maximum(busy - time_before(on_gpu, batches, costs), 0.0)
    cold_pairs = int(cold.sum())
    is_cold = ~loads.of_pairs(here) & batches.pairs
    lost = (1 - ACCURACY) * LOSS_OF_SKIPPING * float((batches.weights * is_cold).sum())
    return without_device(
        "per sequence, CPU a layer ahead",
        batches,
        costs,
        options.loss,
        np.maximum(on_gpu, late),
        found=here,
        prompts=options.popular(options.budget.num_hot),
        fetched=float(hot.sum()),
        cold=Cold(float(FULL_PRECISION_BITS * cold_pairs), cold_pairs, lost / batches.num_decisions),
        traffic=Traffic(
            hbm_bytes=float(((loads.rows > 0) & here).sum()) * costs.shape.expert_bytes,
            host_bytes=ACCURACY * float((cold > 0).sum()) * costs.shape.expert_bytes,
        ),
    )


DAOP = System(
    "daop",
    (
        "the prompt's most used experts move to the GPU, beside the prompt that streams them anyway: no extra time",
        "90 % of cold experts are predicted (a guess), the others are replaced: counted as skipped, the worst",
        "computing from the activations of a layer before also loses; how much is not known and not counted",
    ),
    daop,
)


CPU_BITS, GPU_BITS = (FULL_PRECISION_BITS, 8, 4), (FULL_PRECISION_BITS, 4)


def _widths(options: ReplayOptions) -> tuple[int, int]:
    """Bits on the CPU and on the GPU."""
    return options.choice("cpu_bits", CPU_BITS), options.choice("gpu_bits", GPU_BITS)


def ktransformers_memory(costs: Costs, options: ReplayOptions) -> Memory:
    """The host keeps only the experts that are not on the GPU."""
    cold_bytes, hot_bytes = map(costs.replica_bytes, _widths(options))
    on_gpu = options.held(costs, hot_bytes)
    away = costs.shape.num_layers * costs.shape.num_experts - on_gpu
    return Memory(gpu=on_gpu * hot_bytes, host=away * cold_bytes)


def ktransformers(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """KTransformers' `frequency` placement: the experts used most, over all layers, on the GPU; all others on the CPU.

    `--kt-num-gpu-experts K --kt-expert-placement-strategy frequency`: the K x L highest counts of a profile over all
    layers at once, so a skewed layer gets more. CPU and GPU compute a layer side by side. `cpu_bits` as its AMX kernels
    have them; of narrow experts the same memory holds more. Source: kt-kernel's generate_gpu_experts_masks and its
    test, github.com/kvcache-ai/ktransformers.
    """
    bits, gpu_bits = _widths(options)
    cold_bytes, hot_bytes = costs.replica_bytes(bits), costs.replica_bytes(gpu_bits)
    prior, places = options.prior.values, int(options.held(costs, hot_bytes) / layer_factor(batches, costs))
    hot = highest(prior.ravel(), places).reshape(prior.shape)  # of equal ones the earlier layer and lower id
    rows, here = batches.loads.rows, batches.loads.look_up(hot)
    cold = np.where(here, 0, rows)
    crossing = np.minimum(add_up(cold), batches.rows[:, :, None])  # activations of a row cross once
    on_cpu = add_up(costs.cpu_experts_ps(cold, cold_bytes)) + each_ps(crossing, costs.hop_ps)

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        resident = on_gpu_ps(costs, hot_bytes, np.where(hot, counts, 0))
        return np.maximum(resident, costs.cpu_layers_ps(np.where(hot, 0, counts), cold_bytes))

    return without_device(
        f"frequency, CPU {bits} bits" + (f", GPU {gpu_bits}" if gpu_bits < FULL_PRECISION_BITS else ""),
        batches,
        costs,
        options.loss,
        np.maximum(here_ps(costs, np.where(here, rows, 0), hot_bytes), on_cpu),
        found=here,
        prompts=layers_ps,
        bits=np.where(here, gpu_bits, bits),
        on_host=~here,
        crossing=int(crossing.sum()),
    )


KTRANSFORMERS = System(
    "ktransformers",
    (
        "frequency placement over all layers from the prior; static; no expert deferral (which changes the model)",
        "CPU: 20 TFLOP/s (CXL-Expert's description) and 85 % of 307 GB/s (8 x DDR5-4800), in prompts too",
        "8- and 4-bit CPU experts have our replicas' sizes and losses",
    ),
    ktransformers,
    ktransformers_memory,
    options=("cpu_bits", "gpu_bits"),
)
