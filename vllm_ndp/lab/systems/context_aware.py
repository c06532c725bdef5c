"""The paper (arXiv 2512.04476): hot experts on the GPU in fp16, cold ones computed by the device at 1-4 bits.

Placement and bits are decided when a group's prompts are done and hold for its whole decode. The policy is a parameter,
so this file also replays static, random, prior-shrunk and clairvoyant placement on the same hardware.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import REPLICA_WIDTHS, WIDTHS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import beside_device_memory
from vllm_ndp.lab.systems.system import Memory, ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import SKIPPED, run_pairs, run_prompts
from vllm_ndp.lab.vectorised.outcome import Outcome, layer_factor
from vllm_ndp.layer.joint_menu import OF_ONE_BIT, losses_by_width
from vllm_ndp.layer.prefill_split import PrefillSplit
from vllm_ndp.planning.importance import AUTO_MORE_BITS, has_common_bits, scores_for_bits
from vllm_ndp.planning.placement import top_experts
from vllm_ndp.planning.plan import Placement

PREFILLS = ("streamed", "split")
"""The option `prefill`: as published, or as the plugin does where it can (layer/prefill_split.py)."""
LOSS_OF_SKIPPING = 1 / (1 - 2 / np.pi)
"""Loss of an expert that is not computed at all, in units of its loss at 1 bit, if only that is known. The best one-bit
quantizer of a normal variable leaves 1 - 2 / pi of its energy (Max 1960); skipping leaves all of it."""


_LOSS_COLUMN = np.zeros(256, np.int64)
_LOSS_COLUMN[[1, 2, 3, 4, 8, SKIPPED]] = 1, 2, 3, 4, 5, 6
"""Column of a width in gate_loss's table; column 0 loses nothing."""


def plan_groups(
    batches: Batches, options: ReplayOptions
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.uint8]]:
    """(hot, hot before) [G, L, E] and bits [G, B, L, E] of every group in turn."""
    g, b, _, layers, _ = batches.shape
    shape = (layers, batches.num_experts)
    hot, before = np.zeros((2, g, *shape), np.bool_)
    bits = np.zeros((g, b, *shape), np.uint8)
    current = np.zeros(shape, np.bool_)
    current[:, : options.budget.num_hot] = True  # as the plugin starts: the lowest ids, before anything is known
    for group in range(g):
        before[group] = current
        known = (batches.decodes if options.clairvoyant else batches.prompts)[group]
        scores = [options.policy.score(stats) for stats in known]
        if options.clairvoyant:  # no fixed placement covers more of the group's decode, whatever the batch rule
            counts = np.sum([stats.counts for stats in known], axis=0).astype(np.float64)
            placement = top_experts(counts, options.budget.num_hot)
        else:
            placement = options.policy.place(scores, Placement(current), options.budget)
        if options.migration == "budgeted":
            ranking = np.sum([score.values for score in scores], axis=0)
            placement = Placement(few_moves(current, ranking, options.migration_budget, options.hysteresis))
        current = hot[group] = placement.hot
        is_auto_common = options.bits_for == "auto" and has_common_bits("auto", b)
        budget = options.budget.with_more_bits(AUTO_MORE_BITS) if is_auto_common else options.budget
        for request, score in enumerate(scores_for_bits(scores, options.bits_for)):
            planned = options.policy.assign(score, placement, options.loss, budget).bits
            bits[group, request] = np.where(planned <= WIDTHS[-1], np.minimum(planned, options.widest), planned)
    return hot, before, bits


def few_moves(hot: NDArray[np.bool_], ranking: NDArray[np.float64], most: int, hysteresis: float) -> NDArray[np.bool_]:
    """Exchange the least important hot expert for the most important cold one, up to `most` times per layer.

    Stops where the newcomer's score no longer exceeds the other's by the factor 1 + hysteresis.
    """
    out = hot.copy()
    for layer, row in enumerate(ranking):
        leaving = np.flatnonzero(hot[layer])[np.argsort(row[hot[layer]], kind="stable")][:most]
        coming = np.flatnonzero(~hot[layer])[np.argsort(-row[~hot[layer]], kind="stable")][: len(leaving)]
        leaving = leaving[: len(coming)]
        worth = row[coming] > (1 + hysteresis) * row[leaving]
        out[layer, leaving[worth]], out[layer, coming[worth]] = False, True
    return out


def moved_experts(
    options: ReplayOptions, hot: NDArray[np.bool_], before: NDArray[np.bool_], streamed: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """[G], experts that must cross the link between prefill and decode. streamed [G, L, E]: by the prompts."""
    if options.migration == "free":
        moves = np.zeros_like(hot)
    elif options.migration == "once":
        moves = hot
    else:
        moves = hot & ~before
        if options.migration in ("kept", "budgeted"):
            moves = moves & ~streamed
    count: NDArray[np.int64] = moves.sum(axis=(1, 2), dtype=np.int64)
    return count


def gate_loss(batches: Batches, widths: NDArray[np.uint8], options: ReplayOptions) -> float:
    """Mean over decode pairs of gate x loss of the width it ran at, in units of that expert's loss at 1 bit.

    In its own units because output energies of experts differ by many orders. An expert that serves only the first
    token of a text can outweigh all others together. 0 in full precision.
    """
    layers, experts = options.loss.mse.shape[:2]
    table = np.zeros((layers, experts, 8))  # small enough to stay in the processor's cache
    table[:, :, 1:6] = losses_by_width(options.loss, OF_ONE_BIT)[:, :, REPLICA_WIDTHS]
    table[:, :, 6] = LOSS_OF_SKIPPING
    rows = (np.arange(layers)[:, None] * experts + batches.ids) << 3
    lost = table.ravel().take(rows + _LOSS_COLUMN.take(widths)) * batches.weights
    return float((lost * batches.pairs).sum() / (batches.valid.sum() * layers))


def finish(
    name: str,
    batches: Batches,
    costs: Costs,
    options: ReplayOptions,
    widths: NDArray[np.uint8],
    hot: NDArray[np.bool_],
    before: NDArray[np.bool_],
    copied_experts: float = 0.0,
) -> Outcome:
    """Run pairs at the widths [G, B, D, L, k] and account for them; copied_experts moved during decode."""
    split = run_pairs(batches, widths, costs)
    prompts = run_prompts(batches, before, costs, PrefillSplit(costs) if _splits_prefill(options) else None)
    moved = moved_experts(options, hot, before, prompts.streamed) * layer_factor(batches, costs)
    executed = np.broadcast_to(batches.pairs, widths.shape)
    cold = executed & (widths > 0)
    return Outcome(
        system=name,
        policy=options.policy_name,
        moe_ps=split.moe_ps,
        device_ps=split.device_ps,
        gpu_ps=split.gpu_ps,
        prefill_ps=prompts.ps,
        migration_ps=np.array([costs.gpu.migration_ps(round(count)) for count in moved], np.float64),
        migrated_bytes=(float(moved.sum()) + copied_experts) * costs.shape.expert_bytes,
        hot_pairs=int((executed & (widths == 0)).sum()),
        total_pairs=int(executed.sum()),
        cold_bits=float(widths[cold].sum()),
        cold_pairs=int(cold.sum()),
        loss=gate_loss(batches, widths, options),
        traffic=split.traffic,
    )


def _splits_prefill(options: ReplayOptions) -> bool:
    return options.word("prefill", PREFILLS[0], PREFILLS) == "split"


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    return beside_device_memory(costs, options.budget.num_hot, options.widest)


def replay(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    if options.bits_for == "auto":  # as published, each request has its own
        options = replace(options, bits_for="request")
    hot, before, bits = plan_groups(batches, options)
    # [G, B, L, E] looked up by [G, B, D, L, k]
    widths = np.take_along_axis(bits[:, :, None], batches.ids, axis=4)
    return finish("context_aware", batches, costs, options, widths, hot, before)


CONTEXT_AWARE = System(
    "context_aware",
    (
        "placement and bits fixed after prefill; one placement per group (sum of importances), bits per request",
        "kept: whatever the prompts of a group streamed; the plugin keeps what the last chunk of each prompt streams",
        "GPU and device overlap within a layer, experts of one side run one after the other",
        "prompts run in full precision: resident experts on the GPU, the others streamed over the link; with prefill "
        "'split' the device computes some of these, so that both end together",
    ),
    True,
    replay,
    memory,
    is_bounded=True,
)
