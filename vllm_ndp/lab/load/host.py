"""One host that serves requests as they arrive: the exact engine, with steps from the scheduler instead of a recording.

Routing comes from the trace by (request, position); how the requests meet in steps is new. A request ends where the
trace's does. Knows the scheduler, the engine and when requests arrive. Does not know latencies or devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from vllm_ndp.cost_model.gpu_timing import GpuModel
from vllm_ndp.lab.exact.engine import Asks, Engine, StepRun
from vllm_ndp.lab.load.scheduler import Request, ScheduledSpan, Scheduler, SchedulerRules
from vllm_ndp.lab.load.workload import Workload
from vllm_ndp.layer.setup import Setup
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.format import CACHED
from vllm_ndp.traces.trace import Trace


@dataclass(frozen=True)
class ServedStep:
    """One step as it ran. It was decided at decided_ps; what moved before it lies between that and its start."""

    decided_ps: int
    spans: tuple[ScheduledSpan, ...]
    run: StepRun
    """Of this step, or of one alike."""
    yielded: tuple[int, ...]
    """Requests that got a token at its end."""
    longer_ps: int = 0
    """How much longer it took than the one alike."""

    @property
    def start_ps(self) -> int:
        return self.decided_ps + self.run.migration_ps

    @property
    def end_ps(self) -> int:
        return self.start_ps + self.run.time.total_ps + self.longer_ps


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
        scheduling: SchedulerRules,
        alike: int | None = None,
    ) -> None:
        """arrivals_ps: of each request of the trace. alike: steps as _Alike has them; None: every one is simulated."""
        self._alike = None if alike is None else _Alike(alike)
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
            known = None if self._alike is None else self._alike.find(self.engine, spans)
            if known is None:
                run, longer_ps = (yield from self.engine.step(len(steps), self._rows.of(spans))), 0
                if self._alike is not None:
                    self._alike.note(run)
            else:
                run, longer_ps = known
                took_ps = run.migration_ps + run.time.total_ps + longer_ps
                self.engine.pass_over({span.request: span.end for span in spans}, took_ps)
            yielded, done = scheduler.end_step()
            for request in done:
                self.engine.finish(request)
            steps.append(ServedStep(decided_ps, tuple(spans), run, tuple(yielded), longer_ps))
        prompt_lens = self.engine.trace.prompt_len.astype(np.int64)
        return ServedRequest(self._arrivals_ps, prompt_lens, steps, scheduler.preemptions)


class _Alike:
    """Steps with about as many decode rows and as many prompt rows: the first is simulated, then each n-th. The others
    take as long as the last one simulated, but for their own attention. What moves after a prompt's end takes as long
    as on average where two steps in a row were simulated."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._known: dict[tuple[int, int], tuple[StepRun, int]] = {}  # with its attention
        self._times = Counter[tuple[int, int]]()
        self._now = (0, 0), 0, False  # of the step to be simulated: rows, attention, and whether what moves counts
        self._before = True  # whether the step before was simulated
        self._moved: list[int] = []  # ps
        self._of_decode: dict[tuple[int, int], int] = {}

    def find(self, engine: Engine, spans: Sequence[ScheduledSpan]) -> tuple[StepRun, int] | None:
        """A step that is alike, and how much longer this one takes; None: simulate it, and note it."""
        requests, decode = engine.requests, 0
        for number, start, _ in spans:
            decode += requests[number].prefilled and start >= requests[number].prompt_len
        rows = sum(span.num_tokens for span in spans)
        about, replans = (_about(decode, 3), _about(rows - decode, 2)), engine.prompt_ended
        attention_ps = self._attention(engine.clock.model, spans, rows, decode)
        moves = replans and self._before
        self._times[about] += 1
        if moves or self._times[about] % self._n == 1 % self._n:
            self._now = about, attention_ps, moves
            return None
        self._before = False
        run, known_ps = self._known[about]
        prefill_ps = run.time.total_ps - (run.decode_only.total_ps if run.decode_only else 0)
        moved_ps = sum(self._moved) // max(len(self._moved), 1) if replans else 0
        if run.migration_ps != moved_ps:
            run = replace(run, migration_ps=moved_ps)
        return run, max(attention_ps - known_ps, -prefill_ps)

    def note(self, run: StepRun) -> None:
        about, attention_ps, moves = self._now
        self._known[about], self._before = (run, attention_ps), True
        if moves:
            self._moved.append(run.migration_ps)

    def _attention(self, model: GpuModel, spans: Sequence[ScheduledSpan], rows: int, decode: int) -> int:
        kv_tokens = sum(span.end for span in spans)
        if decode < rows:
            attended = sum((span.start + 1 + span.end) * span.num_tokens // 2 for span in spans)
            whole = [(span.start, span.end) for span in spans]
            return sum(model.before_experts_ps(rows, kv_tokens, attended, whole))
        near = rows, _about(kv_tokens, 7)
        if near not in self._of_decode:
            self._of_decode[near] = sum(model.before_experts_ps(*near))
        return self._of_decode[near]


def _about(count: int, bits: int) -> int:
    """Its so many highest bits."""
    low = max(count.bit_length() - bits, 0)
    return count >> low << low


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
