"""What several commands share: options, and waiting and fitted tables for a person at a terminal.

Imports nothing that takes time: rich when something is shown. A program behind a pipe sees no waiting.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ndp_device.common.command_line import assignments
from ndp_device.common.errors import ConfigError
from ndp_device.common.outputs import A_NEW_FOLDER

if TYPE_CHECKING:
    from rich.table import Table

TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE", help="Directory of the trace.")]
CheckpointArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint directory.")]
OutOption = Annotated[
    Path, A_NEW_FOLDER, typer.Option(help="Directory of the trace to write; must be empty or absent.")
]


def judge_bits(avg_bits: float) -> float:
    """Say on stderr that so few bits are of no use, where they are not."""
    from vllm_ndp.planning.bitwidths import verdict_on

    if verdict := verdict_on(avg_bits):
        typer.echo(f"vllm-ndp: {verdict}", err=True)
    return avg_bits


AvgBitsOption = Annotated[float, typer.Option(help="Average bits of cold experts.", callback=judge_bits)]


def hardware_values(pairs: list[str] | None) -> dict[str, str | int]:
    """Read the values of --set."""
    given = assignments(pairs, "--set", "section.field=value")
    return {name: int(value) if value.removeprefix("-").isdecimal() else value for name, value in given.items()}


def integers(text: str, option: str, *, least: int | None = None) -> tuple[int, ...]:
    """Read "1,4,16" as (1, 4, 16)."""
    try:
        read = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{option} must be whole numbers with commas between them, such as 1,2,3,4, got {text!r}"
        ) from None
    if least is not None and min(read) < least:
        raise ConfigError(f"{option} must be at least {least}, got {min(read)}")
    return read


# -- at a terminal -----------------------------------------------------------------------------------------------------


def waiting(what: str) -> AbstractContextManager[object]:
    """Show what is being waited for on stderr."""
    from rich.console import Console

    return Console(stderr=True).status(what)


def print_table(table: Table, *, width: int, expendable: Sequence[str] = (), elsewhere: str = "") -> None:
    """Print to a terminal what fits into it, else `width` columns.

    expendable: headers of what a narrow terminal goes without, the least first; elsewhere: what shows them all.
    """
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else width, markup=False, emoji=False)  # [cpu] is a word
    unlimited = console.options.update(width=10_000)
    hidden: list[str] = []
    for header in expendable:
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
        hidden.append(header)
        table.columns = [column for column in table.columns if _words(column.header) != header]
    console.print(table)
    if hidden:
        print(f"  {len(hidden)} columns more do not fit{elsewhere and f': {elsewhere}'}", file=sys.stderr)


def _words(header: object) -> str:
    return " ".join(str(header).split())
