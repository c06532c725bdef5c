"""A recorded run of the plugin again: the simulated times and the plans must come out the same.

Works on traces whose Provenance holds a Setup. Steps in which the only device fell back are replayed as if it had
answered, and counted. With several devices the trace says which were down in a step, and replay does without them. A
step in which a device went down or came back depends on wall time. Replay takes its recorded time and counts it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from vllm_ndp.cost_model.memory import Footprint, beside_device_memory
from vllm_ndp.lab.exact.engine import Engine
from vllm_ndp.lab.exact.recorded import RecordedRun
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.format import ALL_REQUESTS, CACHED, UNTIMED
from vllm_ndp.traces.trace import Trace


@dataclass(frozen=True)
class LiveReplay:
    """Simulated picoseconds of every step, beside what the live run said."""

    steps: NDArray[np.int64]
    start_ps: NDArray[np.int64]
    step_ps: NDArray[np.int64]
    recorded_start_ps: NDArray[np.int64]
    recorded_step_ps: NDArray[np.int64]
    plan_mismatches: int
    fallback_steps: int
    changed_steps: int
    """In which one of several devices was lost or came back: their times are the recorded ones."""
    lacks: str
    """Parts that the recording does not hold, so they were not compared; empty if it holds all."""

    @property
    def identical(self) -> bool:
        """Every step to the picosecond, and every plan to the bit, as far as the recording has them."""
        return self.plan_mismatches == 0 and self.steps_identical == int((self.recorded_step_ps != UNTIMED).sum())

    @property
    def steps_identical(self) -> int:
        same = (self.step_ps == self.recorded_step_ps) & (self.start_ps == self.recorded_start_ps)
        return int(same.sum())


def recorded_rules(trace: Trace, loss: LossTable) -> PlannerRules:
    """How plans were made in the recorded run.

    loss: of the replicas the run used; ReplicaFiles know it.
    """
    setup = trace.provenance.live
    if setup is None or setup.planning is None:
        raise TraceError("the trace does not hold a live run: record one with the plugin's 'record' setting")
    return setup.planning.rules(loss)


def replay_live(trace: Trace, loss: LossTable) -> LiveReplay:
    """Replay a recorded run under the policy it ran with. Raises TraceError when the trace is not of a live run.

    loss: as for recorded_rules.
    """
    rules, setup = recorded_rules(trace, loss), trace.provenance.live
    if setup is None or not len(trace.events.get("step", ())):
        raise TraceError("the trace holds no steps of a live run: record one with the plugin's 'record' setting")
    recorded_run = RecordedRun(trace, setup, rules)
    engine = recorded_run.engine
    require_capacity(engine, rules.budget.num_hot)
    plans = _recorded_plans(trace)
    mismatches = 0
    times = np.zeros((2, len(recorded_run.steps)), np.int64)
    for index, step in enumerate(recorded_run.steps.tolist()):
        run = recorded_run.run(step)
        times[:, index] = run.time.start_ps, run.time.total_ps
        if step in recorded_run.changed:
            times[1, index] = engine.clock.now_ps - run.time.start_ps
        if run.replanned:
            mismatches += _differs(engine, plans.get(engine.epoch))
    steps = recorded_run.steps
    recorded = {int(s): i for i, s in enumerate(trace.events["step"])}
    order = [recorded[int(step)] for step in steps if int(step) in recorded]
    if len(order) != len(steps):
        raise TraceError(
            f"the trace has {len(steps)} steps of rows but times for {len(order)} of them: it is incomplete"
        )
    return LiveReplay(
        steps=steps,
        start_ps=times[0],
        step_ps=times[1],
        recorded_start_ps=trace.events["simulated_start_ps"][order],
        recorded_step_ps=trace.events["simulated_step_ps"][order],
        plan_mismatches=mismatches,
        fallback_steps=int((trace.events["fallback_pairs"][order] > 0).sum()),
        changed_steps=len(recorded_run.changed),
        lacks=trace.lacks,
    )


def require_capacity(engine: Engine, num_hot: int) -> None:
    """Raises DoesNotFit where the modelled hardware could not have held the run: its plans and its largest KV cache."""
    costs, trace = engine.costs, engine.trace
    ran = trace.phase != CACHED
    spans, place = np.unique(np.stack([trace.step[ran], trace.request[ran]]), axis=1, return_inverse=True)
    context = np.zeros(spans.shape[1], np.int64)
    np.maximum.at(context, place.ravel(), trace.position[ran].astype(np.int64) + 1)
    which = np.unique(spans[0], return_inverse=True)[1]
    cached, running = int(np.bincount(which, weights=context).max()), int(np.bincount(which).max())
    experts = beside_device_memory(costs, num_hot, computes_on_host=engine.planner.rules.budget.num_warm > 0)
    held = Footprint.of(experts, costs.shape, cached, running)
    held.require(costs.hardware, f"the run with K {num_hot}", "record it with other capacities, or fewer hot_experts")


def _recorded_plans(trace: Trace) -> dict[int, dict[int, NDArray[np.uint8]]]:
    """epoch -> {-1: tiers, request: bits}."""
    out: dict[int, dict[int, NDArray[np.uint8]]] = {}
    if trace.plans:
        columns = (trace.plans[name] for name in ("epoch", "request", "cells"))
        for epoch, request, cells in zip(*columns, strict=True):
            out.setdefault(int(epoch), {})[int(request)] = cells
    return out


def _differs(engine: Engine, plan: dict[int, NDArray[np.uint8]] | None) -> int:
    """1 where a recorded plan of this epoch exists and is not the one just made."""
    if plan is None:
        return 0
    same = np.array_equal(plan[ALL_REQUESTS], engine.planner.placement.tiers)
    for request, cells in plan.items():
        if request != ALL_REQUESTS:
            ours = engine.requests[request].plan
            same = same and ours is not None and np.array_equal(cells, ours.bits.bits)
    return int(not same)
