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
from ndp_device.timing.model import DeviceModel
from vllm_ndp.cost_model.memory import Footprint, beside_device_memory
from vllm_ndp.lab.exact.engine import Engine, StepRun, alone
from vllm_ndp.layer.setup import Setup
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.format import ALL_REQUESTS, CACHED, CHANGED, DOWN, UNTIMED
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
    require_capacity(engine, trace, rules.budget.num_hot)
    plans = _recorded_plans(trace)
    mismatches = 0
    times = np.zeros((2, len(recorded_run.steps)), np.int64)
    for index, step in enumerate(recorded_run.steps.tolist()):
        run = recorded_run.run(step)
        times[:, index] = run.time.start_ps, run.time.total_ps
        if step in recorded_run.changed:
            times[1, index] = engine.clock.now_ps - run.time.start_ps
        if run.replanned:
            mismatches += _differs(engine, plans.get(engine.planner.epoch))
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


class RecordedRun:
    """The steps of a trace in order, the same rows in the same order, on devices of its own.

    The time of a step in which one of several devices was lost or came back depends on when that was. The host runs
    such a step for the effect of its rows, and the clock goes on from the recorded end.
    """

    def __init__(self, trace: Trace, setup: Setup, rules: PlannerRules) -> None:
        self.engine = Engine(trace, setup, rules)
        self._devices = self._idle_devices(setup.num_devices)
        changes = (trace.devices.get(name, np.zeros(0, np.int64)) for name in ("step", "device", "change"))
        self._down: dict[int, set[int]] = {}
        self.changed: set[int] = set()
        """Steps whose time is taken from the record."""
        for step, device, change in zip(*(column.tolist() for column in changes), strict=True):
            if change == DOWN:
                self._down.setdefault(step, set()).add(device)
            elif change == CHANGED:
                self.changed.add(step)
        self._ended_ps = self._recorded_ends(trace)
        executed = np.flatnonzero(trace.phase != CACHED)
        self.steps: NDArray[np.int64] = np.unique(trace.step[executed]).astype(np.int64)
        ordered = executed[np.argsort(trace.step[executed], kind="stable")]
        bounds = np.flatnonzero(np.diff(trace.step[ordered])) + 1
        self._rows = dict(zip(self.steps.tolist(), np.split(ordered, bounds), strict=True))
        self._last_step = np.full(len(trace.prompt_len), -1, np.int64)
        np.maximum.at(self._last_step, trace.request[executed], trace.step[executed])

    def _idle_devices(self, count: int) -> list[DeviceModel]:
        return [DeviceModel(self.engine.hardware) for _ in range(count)]

    def _recorded_ends(self, trace: Trace) -> dict[int, int]:
        columns = (trace.events.get(f"simulated_{name}_ps", np.zeros(0, np.int64)) for name in ("start", "step"))
        ends = sum(columns, np.zeros(len(trace.events.get("step", ())), np.int64))
        found = dict(zip(map(int, trace.events.get("step", ())), ends.tolist(), strict=True))
        found = {step: end_ps for step, end_ps in found.items() if end_ps >= 0}  # without steps that have no time
        if without := self.changed - found.keys():
            raise TraceError(f"a device was lost in step {min(without)}, whose time the trace lacks: it is incomplete")
        return found

    def run(self, step: int) -> StepRun:
        """Run one step on the run's own devices. Call for every step of `steps`, in order."""
        down = self._down.get(step, set())
        alive = tuple(device not in down for device in range(len(self._devices)))
        run = alone(self.engine.step(self._rows[step], alive), *self._devices)
        for request in np.flatnonzero(self._last_step == step).tolist():
            self.engine.finish(request)
        if step in self.changed:  # every device has answered or is gone by then
            self.engine.clock.now_ps = self._ended_ps[step]
            self._devices = self._idle_devices(len(self._devices))
        return run


def require_capacity(engine: Engine, trace: Trace, num_hot: int) -> None:
    """Raises DoesNotFit where the modelled hardware could not have held the run: its plans and its largest KV cache."""
    costs = engine.costs
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
    for epoch, request, cells in zip(
        *(trace.plans.get(name, ()) for name in ("epoch", "request", "cells")), strict=True
    ):
        out.setdefault(int(epoch), {})[int(request)] = cells
    return out


def _differs(engine: Engine, plan: dict[int, NDArray[np.uint8]] | None) -> int:
    """1 where a recorded plan of this epoch exists and is not the one just made."""
    if plan is None:
        return 0
    same = ALL_REQUESTS in plan and np.array_equal(plan[ALL_REQUESTS], engine.planner.placement.tiers)
    for request, cells in plan.items():
        if request != ALL_REQUESTS:
            ours = engine.requests[request].plan
            same = same and ours is not None and np.array_equal(cells, ours.bits.bits)
    return int(not same)
