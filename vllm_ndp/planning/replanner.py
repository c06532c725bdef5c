"""The one planner: score each prompt, place the common hot set, assign each request's bits, say what must move.

    score    when a prefill ends                    RoutingStats -> ImportanceScore
    replan   before the step after it               scores of the running requests -> one Plan each, and what moves
    keep     when a step with ending prefills ends  which of the experts that it streamed the hot slots keep

The plugin and the exact replay feed the same object, so their plans agree to the bit. `K` is whatever names a request.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.planning.bitwidths import LossTable, full_precision
from vllm_ndp.planning.importance import AUTO_MORE_BITS, ImportanceScore, has_common_bits, scores_for_bits
from vllm_ndp.planning.plan import (
    BitwidthPlan,
    Budget,
    Placement,
    Plan,
    keep_streamed,
    top_experts,
    with_warm,
)
from vllm_ndp.planning.policies import Policy
from vllm_ndp.planning.stats import RoutingStats

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Assigned:
    """Assignment of all experts at once by a joint plan, and what must move for it."""

    placement: Placement
    bits: BitwidthPlan
    moved: NDArray[np.bool_]  # [L, E], to or within GPU memory
    moved_bytes: int


JointPlanner = Callable[[NDArray[np.float64], int, Placement, BitwidthPlan], Assigned]
"""Plans tiers and widths at once and remembers the plan before (JointRule.plan, layer/joint_rule.py): from the mean
importance, the number of requests, and what the policy would have with as much GPU memory."""


@dataclass(frozen=True)
class PlannerRules:
    """How plans are made in one run, live or replayed."""

    policy: Policy
    budget: Budget
    loss: LossTable
    bits_for: str = "request"
    """`request`: bits by each request's own score; `batch`: by one score for all that run; `auto`: by how many run."""
    keeps_streamed: bool = True
    """Whether experts that a prefill streamed and that will be hot stay in the slots."""
    full_precision: bool = False
    """The identity mode: cold experts in the checkpoint's own precision, whatever the policy would assign."""
    joint: JointPlanner | None = None
    """Planner that decides tier and width of every expert; None: the number of hot and warm experts is fixed."""


@dataclass(frozen=True)
class PlanChange(Generic[K]):
    """Result of one replan: a plan for each request, and which experts must be copied into GPU memory for it."""

    epoch: int
    placement: Placement
    plans: Mapping[K, Plan]
    moved: NDArray[np.bool_]  # [L, E], hot now and not resident before
    num_kept: int  # experts that became hot and were resident already, kept from a prefill's stream
    moved_bytes: int | None = None
    """Bytes that the plan moves over the link; None: as many as the slots of the moved experts hold."""

    @property
    def num_moved(self) -> int:
        return int(self.moved.sum())


class Replanner:
    """The current placement and its epoch, and what the hot slots hold while copies are still under way."""

    def __init__(self, rules: PlannerRules, num_layers: int, num_experts: int) -> None:
        """Start before the first prompt: the lowest ids are hot, as good as any, and the next ones are warm."""
        self.rules = rules
        alike = np.zeros((num_layers, num_experts))
        num_hot, num_warm = rules.budget.num_hot, rules.budget.num_warm
        self.placement = with_warm(top_experts(alike, num_hot), alike, num_warm)
        if rules.joint is not None:
            score = ImportanceScore.from_weights(alike + 1.0)
            self.placement = self._assign([score], self.placement, rules.joint).placement
        self.resident: NDArray[np.bool_] = self.placement.hot
        """[L, E], experts that the slots hold: the placement, or what a prefill that has just ended made of it."""
        self.epoch = 0

    def score(self, stats: RoutingStats) -> ImportanceScore:
        """Score a prompt, once, when its prefill has ended."""
        return self.rules.policy.score(stats)

    def replan(self, scores: Mapping[K, ImportanceScore]) -> PlanChange[K]:
        """Make one placement for all running requests and a plan for each, under a new epoch."""
        rules = self.rules
        if rules.joint is not None:
            return self._replan_jointly(scores, rules.joint)
        placement = self._place(list(scores.values()))
        together = np.sum([score.values for score in scores.values()], axis=0)
        if rules.budget.num_warm:
            placement = with_warm(placement, together, rules.budget.num_warm)
        became_hot = placement.hot & ~self.placement.hot
        moved = placement.hot & ~self.resident
        self.epoch += 1
        self.placement, self.resident = placement, placement.hot
        bits: dict[int, BitwidthPlan] = {}  # of each distinct score: with bits_for "batch" there is one
        plans = {}
        is_auto_common = rules.bits_for == "auto" and has_common_bits(rules.bits_for, len(scores))
        budget = rules.budget.with_more_bits(AUTO_MORE_BITS) if is_auto_common else rules.budget
        for key, score in zip(scores, scores_for_bits(list(scores.values()), rules.bits_for), strict=True):
            if id(score) not in bits:
                bits[id(score)] = self._bits(score, placement, budget)
            plans[key] = Plan(self.epoch, placement, bits[id(score)])
        return PlanChange(self.epoch, placement, plans, moved, int((became_hot & ~moved).sum()))

    def predicted_nats(
        self, slot_bits: int, score: ImportanceScore | None = None, plan: Plan | None = None
    ) -> float | None:
        """Predict what a request of this score loses under its plan, nats a token; None where the replicas do not say.

        Without them: a request that uses all experts alike, under the first placement; None under joint plans, which
        are made from a prompt. Hot experts lose what their slots do; what runs on the device to save time is not
        counted.
        """
        if score is None or plan is None:
            if self.rules.joint is not None:
                return None
            score = ImportanceScore.from_weights(np.ones(self.placement.hot.shape))
            plan = Plan(0, self.placement, self._bits(score, self.placement, self.rules.budget))
        in_slots = plan.placement.widths if plan.placement.widths.any() else np.uint8(slot_bits)
        by_pair = plan.bits.of_pairs(score.weights)
        widths = np.where(plan.placement.hot[:, :, None], np.atleast_3d(in_slots), by_pair)
        return self.rules.loss.predicted_nats(score, widths)

    def _replan_jointly(self, scores: Mapping[K, ImportanceScore], joint: JointPlanner) -> PlanChange[K]:
        known = list(scores.values())
        assigned = self._assign(known, self._place(known), joint)
        self.epoch += 1
        self.placement, self.resident = assigned.placement, assigned.placement.hot
        plan = Plan(self.epoch, assigned.placement, assigned.bits)
        plans = dict.fromkeys(scores, plan)
        return PlanChange(self.epoch, assigned.placement, plans, assigned.moved, 0, assigned.moved_bytes)

    def _assign(self, scores: Sequence[ImportanceScore], placement: Placement, joint: JointPlanner) -> Assigned:
        """All requests together have one plan, by the mean of their scores."""
        mean = np.mean([score.values for score in scores], axis=0)
        bits = self.rules.policy.assign(
            ImportanceScore.from_weights(mean), placement, self.rules.loss, self.rules.budget
        )
        return joint(mean, len(scores), placement, bits)

    def restore(self) -> NDArray[np.bool_]:
        """Give up a change of plan because its requests are gone. Experts [L, E] that must move back into the slots."""
        moved: NDArray[np.bool_] = self.placement.hot & ~self.resident
        self.resident = self.placement.hot
        return moved

    def keep(self, scores: Sequence[ImportanceScore], streamed: NDArray[np.bool_]) -> None:
        """Note what the slots hold after a step that ended prefills. streamed [L, E]: by its prefill rows.

        scores: of every request that runs, those whose prefill has just ended included.
        """
        self.resident = self.placement.hot
        if self.rules.keeps_streamed:
            wanted = self._place(scores)
            self.resident = keep_streamed(self.placement.hot, wanted, streamed, self.rules.budget.num_hot)

    def predict_resident(
        self,
        layer: int,
        scores: Sequence[ImportanceScore],
        ending: Sequence[RoutingStats],
        streamed: Sequence[int],
    ) -> NDArray[np.bool_]:
        """Predict the experts in the slots of one layer [E] after the running step, from this layer's routing alone.

        `scores`: of the requests already planned. `ending`: this layer's routing [1, E] of the prompts that end in the
        step. `streamed`: experts that are about to pass through. A policy that looks at several layers at once may
        choose other experts when the prompt ends. These are copied then.
        """
        policy, hot = self.rules.policy, self.placement.hot[layer : layer + 1]
        known = [score.layer(layer) for score in scores] + [policy.score(stats.of_layer(layer)) for stats in ending]
        wanted = policy.place(known, Placement(hot), self.rules.budget)
        if wanted.hot.shape != hot.shape:
            raise ConfigError(
                f"policy {policy.name!r} must place one layer {list(hot.shape)} where it is asked about one, got "
                f"{list(wanted.hot.shape)}: see RoutingStats.layer in docs/extend.md"
            )
        passing = np.zeros_like(hot)
        passing[0, list(streamed)] = True
        resident: NDArray[np.bool_] = keep_streamed(hot, wanted, passing, self.rules.budget.num_hot)[0]
        return resident

    def _bits(self, score: ImportanceScore, placement: Placement, budget: Budget) -> BitwidthPlan:
        rules = self.rules
        if rules.full_precision:
            return full_precision(placement)
        bits = rules.policy.assign(score, placement, rules.loss, budget)
        if not rules.budget.num_warm:
            return bits
        return BitwidthPlan(np.where(placement.warm, FULL_PRECISION_BITS, bits.bits), bits.from_weight)

    def _place(self, scores: Sequence[ImportanceScore]) -> Placement:
        return self.rules.policy.place(scores, self.placement, self.rules.budget)
