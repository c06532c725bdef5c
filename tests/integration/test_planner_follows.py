"""The plugin's planner while requests decode, against the exact engine: the same exchanges before the same steps.

Real tracker, sidecar, planner and clock; slots and device are stand-ins that note what they are told. Engines run in
test_integration_replay.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.integration.batch import BatchRows, RequestTracker, Span, TrackedRequest
from vllm_ndp.integration.planner import PlanRunner
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.lab.exact.engine import modelled_host
from vllm_ndp.lab.exact.live import RecordedRun
from vllm_ndp.layer.run import Run
from vllm_ndp.layer.tiers import Tiers
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.follower import FollowRules
from vllm_ndp.planning.plan import Budget, Placement
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace

COSTS = Costs(load_hardware("h100-ndp512", **{"dram.kind": "ideal"}), model_named("mixtral-8x7b"))
LAYERS, EXPERTS, PROMPT, DECODE, BLOCK = 32, 8, 64, 110, 16


class Noted:
    """Slots, device and its link in one: what they are told, in order."""

    devices = None
    setup = SimpleNamespace(splits_prefill=False)

    @property
    def link(self) -> Noted:
        return self

    def __init__(self) -> None:
        self.placed: list[NDArray[np.bool_]] = []
        self.installed: list[int] = []
        self.streamer = SimpleNamespace(keeps=False)

    def place(self, placement: Placement) -> None:
        self.placed.append(placement.hot)

    def begin_install(self, epoch: int, widths: NDArray[np.uint8], hot: NDArray[np.bool_]) -> None:
        assert not widths[hot].any()
        assert widths[~hot].all()
        self.installed.append(epoch)

    def wait_installed(self) -> None: ...

    def wait_for_all(self) -> None: ...


def test_the_plugins_planner_exchanges_what_the_exact_engine_does_and_the_device_hears_of_every_epoch() -> None:
    sizes: dict[str, Any] = {"num_requests": 1, "prompt_len": PROMPT, "decode_len": DECODE}
    trace = synthetic_trace(SyntheticSettings(LAYERS, EXPERTS, 2, **sizes, signal=1.5, turns=2, seed=9))
    policy, loss = load_policy("prefill", PolicySettings()), LossTable.nominal(LAYERS, EXPERTS)
    rules = PlannerRules(policy, Budget(4, 3.0), loss, keeps_streamed=False, follow=FollowRules())
    setup = modelled_host(COSTS, rules)
    replayed = RecordedRun(trace, setup, rules)

    noted: Any = Noted()
    tracker, sidecar = RequestTracker(), RoutingSidecar(LAYERS, 2, torch.device("cpu"), 16, BLOCK)
    request = tracker.requests["a"] = TrackedRequest("a", PROMPT, list(range(12, 0, -1)))
    live = Run[str](setup, rules, replayed.engine.costs, None, Tiers(LAYERS, EXPERTS), 2, lambda: ())
    planner, replanner, clock = PlanRunner(live, tracker, noted, noted), live.planner, live.clock
    planner.start()
    position, changes = 0, 0
    for number in replayed.steps.tolist():
        run = replayed.run(number)
        planned, before = planner.replan(), clock.now_ps
        assert bool(planned) == run.replanned
        assert replanner.epoch == replayed.engine.epoch
        assert (replanner.placement.hot == replayed.engine.hot).all()
        if planned:
            assert planned == {"a": request}
            assert request.plan is not None
            assert (request.plan.bits.bits == replayed.engine.requests[0].plan.bits.bits).all()
            assert (noted.placed[-1] == replanner.placement.hot).all()
            changes += 1
        assert before == run.time.start_ps  # exchanges were waited for alike
        clock.wait_until(run.time.end_ps)
        span = Span(request, position, PROMPT if position == 0 else 1)
        rows = BatchRows((span,))
        entries = torch.from_numpy(rows.expected_slot_mapping(BLOCK))
        here = slice(position, position + span.num_tokens)
        for layer in range(LAYERS):
            ids, weights = (torch.from_numpy(part[here, layer].copy()) for part in (trace.ids, trace.weights))
            sidecar.note(layer, entries).write(ids.to(torch.int64), weights)
        step: Any = SimpleNamespace(
            parts=SimpleNamespace(sidecar=sidecar),
            started=True,
            rows=rows,
            ending=[request] if span.ends_prefill else [],
        )
        planner.score_ended(step)
        position += span.num_tokens
    assert planner.exchanges == changes - 1 > 5
    assert noted.installed == list(range(1, replanner.epoch + 1))
    assert request.score is not None


def test_a_device_prepares_no_expert_that_the_hosts_cpu_computes() -> None:
    """Warm experts have widths in the plans, as all have; no decode row of theirs goes to the device."""
    announced: list[tuple[NDArray[np.uint8], NDArray[np.bool_]]] = []
    noted: Any = Noted()
    noted.begin_install = lambda epoch, widths, hot: announced.append((widths.copy(), hot.copy()))
    sizes: dict[str, Any] = {"num_requests": 1, "prompt_len": PROMPT, "decode_len": 2}
    trace = synthetic_trace(SyntheticSettings(LAYERS, EXPERTS, 2, **sizes, seed=4))
    policy, loss = load_policy("prefill", PolicySettings()), LossTable.nominal(LAYERS, EXPERTS)
    rules = PlannerRules(policy, Budget(3, 3.0, num_warm=2), loss)
    setup = modelled_host(Costs(load_hardware("h100-ndp512"), model_named("mixtral-8x7b")), rules)
    costs, tracker = RecordedRun(trace, setup, rules).engine.costs, RequestTracker()
    run = Run[str](setup, rules, costs, None, Tiers(LAYERS, EXPERTS), 2, lambda: ())
    planner, replanner = PlanRunner(run, tracker, noted, noted), run.planner
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
