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
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace

LAYERS, EXPERTS, PROMPT = 32, 8, 64


def test_a_device_prepares_no_expert_that_the_hosts_cpu_computes() -> None:
    """Warm experts have widths in the plans, as all have; no decode row of theirs goes to the device."""
    announced: list[tuple[NDArray[np.uint8], NDArray[np.bool_]]] = []
    link = SimpleNamespace(
        wait_installed=lambda: None,
        begin_install=lambda epoch, widths, hot: announced.append((widths.copy(), hot.copy())),
    )
    slots, device = SimpleNamespace(place=lambda placement: None), SimpleNamespace(link=link)
    sizes: dict[str, Any] = {"num_requests": 1, "prompt_len": PROMPT, "decode_len": 2}
    trace = synthetic_trace(SyntheticSettings(LAYERS, EXPERTS, 2, **sizes, seed=4))
    policy, loss = load_policy("prefill", PolicySettings()), LossTable.nominal(LAYERS, EXPERTS)
    rules = PlannerRules(policy, Budget(3, 3.0, num_warm=2), loss)
    setup = modelled_host(Costs(load_hardware("h100-ndp512"), model_named("mixtral-8x7b")), rules)
    costs, tracker = RecordedRun(trace, setup, rules).engine.costs, RequestTracker()
    run = Run[str](setup, rules, costs, None, Tiers(LAYERS, EXPERTS), 2, lambda: ())
    planner, replanner = PlanRunner(run, tracker, cast(Any, slots), cast(Any, device)), run.planner
    request = tracker.requests["a"] = TrackedRequest("a", PROMPT, [])
    sequence = trace.sequences[0]
    stats = RoutingStats.from_choices(sequence.prompt_ids, sequence.prompt_weights, EXPERTS)
    run.end_prefills([("a", request, stats)], tracker.requests.values)
    assert planner.replan() == {"a": request}
    ((widths, hot),) = announced
    placement = replanner.placement
    assert placement.warm.sum() == LAYERS * 2
    assert (hot == placement.hot).all()
    assert ((widths != 0) == ~(placement.hot | placement.warm)).all()
