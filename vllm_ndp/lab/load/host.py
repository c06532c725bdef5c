"""One host that serves requests as they arrive: the exact engine, with steps from the scheduler instead of a recording.

Routing comes from the trace by (request, position); how the requests meet in steps is new. A request ends where the
trace's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from vllm_ndp.lab.exact.engine import Asks, Engine, StepRun
from vllm_ndp.lab.load.scheduler import Request, ScheduledSpan, Scheduler
from vllm_ndp.lab.load.workload import Workload
from vllm_ndp.layer.setup import Scheduling, Setup
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.format import CACHED
from vllm_ndp.traces.trace import Trace


@dataclass(frozen=True)
class ServedStep:
    """One step as it ran. It was decided at decided_ps; what moved before it lies between that and its start."""

    decided_ps: int
    spans: tuple[ScheduledSpan, ...]
    run: StepRun
    yielded: tuple[int, ...]
    """Requests that got a token at its end."""

    @property
    def start_ps(self) -> int:
        return self.decided_ps + self.run.migration_ps

    @property
    def end_ps(self) -> int:
        return self.start_ps + self.run.time.total_ps


@dataclass(frozen=True)
class ServedRequest:
    """A whole run of one host."""

    arrivals_ps: NDArray[np.int64]  # [R]
    prompt_lens: NDArray[np.int64]  # [R]
    steps: list[ServedStep]
    preemptions: int


class Host:
    def __init__(
        self,
        trace: Trace | Workload,
        setup: Setup,
        rules: PlannerRules,
        arrivals_ps: NDArray[np.int64],
        scheduling: Scheduling,
    ) -> None:
        """arrivals_ps: of each request of the trace."""
        self.engine = Engine(trace, setup, rules)
        self._rows = _Rows(trace) if isinstance(trace, Trace) else trace
        self._arrivals_ps, self._scheduler = arrivals_ps, Scheduler(scheduling)
        self._requests = [
            Request(number, int(prompt), rows, cached)
            for number, (prompt, rows, cached) in enumerate(
                zip(trace.prompt_len, map(int, self._rows.num_rows), map(int, self._rows.cached), strict=True)
            )
        ]

    def whole(self) -> Asks[ServedRequest]:
        """Serve every request; for `alone` or `together`."""
        clock, scheduler = self.engine.clock, self._scheduler
        order = np.argsort(self._arrivals_ps, kind="stable").tolist()
        steps: list[ServedStep] = []
        arrived = 0
        while arrived < len(order) or scheduler.busy:
            if not scheduler.busy:
                clock.wait_until(int(self._arrivals_ps[order[arrived]]))
            while arrived < len(order) and self._arrivals_ps[order[arrived]] <= clock.now_ps:
                scheduler.add(self._requests[order[arrived]])
                arrived += 1
            decided_ps, spans = clock.now_ps, scheduler.schedule()
            run = yield from self.engine.step(self._rows.of(spans))
            yielded, done = scheduler.end_step()
            for request in done:
                self.engine.finish(request)
            steps.append(ServedStep(decided_ps, tuple(spans), run, tuple(yielded)))
        prompt_lens = self.engine.trace.prompt_len.astype(np.int64)
        return ServedRequest(self._arrivals_ps, prompt_lens, steps, scheduler.preemptions)


class _Rows:
    """Rows of a trace by request and position; a position that ran n times gives its rows one after the other."""

    def __init__(self, trace: Trace) -> None:
        ran = np.flatnonzero(trace.phase != CACHED)
        order = ran[np.lexsort((np.arange(len(ran)), trace.position[ran], trace.request[ran]))]
        request, position = trace.request[order].astype(np.int64), trace.position[order].astype(np.int64)
        new = np.ones(len(order), np.bool_)
        new[1:] = (np.diff(request) != 0) | (np.diff(position) != 0)
        starts = np.flatnonzero(new)
        self._order, self._starts = order, starts
        self._counts = np.diff(np.append(starts, len(order)))
        self._times = np.zeros(len(starts), np.int64)
        self._begin = np.searchsorted(request[starts], np.arange(len(trace.prompt_len) + 1))
        first, last = position[starts], position[starts]
        self.cached: list[int] = []
        self.num_rows: list[int] = []
        for number, prompt_len in enumerate(trace.prompt_len.tolist()):
            here = slice(int(self._begin[number]), int(self._begin[number + 1]))
            low = int(first[here].min(initial=prompt_len))
            high = int(last[here].max(initial=-1)) + 1
            if high - low != here.stop - here.start or high < prompt_len or prompt_len < 1:
                raise TraceError(
                    f"request {number} has rows for {here.stop - here.start} of its positions "
                    f"{low}..{max(high, prompt_len) - 1}: the recording is incomplete, select other requests"
                )
            self.cached.append(low)
            self.num_rows.append(high)

    def of(self, spans: Sequence[ScheduledSpan]) -> NDArray[np.int64]:
        """Rows of a step in the order of its spans; each is used up."""
        cells = np.concatenate(
            [
                np.arange(span.num_tokens) + int(self._begin[span.request]) + span.start - self.cached[span.request]
                for span in spans
            ]
        )
        times = np.minimum(self._times[cells], self._counts[cells] - 1)
        self._times[cells] += 1
        rows: NDArray[np.int64] = self._order[self._starts[cells] + times]
        return rows
