"""The commands of docs/first-experiment.md, as they are written, one after the other."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from engines import ROOT, run_program
from in_this_process import run_here

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_every_command_of_the_page_runs_and_the_replay_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "first-experiment.md").read_text()
    assert len(page.splitlines()) <= 60
    for name in ("models", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    said = {}
    for line in re.findall(r"```\n(.*?)```", page, re.S):
        for command in line.splitlines():
            words = shlex.split(command)
            done = run_program(sys.executable, *words[1:], cwd=tmp_path) if words[0] == "python" else run_here(*words)
            assert done.returncode == 0, (command, done.stderr[-2000:])
            said[words[1]] = done.stdout
    assert json.loads(said["replay"].splitlines()[-1])["identical"] is True
    assert (tmp_path / "rows.md").read_text().count("\n") > 6
    assert (tmp_path / "page.html").stat().st_size > 1000
    assert (tmp_path / "my-trace").is_dir()
