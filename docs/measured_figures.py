"""Measurements as pages quote them: the files of docs/measured/, where each comes from, and the verdict on a target."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Figures(SimpleNamespace):
    """One file of docs/measured/: `question`, `command`, `origin`, `date`, `commit`, `machine`, `figures`."""

    name: str
    figures: Any

    def row(self, table: str = "results", /, **wanted: Any) -> Any:
        """The only row of a list of figures that has these values."""
        rows = [row for row in self.figures[table] if all(row.get(key) == value for key, value in wanted.items())]
        if len(rows) != 1:
            raise LookupError(f"{table} must hold one row with {wanted}, found {len(rows)}")
        return rows[0]


def in_turns(mine: Any, other: Any, what: str) -> float:
    """How many times `other` that is: the median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(mine["rounds"][what], other["rounds"][what], strict=True))


BY_HAND = "by hand, see the log"
ENVELOPE = {"question", "command", "origin", "date", "commit", "machine", "figures"}


def load_measured(folder: Path) -> dict[str, Figures]:
    """By file name. A file without the envelope is refused: a figure without its command and date says nothing."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if missing := sorted(ENVELOPE - content.keys()):
            raise ValueError(f"{path.name} must say {', '.join(missing)}: write it with the benchmark's --json")
        found[path.stem.replace("-", "_")] = Figures(**content, name=path.stem)
    return found


def about(measured: Figures) -> str:
    """Where figures come from: the lines under a table."""
    machine = measured.machine
    at = f" at {measured.commit}" if measured.commit else ""
    origin = re.sub(r"docs/(\S+)", r"[\1](\1)", measured.origin)
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    parts = [f"{origin}{at}, {measured.date}", machine["processor"], cores]
    if load := machine.get("load"):
        low, high = min(load), max(load)
        parts.append(f"load {low:.1f}" if high - low < 0.05 else f"load {low:.1f} to {high:.1f}")
    command = "" if measured.command == BY_HAND else f"`{measured.command}`\\\n"
    return f"{command}{', '.join(parts)}"


def cited(measured: Figures) -> str:
    """Where figures come from, in short: the file has the rest."""
    return f"[{measured.commit}](measured/{measured.name}.json), {measured.machine['processor']}"


def headline(
    claim: str, now: float, target: float, unit: str, source: Figures, *, at_least: bool = False, digits: int = 1
) -> str:
    """One row of the headline table; the verdict follows from the two numbers."""
    met = now >= target if at_least else now <= target
    wanted = f"at {'least' if at_least else 'most'} {target:g} {unit}".rstrip()
    command = source.command if source.command == BY_HAND else f"`{source.command.split(' --')[0]}`"
    while (round(now, digits) >= target if at_least else round(now, digits) <= target) != met:
        digits += 1  # 40.3 of 40 would read as met
    verdict = "met" if met else "**missed**"
    return f"| {claim} | {f'{now:.{digits}f} {unit}'.rstrip()} | {wanted} | {verdict} | {command} |"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Of rows that need not have the same keys."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[str(row.get(column, "")).replace("|", "/") for column in columns] for row in rows]
    return [f"| {' | '.join(row)} |" for row in ([*columns], ["---"] * len(columns), *cells)]
