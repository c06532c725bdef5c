"""Which figures `make figures` takes, in which order, and what a command that fails leaves behind."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import figures
from figure_sources import Figure, FigureTable, read_table

TABLE = FigureTable(
    {
        "long": Figure(("a",), "python a.py", 9),
        "beside": Figure(("a",), "python c.py", 0, alone=False),
        "short": Figure(("a",), "python b.py", 1),
        "away": Figure(("a",)),
    },
    {},
)


def test_short_figures_come_first_those_beside_others_last_and_those_of_other_machines_not_at_all() -> None:
    assert list(figures.wanted(TABLE, [], everything=True)) == ["short", "long", "beside"]


def test_a_name_without_a_command_is_refused_with_the_names_that_have_one() -> None:
    with pytest.raises(SystemExit, match="no figure with a command is called away: give some of beside, long, short"):
        figures.wanted(TABLE, ["away"], everything=False)


def test_every_command_of_the_table_names_a_program_that_exists() -> None:
    for name, figure in read_table(ROOT).figures.items():
        words = shlex.split(figure.command)
        if words[:1] == ["python"]:
            assert (ROOT / words[1]).is_file(), name
        else:
            assert words[:1] in ([], ["make"]), name


def test_a_command_that_fails_leaves_the_old_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs" / "measured").mkdir(parents=True)
    kept = tmp_path / "docs" / "measured" / "one.json"
    kept.write_text("old")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "WORK", tmp_path)
    script = "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('half'); sys.exit({})"
    assert not figures.take("one", Figure(("a",), f"python -c {shlex.quote(script.format(3))}"))
    assert kept.read_text() == "old"
    assert figures.take("one", Figure(("a",), f"python -c {shlex.quote(script.format(0))}"))
    assert kept.read_text() == "half"


def test_a_command_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    begun_s, number = time.monotonic(), tmp_path / "number"
    script = f"sleep 60 & echo $! > {number}; wait"
    assert not figures.run(f"sh -c {shlex.quote(script)}", tmp_path / "log", patience_s=1.0)
    assert time.monotonic() - begun_s < 30
    assert "ended after 1 s" in (tmp_path / "log").read_text()
    started = Path("/proc", number.read_text().strip(), "status")
    assert not started.exists() or "zombie" in started.read_text()
