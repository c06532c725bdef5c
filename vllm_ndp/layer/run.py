"""One run: who is hot, what each request's plan is, where each pair runs, and the simulated time of it all.

The plugin feeds it the rows of vLLM's steps and the answers of a device; the exact replay feeds it recorded rows and
modelled answers. Both call these methods and decide nothing themselves. In the order of a step:

    replan          plans for prompts that ended in the step before
    begin_step      whose rows run
    clock.begin_layer, splitter.split, end_layer     of each layer
    clock.end_step  the simulated time
    end_prefills    scores of the prompts that ended in the step
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.gpu_timing import LayerTime, StepClock
from vllm_ndp.layer.balance import Balancer
from vllm_ndp.layer.devices import Alive, Devices, DevicesBalancer
from vllm_ndp.layer.joint_rule import JointRule
from vllm_ndp.layer.prefill_split import PrefillSplit
from vllm_ndp.layer.setup import Setup
from vllm_ndp.layer.split import Split, Splitter
from vllm_ndp.layer.tiers import Tiers
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import BitwidthPlan, Plan
from vllm_ndp.planning.replanner import PlanChange, PlannerRules, Replanner
from vllm_ndp.planning.stats import RoutingStats


class Planned(Protocol):
    """A request as plans see it."""

    score: ImportanceScore | None
    """Once its prefill has ended."""
    plan: Plan | None


K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Replanned(Generic[K]):
    """What changed before a step."""

    change: PlanChange[K] | None = None
    """New plans, which are in force now; None: those of before."""
    moves_slots: bool = False
    """Whether a placement takes effect."""
    num_moved: int = 0
    """Experts whose weights leave for the GPU now, before the step."""
    moved_bytes: int | None = None
    """Their bytes; None: as many as slots hold."""
    num_ended: int = 0
    """Prompts that ended in the step before and whose requests are still there."""


class Run(Generic[K]):
    """K: what requests are called."""

    def __init__(
        self,
        setup: Setup,
        rules: PlannerRules,
        costs: Costs,
        devices: Devices | None,
        tiers: Tiers,
        top_k: int,
        counted_on: Callable[[], Alive],
        **layout: Any,
    ) -> None:
        """devices: where there are several. counted_on: which of them a step's experts may run on. layout: how hot
        pairs are laid out for the slots of a worker, as Splitter takes it."""
        prices, self.setup, self.costs, self.devices, self.tiers = setup.prices, setup, costs, devices, tiers
        if setup.joint_tiers:
            num_hot = rules.budget.num_hot
            joint = JointRule.live(costs, setup.joint_tiers, rules.loss, num_hot, prices, setup.num_devices)
            rules = replace(rules, joint=joint.plan)
        self.planner = Replanner(rules, *tiers.where.shape)
        self.clock = StepClock(
            replace(costs.gpu, stage=setup.stage, num_stages=setup.num_stages, whole_experts=setup.whole_experts)
        )
        balancer = Balancer(prices or costs, setup.spill_bits, setup.device_hosts) if setup.spill_bits else None
        each: Sequence[Balancer | DevicesBalancer] | None = None
        if balancer is not None:
            each = [balancer] * len(tiers.where) if devices is None else devices.balancers(balancer, counted_on)
        prompts = PrefillSplit(costs, prices, setup.prompt_bits) if setup.splits_prefill else None
        self.splitter = self.make_splitter(top_k, balancers=each, prompts=prompts, **layout)
        self.streamed: NDArray[np.bool_] = np.zeros(tiers.where.shape, np.bool_)
        """Experts that the prefill rows of the running step streamed [L, E]."""
        self._ended: list[tuple[K, Planned]] = []  # their prefill ended in the step before

    def make_splitter(self, top_k: int, **rules: Any) -> Splitter:
        """A splitter over the same tiers and the prices of the host's CPU. rules: as Splitter takes them."""
        host = self.costs if self.setup.has_warm_experts else None
        widths = self.costs.bytes_of_width if self.setup.joint_tiers else None
        return Splitter(self.tiers, top_k, host=host, bytes_of_width=widths, **rules)

    # -- between steps --------------------------------------------------------------------------------------------

    def replan(self, there: Mapping[K, Planned]) -> Replanned[K]:
        """Make new plans if a prefill has ended whose request is still there.

        there: the requests that run, whose plans and scores are set.
        """
        ended, self._ended = self._ended, []
        if not ended:
            return Replanned()
        alive = sum(there.get(name) is request for name, request in ended)
        if not alive:
            return Replanned(moves_slots=True, num_moved=int(self.planner.restore().sum()))
        scores = {name: request.score for name, request in there.items() if request.score is not None}
        change = self.planner.replan(scores)
        for name, plan in change.plans.items():
            there[name].plan = plan
        return Replanned(change, True, change.num_moved, change.moved_bytes, alive)

    def end_prefills(
        self, ended: Iterable[tuple[K, Planned, RoutingStats]], there: Callable[[], Iterable[Planned]]
    ) -> None:
        """After a step: score the prompts that ended in it; of what it streamed, the slots keep what will be hot.

        there: the requests that run, those included.
        """
        for name, request, stats in ended:
            request.score = self.planner.score(stats)
            self._ended.append((name, request))
        if self._ended:
            scores = [request.score for request in there() if request.score is not None]
            self.planner.keep(scores, self.streamed)

    # -- a step ---------------------------------------------------------------------------------------------------

    def begin_step(
        self,
        owner: NDArray[np.int32],
        decode: NDArray[np.bool_],
        plans: Sequence[BitwidthPlan | None],
        spans: Sequence[tuple[int, int]],
        entries: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """owner [T]: the request of each row, decode [T]; plans and spans [R]: of each request, its bits and the
        positions that run. Returns counts as Splitter does."""
        attended = sum((end - start) * (start + end + 1) // 2 for start, end in spans)  # by each row itself and before
        self.clock.begin_step(len(owner), sum(end for _, end in spans), attended, spans)
        self.streamed[:] = False
        return self.splitter.begin_step(owner, decode, plans, entries)

    def end_layer(self, layer: int, split: Split, device_ps: int | None) -> LayerTime:
        """As the function end_layer."""
        if split.stream:
            self.streamed[layer, split.stream.experts] = True
        return end_layer(self.clock, self.splitter, split, device_ps)


def end_layer(clock: StepClock, splitter: Splitter, split: Split, device_ps: int | None) -> LayerTime:
    """End the layer that `split` was of. `device_ps`: of the device's answer, 0 where it was not asked or has no
    simulated time. None where no answer came: its pairs were computed here, and count as fallbacks and as streamed."""
    experts, pairs = split.stream_experts, split.stream_pairs
    if device_ps is None:
        device_ps, experts, pairs = 0, splitter.fall_back(), pairs + len(split.device.experts)
    return clock.end_layer(
        split.hot_loads,
        hot_bytes=split.hot_bytes,
        device_ps=device_ps,
        streamed_experts=experts,
        streamed_pairs=pairs,
        host_ps=split.host_ps,
    )
