"""What a benchmark hands over: one envelope, in its last line and in the file of `--json`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]

import generate  # noqa: E402
import measured  # noqa: E402


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
    found = generate.load_measured(tmp_path)["some_figure"]
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


def test_a_table_that_several_runs_fill_keeps_the_rows_of_earlier_ones(tmp_path: Path) -> None:
    file = tmp_path / "families.json"
    for name, tokens in (("second", 2), ("first", 1), ("second", 3)):
        measured.save_row(file, "Same?", "make it", name, {"tokens": tokens})
    rows = generate.load_measured(tmp_path)["families"].figures
    assert {name: row["tokens"] for name, row in rows.items()} == {"first": 1, "second": 3}
    assert all("commit" in row for row in rows.values())
