"""Per request: both clocks and what ran where. The worker fills StepReports, the scheduler side adds wall time.

simulated_* comes from the step's simulated clock, measured_* from the wall; no field holds both. Where something ran
that no simulated clock holds, `unsimulated` names it, and what would lack it is null.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

from ndp_device.timing.work import Timing
from vllm_ndp.cost_model.gpu_timing import PipelineClock
from vllm_ndp.layer.split import PAIR_KINDS
from vllm_ndp.planning.bitwidths import trusted

PS_PER_US = 1_000_000
DEVICE_PAIR_KINDS = ("spilled", "cold", "prefill_device")
PHASES = ("decode", "prompt")


DEVICE_STAGES = ("launch", "link_in", "queue", "dram", "compute", "dequant", "vector", "link_out", "completion")
"""Stages of one command on the simulated device. Its time is their sum less what overlaps
(ndp_device/timing/work.py)."""
_SUMMED = (
    *(f"{stage}_ps" for stage in DEVICE_STAGES),
    *("overlap_saved_ps", "total_ps", "bytes_in", "bytes_out", "weight_bytes", "row_activations", "energy_pj"),
)
_values_of = attrgetter(*_SUMMED)
DEVICE_TIME = "the device's time"
"""Name of the time that real hardware leaves out of every simulated clock."""


def device_sums(answers: Sequence[Timing | None]) -> dict[str, int] | None:
    """Stages in ps, bytes, row openings and pJ of a step's answers; empty without any, None where one has no time."""
    timed = [answer for answer in answers if answer is not None]
    if len(timed) < len(answers):
        return None
    return dict(zip(_SUMMED, map(sum, zip(*map(_values_of, timed), strict=True)), strict=True)) if timed else {}


@dataclass
class StepReport:
    """The worker's report of one forward pass. Plain values: it may cross a process boundary."""

    start_ps: int
    end_ps: int
    pairs: dict[str, dict[str, int]]  # of every request of the step
    plans: dict[str, dict[str, Any]]  # requests planned before this step: epoch, hot_experts, avg_bits, prices
    drafts: dict[str, int]  # tokens guessed by a proposer and checked in this step, of requests with any
    pairs_per_row: int
    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of every request, by phase as in PHASES
    stage: int = 0  # of a pipeline, each of which tells of its own layers and by its own clock
    before_ps: int = 0  # that clock when the step before had ended
    device: dict[str, int] | None = field(default_factory=dict)  # device_sums
    device_bounds: dict[str, int] = field(default_factory=dict)  # answers by their bound
    unsimulated: str = ""  # what ran and is in no simulated clock, so that start_ps and end_ps lack it
    # counted by the worker, or measured on the wall
    plan_s: float | None = None  # making and announcing new plans before the step; None where there were none
    round_trips_s: list[float] = field(default_factory=list)  # of its messages: sent, computed and in hand
    migrated_experts: int = 0
    kept_experts: int = 0
    prefills: int = 0
    device_up: bool = True
    fallbacks: dict[str, int] = field(default_factory=dict)  # pairs without an answer, by cause


def counts_of(step: StepReport) -> dict[str, float]:
    """What a step adds to sums since a start, the worker's totals and /metrics, under `KEY` or `KEY:LABEL`."""
    counts: defaultdict[str, float] = defaultdict(int)
    counts |= {"steps": 1, "messages": len(step.round_trips_s), "prefills": step.prefills}
    counts |= {"migrated": step.migrated_experts, "kept": step.kept_experts}
    if not step.unsimulated:
        counts["simulated_ps"] = step.end_ps - step.before_ps  # experts that moved between the two, too
    of_step = ("device", step.device or {}), ("bound", step.device_bounds), ("why", step.fallbacks)
    labelled: list[tuple[str, Mapping[str, float]]] = [("pairs", of) for of in step.pairs.values()]
    labelled += [("rows", dict(zip(PHASES, rows, strict=True))) for rows in step.rows.values()]
    for key, values in (*labelled, *of_step):
        for label, count in values.items():
            counts[f"{key}:{label}"] += count
    return counts


def of_all_stages(reports: Sequence[StepReport], pipeline: PipelineClock) -> StepReport:
    """One report of a step from those of its stages, whose layers and times add up."""
    if len(reports) == 1:
        return reports[0]
    ordered = sorted(reports, key=lambda report: report.stage)
    first = ordered[0]
    before = pipeline.ended_ps
    start, end = pipeline.run([report.end_ps - report.before_ps for report in ordered], first.pairs)
    pairs = {name: dict(_sum(report.pairs[name] for report in ordered)) for name in first.pairs}
    plans = {name: dict(plan) for name, plan in first.plans.items()}
    for name, plan in plans.items():
        bits = [(report.plans[name]["avg_bits"], report.pairs_per_row) for report in ordered]
        plan["avg_bits"] = sum(value * weight for value, weight in bits) / sum(weight for _, weight in bits)
        nats = [report.plans[name]["predicted_nats"] for report in ordered]
        plan["predicted_nats"] = None if None in nats else sum(nats)
    per_row = sum(report.pairs_per_row for report in ordered)
    has_times = all(report.device is not None for report in ordered)
    return StepReport(
        *(start, end, pairs, plans, first.drafts, per_row, first.rows),
        before_ps=before,
        device=dict(_sum(report.device or {} for report in ordered)) if has_times else None,
        device_bounds=dict(_sum(report.device_bounds for report in ordered)),
        unsimulated=max((report.unsimulated for report in ordered), key=len),
        plan_s=max(
            (report.plan_s for report in ordered if report.plan_s is not None), default=None
        ),  # at the same time
        round_trips_s=[value for report in ordered for value in report.round_trips_s],
        migrated_experts=sum(report.migrated_experts for report in ordered),
        kept_experts=sum(report.kept_experts for report in ordered),
        prefills=first.prefills,
        device_up=all(report.device_up for report in ordered),
        fallbacks=dict(_sum(report.fallbacks for report in ordered)),
    )


def _sum(counts: Iterable[Mapping[str, Any]]) -> Counter[str]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return total


@dataclass
class RequestReport:
    arrival_s: float
    prompt_tokens: int = 0
    unsimulated: str = ""  # as of the steps
    last_step: int = 0  # that the scheduler has put it into
    prompt_end: int = 0  # position of the last part's first answered token; prompt_tokens are what the client sent
    parts: list[int] = field(default_factory=list)  # how many tokens were made before each later part of the input
    appended: int | None = None  # tokens so far, where vLLM forgets those of earlier parts
    part_finish: str = ""  # how the last part ended, while the session waits for the next
    first_scheduled_ps: int | None = None
    token_ps: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    pairs: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    plan: dict[str, Any] = field(default_factory=dict)
    drafted: int = 0
    rejected: int = 0
    pairs_per_row: int = 0
    device: Counter[str] | None = field(default_factory=Counter)
    """Sums over the device's simulated times; None if one of its answers has no time."""
    device_bounds: Counter[str] = field(default_factory=Counter)

    def add(self, request_id: str, step: StepReport, output_tokens: int, now_s: float) -> int:
        """Count one step; how many tokens it made, all of which come at its end.

        output_tokens: of the request, those that this step made included.
        """
        if self.appended is not None:
            output_tokens = self.appended
        if self.first_scheduled_ps is None:
            self.first_scheduled_ps = step.start_ps
        pairs = step.pairs.get(request_id, {})
        for kind, count in pairs.items():
            self.pairs[kind] = self.pairs.get(kind, 0) + count
        for phase, rows in zip(PHASES, step.rows.get(request_id, ()), strict=False):
            self.rows[phase] += rows
        if any(pairs.get(kind, 0) for kind in DEVICE_PAIR_KINDS):
            if self.device is None or step.device is None:
                self.device = None
            else:
                self.device.update(step.device)
            self.device_bounds.update(step.device_bounds)
        self.unsimulated = step.unsimulated or self.unsimulated
        made = output_tokens - len(self.token_ps)
        self.token_ps += [step.end_ps] * made
        self.token_s += [now_s] * made
        if drafts := step.drafts.get(request_id, 0):
            self.drafted += drafts
            self.rejected += drafts - max(made - 1, 0)  # it may have ended before the step did
            self.pairs_per_row = step.pairs_per_row
        return made

    def as_dict(self, output_tokens: int, finish: str) -> dict[str, Any]:
        """Times in ms (measured) and us (simulated). Simulated time starts when the request is first scheduled.

        simulated_device_us: stages of the device's answers that the request waited for, those beside it too; they are
        not divided among the requests of a step. predicted_nats: null where it is not to be trusted.
        """
        output_tokens = output_tokens if self.appended is None else self.appended
        report: dict[str, Any] = {"finish": finish, "prompt_tokens": self.prompt_tokens, "output_tokens": output_tokens}
        report |= {f"{phase}_rows": self.rows[phase] for phase in PHASES}
        report |= {f"{kind}_pairs": self.pairs.get(kind, 0) for kind in PAIR_KINDS}
        if self.drafted:  # their rows ran, so the pairs above count them
            report |= {"drafted_tokens": self.drafted, "accepted_drafts": self.drafted - self.rejected}
            report["rejected_pairs"] = self.rejected * self.pairs_per_row
        report |= self.plan
        if self.plan:
            report["predicted_nats"] = trusted(self.plan["predicted_nats"])
        if self.unsimulated:
            report["unsimulated"] = self.unsimulated
        if self.token_s and self.first_scheduled_ps is not None:
            measured = [took * 1e3 for took in self._between(self.token_s)]
            report |= {
                "measured_ttft_ms": round((self.token_s[0] - self.arrival_s) * 1e3, 3),
                "measured_tpot_ms": round(sum(measured) / len(measured), 3) if measured else None,
                "measured_token_ms": [round(value, 3) for value in measured],
            }
            report |= self._simulated(self.first_scheduled_ps)
        if self.device:
            stages = (*DEVICE_STAGES, "overlap_saved", "total")
            report["simulated_device_us"] = {
                stage: round(self.device[f"{stage}_ps"] / PS_PER_US, 6) for stage in stages
            }
            report["simulated_device_bound"] = dict(self.device_bounds)
        return report

    def begin_part(self, prompt_end: int, sent: int) -> None:
        """The client sent more input. prompt_end: where the prompt ends now, with the answers that vLLM keeps in it."""
        self.parts.append(len(self.token_ps))
        self.prompt_end, self.part_finish = prompt_end, ""
        self.prompt_tokens += sent

    def _between(self, times: Sequence[float]) -> list[float]:
        """From each token to the next; the time until the client sends another part is the client's."""
        return [b - a for count, (a, b) in enumerate(pairwise(times), 1) if count not in self.parts]

    def _simulated(self, begun_ps: int) -> dict[str, Any]:
        """Times in us; null where the simulated clock lacks something that ran."""
        if self.unsimulated:
            return dict.fromkeys(("simulated_ttft_us", "simulated_tpot_us", "simulated_token_us"))
        took = [ps / PS_PER_US for ps in self._between(self.token_ps)]
        return {
            "simulated_ttft_us": round((self.token_ps[0] - begun_ps) / PS_PER_US, 6),
            "simulated_tpot_us": round(sum(took) / len(took), 6) if took else None,
            "simulated_token_us": [round(value, 6) for value in took],
        }
