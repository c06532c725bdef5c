"""The paper's system and ours: the plugin's own `Run` (layer/run.py) on the groups of a trace, each a few settings.

    context_aware   `execution` 'paper' (arXiv 2512.04476): hot experts on the GPU in fp16, cold ones on the device
    balanced        the default: hot experts of least router weight run on the device where that shortens a layer
    replanned       `replan` 'drift': the same, and experts are exchanged when decode shows another subject
    adaptive        no setting of the plugin: the paper's plan, then a hot set that follows decode over the idle link

The policy is a parameter, so static, random, prior-shrunk and clairvoyant placement run on the same hardware.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import WIDTHS
from vllm_ndp.config import DEFAULT_OFFLOAD_BITS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory, beside_device_memory
from vllm_ndp.lab.exact.groups import Clairvoyant, Groups, OfExperts
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import PairCounts, cold_at, run_pairs
from vllm_ndp.lab.vectorised.outcome import Outcome, layer_factor
from vllm_ndp.planning.follower import DriftRules, FollowRules
from vllm_ndp.planning.policies import Policy
from vllm_ndp.planning.replanner import PlannerRules

PREFILLS = ("streamed", "split")
"""The option `prefill`: as published, or as the plugin does where it can (layer/prefill_split.py)."""
MEMORY_TOKENS = {"decayed": 128.0, "lfu": 1e12, "lru": 2.0}
"""Counts fade with this time constant: never (least frequently used leaves), at once (least recently), or between."""
HYSTERESIS = 0.1


def groups_of(
    batches: Batches,
    costs: Costs,
    options: ReplayOptions,
    *,
    offload_bits: int = 0,
    drift: DriftRules | None = None,
    of_experts: bool = False,
) -> Groups:
    """of_experts: every pair of an expert has one width."""
    policy: Policy = options.policy
    if options.clairvoyant:
        policy = Clairvoyant(policy, [stats for group in batches.decodes for stats in group])
    moves = 0 < options.budget.num_hot < batches.num_experts
    rules = PlannerRules(
        OfExperts(policy) if of_experts else policy,
        options.budget,
        options.loss.up_to(options.widest),
        bits_for=options.bits_for,
        keeps_streamed=options.migration == "kept",
        follow=FollowRules(drift, options.prior) if drift is not None and moves else None,
    )
    splits = options.choice("prefill", PREFILLS) == "split"
    return Groups(batches, costs, rules, offload_bits=offload_bits if moves else 0, splits_prefill=splits)


def outcome_of(
    ran: Groups, batches: Batches, costs: Costs, options: ReplayOptions, *, by_tables: bool = False
) -> Outcome:
    """by_tables: times of decode pairs are those of the tables, since `ran` did not decode."""
    executed = np.broadcast_to(batches.pairs, ran.widths.shape)
    copied = ran.copies * layer_factor(batches, costs)
    pairs = run_pairs(batches, ran.widths, costs)
    times: Groups | PairCounts = pairs if by_tables else ran
    return Outcome(
        policy=options.policy_name,
        moe_ps=times.moe_ps,
        device_ps=times.device_ps,
        gpu_ps=times.gpu_ps,
        prefill_ps=ran.prefill_ps,
        migration_ps=ran.migration_ps,
        migrated_bytes=(ran.moved + copied) * costs.shape.expert_bytes,
        hot_pairs=int((executed & (ran.widths == 0)).sum()),
        cold=cold_at(batches, ran.widths, options.loss),
        traffic=pairs.traffic,
    )


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    return beside_device_memory(costs, options.budget.num_hot, options.widest)


def papers(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    ran = groups_of(batches, costs, options)
    ran.run()
    return outcome_of(ran, batches, costs, options)


def plugins(batches: Batches, costs: Costs, options: ReplayOptions, *, follows: bool) -> Outcome:
    bits = min(options.whole("spill_bits", DEFAULT_OFFLOAD_BITS, WIDTHS[0], WIDTHS[-1]), options.widest)
    execution = options.choice("execution", ("balanced", "paper"))
    drift = DriftRules() if follows else None
    offload_bits = bits if execution == "balanced" else 0
    ran = groups_of(batches, costs, options, offload_bits=offload_bits, drift=drift)
    ran.run()
    outcome = outcome_of(ran, batches, costs, options)
    outcome.policy += f", {execution}" if follows else f", spill {bits}"
    outcome.notes.update(spilled_pairs=ran.offloaded_pairs, copies=ran.copies)
    return outcome


def following(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    """Every decode token decays the prompt's counts and adds its own. An idle link copies one expert at a time per
    group: the exchange that gains most over all layers. The newcomer's count must exceed the leaver's by HYSTERESIS.
    Decode never waits: until a copy is complete the expert runs on the device as before."""
    frequency = options.choice("frequency", tuple(MEMORY_TOKENS))
    tokens = MEMORY_TOKENS[frequency]
    g, b, _, layers, _ = batches.shape
    ran = groups_of(batches, costs, options, of_experts=True)
    hot = np.zeros((g, layers, batches.num_experts), np.bool_)
    bits = np.zeros((g, b, layers, batches.num_experts), np.uint8)
    for group in range(g):
        ran.prompts(group)
        bits[group] = [plan.bits for plan in ran.plan(group)]
        hot[group] = ran.engine.hot
        ran.end(group)
    # A newcomer takes the leaver's place; the leaver takes the newcomer's bits, so the bit budget is kept.
    heat = np.stack([_prompt_heat(batches, group, tokens) for group in range(g)])
    ran.copies = follow(batches, copies_per_step(batches, costs, bits), tokens, heat, hot, bits, ran.widths)
    outcome = outcome_of(ran, batches, costs, options, by_tables=True)
    outcome.policy += f" then {frequency}"
    outcome.notes["copies"] = ran.copies
    return outcome


def follow(
    batches: Batches,
    each_step: NDArray[np.float64],
    memory: float,
    heat: NDArray[np.float64],
    hot: NDArray[np.bool_],
    bits: NDArray[np.uint8],
    widths: NDArray[np.uint8],
) -> int:
    """How many experts are exchanged. each_step [G]: copies that a step has time for; memory: tokens after which a
    count has faded. heat and hot [G, L, E] and bits [G, B, L, E] are changed, widths [G, B, D, L, k] filled."""
    loads, groups = batches.loads, np.arange(len(heat))
    cells = np.arange(hot.shape[0] * hot.shape[1]).reshape(hot.shape[:2])[:, :, None] * batches.num_experts
    credit, copied = np.zeros(len(heat)), 0
    for step in range(batches.shape[2]):
        widths[:, :, step] = np.take_along_axis(bits, batches.ids[:, :, step], axis=3)
        rows, where = loads.rows[:, step], cells + loads.experts[:, step]
        heat *= 1.0 - 1.0 / memory
        heat += np.bincount(where.ravel(), weights=rows.ravel(), minlength=heat.size).reshape(heat.shape)
        credit = np.minimum(credit + each_step, 1.0)
        coming, leaving = np.where(hot, -np.inf, heat).argmax(axis=2), np.where(hot, heat, np.inf).argmin(axis=2)
        came, left = (np.take_along_axis(heat, who[:, :, None], 2)[:, :, 0] for who in (coming, leaving))
        gain = np.where(hot.any(axis=2) & ~hot.all(axis=2), came - (1 + HYSTERESIS) * left, 0.0)
        layer = gain.argmax(axis=1)
        go = np.flatnonzero((gain[groups, layer] > 0) & (credit >= 1.0) & rows.any(axis=(1, 2)))
        at, new, old = layer[go], coming[go, layer[go]], leaving[go, layer[go]]
        hot[go, at, new], hot[go, at, old] = True, False
        bits[go, :, at, old] = bits[go, :, at, new]
        bits[go, :, at, new] = 0
        credit[go] = 0.0
        copied += len(go)
    return copied


def _prompt_heat(batches: Batches, group: int, memory: float) -> NDArray[np.float64]:
    """Counts of the prompts as if their last `memory` tokens were alike: what a decayed count would be by now."""
    heat = np.zeros(batches.prompts[group][0].counts.shape)
    for stats in batches.prompts[group]:
        heat += stats.counts * (min(memory, stats.num_tokens) / max(stats.num_tokens, 1))
    return heat


def copies_per_step(batches: Batches, costs: Costs, bits: NDArray[np.uint8]) -> NDArray[np.float64]:
    """[G], how much of one expert's copy (all layers the trace's layer stands for) fits beside one decode step."""
    first = batches.first_steps(1)
    widths = np.take_along_axis(bits[:, :, None], first.ids, axis=4)
    step_ps = run_pairs(first, widths, costs).moe_ps[:, 0].sum(axis=1) * layer_factor(batches, costs)
    copies: NDArray[np.float64] = step_ps / (costs.fetch_ps() * max(layer_factor(batches, costs), 1.0))
    return copies


CONTEXT_AWARE = System(
    "context_aware",
    (
        "placement and bits fixed after prefill; one placement for a group (sum of importances)",
        "prompts run one after the other, and a new plan is made after each; the slots keep what it streamed",
        "GPU and device overlap within a layer, experts of one side run one after the other",
        "prompts run in full precision: resident experts on the GPU, the others streamed over the link; with prefill "
        "'split' the device computes some of these, so that both end together",
    ),
    papers,
    memory,
    follows_policy=True,
    options=("prefill",),
)
BALANCED = System(
    "balanced",
    (
        "the plugin's own run: the device holds replicas of hot experts too; where a hot expert runs is chosen per "
        "layer from the router's output alone",
        "hot experts of least gate weight go first, at 3 bits unless told otherwise",
    ),
    partial(plugins, follows=False),
    memory,
    follows_policy=True,
    options=("spill_bits", "prefill"),
)
REPLANNED = System(
    "replanned",
    (
        "drift is noticed from decode's own routing, bounded against false alarms; nothing moves before",
        "copies take the link's idle time, as the plugin's setting replan 'drift'",
    ),
    partial(plugins, follows=True),
    memory,
    follows_policy=True,
    options=("execution", "spill_bits", "prefill"),
)
ADAPTIVE = System(
    "adaptive",
    (
        "the link's idle time is worth one step's expert time per step; activations are too small to count against it",
        "one exchange at a time per group; a trace with fewer layers than the model moves all layers it stands for",
    ),
    following,
    memory,
    follows_policy=True,
    options=("frequency", "prefill"),
)
