"""Every expert in GPU memory, at one width or at two. No device, no link, nothing is ever missing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory
from vllm_ndp.lab.systems.system import ReplayOptions, System, TooFewPlaces
from vllm_ndp.lab.vectorised.batches import Batches, add_up
from vllm_ndp.lab.vectorised.execution import cold_at, launched, on_gpu_ps, prompts_ps, without_device
from vllm_ndp.lab.vectorised.outcome import Outcome, Traffic
from vllm_ndp.planning.plan import highest

WEIGHT_BITS = (FULL_PRECISION_BITS, 8, 4, 3, 2)


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
    """The usual alternative: every expert in GPU memory, all at one width. No device, no link, no migration.

    `weight_bits`: one of WEIGHT_BITS; one that does not fit is refused.
    """
    bits = chosen_bits(costs, options)
    rows, expert_bytes = batches.loads.rows, costs.replica_bytes(bits)
    moe = launched(add_up(costs.gpu_experts_ps(batches.shape[1], expert_bytes)[rows]), costs, expert_bytes)
    return without_device(
        f"{bits} bits",
        batches,
        costs,
        moe_ps=moe,
        prefill_ps=prompts_ps(batches, costs, lambda counts: on_gpu_ps(costs, counts, expert_bytes)),
        hot_pairs=int(rows.sum()),
        cold=cold_at(batches, bits % FULL_PRECISION_BITS, options.loss),
        traffic=Traffic(hbm_bytes=float((rows > 0).sum()) * expert_bytes),
    )


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
    """DynaExq (arXiv 2511.15015): every expert in GPU memory, the hot ones at more bits, chosen by what was used
    lately.

    A low width for all, and as many of the hottest per layer at a high width as the memory of num_hot full-precision
    experts leaves. The closest rival of context-aware bits on a device: the same idea inside GPU memory.
    """
    high, low, num_high = dynaexq_widths(costs, options)
    g, b, _, layers, k = batches.shape
    heat = batches.prompt_counts + PRIOR_TOKENS * k * options.prior.values
    loads = batches.loads
    is_wide = loads.look_up(highest(heat, num_high))
    tables = [costs.gpu_experts_ps(b, costs.replica_bytes(bits)) for bits in (low, high)]
    each = add_up(np.where(is_wide, tables[1][loads.rows], tables[0][loads.rows]))
    moe = launched(each, costs, costs.replica_bytes(low))
    used = loads.rows > 0
    ran = np.where(is_wide.ravel()[loads.places], high, low)
    read = used.sum() * costs.replica_bytes(low) + (used & is_wide).sum() * (
        costs.replica_bytes(high) - costs.replica_bytes(low)
    )

    def layers_ps(prompt: NDArray[np.int64]) -> NDArray[np.float64]:
        return on_gpu_ps(costs, prompt, costs.replica_bytes(low))

    return without_device(
        f"{high} over {low} bits, {num_high} high",
        batches,
        costs,
        moe_ps=moe,
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        fetched_experts=float(g * layers * num_high * costs.replica_bytes(high) / costs.shape.expert_bytes),
        hot_pairs=int(loads.rows[is_wide].sum()),
        cold=cold_at(batches, ran % FULL_PRECISION_BITS, options.loss),
        traffic=Traffic(hbm_bytes=float(read)),
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
