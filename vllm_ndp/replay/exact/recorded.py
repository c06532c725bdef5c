"""A host that repeats the steps of a trace: the same rows in the same order. Knows which rows a recorded step had."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.timing.model import DeviceModel
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.replay.exact.clients import alone
from vllm_ndp.replay.exact.engine import Asks, Engine, StepRun
from vllm_ndp.traces.format import CACHED, LiveSetup
from vllm_ndp.traces.trace import Trace


class RecordedRun:
    """The steps of a trace in order, on devices of its own or beside other hosts."""

    def __init__(self, trace: Trace, setup: LiveSetup, rules: PlannerRules) -> None:
        self.engine = Engine(trace, setup, rules)
        self._devices = [DeviceModel(self.engine.hardware) for _ in range(setup.num_devices)]
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

    def run(self, step: int) -> StepRun:
        """Run one step on the run's own devices. Call for every step of `steps`, in order."""
        return alone(self._step(step), *self._devices)

    def whole(self, start_ps: int = 0) -> Asks[list[StepRun]]:
        """All steps, for clients.together; this host's clock starts at start_ps."""
        self.engine.clock.wait_until(start_ps)
        runs = []
        for step in self.steps.tolist():
            runs.append((yield from self._step(step)))
        return runs

    def _step(self, step: int) -> Asks[StepRun]:
        run = yield from self.engine.step(step, self._rows[step])
        for request in self._finished.get(step, ()):
            self.engine.finish(request)
        return run
