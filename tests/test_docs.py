"""What the docs point at exists, and their generated parts say what the sources and the measurements say."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "benchmarks")]

import code_tables  # noqa: E402
import fault_figures  # noqa: E402
import figure_sources  # noqa: E402
import generate  # noqa: E402
import measured_figures  # noqa: E402

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted(
    path
    for folder in ("ndp_device", "vllm_ndp", "benchmarks", "tests", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".pyi", ".h", ".cpp", ".c", ".md")
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
MENTION = re.compile(r"docs/[\w./-]*\w\.(?:md\.j2|md|json|py)\b(?!\.\w)")
HEADING = re.compile(r'(docs/[\w./-]*\w\.md), "([^"]+)"')


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    dead = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_table_has_a_header_and_rows_of_one_width(page: Path) -> None:
    """A template left a blank line after each row, and cells of four widths in one: the page showed no table."""
    lines = [re.sub(r"`[^`]*`|\\\|", "", line).strip() for line in page.read_text().split("\n")]
    widths: list[int] = []
    for number, line in enumerate(lines, 1):
        widths = [*widths, line.count("|")] if line.startswith("|") else []
        if len(widths) == 1:
            assert re.fullmatch(r"\|[ :|-]+\|?", lines[number]), f"{page.name}:{number} begins a table without a header"
        assert len(set(widths)) < 2, f"{page.name}:{number} has another number of cells than the rows above it"


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
    assert long == []


def test_the_index_of_the_log_leads_to_every_topic() -> None:
    folder = ROOT / "docs" / "log"
    linked = set(LINK.findall((folder / "README.md").read_text()))
    assert sorted(path.name for path in folder.glob("*.md") if path.name not in linked | {"README.md"}) == []


def test_every_test_that_a_page_names_exists() -> None:
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = {
        (page.name, name)
        for page in PAGES
        if "log" not in page.parts
        for name in re.findall(r"\btest_\w+\.py", page.read_text())
    }
    assert {name for _, name in named}, "the pattern finds nothing any more"
    assert sorted((page, name) for page, name in named if name not in there) == []


# -- generated parts ---------------------------------------------------------------------------------------------------


def test_the_generated_parts_of_all_pages_are_current() -> None:
    """Run `make docs` where this fails."""
    assert generate.stale() == []


def test_every_source_file_is_named_on_the_page_of_files() -> None:
    page = code_tables.files_page()
    names = {
        path.name
        for package in ("ndp_device", "vllm_ndp")
        for path in (ROOT / package).rglob("*")
        if path.suffix in code_tables.SOURCES and path.name != "__init__.py"
    }
    assert sorted(name for name in names if f"`{name}`" not in page) == []


def test_stale_claims_are_those_that_figures_toml_names() -> None:
    """Take a stale figure again (`make figures`), or name it under [stale] with the reason; take a fresh one off."""
    claims = (ROOT / "docs" / "performance.md").read_text().split("## Machine and method")[0]
    rows = claims + (ROOT / "README.md").read_text()
    stale = set(re.findall(r"\[stale\]\((?:docs/)?measured/([\w-]+)\.json\)", rows))
    assert stale == set(figure_sources.read_table(ROOT).stale)


def test_every_kept_measurement_names_its_sources_and_each_finds_a_file() -> None:
    table = figure_sources.read_table(ROOT).figures
    kept = {path.stem for path in (ROOT / "docs" / "measured").glob("*.json")}
    assert sorted(kept ^ set(table)) == []
    empty = figure_sources.digest("no such file", ROOT)
    globs = {glob for figure in table.values() for glob in figure.sources}
    assert [glob for glob in sorted(globs) if figure_sources.digest(glob, ROOT) == empty] == []


@pytest.mark.parametrize(
    ("name", "before", "after", "stale"),
    [
        ("one.py", '"""One."""\nx = 1\n', '"""Two."""\nx = 1  # a word\n', False),
        ("one.py", "x = 1\n", "x = 2\n", True),
        ("one.h", "int x = 1; // a word\n", "int x = 1;\n/* two\n */\n", False),
        ("one.h", "int x = 1;\n", "int x = 2;\n", True),
    ],
)
def test_a_figure_is_stale_after_code_changed_and_not_after_words(
    tmp_path: Path, name: str, before: str, after: str, stale: bool
) -> None:
    (tmp_path / "docs" / "measured").mkdir(parents=True)
    (tmp_path / "docs" / "measured" / "figures.toml").write_text('[figures.a]\nsources = ["one.*"]\n')
    (tmp_path / name).write_text(before)
    taken = figure_sources.digests("a", tmp_path)
    assert figure_sources.changed_sources("a", taken, tmp_path) == []
    (tmp_path / name).write_text(after)
    figure_sources.digest.cache_clear()
    assert figure_sources.changed_sources("a", taken, tmp_path) == (["one.*"] if stale else [])


def test_a_figure_that_a_newer_python_took_is_not_stale_for_that() -> None:
    """From 3.12 on a dump names parameters of types, and from 3.13 on it leaves out what is empty."""
    name = "Name(id='x', ctx=Load())"
    arguments = "arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])"
    function = f"FunctionDef(name='f', args={arguments}, body=[Return(value={name})], decorator_list=[])"
    assert figure_sources.python_code("def f():\n    return x") == f"Module(body=[{function}], type_ignores=[])"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The docs and a small package beside them, all pages current."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "tests" / "data", tmp_path / "tests" / "data")
    for package in ("ndp_device", "vllm_ndp/integration"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "one.py").write_text('"""One thing. Knows no other."""\n')
    for path, text in generate.pages(tmp_path).items():
        path.write_text(text)
    assert generate.stale(tmp_path) == []
    return tmp_path


def test_a_page_is_stale_after_one_digit_changed_in_a_measurement(copied: Path) -> None:
    path = copied / "docs" / "measured" / "protocol_roundtrip.json"
    content = json.loads(path.read_text())
    row = next(row for row in content["figures"]["results"] if (row["name"], row["bytes"]) == ("slot", 8192))
    row["p50_us"] += 0.1
    path.write_text(json.dumps(content))
    assert generate.stale(copied) == ["docs/performance.md", "README.md"]


def test_a_page_is_stale_after_one_digit_changed_in_it(copied: Path) -> None:
    page = copied / "docs" / "performance.md"
    text = page.read_text()
    digit = re.search(r"\d+\.(\d)", text)
    assert digit is not None
    page.write_text(text[: digit.start(1)] + str((int(digit[1]) + 1) % 10) + text[digit.end(1) :])
    assert generate.stale(copied) == ["docs/performance.md"]


def test_a_new_file_is_on_the_page_of_files_with_its_first_sentence(copied: Path) -> None:
    (copied / "ndp_device" / "two.py").write_text('"""Knows two things. More."""\n')
    assert "| `two.py` | Knows two things. More. |" in code_tables.files_page(copied)


def test_a_new_arrow_makes_the_architecture_stale(copied: Path) -> None:
    (copied / "ndp_device" / "two.py").write_text('"""Two."""\n')
    (copied / "docs" / "architecture.md").write_text(generate.pages(copied)[copied / "docs" / "architecture.md"])
    (copied / "ndp_device" / "two.py").write_text('"""Two."""\n\nfrom ndp_device import one\n')
    assert generate.stale(copied) == ["docs/architecture.md"]


def test_figures_without_their_origin_are_refused(copied: Path) -> None:
    path = copied / "docs" / "measured" / "identity.json"
    content = json.loads(path.read_text())
    del content["command"], content["date"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"identity\.json must say command, date"):
        generate.stale(copied)


def test_a_verdict_follows_from_the_figure_and_its_target() -> None:
    source = measured_figures.Figures(name="x", command="python benchmarks/x.py --model M", figures={})
    assert "| 11.0 us | at most 10 us | **missed** | `python benchmarks/x.py` |" in measured_figures.headline(
        "a", 11, 10, "us", source
    )
    assert "| met |" in measured_figures.headline("a", 10, 10, "us", source)
    assert "| 10.04 us | at most 10 us | **missed** |" in measured_figures.headline("a", 10.04, 10, "us", source)
    assert "| met |" in measured_figures.headline("a", 11, 10, "us", source, at_least=True)
    assert "| **missed** |" in measured_figures.headline("a", 9, 10, "us", source, at_least=True)


def test_every_fault_that_is_claimed_names_tests_that_exist() -> None:
    """`tests` of docs/faults.toml holds a letter for the file and parts of test names: `F stopped, stop_loop`."""
    known = fault_figures.known_faults(ROOT)
    names = {
        letter: [
            name
            for file in row["file"].split(", ")
            for name in re.findall(r"def (test_\w+)", next((ROOT / "tests").rglob(file)).read_text())
        ]
        for letter, row in known["files"].items()
    }
    parts = [
        (letter, part)
        for fault in known["fault"]
        for letter, rest in re.findall(r"\b([A-Z])\b([^A-Z]*)", re.sub(r"\[[^\]]*\]", "", fault["tests"]))
        for part in re.findall(r"\w+", rest)
        if not part.startswith("test_")
    ]
    assert len(parts) > 30, "the pattern finds less than the list holds"
    assert [(letter, part) for letter, part in parts if not any(part in name for name in names[letter])] == []


def test_every_kind_of_fault_says_what_happens_in_short() -> None:
    assert set(fault_figures.OUTCOMES) == {fault["group"] for fault in fault_figures.known_faults(ROOT)["fault"]}


def test_every_command_that_a_page_shows_exists_with_its_options() -> None:
    """Words that name a command are looked up in the real programs, and every --option after them among its own."""
    from typer.main import get_command

    from ndp_device.__main__ import app as ndp_device
    from vllm_ndp.app import app as vllm_ndp

    programs = {"vllm-ndp": get_command(vllm_ndp), "ndp-device": get_command(ndp_device)}
    pattern = re.compile(r"(?:^|`|\$ )((?:vllm-ndp|ndp-device) [^`\n]*)", re.MULTILINE)
    wrong, seen = [], 0
    for page in PAGES:
        if "log" in page.parts:
            continue
        for line in pattern.findall(page.read_text()):
            words = line.replace("\\|", "|").split()
            node = programs[words[0]]
            for word in words[1:]:
                if word not in getattr(node, "commands", {}):
                    break
                node = node.commands[word]
            seen += node is not programs[words[0]]
            alternatives = [word for word in words[1:2] if node is programs[words[0]] and word.isidentifier()]
            options = {name for parameter in node.params for name in (*parameter.opts, *parameter.secondary_opts)}
            unknown = [word for word in re.findall(r"(?<!\S)\[?(--[\w-]+)", line) if word not in options]
            wrong += [(page.name, line, word) for word in (*alternatives, *unknown)]
    assert seen > 10, "the pattern finds less than the pages hold"
    assert wrong == []


def test_the_log_counts_the_findings_about_the_path_for_a_gpu_as_their_list_does() -> None:
    """The log said 18 mended, three of them otherwise."""
    outcomes = list(tomllib.loads((ROOT / "docs/measured/gpu_review.toml").read_text()).values())
    mended, otherwise = (sum(each.startswith(word) for each in outcomes) for word in ("done", "done otherwise"))
    numbers = {1: "one", 2: "two", 3: "three", 4: "four"}
    said = f"{mended} of {len(outcomes)} findings are mended, {numbers[otherwise]} of them otherwise than proposed"
    assert said in (ROOT / "docs/log/gpu.md").read_text()


def test_each_finding_about_the_path_for_a_gpu_that_is_mended_names_code_or_a_test_that_is_there() -> None:
    """The list said that `speed` has a row that another piece has."""
    folders = ("benchmarks", "docs", "ndp_device", "tests", "vllm_ndp")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    wrong = []
    for finding, outcome in tomllib.loads((ROOT / "docs/measured/gpu_review.toml").read_text()).items():
        named = re.findall(r"([\w.]+)::([^,\]]+)", outcome)
        if outcome.startswith("done") and not named:
            wrong.append((finding, "names nothing"))
        for name, words in named:
            if not any(words in path.read_text() for path in files if path.name == name):
                wrong.append((finding, f"{name}::{words}"))
    assert wrong == []
