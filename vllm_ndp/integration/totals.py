"""Totals of one worker since it started: steps, rows, pairs, the device's simulated answers. Knows step reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm_ndp.integration.report import PAIR_KINDS, PHASES, StepReport, added


@dataclass
class Totals:
    steps: int = 0
    preempted: int = 0
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    pairs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PAIR_KINDS, 0))
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Pairs without an answer of the device, by cause."""
    device: Counter[str] | None = field(default_factory=Counter)
    """None: an answer had no simulated time."""
    device_bounds: Counter[str] = field(default_factory=Counter)

    def begin_step(self, *, num_resumed: int) -> None:
        """num_resumed: requests that were preempted before."""
        self.steps += 1
        self.preempted += num_resumed

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "preempted": self.preempted,
            **{f"{phase}_rows": count for phase, count in self.rows.items()},
            **{f"{kind}_pairs": count for kind, count in self.pairs.items()},
            "fallback_causes": dict(self.fallbacks),
            "simulated_device": None if self.device is None else dict(self.device),
            "simulated_device_bound": dict(self.device_bounds),
        }

    def add(self, report: StepReport) -> None:
        """A step has ended; it was counted when it began."""
        for counts in report.pairs.values():
            for kind, count in counts.items():
                self.pairs[kind] += count
        for rows in report.rows.values():
            for phase, count in zip(PHASES, rows, strict=True):
                self.rows[phase] += count
        if report.costs.fallbacks:
            self.fallbacks.update(report.costs.fallbacks)
        self.device = added(self.device, report.device)
        if report.device_bounds:
            self.device_bounds.update(report.device_bounds)
