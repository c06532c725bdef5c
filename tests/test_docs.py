"""What the docs point at exists, for readers who follow it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted(
    path
    for folder in ("ndp_device", "vllm_ndp", "benchmarks", "tests", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".pyi", ".h", ".cpp", ".c", ".md")
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
MENTION = re.compile(r"docs/[\w./-]*\w\.(?:md|json|py)")
HEADING = re.compile(r'(docs/[\w./-]*\w\.md), "([^"]+)"')


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    dead = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert dead == []


def test_every_page_of_the_docs_that_a_source_names_exists() -> None:
    dead = {
        f"{path.relative_to(ROOT)} names {name}"
        for path in SOURCES
        for name in MENTION.findall(path.read_text())
        if not (ROOT / name).exists()
    }
    assert dead == set()


def test_every_section_that_a_source_cites_exists() -> None:
    """A page and a word in quotes after it: the word must stand on that page."""
    cited = {
        (name, words) for path in SOURCES if path.suffix != ".md" for name, words in HEADING.findall(path.read_text())
    }
    assert cited, "the pattern finds nothing any more"
    dead = [(name, words) for name, words in cited if words.lower() not in (ROOT / name).read_text().lower()]
    assert dead == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "log").glob("*.md")), ids=lambda path: path.name)
def test_lines_of_the_log_fit_on_a_screen(page: Path) -> None:
    long = [number for number, line in enumerate(page.read_text().splitlines(), 1) if len(line) > 160]
    assert page.name == "renames.md" or long == []
