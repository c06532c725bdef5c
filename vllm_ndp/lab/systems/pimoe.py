"""PIMoE (DAC 2025) on this hardware: experts on both sides in full precision, the longest moved until both sides agree.

num_hot popular experts lie in GPU memory and on the device, all others on the device alone. Each layer begins with all
on the device. The expert with most rows that the GPU also holds moves to the GPU, then the next. That goes on as long
as it shortens max(GPU, device). The published system balances an NPU and PIM units that share memory. Duplex (arXiv
2409.01141) decides per expert by a table of both times, which is the same choice.
"""

from __future__ import annotations

import numpy as np

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory, all_experts_bytes, slots_bytes
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import run_pairs, run_prompts, shared_ps
from vllm_ndp.lab.vectorised.loads import add_up, sums_before
from vllm_ndp.lab.vectorised.outcome import Outcome


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    return Memory(gpu=slots_bytes(costs.shape, options.budget.num_hot), device=all_experts_bytes(costs.shape))


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    g, b = batches.shape[:2]
    resident = options.popular(options.budget.num_hot)
    loads = batches.loads
    here = loads.look_up(resident) & (loads.rows > 0)
    device, gpu = costs.device_experts_ps(b)[FULL_PRECISION_BITS], costs.gpu_experts_ps(b)
    order = np.argsort(-np.where(here, loads.rows, 0), axis=3, kind="stable")
    movable = np.take_along_axis(np.where(here, loads.rows, 0), order, axis=3)  # longest first
    left = add_up(device[loads.rows])[..., None] - sums_before(device[movable])
    message = costs.device_fill_ps + costs.links_ps(b)[1, 1]
    shared = shared_ps(batches, costs)[..., None]
    both = np.maximum(sums_before(gpu[movable]) + shared, np.where(left > 1.0, left + message, 0.0))
    moved = np.zeros(here.shape, np.bool_)
    np.put_along_axis(moved, order, np.arange(here.shape[3]) < both.argmin(axis=3)[..., None], axis=3)
    moved &= here
    widths = np.where(moved.ravel()[loads.places], 0, FULL_PRECISION_BITS).astype(np.uint8)
    split = run_pairs(batches, widths, costs)
    pairs, on_gpu = int(loads.rows.sum()), int(loads.rows[moved].sum())
    return Outcome(
        policy="longest to the GPU",
        moe_ps=split.moe_ps,
        device_ps=split.device_ps,
        gpu_ps=split.gpu_ps,
        prefill_ps=run_prompts(batches, np.broadcast_to(resident, (g, *resident.shape)), costs),
        migration_ps=np.zeros(g),
        migrated_bytes=0.0,
        hot_pairs=on_gpu,
        cold_bits=float(FULL_PRECISION_BITS * (pairs - on_gpu)),
        cold_pairs=pairs - on_gpu,
        loss=0.0,
        traffic=split.traffic,
    )


PIMOE = System(
    "pimoe",
    (
        "popular experts are on the GPU too, as the published shared memory gives both sides all; no copies in decode",
        "the division is the best prefix by load, where moving one at a time until it no longer pays would stop",
        "full precision on both sides; prompts stream what the GPU does not hold",
    ),
    False,
    replay,
    memory,
)
