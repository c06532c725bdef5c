"""Tables for people that the replay commands print before their last line. Knows columns; computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ndp_device.widths import WIDTHS
from vllm_ndp.replay.analysis import Analysis, Sensitivity
from vllm_ndp.replay.compare import CompareSettings, Comparison
from vllm_ndp.replay.reproduce import Reproduction
from vllm_ndp.replay.serving.latency import CAUSES, Percentile
from vllm_ndp.replay.sweep.run import SweepResult
from vllm_ndp.replay.systems import SYSTEMS


def print_comparison(result: Comparison, settings: CompareSettings) -> None:
    where = f"{settings.model} on {settings.hardware} ({result.config_hash})"
    table = Table(title=f"{where}, {result.num_requests} requests; simulated times")
    for name in result.rows[0].cells():
        table.add_column(name, justify="left" if name in ("system", "policy") else "right")
    for row in result.rows:
        table.add_row(*row.cells().values())
    Console(width=230).print(table)
    for name in settings.systems:
        for assumption in SYSTEMS[name].assumptions:
            print(f"  {name}: {assumption}")
    for note in result.skipped:
        print(f"  skipped {note}")


@contextmanager
def progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, shown to people only; what it yields is called with how many are done, of how many."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_sweep(result: SweepResult) -> None:
    """For each point and batch size the fastest row that is no oracle, and the best of the others' systems."""
    table = Table(title="fastest system at each point; simulated decode tokens/s")
    for name in (
        "model",
        "hardware",
        "memory GB",
        "batch",
        "system",
        "policy",
        "tokens/s",
        "loss",
        "next system",
        "of it",
    ):
        table.add_column(name, justify="left" if name in ("model", "hardware", "system", "policy") else "right")
    for point, batch, best, second in result.winners():
        model, hardware, memory = map(str, point.columns().values())
        cells = best.cells()
        other = (
            ("-", "-")
            if second is None
            else (second.system, f"{second.decode_tokens_per_s / best.decode_tokens_per_s:.2f}")
        )
        table.add_row(
            model,
            hardware,
            memory,
            str(batch),
            best.system,
            best.policy,
            cells["decode tokens/s"],
            cells["loss"],
            *other,
        )
    Console(width=200).print(table)
    for point, why in result.refused:
        print(f"  refused {', '.join(map(str, point.columns().values()))}: {why}")
    for note in result.skipped:
        print(f"  skipped {note}")


def print_latencies(hosts: Sequence[Mapping[str, Sequence[Percentile]]], title: str) -> None:
    """hosts: of each, kind of latency -> percentiles."""
    table = Table(title=title)
    for name in ("host", "latency", "percentile", "ms", *CAUSES):
        table.add_column(name, justify="left" if name == "latency" else "right")
    for number, kinds in enumerate(hosts):
        for kind, found in kinds.items():
            for one in found:
                shares = (f"{one.causes_ps[cause] / 1e9:.3f}" if one.causes_ps[cause] else "-" for cause in CAUSES)
                table.add_row(str(number), kind, f"p{one.percent:g}", f"{one.latency_ps / 1e9:.3f}", *shares)
    Console(width=160).print(table)


def print_reproduction(result: Reproduction) -> None:
    table = Table(title=result.source)
    for name in ("row", "quantity", "published", "ours", "unit", "off by", "assumptions"):
        table.add_column(name, justify="right" if name in ("published", "ours", "off by") else "left")
    for row in result.rows:
        off = "" if row.deviation is None else f"{100 * row.deviation:+.1f} %"
        published = "" if row.published is None else f"{row.published:g}"
        table.add_row(row.name, row.quantity, published, f"{row.ours:.4g}", row.unit, off, row.assumptions)
    Console(width=200).print(table)
    for note in result.notes:
        print(f"  note: {note}")


def print_analysis(result: Analysis) -> None:
    table = Table(title=f"per layer, {result.num_requests} requests")
    for name in ("layer", "gini", "cosine prefill-decode", "null 95 %", "cosine to other requests"):
        table.add_column(name, justify="right")
    for layer, cosine in enumerate(result.cosine):
        band = f"{result.cosine_null_low[layer]:.3f}-{result.cosine_null_high[layer]:.3f}"
        table.add_row(
            str(layer), f"{result.gini[layer]:.3f}", f"{cosine:.3f}", band, f"{result.cosine_across[layer]:.3f}"
        )
    Console(width=140).print(table)
    coverage = Table(title=f"share of decode choices in {result.num_hot} hot experts, 95 % interval over requests")
    coverage.add_column("hot set from")
    for name in ("covered", "interval", "minus static", "interval "):
        coverage.add_column(name, justify="right")
    for name, value in result.coverage.items():
        over = result.over_static.get(name)
        paired = ("", "") if over is None else (f"{over.mean:+.4f}", f"{over.low:+.4f} {over.high:+.4f}")
        coverage.add_row(name, f"{value.mean:.4f}", f"{value.low:.4f} {value.high:.4f}", *paired)
    for title, curve in (
        ("first {} prompt tokens", result.first_tokens),
        ("first {} and prior", result.first_tokens_and_prior),
        ("last {} prompt tokens", result.last_tokens),
        ("refreshed every {} decode tokens", result.refresh),
        ("prior worth {} tokens", result.prior_tokens),
    ):
        for tokens, value in curve.items():
            coverage.add_row(title.format(tokens), f"{value.mean:.4f}", f"{value.low:.4f} {value.high:.4f}", "", "")
    Console(width=140).print(coverage)


def print_agreement(agreement: Sensitivity) -> None:
    correlations = ", ".join(
        f"{value:.3f} at {width} bit" for width, value in zip(WIDTHS, agreement.rank_correlation, strict=True)
    )
    changed = f"{100 * agreement.bits_changed:.1f} % of cold experts get other bits"
    print(f"calibrations: rank correlation of losses {correlations}; {changed}")
