"""The ledger of tests that fail beside others and pass alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from reruns import RUNS, main


def run(tmp_path: Path, *names: str) -> int:
    (tmp_path / "names").write_text("".join(f"{name}\n" for name in names))
    return main(str(tmp_path / "names"), str(tmp_path / "cache" / "reruns.json"))


def test_a_test_that_needs_its_second_run_in_two_of_ten_runs_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "t.py::a", "t.py::a", "t.py::b[x y]") == 0, "twice within one run is once"
    assert "second run: t.py::a, t.py::b[x y]" in capsys.readouterr().out
    assert [run(tmp_path) for _ in range(RUNS - 2)] == [0] * (RUNS - 2)
    assert run(tmp_path, "t.py::b[x y]", "t.py::c") == 1
    said = capsys.readouterr().out
    assert "t.py::b[x y] needed a second run twice" in said
    assert "t.py::c needed" not in said
    assert run(tmp_path, "t.py::a") == 0, "ten runs ago"
    assert run(tmp_path, "t.py::c") == 1


def test_a_ledger_that_cannot_be_read_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "reruns.json").write_text("[[")
    assert [run(tmp_path, "t.py::a") for _ in range(2)] == [0, 1]
