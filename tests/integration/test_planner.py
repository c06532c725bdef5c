"""What the plugin's planner tells slots and device, which are stand-ins here; tracker and planner are real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.integration.batch import RequestTracker, TrackedRequest
from vllm_ndp.integration.planner import PlanRunner
from vllm_ndp.lab.exact.engine import modelled_host
from vllm_ndp.lab.exact.live import RecordedRun
from vllm_ndp.layer.run import Run
from vllm_ndp.layer.tiers import Tiers
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement, Plan
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlanChange, PlannerRules
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace

LAYERS, EXPERTS, PROMPT = 32, 8, 64


def planner_beside(link: Any) -> tuple[PlanRunner, list[RoutingStats]]:
    """A planner of no request yet, and what two prompts chose."""
    slots, device = SimpleNamespace(place=lambda placement: None), SimpleNamespace(link=link)
    sizes: dict[str, Any] = {"num_requests": 2, "prompt_len": PROMPT, "decode_len": 2}
    trace = synthetic_trace(SyntheticSettings(LAYERS, EXPERTS, 2, **sizes, seed=4))
    policy, loss = load_policy("prefill", PolicySettings()), LossTable.nominal(LAYERS, EXPERTS)
    rules = PlannerRules(policy, Budget(3, 3.0, num_warm=2), loss)
    setup = modelled_host(Costs(load_hardware("h100-ndp512"), model_named("mixtral-8x7b")), rules)
    costs, tracker = RecordedRun(trace, setup, rules).engine.costs, RequestTracker()
    run = Run[str](setup, rules, costs, None, Tiers(LAYERS, EXPERTS), 2, lambda: ())
    stats = [RoutingStats.from_choices(of.prompt_ids, of.prompt_weights, EXPERTS) for of in trace.sequences]
    return PlanRunner(run, tracker, cast(Any, slots), cast(Any, device)), stats


def end_prompts(planner: PlanRunner, stats: dict[str, RoutingStats]) -> None:
    there = {name: TrackedRequest(name, PROMPT, []) for name in stats}
    planner._requests.requests.update(there)
    planner.run.end_prefills([(name, there[name], of) for name, of in stats.items()], there.values)


def test_a_device_prepares_no_expert_that_the_hosts_cpu_computes() -> None:
    """Warm experts have widths in the plans, as all have; no decode row of theirs goes to the device."""
    announced: list[tuple[NDArray[np.uint8], NDArray[np.bool_]]] = []
    link = SimpleNamespace(
        wait_installed=lambda: None,
        begin_install=lambda epoch, widths, hot: announced.append((widths.copy(), hot.copy())),
    )
    planner, stats = planner_beside(link)
    end_prompts(planner, {"a": stats[0]})
    assert planner.replan().keys() == {"a"}
    ((widths, hot),) = announced
    placement = planner.replanner.placement
    assert placement.warm.sum() == LAYERS * 2
    assert (hot == placement.hot).all()
    assert ((widths != 0) == ~(placement.hot | placement.warm)).all()


def test_prompts_that_ended_are_counted_and_one_whose_name_another_request_has_now_is_none_of_them() -> None:
    planner, stats = planner_beside(None)
    end_prompts(planner, {"a": stats[0], "b": stats[1]})
    assert planner.replan().keys() == {"a", "b"}
    assert planner.prefills == 2
    end_prompts(planner, {"a": stats[0], "b": stats[1]})
    planner._requests.requests["a"] = TrackedRequest("a", PROMPT, [])
    assert planner.replan().keys() == {"b"}
    assert planner.prefills == 3


def test_ranks_tell_plans_apart_by_tiers_by_widths_and_by_what_a_pair_pays_for() -> None:
    planner, _ = planner_beside(None)
    hot = np.array([[True, False, False]])
    usual, weights = np.array([[0, 3, 3]], np.uint8), np.zeros((1, 3, 3), np.float32)
    narrow, sums = BitwidthPlan(np.minimum(usual, 2)), set[int]()
    for width in (16, 4):
        for bits in (narrow, BitwidthPlan(usual), BitwidthPlan(usual, weights), BitwidthPlan(usual, weights + 1)):
            placement = Placement(hot, widths=np.where(hot, width, 0))
            planner._announce(PlanChange(1, placement, {"a": Plan(1, placement, bits)}, hot, 0))
            sums.add(planner.checksum)
    assert len(sums) == 8
