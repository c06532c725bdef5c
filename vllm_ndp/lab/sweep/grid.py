"""Tasks of a sweep: every model on every hardware at every memory size, and the rows of `compare` for each.

A model is replayed on the trace of its routing shape, so one sweep may take several traces. A refusal at one point (a
budget that fits nothing, say) is a result of that point, not the end of the sweep. The grid refuses before the run what
no point could do. Knows points and rows. Does not know processes or files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ndp_device.common.errors import ConfigError, NdpError
from vllm_ndp.cost_model.costs import model_named
from vllm_ndp.lab.compare import CompareSettings, Comparison, Replayed, Replays, Workload, side_by_side
from vllm_ndp.lab.sweep.digests import array_digest, plain, program_digest, trace_digest
from vllm_ndp.lab.systems import OPTIONS
from vllm_ndp.lab.vectorised.outcome import Summary
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.traces.trace import Trace

GB = 10**9
CAPACITY = "gpu.hbm_capacity_bytes"


@dataclass(frozen=True)
class Axes:
    """Values to vary. `settings` of the grid hold everything else, batch sizes, systems and policies included."""

    models: tuple[str, ...]
    hardware: tuple[str, ...]
    memory_gb: tuple[int, ...] = ()
    """GPU memory in GB of 10^9 bytes; empty: as the hardware has it."""

    def __post_init__(self) -> None:
        for name in ("models", "hardware", "memory_gb"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ConfigError(f"a sweep takes every value once, {name} has {', '.join(map(str, values))}")
        if not self.models or not self.hardware:
            raise ConfigError("a sweep needs at least one model and one hardware")
        if any(size < 1 for size in self.memory_gb):
            raise ConfigError(f"memory must be at least 1 GB, got {', '.join(map(str, self.memory_gb))}")


@dataclass(frozen=True)
class SweepPoint:
    """One model on one hardware."""

    trace: int
    """Which of the traces."""
    model: str
    hardware: str
    memory_gb: int | None

    def columns(self) -> dict[str, Any]:
        """First columns of the point's rows in a table."""
        memory = "preset" if self.memory_gb is None else self.memory_gb
        return {"model": self.model, "hardware": self.hardware, "memory_gb": memory}


class SweepPart(NamedTuple):
    """Systems at one point that are refused together: one each in a sweep, all of them in a `compare`."""

    point: SweepPoint
    systems: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """One row of one point."""

    part: SweepPart
    combination: int

    @property
    def point(self) -> SweepPoint:
        return self.part.point

    @property
    def key(self) -> str:
        """Name of the task in a file of results. It contains the traces' order, which the file depends on."""
        p, systems = self.part
        return f"{p.trace}/{p.model}/{p.hardware}/{p.memory_gb or '-'}/{'+'.join(systems)}/{self.combination}"


Result = Replayed | str
"""Result of a task: a row, or the sentence that refused it."""


class Grid:
    """All tasks of a sweep, and how to do one."""

    def __init__(
        self,
        traces: Sequence[Trace],
        axes: Axes,
        settings: CompareSettings,
        *,
        prior: ImportanceScore | None = None,
        loss: LossTable | None = None,
        apart: bool = True,
    ) -> None:
        """apart: what one system refuses does not keep the others from a point."""
        self._settings, self._loss = settings, loss
        self.about = {
            "program": program_digest(),
            "traces": [trace_digest(trace) for trace in traces],
            "axes": plain(axes),
            "settings": plain(settings),
            "prior": None if prior is None else array_digest(prior.values),
            "losses": None if loss is None else array_digest(loss.mse),
        }
        """Everything that the rows depend on."""
        self._workloads = [Workload(trace, prior=prior, affinity=settings.affinity) for trace in traces]
        self.points = [
            SweepPoint(_trace_of(model, traces), model, hardware, memory)
            for model in axes.models
            for hardware in axes.hardware
            for memory in axes.memory_gb or (None,)
        ]
        unused = set(range(len(traces))) - {point.trace for point in self.points}
        if unused:
            p = traces[min(unused)].provenance
            raise ConfigError(
                f"no model of the sweep has {p.num_experts} experts top-{p.top_k} as trace {min(unused) + 1} "
                f"(of {p.model}): leave it out or name a model of its routing shape"
            )
        groups = [(name,) for name in settings.systems] if apart else [settings.systems]
        self._replays: dict[SweepPart, Replays] = {}
        self.refused: dict[SweepPart, str] = {}
        """Parts of which nothing can be replayed, and why."""
        for part in (SweepPart(point, group) for point in self.points for group in groups):
            try:
                self._replays[part] = self._replays_of(part)
            except NdpError as error:
                self.refused[part] = str(error)
        if not self._replays:
            raise ConfigError(next(iter(self.refused.values())))

    @cached_property
    def tasks(self) -> list[Task]:
        """In the order of a table: by point, then by batch size, then by system."""
        tasks = [
            (self.points.index(part.point), self._settings.batches.index(combination.batch), Task(part, number))
            for part, replays in self._replays.items()
            for number, combination in enumerate(replays.combinations)
        ]
        return [task for _, _, task in sorted(tasks, key=lambda placed: placed[:2])]

    @property
    def skipped(self) -> list[str]:
        """Rows that are missing and why; with their point where not every part lacks them."""
        notes = {part: list(dict.fromkeys(replays.skipped)) for part, replays in self._replays.items()}
        everywhere = set.intersection(*(set(said) for said in notes.values()))
        common = [note for note in next(iter(notes.values())) if note in everywhere]
        return common + [
            f"{', '.join(map(str, part.point.columns().values()))}: {note}"
            for part, said in notes.items()
            for note in said
            if note not in everywhere
        ]

    def arrange(self) -> None:
        """Do now what every task needs, so that processes forked from this one share it."""
        for replays in self._replays.values():
            replays.arrange()

    def run(self, number: int) -> Result:
        """Do one of the tasks. Pure: the same result in any process at any time."""
        task = self.tasks[number]
        replays = self._replays[task.part]
        try:
            return replays.replay(replays.combinations[task.combination])[0]
        except NdpError as error:
            return str(error)

    def rows(self, results: Sequence[Result]) -> list[tuple[SweepPoint, Summary]]:
        """The table, from the results of all tasks in order: rows of a point set against the paper's system there."""
        by_point: dict[SweepPoint, list[Replayed]] = {part.point: [] for part in self._replays}
        for task, result in zip(self.tasks, results, strict=True):
            if not isinstance(result, str):
                by_point[task.point].append(result)
        return [(point, row) for point, done in by_point.items() for row in side_by_side(done)]

    def comparison(self, results: Sequence[Result]) -> Comparison:
        """The table of `compare`, for a grid of one point. Raises ConfigError with the first refusal of a task."""
        (replays,) = self._replays.values()
        refused = [result for result in results if isinstance(result, str)]
        if refused:
            raise ConfigError(refused[0])
        return replays.compared([result for result in results if not isinstance(result, str)])

    def _replays_of(self, part: SweepPart) -> Replays:
        point, own = part.point, {option for name in part.systems for option in OPTIONS.get(name, ())}
        overrides = dict(self._settings.overrides)
        if point.memory_gb is not None:
            overrides[CAPACITY] = point.memory_gb * GB
        settings = dataclasses.replace(
            self._settings,
            model=point.model,
            hardware=point.hardware,
            overrides=overrides,
            systems=part.systems,
            options={name: value for name, value in self._settings.options.items() if name in own},
        )
        return Replays(self._workloads[point.trace], settings, self._loss)


def _trace_of(model: str, traces: Sequence[Trace]) -> int:
    """The first trace of the model's routing shape."""
    shape = model_named(model)
    for number, trace in enumerate(traces):
        if (trace.provenance.num_experts, trace.provenance.top_k) == (shape.num_experts, shape.top_k):
            return number
    given = ", ".join(f"{t.provenance.num_experts} top-{t.provenance.top_k}" for t in traces)
    raise ConfigError(
        f"{model} has {shape.num_experts} experts top-{shape.top_k}, the traces have {given}: "
        "add a trace of its routing shape"
    )
