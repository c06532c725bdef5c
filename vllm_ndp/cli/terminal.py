"""Progress and fitted tables for a person at a terminal; a program behind a pipe sees neither.

Knows rich. Does not know what is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show what is being waited for, and for how long, on stderr."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as line:
        line.add_task(what, total=None)
        yield


@contextmanager
def progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr; what it yields is called with how many are done, of how many."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_table(table: Table, *, width: int, expendable: Sequence[str] = (), elsewhere: str = "") -> None:
    """Print to a terminal what fits into it, else `width` columns.

    expendable: headers of what a narrow terminal goes without, the least first; elsewhere: what shows them all.
    """
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else width)
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
