"""What the lab's commands show before their last line: tables for people and files of rows."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cli.shared import print_table
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.compare import MARGIN, Compared, beside_fastest, columns, named
from vllm_ndp.lab.load.latency import CAUSES, Percentile
from vllm_ndp.lab.locality import Locality
from vllm_ndp.lab.reproduce import Reproduction
from vllm_ndp.lab.systems import SYSTEMS

EXPENDABLE = (
    "MoE ms/layer",
    "NDP busy %",
    "moved GB",
    "hit mass",
    "p99 ms",
    "GPU GB",
    "mJ/token",
    "K",
    "bits",
    "TPOT p50 ms",
    "batch",
)
"""Columns of a comparison that a narrow terminal goes without, the least first."""
_HEADING = 9
"""Characters of a line of a heading; a longer word is not broken."""
WIDTH = 100
"""Columns of a comparison that no terminal shows."""


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """By the file's ending: Parquet, CSV, or else Markdown."""
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(list(rows))
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        lines = [
            table.column_names,
            ["---"] * table.num_columns,
            *([str(cell) for cell in row.values()] for row in rows),
        ]
        path.write_text("".join(f"| {' | '.join(cells)} |\n" for cells in lines))


def print_comparison(found: Compared, routing: str, *, notes: bool) -> None:
    """Of a single point. routing: of which model. notes: what else there is to know of each row and system."""
    settings, result = found.points[0]
    where = f"{settings.model} on {settings.hardware}"
    routed = "" if routing == settings.model else f" with {routing}'s routing"
    table = Table(title=f"{where}{routed}, {result.num_requests} requests; simulated times", title_justify="left")
    for name in result.rows[0].cells():
        table.add_column(
            textwrap.fill(name, _HEADING, break_long_words=False),
            justify="left" if name in ("system", "policy") else "right",
            no_wrap=name not in ("policy", "routing"),
        )
    for row in result.rows:
        table.add_row(*row.cells().values())
    print_table(table, width=WIDTH, expendable=EXPENDABLE, elsewhere="--out FILE has all columns")
    _print_missing(found)
    if not notes:
        print("  --notes says what each system assumes; --systems all and --policies all show every one")
        return
    print(f"  hardware {result.config_hash}")
    for row, beside in zip(result.rows, beside_fastest(result.replayed), strict=True):
        if beside is not None and beside.equal and (beside.low, beside.high) != (0, 0):
            print(
                f"  as fast as batch {row.batch}'s fastest within {100 * MARGIN:g} % (paired TOST at 5 %): "
                f"{row.system} {row.policy}, {100 * beside.mean:+.1f} % of time ({100 * beside.low:+.1f} to "
                f"{100 * beside.high:+.1f})"
            )
    for done in result.replayed:
        if done.over_least >= 0:
            print(
                f"  {done.row.system} {done.row.policy}, batch {done.row.batch}: its last plan takes at most "
                f"{100 * done.over_least:.0f} % longer than the fastest one, by a relaxation"
            )
    costs = Costs(load_hardware(settings.hardware, **settings.overrides), model_named(settings.model))
    for side in ("host", "device"):
        us = costs.opening_ps(side) / 1e6
        print(f"  one row to the {side} and back takes {us:.2f} us before any expert is read")
    for name in settings.systems:
        for assumption in SYSTEMS[name].assumptions:
            print(f"  {name}: {assumption}")


def print_winners(result: Compared) -> None:
    """For each point and batch size the row that wins, and the best of the others' systems."""
    won, names = list(result.winners()), ("model", "hardware", "memory GB", "avg bits", "batch")
    points = [
        ["preset" if value is None else str(value) for value in (*columns(at).values(), batch)] for at, batch, *_ in won
    ]
    varies = [len({point[place] for point in points}) > 1 for place in range(len(names))]
    common = itertools.compress(zip(names, points[0] if points else (), strict=False), (not does for does in varies))
    same = ", ".join(value if name in ("model", "hardware") else f"{name} {value}" for name, value in common)
    table = Table(
        title=f"fastest system that loses no more than every expert at as many bits; simulated decode tokens/s\n{same}"
    )
    for name in (*itertools.compress(names, varies), "system", "policy", "tokens/s", "loss", "next system", "of it"):
        table.add_column(name, justify="left" if name in ("model", "hardware", "system", "policy") else "right")
    for point, (_, _, best, second) in zip(points, won, strict=True):
        cells = best.cells()
        other = (
            ("-", "-")
            if second is None
            else (second.system, f"{second.decode_tokens_per_s / best.decode_tokens_per_s:.2f}")
        )
        where = itertools.compress(point, varies)
        table.add_row(*where, best.system, best.policy, cells["decode tokens/s"], cells["loss"], *other)
    print_table(table, width=200)
    _print_missing(result)


def _print_missing(result: Compared) -> None:
    for at, why in result.refused:
        print(f"  refused {named(at)}: {why}")
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
    print_table(table, width=160)


def print_reproduction(result: Reproduction) -> None:
    table = Table(title=result.source)
    for name in ("row", "quantity", "published", "ours", "unit", "off by", "assumptions"):
        table.add_column(name, justify="right" if name in ("published", "ours", "off by") else "left")
    for row in result.rows:
        off = "" if row.deviation is None else f"{100 * row.deviation:+.1f} %"
        published = "" if row.published is None else f"{row.published:g}"
        table.add_row(row.name, row.quantity, published, f"{row.ours:.4g}", row.unit, off, row.assumptions)
    print_table(table, width=200)
    for note in result.notes:
        print(f"  note: {note}")


def print_locality(found: Locality, places: tuple[int, ...]) -> None:
    """Means over layers, one row per rule."""
    chance = found.top_k / found.num_experts
    table = Table(
        title=f"{found.num_tokens} decode tokens: {_percent(found.repeats)} % of choices repeat, "
        f"{_percent(found.shuffled)} shuffled, {100 * chance:.1f} by chance"
    )
    table.add_column("% of choices found in")
    for size in places:
        table.add_column(f"{size} of {found.num_experts}", justify="right")
    for rule in found.hits:
        table.add_row(rule, *(f"{100 * found.mean_hits(rule, size):.1f}" for size in places))
    for name, curve in (("lru misses, first 64 tokens", found.early_misses), ("later", found.later_misses)):
        table.add_row(name, *(_percent(curve[:, size]) for size in places))
    table.add_row("most used, share", *(f"{100 * found.concentration[:, size].mean():.1f}" for size in places))
    print_table(table, width=120)
    coverage = Table(title=f"% of decode choices in {found.num_hot} hot experts per layer, over requests")
    for name in ("hot set from", "mean", "95 % interval"):
        coverage.add_column(name, justify="left" if name == "hot set from" else "right")
    for name, value in found.coverage.items():
        between = "-" if value.low is None or value.high is None else f"{100 * value.low:.2f} to {100 * value.high:.2f}"
        coverage.add_row(name, f"{100 * value.mean:.2f}", between)
    print_table(coverage, width=120)


def _percent(shares: NDArray[np.float64]) -> str:
    return "-" if np.isnan(shares).any() else f"{100 * shares.mean():.1f}"
