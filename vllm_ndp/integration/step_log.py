"""Log of a worker's steps: a report of each, once; a recording, if one was asked for; totals.

Knows steps that have run, the planner's counters and the device's round trips. Acts on nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from vllm_ndp.integration.assembly import LoadedWorker
from vllm_ndp.integration.recording import RunRecorder
from vllm_ndp.integration.report import DEVICE_TIME, PHASES, StepReport, counts_of
from vllm_ndp.integration.serving.live import FinishedRequests
from vllm_ndp.integration.step import Step
from vllm_ndp.operating.server import PAIR_KINDS

_MOST_LATE = 2
"""Reports: vLLM launches one step while another one's tokens are on their way."""


class LateReport:
    """Report of a step that waited for nothing: made when the scheduler reads it, which has the step's tokens then."""

    def __init__(self, step: Step, settle: Callable[[int], None]) -> None:
        self.step, self._settle = step, settle
        self.made: StepReport | None = None

    def get(self) -> StepReport:
        self._settle(self.step.number)
        assert self.made is not None
        return self.made


class StepLog:
    def __init__(self, worker: LoadedWorker, recorder: RunRecorder | None) -> None:
        """recorder: None where nothing is recorded."""
        self._worker, self.recorder = worker, recorder
        self.finished = FinishedRequests()
        self.steps = 0  # that have begun
        self.preempted = 0  # requests that came back after a preemption
        self._sums: defaultdict[str, float] = defaultdict(int)  # counts_of
        self._has_device_times = True  # every answer of the device so far had one
        self.unsimulated = worker.unsimulated  # what ran so far and is in no simulated clock
        self._late = deque[LateReport]()  # in the order of their steps
        self._left: StepReport | LateReport | None = None  # of the step that has ended, if nobody has asked for it yet
        self._ended_ps = 0
        self._counted = (0, 0, 0)  # of the planner, by the reports so far

    def close(self, step: Step) -> StepReport | LateReport | None:
        """Report of a step, once, as the leader tells it. Waits for no step that waited for nothing itself."""
        if self._late and self._late[-1].step is step:
            return None
        if not (step.waits_for_nothing and self._may_be_late):
            self.settle()
            return self._close(step)
        step.send_routing()
        if len(self._late) == _MOST_LATE:
            self.settle(self._late[0].step.number)
        self._late.append(LateReport(step, self.settle))
        return self._late[-1]

    @property
    def _may_be_late(self) -> bool:
        """Nobody reads the step's entries before the next one, and the scheduler is in this process."""
        facts = self._worker.facts
        is_here = facts.vllm_config.parallel_config.distributed_executor_backend == "uni"
        return is_here and self.recorder is None

    def settle(self, last: int | None = None) -> None:
        """Make the reports that are late, in order, up to that of this step."""
        while self._late and (last is None or self._late[0].step.number <= last):
            late = self._late.popleft()
            late.made = self._close(late.step)

    def _close(self, step: Step) -> StepReport | None:
        """Close the step's simulated clock."""
        if (closed := step.report()) is None:
            return None
        report, time_of_step = closed
        ranks = self._worker.facts.ranks
        report.stage, report.before_ps, self._ended_ps = ranks.stage.index, self._ended_ps, report.end_ps
        self._note_costs(step, report)
        if report.device is None:
            self.unsimulated = self.unsimulated or DEVICE_TIME
        report.unsimulated = self.unsimulated
        if self.recorder is not None:
            device, epoch = self._worker.parts.device, self._worker.parts.planner.replanner.epoch
            assert device.link is not None  # the leader's
            took_s = time.perf_counter() - step.before.began_s
            simulated = None if self.unsimulated else time_of_step
            self.recorder.note_step(step, epoch, simulated, took_s, device.link.take_availability())
        for key, count in counts_of(report).items():
            self._sums[key] += count
        self._has_device_times &= report.device is not None
        return report if ranks.leads else None

    def totals(self) -> dict[str, Any]:
        """Sums since the start."""

        def labelled(key: str) -> dict[str, float]:
            return {name.partition(":")[2]: count for name, count in self._sums.items() if name.startswith(f"{key}:")}

        return {
            "steps": self.steps,
            "preempted": self.preempted,
            **{f"{phase}_rows": self._sums[f"rows:{phase}"] for phase in PHASES},
            **{f"{kind}_pairs": self._sums[f"pairs:{kind}"] for kind in PAIR_KINDS},
            "fallback_causes": labelled("why"),
            "simulated_device": labelled("device") if self._has_device_times else None,
            "simulated_device_bound": labelled("bound"),
        }

    def leave(self, step: Step) -> None:
        """The step has ended, whether or not somebody asked for its report: model runner V2 asks when it samples."""
        self._left = self.close(step)

    def take_left(self) -> StepReport | LateReport | None:
        left, self._left = self._left, None
        return left

    def _note_costs(self, step: Step, report: StepReport) -> None:
        """Costs of the planner before the step, and times of the device's answers."""
        planner, device, before = self._worker.parts.planner, self._worker.parts.device, self._counted
        self._counted = planner.migrated_experts, planner.kept_experts, planner.prefills
        spent = (now - then for now, then in zip(self._counted, before, strict=True))
        report.migrated_experts, report.kept_experts, report.prefills = spent
        report.plan_s, report.device_up = step.before.plan_s, any(device.up)
        if device.link is not None:
            report.round_trips_s, report.fallbacks = device.link.take_round_trips(), device.link.take_fallbacks()

    def note_plan(self, step: int) -> None:
        """A plan is in force from this step on."""
        if self.recorder is not None:
            replanner, requests = self._worker.parts.planner.replanner, self._worker.requests.requests
            plans = {name: request.plan for name, request in requests.items() if request.plan is not None}
            self.recorder.note_plan(step, replanner.epoch, replanner.placement, plans)

    def note_sampled(self, output: Any) -> None:
        """The tokens of the step are known: a recording of drafts needs to know which of them were accepted.

        Model runner V2 hands over what is still on its way to the host, without names: there it is not known yet.
        """
        names = getattr(output, "req_ids", None)
        if self.recorder is not None and names and (sampled := output.sampled_token_ids):
            self.recorder.note_sampled({name: len(tokens) for name, tokens in zip(names, sampled, strict=True)})
