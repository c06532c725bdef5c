"""Ours: every expert in the tier and at the width that the joint planner finds (planning/joint.py), in the same memory.

One plan per group, made when its prompts are done. `max_gate_loss` sets another limit than what the paper's plan loses:
of the column `loss`, in units of what every expert loses at 1 bit. Experts that the prompts streamed and that stay at
16 or 8 bits cost nothing to move. All others cross the link, 8 bits as 16; replicas cross at their width: only the
planes and scales that are not there yet.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import BYTE_BITS, FULL_PRECISION_BITS, WIDTHS
from vllm_ndp.cost_model.costs import Costs, each_case, each_ps
from vllm_ndp.cost_model.memory import Memory, all_experts_bytes, beside_device_memory
from vllm_ndp.lab.systems.host_cpu import CPU_BITS
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches, add_up
from vllm_ndp.lab.vectorised.execution import cold_at, prompts_ps, shared_ps
from vllm_ndp.lab.vectorised.outcome import Outcome, Traffic, layer_factor
from vllm_ndp.layer.joint_rule import OF_ONE_BIT, TIER_SETS, JointRule, Menu, losses_by_width, unit_of
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import BitwidthPlan, Placement, top_experts

GPU_BITS = (16, 8, 4, 3, 2)


def widths_of(costs: Costs, options: ReplayOptions) -> dict[str, tuple[int, ...]]:
    """By tier."""
    in_bytes = (BYTE_BITS,) if costs.has_bytes else ()
    on_device = (FULL_PRECISION_BITS, *in_bytes, *range(options.widest, WIDTHS[0] - 1, -1))
    held = {"gpu": GPU_BITS, "host": CPU_BITS, "device": on_device}
    return {tier: held[tier] for tier in options.choice("tiers", TIER_SETS).split("+")}


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Memory of a joint plan: K full-precision experts per layer on the GPU, all experts and replicas on the device.

    The host holds the experts that its CPU may compute.
    """
    tiers = widths_of(costs, options)
    gpu = options.gpu_memory(costs)
    if "device" not in tiers:
        return Memory(gpu=gpu, host=all_experts_bytes(costs.shape))
    held = beside_device_memory(costs, 0, options.widest)
    host = all_experts_bytes(costs.shape) if "host" in tiers else 0
    return replace(held, gpu=gpu, host=host)


def papers(
    options: ReplayOptions, scores: list[ImportanceScore], values: NDArray[np.float64]
) -> tuple[Placement, BitwidthPlan]:
    """The paper's plan with the same memory and average bits, for requests of these scores and their mean [L, E]."""
    if options.clairvoyant:
        placement = top_experts(values, options.budget.num_hot)
    else:
        placement = options.policy.place(scores, Placement(np.zeros(values.shape, np.bool_)), options.budget)
    bits = options.policy.assign(ImportanceScore.from_weights(values), placement, options.loss, options.budget).bits
    return placement, BitwidthPlan(np.where(bits <= WIDTHS[-1], np.minimum(bits, options.widest), bits))


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    g, b, _, layers, _ = batches.shape
    menu = Menu(costs, widths_of(costs, options), b)
    on_gpu, on_host, on_device = (menu.where(tier) for tier in ("gpu", "host", "device"))
    unit, limit = unit_of(options.loss), None
    if "max_gate_loss" in options.own:
        unit, limit = OF_ONE_BIT, options.number("max_gate_loss", 0.0, 0.0, 1.0)
    elif not on_device.any():
        raise ConfigError(
            f"tiers {menu.tiers} have no plan of the paper to compare with: give --option max_gate_loss=X"
        )
    losses = losses_by_width(options.loss, unit)
    room, steps = options.room(costs) / layer_factor(batches, costs), float((batches.rows > 0).sum() / g)
    rule = JointRule(costs, menu.widths, losses, room, most_loss=limit, steps_to_come=steps)
    even = ImportanceScore.from_weights(np.ones((layers, batches.num_experts)))  # nothing is known
    last = rule.choose(even.values, b, *papers(options, [even], even.values)).chosen
    chosen, before = np.zeros((2, g, layers, batches.num_experts), np.int64)
    moved = np.zeros(g)
    for group in range(g):
        before[group] = last
        known = (batches.decodes if options.clairvoyant else batches.prompts)[group]
        scores = [options.policy.score(stats) for stats in known]
        values = np.mean([score.values for score in scores], axis=0)
        streamed = np.any([stats.counts > 0 for stats in batches.prompts[group]], axis=0) & ~on_gpu[last]
        plan = rule.choose(values, b, *papers(options, scores, values), streamed)
        last = chosen[group] = plan.chosen
        moved[group] = plan.problem.moved_bytes(last)
    loads = batches.loads
    slots = loads.look_up(chosen)  # [G, D, L, S]
    times, used, bits = menu.ps[slots, loads.rows], loads.rows > 0, menu.bits[slots].astype(np.int64)
    gpu, host, device = (add_up(np.where(here[slots], times, 0.0)) for here in (on_gpu, on_host, on_device))
    away, aside = (add_up(loads.of_pairs(here[slots]) & batches.pairs) for here in (on_device, on_host))
    pairs, rows = away.sum(axis=1), (away > 0).sum(axis=1)
    device += np.where(rows > 0, each_case(rows, pairs, costs.link_ps) + costs.device_fill_ps, 0.0)
    host += each_ps((aside > 0).sum(axis=1), costs.hop_ps)
    gpu += np.where(on_gpu[slots] & used, menu.openings[slots], 0.0).max(axis=-1) + shared_ps(batches, costs)
    read = np.where(used, costs.bytes_of_width[bits], 0)
    energy = np.where(on_device[slots], costs.device_energy(b)[:, bits, loads.rows], 0.0)
    dram_pj, arrays_pj = energy.sum(axis=(1, 2, 3, 4))
    bytes_moved = moved * layer_factor(batches, costs)
    whole = [round(each / costs.shape.expert_bytes) for each in bytes_moved]
    return Outcome(
        policy=f"{options.policy_name}, {menu.tiers}, loss in {unit}",
        moe_ps=np.maximum(np.maximum(gpu, device), host),
        device_ps=device,
        prefill_ps=prompts_ps(batches, costs, on_gpu[before]),
        migration_ps=np.array([costs.gpu.migration_ps(count) for count in whole], np.float64),
        migrated_bytes=float(bytes_moved.sum()),
        hot_pairs=int(loads.rows[on_gpu[slots]].sum()),
        cold=cold_at(batches, loads.of_pairs(bits % FULL_PRECISION_BITS), options.loss),
        traffic=Traffic(
            hbm_bytes=float(read[on_gpu[slots]].sum()),
            host_bytes=float(read[on_host[slots]].sum()),
            link_bytes=float(each_case(rows, pairs, costs.message_wire_bytes).sum()),
            device_dram_pj=float(dram_pj),
            device_arrays_pj=float(arrays_pj),
        ),
        over_least=plan.time_ps / plan.least_ps - 1,
    )


JOINT = System(
    "joint",
    (
        "one plan per group; the fastest that is expected to lose no more than the paper's at the same memory and bits",
        "that limit is of the row's own policy: a policy that loses more may be faster here, so look at both",
        "losses are nats where the replicas were made with text, else in units of what each expert loses at 1 bit",
        "unless replicas have them, 8 bits are rounded from 16 on arrival and lose 4.4x less per bit than 4",
        "dequantising on the GPU is free beside the read; prompts as the paper's, other experts streamed in 16 bits",
        "moving is weighed against as many steps to come as the trace's groups have on average",
    ),
    replay,
    memory,
    follows_policy=True,
    fills_memory=True,
    options=("tiers", "max_gate_loss"),
)
