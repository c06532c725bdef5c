"""The paper's system and ours: the plugin's own `Run` (layer/run.py) on the groups of a trace, each a few settings.

    context_aware   `execution` 'paper' (arXiv 2512.04476): hot experts on the GPU in fp16, cold ones on the device
    balanced        the default: hot experts of least router weight run on the device where that shortens a layer

The policy is a parameter, so static, random, prior-shrunk and clairvoyant placement run on the same hardware.
"""

from __future__ import annotations

import numpy as np

from ndp_device.common.widths import WIDTHS
from vllm_ndp.config import DEFAULT_OFFLOAD_BITS, NdpSettings
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import Memory, beside_device_memory
from vllm_ndp.lab.exact.groups import Clairvoyant, Groups
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import cold_at, run_pairs
from vllm_ndp.lab.vectorised.outcome import Outcome
from vllm_ndp.planning.policies import Policy
from vllm_ndp.planning.replanner import PlannerRules

PREFILLS = ("streamed", "split")
"""The option `prefill`: as published, or as the plugin does where it can (layer/prefill_split.py)."""


def groups_of(batches: Batches, costs: Costs, options: ReplayOptions, *, offload_bits: int = 0) -> Groups:
    policy: Policy = options.policy
    if options.clairvoyant:
        policy = Clairvoyant(policy, [stats for group in batches.decodes for stats in group])
    moves = 0 < options.budget.num_hot < batches.num_experts
    rules = PlannerRules(
        policy,
        options.budget,
        options.loss.up_to(options.widest),
        bits_for=NdpSettings.bits_for,
    )
    splits = options.choice("prefill", PREFILLS) == "split"
    return Groups(batches, costs, rules, offload_bits=offload_bits if moves else 0, splits_prefill=splits)


def outcome_of(ran: Groups, batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    executed = np.broadcast_to(batches.pairs, ran.widths.shape)
    return Outcome(
        policy=options.policy_name,
        moe_ps=ran.moe_ps,
        device_ps=ran.device_ps,
        gpu_ps=ran.gpu_ps,
        prefill_ps=ran.prefill_ps,
        migration_ps=ran.migration_ps,
        migrated_bytes=ran.moved * costs.shape.expert_bytes,
        hot_pairs=int((executed & (ran.widths == 0)).sum()),
        cold=cold_at(batches, ran.widths, options.loss),
        traffic=run_pairs(batches, ran.widths, costs).traffic,
    )


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    return beside_device_memory(costs, options.budget.num_hot, options.widest)


def papers(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    ran = groups_of(batches, costs, options)
    ran.run()
    return outcome_of(ran, batches, costs, options)


def plugins(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    bits = min(options.choice("spill_bits", WIDTHS, DEFAULT_OFFLOAD_BITS), options.widest)
    ran = groups_of(batches, costs, options, offload_bits=bits)
    ran.run()
    outcome = outcome_of(ran, batches, costs, options)
    outcome.policy += f", spill {bits}"
    return outcome


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
    plugins,
    memory,
    follows_policy=True,
    options=("spill_bits", "prefill"),
)
