"""Experts in full precision near memory, some of them on the GPU: MoNDE and PIMoE."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs, each_case, each_ps
from vllm_ndp.cost_model.memory import Memory, all_experts_bytes, slots_bytes
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, add_up, sums_after, sums_before
from vllm_ndp.lab.vectorised.execution import (
    cold_at,
    copied_in_order,
    launched,
    prompts_ps,
    run_pairs,
    shared_ps,
)
from vllm_ndp.lab.vectorised.outcome import Cold, Outcome, Traffic, layer_factor

ROUNDINGS = ("floor", "ceil", "cost")


def monde(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """MoNDE (arXiv 2405.18832): experts near memory in fp16; per layer the H most loaded ones move to the GPU.

    H = BW_link / (BW_link + BW_device) x active experts. At small batches the rounding of H decides: floor, ceil (as in
    a third-party simulator), or cost, the H that makes the layer shortest.
    """
    rounding = options.choice("h_rounding", ROUNDINGS, "cost")
    b = batches.shape[1]
    link, memory = costs.hardware.link.bulk_bytes_per_s, costs.hardware.dram.peak_bytes_per_s
    share = link / (link + memory)  # with the peak rates of the public re-implementation 32 / (32 + 512)
    device_expert_ps = partial(costs.device_expert_ps, FULL_PRECISION_BITS)

    def divided(counts: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """counts [..., S]: rows of experts, which all cross the link; rows [..., 1]: of the layer. Of a division: how
        many experts move, the device's time and the GPU's, and pairs and rows that the device gets; all [...]."""
        ranked = -np.sort(-counts, axis=-1)  # most loaded first
        rest, left = sums_after(each_ps(ranked, device_expert_ps)), sums_after(ranked)
        sent = np.minimum(left, rows)
        device_ps = np.where(rest > 0, rest + costs.device_fill_ps + each_case(sent, left, costs.link_ps), 0.0)
        gpu_ps = copied_in_order(each_ps(ranked, costs.gpu_expert_ps), np.zeros((*ranked.shape[:-1], 1)), costs)
        if rounding == "cost":
            chosen = np.maximum(gpu_ps, device_ps).argmin(axis=-1)
        else:
            active = (ranked > 0).sum(axis=-1)
            rounded = np.floor if rounding == "floor" else np.ceil
            chosen = np.minimum(rounded(share * active).astype(np.int64), active)
        return chosen, *(np.take_along_axis(a, chosen[..., None], -1)[..., 0] for a in (device_ps, gpu_ps, left, sent))

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        rows = counts.sum(axis=1, keepdims=True) // costs.shape.top_k
        _, device_ps, gpu_ps, _, _ = divided(counts, rows)
        times: NDArray[np.float64] = np.maximum(device_ps, gpu_ps)
        return times

    loads = batches.loads
    chosen, device_ps, gpu_ps, after, sent = divided(loads.rows, batches.rows[:, :, None, None])
    ranked = -np.sort(-loads.rows, axis=3)
    reads = np.bincount(ranked[np.arange(ranked.shape[3]) >= chosen[..., None]], minlength=b + 1)
    moved_bytes, on_device = int(chosen.sum()) * costs.shape.expert_bytes, int(after.sum())
    dram_pj, arrays_pj = costs.device_energy(b)[:, FULL_PRECISION_BITS] @ reads
    link_bytes = float(each_case(sent, after, costs.message_wire_bytes).sum())
    return Outcome(
        policy=f"H {rounding}",
        moe_ps=np.maximum(device_ps, gpu_ps + shared_ps(batches, costs)),
        device_ps=device_ps,
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        migrated_bytes=moved_bytes * layer_factor(batches, costs),
        hot_pairs=int(loads.rows.sum()) - on_device,
        cold=Cold(float(FULL_PRECISION_BITS * on_device), on_device),
        traffic=Traffic(moved_bytes, 0.0, link_bytes, float(dram_pj), float(arrays_pj)),
    )


MONDE = System(
    "monde",
    (
        "no expert is cached on the GPU between steps; device and copies to the GPU run side by side",
        "h_rounding=cost unless told otherwise; copies are pipelined with GPU compute",
        "prompts follow the same rule as decode (ours: MoNDE's own prefill rule is not public)",
    ),
    monde,
    lambda costs, _: Memory(gpu=slots_bytes(costs.shape, 0), device=all_experts_bytes(costs.shape)),
    options=("h_rounding",),
)


def pimoe(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """PIMoE (DAC 2025): of experts on both sides, the longest move to the GPU while that shortens the layer.

    The published system balances an NPU and PIM units. Duplex (arXiv 2409.01141) decides per expert by a table of both
    times, which is the same choice.
    """
    resident, loads = options.popular(options.budget.num_hot), batches.loads
    device_ps = partial(costs.device_expert_ps, FULL_PRECISION_BITS)
    here = np.where(loads.look_up(resident), loads.rows, 0)
    order = np.argsort(-here, axis=3, kind="stable")
    movable = np.take_along_axis(here, order, axis=3)  # longest first
    left = add_up(each_ps(loads.rows, device_ps))[..., None] - sums_before(each_ps(movable, device_ps))
    message = costs.message_ps(1, 1)
    shared = shared_ps(batches, costs)[..., None]
    gpu_ps = launched(sums_before(each_ps(movable, costs.gpu_expert_ps)), costs) + shared
    both = np.maximum(gpu_ps, np.where(left > 1.0, left + message, 0.0))
    moved = np.zeros(here.shape, np.bool_)
    np.put_along_axis(moved, order, np.arange(here.shape[3]) < both.argmin(axis=3)[..., None], axis=3)
    moved &= here > 0
    widths = np.where(loads.of_pairs(moved), 0, FULL_PRECISION_BITS).astype(np.uint8)
    on_gpu_ps, on_device_ps, traffic = run_pairs(batches, widths, costs)
    return Outcome(
        policy="longest to the GPU",
        moe_ps=np.maximum(on_gpu_ps, on_device_ps),
        device_ps=on_device_ps,
        prefill_ps=prompts_ps(batches, costs, resident),
        hot_pairs=int(loads.rows[moved].sum()),
        cold=cold_at(batches, widths, options.loss),
        traffic=traffic,
    )


PIMOE = System(
    "pimoe",
    (
        "popular experts are on the GPU too, as the published shared memory gives both sides all; no copies in decode",
        "the division is the best prefix by load, where moving one at a time until it no longer pays would stop",
        "full precision on both sides; prompts stream what the GPU does not hold",
    ),
    pimoe,
    lambda costs, options: Memory(options.gpu_memory(costs), device=all_experts_bytes(costs.shape)),
)
