"""MoNDE (arXiv 2405.18832): every expert stays near memory in fp16; per layer the H most loaded ones move to the GPU.

H = BW_link / (BW_link + BW_device) x active experts. At small batches the rounding of H decides the baseline, so it is
an option. Choices: floor, ceil (as in a third-party simulator), round, or cost, the H that makes the layer shortest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory, all_experts_bytes, slots_bytes
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import copied_in_order, each_ps, prompts_ps, shared_ps
from vllm_ndp.lab.vectorised.loads import sums_after, sums_before
from vllm_ndp.lab.vectorised.outcome import Outcome, Traffic, layer_factor

ROUNDINGS = ("floor", "round", "ceil", "cost")


def moved_share(costs: Costs) -> float:
    """0.0588 = 32 / (32 + 512) with the peak rates of the public re-implementation; ours from the preset."""
    link, device = costs.hardware.link.bulk_bytes_per_s, costs.hardware.dram.peak_bytes_per_s
    return link / (link + device)


def num_moved(active: NDArray[np.int64], share: float, rounding: str) -> NDArray[np.int64]:
    """H for each number of active experts; not defined for `cost`, which needs times."""
    exact = share * active
    rounded: NDArray[np.float64] = {"floor": np.floor(exact), "round": np.rint(exact)}.get(rounding, np.ceil(exact))
    return rounded.astype(np.int64)


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Every expert beside the device's memory; the GPU holds the ones that pass through."""
    return Memory(gpu=slots_bytes(costs.shape, 0), device=all_experts_bytes(costs.shape))


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    rounding = options.choice("h_rounding", ROUNDINGS, "cost")
    g, b, d, layers, _ = batches.shape
    device, gpu, links = costs.device_experts_ps(b)[FULL_PRECISION_BITS], costs.gpu_experts_ps(b), costs.links_ps(b)
    share = moved_share(costs)
    moe, on_device, on_gpu = np.zeros((3, g, d, layers))
    reads, wire, link_bytes = np.zeros(b + 1, np.int64), costs.message_wire_bytes(b), 0.0
    moved_pairs = moved = 0
    for part in batches.loads.chunks():
        ranked = -np.sort(-batches.loads.rows[:, part], axis=3)  # most loaded first
        active = (ranked > 0).sum(axis=3)
        rest, left = sums_after(device[ranked]), sums_after(ranked)
        rows = np.minimum(left, batches.rows[:, part, None, None])
        device_ps = np.where(rest > 0, rest + costs.device_fill_ps + links[rows, left], 0.0)
        gpu_ps = copied_in_order(gpu[ranked], np.zeros((*ranked.shape[:3], 1)), costs)
        compute = sums_before(gpu[ranked])
        if rounding == "cost":
            chosen = np.maximum(gpu_ps, device_ps).argmin(axis=3)
        else:
            chosen = np.minimum(num_moved(active, share, rounding), active)
        device_ps, gpu_ps, compute, after = (
            np.take_along_axis(a, chosen[..., None], 3)[..., 0] for a in (device_ps, gpu_ps, compute, left)
        )
        on_device[:, part], on_gpu[:, part] = device_ps, compute
        moe[:, part] = np.maximum(device_ps, gpu_ps + shared_ps(batches, costs)[:, part])
        moved += int(chosen.sum())
        stays = np.arange(ranked.shape[3]) >= chosen[..., None]
        reads += np.bincount(ranked[stays], minlength=b + 1)
        sent = np.take_along_axis(rows, chosen[..., None], 3)[..., 0]
        link_bytes += float(wire[sent, after].sum())
        moved_pairs += int((left[..., 0] - after).sum())
    pairs = int(np.broadcast_to(batches.pairs, batches.ids.shape).sum())
    dram_pj, arrays_pj = costs.device_energy(b)[:, FULL_PRECISION_BITS] @ reads

    def layers_ps(counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The same rule for the rows of a prompt; they all cross the link."""
        ranked = -np.sort(-counts, axis=1)
        rest = sums_after(each_ps(ranked, lambda rows: costs.device_expert_ps(FULL_PRECISION_BITS, rows)))
        left, rows = sums_after(ranked), counts.sum(axis=1, keepdims=True) // costs.shape.top_k
        message = costs.messages_ps(np.minimum(left, rows), left)
        beside = np.where(rest > 0, rest + costs.device_fill_ps + message, 0.0)
        here = copied_in_order(
            each_ps(ranked, lambda rows: costs.resident_ps(1, rows)), np.zeros((len(counts), 1)), costs
        )
        layer = np.maximum(here, beside)
        active = (counts > 0).sum(axis=1)
        chosen = layer.argmin(axis=1) if rounding == "cost" else np.minimum(num_moved(active, share, rounding), active)
        times: NDArray[np.float64] = np.take_along_axis(layer, chosen[:, None], 1)[:, 0]
        return times

    return Outcome(
        policy=f"H {rounding}",
        moe_ps=moe,
        device_ps=on_device,
        gpu_ps=on_gpu,
        prefill_ps=prompts_ps(batches, costs, layers_ps),
        migration_ps=np.zeros(g),
        migrated_bytes=moved * layer_factor(batches, costs) * costs.shape.expert_bytes,
        hot_pairs=moved_pairs,
        cold_bits=float(FULL_PRECISION_BITS * (pairs - moved_pairs)),
        cold_pairs=pairs - moved_pairs,
        loss=0.0,
        traffic=Traffic(moved * costs.shape.expert_bytes, 0.0, link_bytes, float(dram_pj), float(arrays_pj)),
        notes={"h_share": share},
    )


MONDE = System(
    "monde",
    (
        "no expert is cached on the GPU between steps; device and copies to the GPU run side by side",
        "h_rounding=cost unless told otherwise; copies are pipelined with GPU compute",
        "prompts follow the same rule as decode (ours: MoNDE's own prefill rule is not public)",
    ),
    False,
    replay,
    memory,
    is_bounded=True,
    options=("h_rounding",),
)
