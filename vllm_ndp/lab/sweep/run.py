"""Runs a grid: takes over the results of an earlier run, shares out the rest, puts rows back into order.

The result is the same to the digit for any number of processes, since no row depends on another. Rows meet only
afterwards, in the grid's own order. Knows grids, jobs and the file of results. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from vllm_ndp.lab.compare import ORACLE, CompareSettings, Comparison, compare
from vllm_ndp.lab.sweep.grid import Axes, Grid, Result, SweepPoint
from vllm_ndp.lab.sweep.jobs import run_each
from vllm_ndp.lab.sweep.results import SweepFile
from vllm_ndp.lab.vectorised.outcome import Summary
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.traces.trace import Trace


@dataclass(frozen=True)
class SweepResult:
    """Rows in the grid's order."""

    rows: list[tuple[SweepPoint, Summary]]
    found_before: int
    refused: list[tuple[SweepPoint, str]]
    skipped: list[str]

    def winners(self) -> Iterator[tuple[SweepPoint, int, Summary, Summary | None]]:
        """Per point and batch size: the fastest row, and the fastest of all other systems. Oracles do not take part."""
        rows = [(point, row) for point, row in self.rows if not row.policy.startswith(ORACLE)]
        for (point, batch), group in groupby(rows, key=lambda pair: (pair[0], pair[1].batch)):
            ranked = sorted((row for _, row in group), key=lambda row: -row.decode_tokens_per_s)
            yield point, batch, ranked[0], next((row for row in ranked if row.system != ranked[0].system), None)


def run_sweep(
    grid: Grid, out: Path, jobs: int | str = 1, watch: Callable[[int, int], None] = lambda done, total: None
) -> SweepResult:
    """Find every row that the file in `out` does not hold yet. watch: called with how many are done, of how many."""
    with SweepFile(out, grid.about) as file:
        results = {n: file.known[task.key] for n, task in enumerate(grid.tasks) if task.key in file.known}
        before = len(results)
        watch(before, len(grid.tasks))
        for number, result in _run(grid, [n for n in range(len(grid.tasks)) if n not in results], jobs):
            file.add(grid.tasks[number].key, result)
            results[number] = result
            watch(len(results), len(grid.tasks))
    ordered = [results[number] for number in range(len(grid.tasks))]
    sentences = [
        (task.point, result) for task, result in zip(grid.tasks, ordered, strict=True) if isinstance(result, str)
    ]
    refused = [*((part.point, why) for part, why in grid.refused.items()), *dict.fromkeys(sentences)]
    return SweepResult(grid.rows(ordered), before, refused, grid.skipped)


def compare_by(
    jobs: int | str,
    trace: Trace,
    settings: CompareSettings,
    *,
    prior: ImportanceScore | None = None,
    loss: LossTable | None = None,
) -> Comparison:
    """`compare` shared out over processes; its outcomes stay there."""
    if jobs == 1:
        return compare(trace, settings, prior=prior, loss=loss)
    grid = Grid([trace], Axes((settings.model,), (settings.hardware,)), settings, prior=prior, loss=loss, apart=False)
    results = dict(_run(grid, list(range(len(grid.tasks))), jobs))
    return grid.comparison([results[number] for number in range(len(grid.tasks))])


def _run(grid: Grid, numbers: list[int], jobs: int | str) -> Iterator[tuple[int, Result]]:
    if numbers:
        grid.arrange()
    return run_each(grid.run, numbers, jobs)
