"""Planner rules of one run with what depends on its hardware filled in, the same live and in a replay.

Knows costs. Does not know settings, requests or clocks.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.simulation.beside_decode import copies_beside_decode
from vllm_ndp.simulation.costs import Costs
from vllm_ndp.simulation.joint_rule import JointRule
from vllm_ndp.simulation.prices import MeasuredPrices


def on_hardware(
    rules: PlannerRules, costs: Costs, joint_tiers: str, prices: MeasuredPrices | None = None, *, num_devices: int = 1
) -> PlannerRules:
    """joint_tiers: among which a joint plan chooses, names with + between them; empty where plans are fixed.

    prices: of the machine that a run is on; None: of the simulated hardware. num_devices: at the start of the run.
    """
    if rules.follow is not None:
        rules = replace(rules, follow=replace(rules.follow, copies=copies_beside_decode(costs, rules.budget)))
    if joint_tiers:
        joint = JointRule(costs, joint_tiers, rules.loss, rules.budget.num_hot, prices, num_devices)
        rules = replace(rules, joint=joint)
    return rules
