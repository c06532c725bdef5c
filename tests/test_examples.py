"""Every script of `examples/` does what its first lines say, started as they say. `host_of_your_own.py` is started in
test_device_program.py, beside a device; the one that starts vLLM in tests/integration."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

BIN = Path(sys.executable).parent
ELSEWHERE = {"host_of_your_own.py", "serve_offline.py"}
EXPECTED = {
    "plan_a_server.py": ("1 of 8 experts hot", "vllm serve mistralai/Mixtral-8x7B-v0.1 --quantization ndp"),
    "policy_of_your_own.py": ("prefill ", "sticky ", "oracle "),
    "ask_a_device.py": ("y (2, 128)", "simulated_ns"),
    "replay_a_recording.py": ("h100-ndp512", "h200-gen5", "context_aware"),
    "quantize_and_check.sh": ("32 experts, data-free", '"ok": true', '"serve": "vllm serve'),
}


def test_every_example_is_run_by_a_test() -> None:
    assert {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} == set(EXPECTED) | ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs_and_prints_what_it_is_about(name: str, tmp_path: Path) -> None:
    arguments = [ROOT / "models" / "tiny-mixtral", tmp_path / "replicas"] if name.endswith(".sh") else []
    program = "bash" if name.endswith(".sh") else sys.executable
    done = subprocess.run(
        [program, ROOT / "examples" / name, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    for text in EXPECTED[name]:
        assert text in done.stdout


# -- docs/extend.md to the letter: each section as a package of its own, installed, its commands in an empty direct ----


FOLDER = re.compile(r"\[(examples/packages/\w+)\]")
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
SECTIONS = dict(part.split("\n", 1) for part in (ROOT / "docs" / "extend.md").read_text().split("\n## ")[1:])


def install(package: Path) -> None:
    """What `pip install .` leaves of a package of modules: the modules, and a dist-info that names entry points."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = package / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project.get("entry-points", {})
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


def commands(section: str) -> Iterator[tuple[str, list[str]]]:
    """Each command, and the lines that it must print something of."""
    for block in CONSOLE.findall(section):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *expected = part.strip().split("\n")
            yield command, expected


@pytest.mark.slow
@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_followed_to_the_letter_does_what_it_says(title: str, tmp_path: Path) -> None:
    (folder,) = FOLDER.findall(SECTIONS[title])
    shutil.copytree(ROOT / folder, tmp_path, dirs_exist_ok=True)
    install(tmp_path)
    env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
    ran = list(commands(SECTIONS[title]))
    assert ran
    for command, expected in ran:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        for line in expected:
            assert line in done.stdout, f"{command}: {done.stdout}"
