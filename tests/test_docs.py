"""What the docs point at exists: files, commands, settings. Figures on pages are those that are kept."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from typer.main import get_command

from ndp_device.__main__ import app as ndp_device
from ndp_device.timing.spec import PRESETS
from vllm_ndp.app import app as vllm_ndp
from vllm_ndp.config import DEBUG, TOP, NdpSettings
from vllm_ndp.lab.systems import SYSTEMS

sys.path.insert(0, str(ROOT / "docs"))

import generate

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TODAY = [page for page in PAGES if "log" not in page.parts and page.name != "CHANGELOG.md"]
"""The log and the changelog tell of commands of their time."""
SOURCES = [
    path
    for folder in ("ndp_device", "vllm_ndp", "benchmarks", "tests", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".pyi", ".h", ".cpp", ".c", ".md")
]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
MENTION = re.compile(r"docs/[\w./-]*\w\.(?:md|json|py)\b(?!\.\w)")
PROGRAMS = {"vllm-ndp": get_command(vllm_ndp), "ndp-device": get_command(ndp_device)}
COMMAND = re.compile(r"(?:^|`|\$ )((?:vllm-ndp|ndp-device) [^`\n]*)", re.MULTILINE)
SETTINGS = {*TOP, *DEBUG, *(field.name for field in fields(NdpSettings))}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    assert [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()] == []


def test_every_page_that_a_source_names_exists() -> None:
    named = {(path.relative_to(ROOT), name) for path in SOURCES for name in MENTION.findall(path.read_text())}
    assert sorted((path, name) for path, name in named if not (ROOT / name).exists()) == []


def test_every_program_that_a_page_tells_to_run_exists() -> None:
    """But where a line below says of which commit a figure is: that commit has it."""
    told = re.compile(
        r"(?<![\w/])((?:benchmarks|examples|tests|models)/[\w/]*\w\.(?:py|sh))\b(?![^\n]*\n(?:measured|transcribed) at)"
    )
    named = {(page.name, name) for page in TODAY for name in told.findall(page.read_text())}
    assert len(named) > 5, "the pattern finds less than the pages hold"
    assert sorted((page, name) for page, name in named if not (ROOT / name).exists()) == []


def test_every_command_that_a_page_shows_exists_with_its_options() -> None:
    wrong, seen = [], 0
    for page in TODAY:
        for line in COMMAND.findall(page.read_text()):
            words = line.replace("\\|", "|").split()
            node: Any = PROGRAMS[words[0]]
            for word in words[1:]:
                if word not in getattr(node, "commands", {}):
                    break
                node = node.commands[word]
            is_named = node is not PROGRAMS[words[0]]
            seen += is_named
            strange = [word for word in words[1:2] if not is_named and word.isidentifier()]
            options = {name for parameter in node.params for name in (*parameter.opts, *parameter.secondary_opts)}
            strange += [word for word in re.findall(r"(?<!\S)\[?(--[\w-]+)", line) if word not in options]
            wrong += [(page.name, line, word) for word in strange]
    assert seen > 10, "the pattern finds less than the pages hold"
    assert wrong == []


def settings_named(text: str) -> Iterator[str]:
    """In `{"ndp": {...}}`, its `debug` included, and in `--additional-config.ndp.NAME`."""
    for path in re.findall(r"additional[-_]config\.ndp\.([a-z_.]+)", text):
        yield from path.rstrip(".").split(".")[: 2 if path.startswith("debug.") else 1]
    for start in re.finditer(r'"ndp": (?=\{)', text):
        try:
            value, _ = json.JSONDecoder().raw_decode(text[start.end() :])
        except json.JSONDecodeError:
            continue  # a sketch, with ... in it
        yield from value
        yield from value.get("debug", {})


def test_every_setting_that_a_page_shows_exists() -> None:
    named = {(page.name, name) for page in TODAY for name in settings_named(page.read_text())}
    assert len(named) > 5, "the pattern finds less than the pages hold"
    assert sorted((page, name) for page, name in named if name not in SETTINGS) == []


def test_every_preset_of_hardware_stands_on_its_page() -> None:
    page = (ROOT / "docs" / "timing.md").read_text()
    assert [name for name in PRESETS if f"`{name}`" not in page] == []


def test_every_system_of_the_lab_stands_on_its_page() -> None:
    page = (ROOT / "docs" / "systems.md").read_text()
    assert [name for name in SYSTEMS if f"`{name}`" not in page] == []


def test_figures_on_pages_are_those_of_docs_measured() -> None:
    """Run `make docs` where this fails: a file of docs/measured has changed, or a figure on a page."""
    assert sorted(path.name for path in generate.stale()) == []


def test_a_changed_figure_reaches_its_pages_and_one_without_its_origin_is_refused(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    path = tmp_path / "docs" / "measured" / "protocol_roundtrip.json"
    content = json.loads(path.read_text())
    row = next(row for row in content["figures"]["results"] if (row["name"], row["bytes"]) == ("slot", 8192))
    row["p50_us"] += 10
    path.write_text(json.dumps(content))
    pages = {path.name: text for path, text in generate.stale(tmp_path).items()}
    assert set(pages) == {"README.md", "performance.md"}
    assert f"| {row['p50_us']:.1f} us **missed** | ≤ 10 |" in pages["performance.md"]
    del content["command"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"protocol_roundtrip\.json must say command"):
        generate.stale(tmp_path)
