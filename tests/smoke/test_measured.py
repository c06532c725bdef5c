"""What a benchmark hands over: one envelope, in its last line and in the file of `--json`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]

import measured  # noqa: E402
import measured_figures  # noqa: E402


def test_the_file_and_the_last_line_hold_the_same_and_the_docs_can_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "some-figure.json"
    monkeypatch.setattr(sys, "argv", ["benchmarks/some.py", "--rounds", "2", "--json", str(path)])
    parser = argparse.ArgumentParser()
    measured.add_json_option(parser)
    arguments = parser.parse_args(["--json", str(path)])
    rows = [{"bits": bits, "ms": 1.5 * bits, "note": "x" * 100} for bits in (1, 2)]
    measured.Measurement("How fast?\n\nMore about it.").end({"results": rows}, arguments.json)
    assert json.loads(path.read_text()) == json.loads(capsys.readouterr().out.splitlines()[-1])
    found = measured_figures.load_measured(tmp_path)["some_figure"]
    assert found.question == "How fast?"
    assert found.command == "python benchmarks/some.py --rounds 2"
    assert found.row(bits=2)["ms"] == 3.0
    assert found.machine["cores"] >= 1
    assert len(found.machine["load"]) == 2
    with pytest.raises(LookupError, match="found 0"):
        found.row(bits=3)


def test_a_command_shows_no_path_of_this_machine() -> None:
    argv = [
        "/elsewhere/benchmarks/b.py",
        "--model",
        "/data/of/mine/model",
        f"--json={ROOT}/x",
        "--out",
        f"{ROOT}/docs",
        "a b",
    ]
    assert measured.command_line(argv) == "python benchmarks/b.py --model model --out docs 'a b'"


def test_a_file_of_figures_keeps_short_values_on_one_line() -> None:
    value = {"rows": [{"a": 1, "b": "x" * 70}, {"a": 2, "b": "y" * 70}], "short": [1, 2, 3]}
    text = measured.readable(value)
    assert json.loads(text) == value
    assert '  "short": [1, 2, 3]' in text.splitlines()
    assert text.count("\n") == 6


def test_a_table_of_several_runs_is_current_only_while_every_row_is_of_todays_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of an earlier run stay. `make test-families` in pieces gives what one run gives."""
    file, today = tmp_path / "families.json", {"source": "1"}
    monkeypatch.setattr(measured, "version", lambda name, root: today["source"])
    monkeypatch.setattr(measured, "digests", lambda name, root: {"some/**": today["source"]})

    def after(name: str, tokens: int) -> dict[str, Any]:
        measured.save_row(file, "Same?", "make it", name, {"tokens": tokens})
        return dict(json.loads(file.read_text()))

    assert after("second", 2)["sources"] == {"some/**": "1"}
    assert after("first", 1)["sources"] == {"some/**": "1"}
    today["source"] = "2"
    mixed = after("first", 3)
    assert mixed["sources"] == {}
    assert {name: row["tokens"] for name, row in mixed["figures"].items()} == {"first": 3, "second": 2}
    assert after("second", 2)["sources"] == {"some/**": "2"}
    assert list(measured_figures.load_measured(tmp_path)["families"].figures) == ["first", "second"]
