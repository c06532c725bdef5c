"""Groups of long tests: none is forgotten, and one is due until it passes and again when a file of its changes."""

import re
from pathlib import Path
from typing import Any

import long_tests
import pytest
from paths import ROOT

MARK = re.compile(r"pytest\.mark\.(\w+)")


@pytest.mark.parametrize("group", long_tests.GROUPS)
def test_a_group_is_about_files_that_exist_and_about_its_own_tests(group: str) -> None:
    assert all(long_tests.files([pattern]) for pattern in long_tests.GROUPS[group])
    tests = set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)}
    marked = {path for path in tests if group in MARK.findall(path.read_text())}
    assert marked == set(long_tests.marked(group)) != set()
    assert long_tests.LONGEST_LAST.count(group) == 1


def test_a_group_is_due_until_it_passes_and_again_when_a_file_of_its_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_tests, "ROOT", tmp_path)
    monkeypatch.setattr(long_tests, "PASSED", tmp_path / "passed.json")
    monkeypatch.setattr(long_tests, "GROUPS", {"ours": ("*.py",), "others": ("*.txt",)})
    (tmp_path / "source.py").write_text("one = 1\n")
    assert long_tests.changed() == ["ours", "others"]
    long_tests.note_passed(["ours"])
    assert long_tests.changed() == ["others"]
    (tmp_path / "source.py").write_text("one = 2\n")
    assert long_tests.changed() == ["ours", "others"]


def test_no_group_has_passed_where_a_process_of_its_tests_ended() -> None:
    """xdist reports such a test without its marks."""
    outcomes, group = long_tests.Outcomes(), next(iter(long_tests.GROUPS))
    parts: dict[str, Any] = {"nodeid": "a", "location": ("a", 1, "a"), "longrepr": None, "when": "call"}
    outcomes.pytest_runtest_logreport(pytest.TestReport(**parts, keywords={group: 1}, outcome="passed"))
    assert outcomes.whole() == [group]
    outcomes.pytest_runtest_logreport(pytest.TestReport(**parts, keywords={}, outcome="failed"))
    assert outcomes.whole() == []
