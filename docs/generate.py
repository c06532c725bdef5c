"""Puts figures of docs/measured/*.json into the pages (`make docs`), or says which pages are not current (`--check`).

In a page, the text from `<!-- generated: CALL -->` to `<!-- end -->` is replaced by what CALL gives: a macro of
docs/templates/figures.md.j2, with files of docs/measured by name (`-` is `_`). All other text is written by hand.
docs/claims.toml lists the claims with their bounds. A figure says its commit, date, machine and command; `make docs`
does not judge whether the code changed since.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- generated: (?P<call>\w+\([^>]*\)) -->\n).*?(<!-- end -->)", re.DOTALL)
ENVELOPE = {"question", "command", "origin", "date", "commit", "machine", "figures"}


class Figures(SimpleNamespace):
    """One file of docs/measured/: `question`, `command`, `origin`, `date`, `commit`, `machine`, `figures`."""

    name: str
    figures: Any

    def row(self, table: str = "results", /, **wanted: Any) -> Any:
        """The only row of a list of figures that has these values."""
        rows = [row for row in self.figures[table] if all(row.get(key) == value for key, value in wanted.items())]
        if len(rows) != 1:
            raise LookupError(f"{self.name}: {table} must hold one row with {wanted}, found {len(rows)}")
        return rows[0]


def load_measured(folder: Path) -> dict[str, Figures]:
    """By file name. A file without the envelope is refused: a figure without its command and date says nothing."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if missing := sorted(ENVELOPE - content.keys()):
            raise ValueError(f"{path.name} must say {', '.join(missing)}: write it with the benchmark's --json")
        found[path.stem.replace("-", "_")] = Figures(**content, name=path.stem)
    return found


# -- what templates call -----------------------------------------------------------------------------------------------


def about(measured: Figures) -> str:
    """Where figures come from: the lines under a table."""
    machine = measured.machine
    at = f" at {measured.commit}" if measured.commit else ""
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    parts = [f"{measured.origin}{at}, {measured.date}", machine["processor"], cores]
    if load := machine.get("load"):
        low, high = min(load), max(load)
        parts.append(f"load {low:.1f}" if high - low < 0.05 else f"load {low:.1f} to {high:.1f}")
    return f"`{measured.command}`\\\n{', '.join(parts)}"


def in_turns(mine: Any, other: Any, what: str) -> float:
    """How many times `other` that is: the median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(mine["rounds"][what], other["rounds"][what], strict=True))


def over(file: Figures, mine: str, other: str, batch: str, what: str = "decode") -> float:
    """Speed of one system of an end-to-end run over another's, at a batch or, for "long", over the long prompt."""
    rows = [file.row(system=name) for name in (mine, other)]
    first, second = (row["long_prompt"] if batch == "long" else row["batches"][batch] for row in rows)
    return in_turns(first, second, f"{what}_tokens_per_s")


def by_kind(found: Mapping[str, Any], same: str, but: tuple[str, ...] = ()) -> list[tuple[list[str], Any]]:
    """Rows that have the key `same`, those alike together: names, and the row of the first. Of a sentence, the name
    and the numbers of layers do not count; else `but` does not."""
    groups: dict[str, tuple[list[str], Any]] = {}
    for name, row in found.items():
        if same in row:
            if isinstance(row[same], str):
                kind = re.sub(r"layers\.\d+\.\S+", "", row[same].replace(name, ""))
            else:
                kind = str({key: value for key, value in row.items() if key not in but})
            groups.setdefault(kind, ([], row))[0].append(name)
    return list(groups.values())


# -- pages -------------------------------------------------------------------------------------------------------------


def claims(root: Path, measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of docs/claims.toml with `now`, its value today, and `met`."""
    expressions = jinja2.Environment(undefined=jinja2.StrictUndefined)
    rows = []
    for says, file, figure, bound, unit in tomllib.loads((root / "docs" / "claims.toml").read_text())["claims"]:
        source = measured[file]
        now = expressions.compile_expression(figure)(f=source, d=source.figures, over=over)
        is_least, limit = bound.startswith(">="), float(bound[2:])
        met = now >= limit if is_least else now <= limit
        digits = 0 if abs(now) >= 100 else 1 if unit else 2
        while (round(now, digits) >= limit if is_least else round(now, digits) <= limit) != met:
            digits += 1  # 40.3 of 40 would read as met
        rows.append({"says": says, "now": f"{now:.{digits}f}", "bound": bound, "unit": unit, "met": met, "of": source})
    return rows


def stale(root: Path = ROOT) -> dict[Path, str]:
    """Pages that do not say what docs/measured says, with what they should say."""
    measured = load_measured(root / "docs" / "measured")
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root / "docs" / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.tests["match_any"] = lambda text, starts: text.startswith(tuple(f"{start}: " for start in starts))
    templates.filters["after_colon"] = lambda text: text.partition(": ")[2]
    templates.globals |= {"about": about, "in_turns": in_turns, "over": over, "by_kind": by_kind}
    templates.globals |= {**measured, "measured": measured, "claimed": claims(root, measured)}

    def fill(match: re.Match[str]) -> str:
        call = templates.from_string("{% import 'figures.md.j2' as f %}{{ f." + match["call"] + " }}")
        return f"{match[1]}\n{call.render().strip()}\n\n{match[3]}"

    pages = {path: path.read_text() for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]}
    return {path: text for path, page in pages.items() if (text := BLOCK.sub(fill, page)) != page}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is not current")
    given = parser.parse_args()
    found = stale()
    for path, text in found.items():
        said = "is not what docs/measured says: run `make docs`" if given.check else "written"
        print(f"{path.relative_to(ROOT)} {said}")
        if not given.check:
            path.write_text(text)
    return 1 if given.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
