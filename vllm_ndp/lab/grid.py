"""`compare` at every point of a grid, shared out over processes.

A refusal of one system at one point (a budget that fits nothing, say) is a result, not the end. A model is replayed on
the first trace of its routing shape. No row depends on another, so any number of processes finds the same to the digit.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from ndp_device.common.errors import ConfigError, NdpError
from ndp_device.common.widths import WIDTHS
from vllm_ndp.cost_model.costs import model_named
from vllm_ndp.lab.compare import Comparison, Planned, Replayed, Replays, Workload, side_by_side
from vllm_ndp.lab.options import CAPACITY, GB, ORACLE, CompareSettings
from vllm_ndp.lab.systems import SYSTEMS
from vllm_ndp.lab.vectorised.outcome import Summary
from vllm_ndp.planning.bitwidths import LossTable, nominal_loss
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.traces.trace import Trace

_SAME = 1e-6
"""Sums of the same losses differ by their order."""


@dataclass(frozen=True)
class Compared:
    """Points of a grid with their comparisons, and what was refused where."""

    points: list[tuple[CompareSettings, Comparison]]
    refused: list[tuple[CompareSettings, str]]
    skipped: list[str]
    loss: LossTable | None = None

    def rows(self) -> list[dict[str, Any]]:
        """Every row, with its point in the first columns."""
        return [columns(at) | row.as_dict() for at, comparison in self.points for row in comparison.rows]

    def winners(self) -> Iterator[tuple[CompareSettings, int, Summary, Summary | None]]:
        """Per point and batch size: the fastest row, and the fastest of all other systems, of those that lose no more
        than every expert at the point's bits does. If none does, of all. Oracles do not take part."""
        for at, comparison in self.points:
            for batch in dict.fromkeys(row.batch for row in comparison.rows):
                rows = [row for row in comparison.rows if row.batch == batch and not row.policy.startswith(ORACLE)]
                most = self._loss_at(int(at.avg_bits), rows)
                within = [row for row in rows if row.loss <= most] or rows
                ranked = sorted(within, key=lambda row: -row.decode_tokens_per_s)
                if ranked:
                    other = next((row for row in ranked if row.system != ranked[0].system), None)
                    yield at, batch, ranked[0], other

    def _loss_at(self, bits: int, rows: Sequence[Summary]) -> float:
        """Of every expert at so many bits: as a row has it, or else by the table."""
        known = [row.loss for row in rows if (row.system, row.policy) == ("quantized", f"{bits} bits")]
        by_table = (
            nominal_loss(bits) if self.loss is None else float(self.loss.mse[:, :, min(bits, WIDTHS[-1]) - 1].mean())
        )
        return (known or [by_table])[0] * (1 + _SAME)


def columns(at: CompareSettings) -> dict[str, Any]:
    """First columns of a point's rows. memory_gb None: as the hardware has it."""
    capacity = at.overrides.get(CAPACITY)
    memory = None if capacity is None else int(capacity) / GB
    return {"model": at.model, "hardware": at.hardware, "memory_gb": memory, "asked_bits": at.avg_bits}


def processes(text: str) -> int:
    """Read a number of processes, or `all`: one for each core this process may use."""
    if text == "all":
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--jobs must be a number of processes, or all, got {text!r}")
    return int(text)


def compare_all(
    traces: Sequence[Trace],
    points: Sequence[CompareSettings],
    *,
    prior: ImportanceScore | None = None,
    loss: LossTable | None = None,
    jobs: int = 1,
) -> Compared:
    """Raises ConfigError where a trace has no model, a model no trace, or nothing can be replayed anywhere; at a single
    point whatever `Replays` refuses."""
    numbers = [_trace_of(at.model, traces) for at in points]
    if unused := set(range(len(traces))) - set(numbers):
        p = traces[min(unused)].provenance
        raise ConfigError(
            f"no model of the grid has {p.num_experts} experts top-{p.top_k} as trace {min(unused) + 1} "
            f"(of {p.model}): leave it out or name a model of its routing shape"
        )
    workloads = [Workload(trace, prior=prior) for trace in traces]
    refused: dict[tuple[int, str], None] = {}
    prepared: list[list[Replays]] = [[] for _ in points]
    for place, (number, at) in enumerate(zip(numbers, points, strict=True)):
        for part in [at] if len(points) == 1 else [_of_system(at, name) for name in at.systems]:
            try:
                prepared[place].append(Replays(workloads[number], part, loss))
            except NdpError as error:
                if len(points) == 1:
                    raise
                refused[place, str(error)] = None
    rows = [(place, of, one) for place, every in enumerate(prepared) for of in every for one in of.planned]
    done: list[list[Replayed]] = [[] for _ in points]
    for (place, _, _), found in zip(rows, _run(rows, min(jobs, len(rows))), strict=True):
        if isinstance(found, str):
            refused[place, found] = None
        else:
            done[place].append(found)
    if not any(done):
        raise ConfigError(next(why for _, why in refused))
    there = [(at, _comparison(own, every)) for at, own, every in zip(points, done, prepared, strict=True) if own]
    return Compared(there, [(points[place], why) for place, why in refused], _skipped(there), loss)


def compare(trace: Trace, settings: CompareSettings) -> Comparison:
    """Replay the trace under every combination. Raises ConfigError or TraceError before any replay starts."""
    return compare_all([trace], [settings]).points[0][1]


Task = tuple[int, Replays, Planned]
"""A row to be found: its point, and by whom."""
_shared: list[Sequence[Task]] = []
"""What processes replay: they are forked, so they read the traces without a copy."""


def _replayed(number: int) -> Replayed | str:
    _, replays, one = _shared[0][number]
    try:
        return replays.replay(one)
    except NdpError as error:
        return str(error)


def _run(tasks: Sequence[Task], jobs: int) -> Iterator[Replayed | str]:
    """In the order of the tasks."""
    _shared[:] = [tasks]
    if jobs <= 1:
        yield from map(_replayed, range(len(tasks)))
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        try:
            yield from pool.map(_replayed, range(len(tasks)))
        except BrokenProcessPool:
            raise NdpError(
                "a worker process ended without an answer, perhaps because memory ran out: try with fewer --jobs"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _of_system(at: CompareSettings, name: str) -> CompareSettings:
    own = SYSTEMS[name].options
    return dataclasses.replace(
        at, systems=(name,), options={option: value for option, value in at.options.items() if option in own}
    )


def _comparison(rows: Sequence[Replayed], prepared: Sequence[Replays]) -> Comparison:
    """Of a point, from the rows of its systems: by batch size, then by system."""
    skipped = list(dict.fromkeys(note for of in prepared for note in of.skipped))
    in_order = side_by_side(sorted(rows, key=lambda done: done.row.batch))
    return Comparison(in_order, skipped, prepared[0].costs.hardware.config_hash, prepared[0].num_requests)


def _skipped(points: Sequence[tuple[CompareSettings, Comparison]]) -> list[str]:
    """Rows that are missing and why; with their point where not every point lacks them."""
    everywhere = set.intersection(*(set(comparison.skipped) for _, comparison in points))
    common = [note for note in points[0][1].skipped if note in everywhere]
    return common + [
        f"{named(at)}: {note}" for at, comparison in points for note in comparison.skipped if note not in everywhere
    ]


def named(at: CompareSettings) -> str:
    return ", ".join(str(value) for value in columns(at).values() if value is not None)


def _trace_of(model: str, traces: Sequence[Trace]) -> int:
    """The first trace of the model's routing shape; the only one is held to it by its replay."""
    if len(traces) == 1:
        return 0
    shape = model_named(model)
    for number, trace in enumerate(traces):
        if (trace.provenance.num_experts, trace.provenance.top_k) == (shape.num_experts, shape.top_k):
            return number
    given = ", ".join(f"{t.provenance.num_experts} top-{t.provenance.top_k}" for t in traces)
    raise ConfigError(
        f"{model} has {shape.num_experts} experts top-{shape.top_k}, the traces have {given}: "
        "add a trace of its routing shape"
    )
