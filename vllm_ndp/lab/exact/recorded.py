"""A host that repeats the steps of a trace: the same rows in the same order, on the devices that were up.

The time of a step in which one of several devices was lost or came back depends on when that was. The host runs such a
step for the effect of its rows, and the clock goes on from the recorded end. Knows which rows and devices a recorded
step had.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from ndp_device.timing.model import DeviceModel
from vllm_ndp.lab.exact.clients import alone
from vllm_ndp.lab.exact.engine import Asks, Engine, StepRun
from vllm_ndp.layer.setup import Setup
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.format import CACHED, CHANGED, DOWN, JOINED
from vllm_ndp.traces.trace import Trace


class RecordedRun:
    """The steps of a trace in order, on devices of its own or beside other hosts."""

    def __init__(self, trace: Trace, setup: Setup, rules: PlannerRules) -> None:
        self.engine = Engine(trace, setup, rules)
        self._devices = self._idle_devices(setup.num_devices)
        changes = (trace.devices.get(name, np.zeros(0, np.int64)) for name in ("step", "device", "change"))
        self._down: dict[int, set[int]] = {}
        self._joined: set[int] = set()  # before the step
        self.changed: set[int] = set()
        """Steps whose time is taken from the record."""
        for step, device, change in zip(*(column.tolist() for column in changes), strict=True):
            if change == DOWN:
                self._down.setdefault(step, set()).add(device)
            elif change == JOINED:
                self._joined.add(step)
            elif change == CHANGED:
                self.changed.add(step)
        self._ended_ps = self._recorded_ends(trace)
        executed = np.flatnonzero(trace.phase != CACHED)
        self.steps: NDArray[np.int64] = np.unique(trace.step[executed]).astype(np.int64)
        ordered = executed[np.argsort(trace.step[executed], kind="stable")]
        bounds = np.flatnonzero(np.diff(trace.step[ordered])) + 1
        self._rows = dict(zip(self.steps.tolist(), np.split(ordered, bounds), strict=True))
        last = np.full(len(trace.prompt_len), -1, np.int64)
        np.maximum.at(last, trace.request[executed], trace.step[executed])
        self._finished: dict[int, list[int]] = {}
        for request, step in enumerate(last.tolist()):
            self._finished.setdefault(step, []).append(request)

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
        if step in self._joined:
            self.engine.join_device()
            self._devices += self._idle_devices(1)
        run = alone(self._step(step), *self._devices)
        if step in self.changed:  # every device has answered or is gone by then
            self.engine.clock.resume_at(self._ended_ps[step])
            self._devices = self._idle_devices(len(self._devices))
        return run

    def whole(self, start_ps: int = 0) -> Asks[list[StepRun]]:
        """All steps, for clients.together; this host's clock starts at start_ps."""
        if self._joined or self.changed:
            raise TraceError(
                f"in {len(self._joined | self.changed)} steps of the trace a device was lost, came back or joined, "
                "which cannot be replayed beside other hosts: record one with steady devices"
            )
        self.engine.clock.wait_until(start_ps)
        runs = []
        for step in self.steps.tolist():
            runs.append((yield from self._step(step)))
        return runs

    def _step(self, step: int) -> Asks[StepRun]:
        down = self._down.get(step, set())
        alive = tuple(device not in down for device in range(len(self._devices)))
        run = yield from self.engine.step(step, self._rows[step], alive)
        for request in self._finished.get(step, ()):
            self.engine.finish(request)
        return run
