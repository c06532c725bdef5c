"""Long tests run when asked for, and where a file that they are about has changed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import long_tests
import pytest
from paths import ROOT

MARK = re.compile(r"pytest\.mark\.(\w+)")
EXAMPLE = "import pytest\n\n@pytest.mark.families\ndef test_long(): ...\n\ndef test_short(): ...\n"


@pytest.mark.parametrize("group", long_tests.GROUPS)
def test_a_group_is_about_files_that_exist_and_about_its_own_tests(group: str) -> None:
    assert all(long_tests.files([pattern]) for pattern in long_tests.GROUPS[group])
    tests = set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)}
    marked = {path for path in tests if group in MARK.findall(path.read_text())}
    assert marked == set(long_tests.marked(group)) != set()


@pytest.mark.parametrize(
    ("marks", "runs"),
    [(("-m", "not slow"), ["test_short"]), (("-m", "vllm or families"), ["test_long"])],
)
def test_a_long_test_runs_when_its_group_is_asked_for(marks: Sequence[str], runs: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "conftest", "-p", "no:cacheprovider", *marks]
    done = subprocess.run(
        [*words, "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path],
        env={"PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line] == runs, done.stderr


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(long_tests, "ROOT", tmp_path)
    monkeypatch.setattr(long_tests, "PASSED", tmp_path / "passed.json")
    monkeypatch.setattr(long_tests, "GROUPS", {"ours": ("*.py",), "others": ("*.txt",)})
    return tmp_path


def test_a_group_is_due_until_it_passes_and_again_when_a_file_of_its_changes(elsewhere: Path) -> None:
    source = elsewhere / "source.py"
    source.write_text("one = 1\n")
    assert long_tests.changed() == ["ours", "others"]
    long_tests.note_passed(["ours"])
    assert long_tests.changed() == ["others"]
    source.write_text("one = 2\n")
    assert long_tests.changed() == ["ours", "others"]
    source.write_text("one = 1\n")
    assert long_tests.changed() == ["others"]
    source.rename(elsewhere / "moved.py")
    assert long_tests.changed() == ["ours", "others"]


def report(group: str, outcome: str) -> pytest.TestReport:
    return pytest.TestReport("a test", ("", 0, ""), {group: 1}, outcome, None, "call")  # type: ignore[arg-type]


def test_a_group_has_passed_when_none_of_its_tests_failed_or_was_skipped(elsewhere: Path) -> None:
    for outcome in ("skipped", "failed"):
        outcomes = long_tests.Outcomes()
        for one in (report("ours", "passed"), report("others", "passed"), report("others", outcome)):
            outcomes.pytest_runtest_logreport(one)
        assert outcomes.whole() == ["ours"]


def test_a_group_that_does_not_exist_is_named() -> None:
    with pytest.raises(SystemExit, match=r"no group of long tests is called familys: give all, changed or of \w+, "):
        long_tests.main(["familys", "-q"])


def test_the_order_in_which_ci_runs_what_is_due_names_every_group_once() -> None:
    assert sorted(long_tests.LONGEST_LAST) == sorted(long_tests.GROUPS)
