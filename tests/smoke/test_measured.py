"""What a benchmark's file of `--json` says of its command."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import measured  # noqa: E402


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
