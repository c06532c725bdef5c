"""The site of the docs: every page has its place, and the pages made from the code hold all that the code has.

`make site` builds it, and ends at a broken link. test_docs.py holds the links of every page without mkdocs.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from paths import ROOT

from vllm_ndp.app import app
from vllm_ndp.setting_names import DEBUG, TOP

sys.path.insert(0, str(ROOT / "docs"))

import site_pages
from error_families import FAMILIES, family_of, of_each

DOCS = ROOT / "docs"


def pages_of(nav: list[Any]) -> list[str]:
    """The files of mkdocs.yml, in order."""
    found = []
    for entry in nav:
        (value,) = entry.values()
        found += pages_of(value) if isinstance(value, list) else [value]
    return found


def test_every_page_has_a_place_in_the_site_and_every_place_a_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text().replace("!!python/name:", "")
    placed = pages_of(yaml.safe_load(text)["nav"])
    assert len(placed) == len(set(placed))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    in_the_log = {name for name in there if name.startswith("log/") and name != "log/README.md"}
    assert set(placed) == (there - in_the_log) | set(site_pages.PAGES) | {"index.md"}


def test_the_catalogue_has_every_class_of_error_and_its_sentences() -> None:
    """Counted a second way: occurrences of `raise X(` in the text."""
    page = site_pages.errors_page()
    raised = set()
    for package in site_pages.PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            raised |= set(re.findall(r"raise (\w+)\(\s*f?\"[^\"]* ", path.read_text()))
    ours = raised & set(site_pages.error_classes())
    assert {"ConfigError", "ReplicaError", "DeviceUnavailable", "HubError", "DoesNotFit"} <= set(
        site_pages.error_classes()
    )
    assert [name for name in sorted(ours) if f"`{name}`: " not in page] == []
    assert len(set(site_pages.sentences())) > 300


def test_every_sentence_has_a_family_that_says_why_and_what_to_do_and_every_family_a_sentence() -> None:
    found = {*site_pages.sentences(), *site_pages.refusals()}
    homeless = [one for one in found if family_of(one.error, one.text, one.file) is None]
    assert homeless == []
    assert [
        title for title, count in of_each((one.error, one.text, one.file) for one in found).items() if not count
    ] == []
    assert all(family.why.endswith((".", ")")) and family.what_to_do.endswith((".", ")")) for family in FAMILIES)


def test_refusals_of_vllms_features_are_whole_sentences_and_say_what_to_drop() -> None:
    """As they are raised: test_integration_refusals.py starts engines that are refused with them."""
    refused = list(site_pages.refusals())
    assert len(refused) > 20
    for one in refused:
        assert family_of(one.error, one.text, one.file) is FAMILIES[0]
        assert re.search(r"drop|use |disable|set |give it|unset|name other|choose", one.advice or one.text), one
    page = site_pages.errors_page()
    assert "expert load balancing (EPLB): drop --enable-eplb" in page


def test_a_sentence_of_the_catalogue_has_its_advice_apart() -> None:
    found = {one.text: one for one in site_pages.sentences()}
    one = found["ndp setting 'offload_bits' must be 1, 2, 3, 4 or 8, got …"]
    assert (one.error, one.file, one.advice) == ("ConfigError", "vllm_ndp/config.py", "")
    together = [one for text, one in found.items() if text.startswith("quantization 'ndp' does not work together with")]
    assert "vllm_ndp/integration/compat.py" in {one.file for one in together}
    assert any(one.advice.startswith("give --gpu-memory") for one in found.values())


def test_the_pages_of_commands_and_settings_leave_none_out() -> None:
    commands = site_pages.commands_page()
    group: Any = typer.main.get_command(app)
    assert [name for name in group.commands if f"### vllm-ndp {name}\n" not in commands] == []
    assert "$ vllm-ndp doctor" in commands
    settings = site_pages.settings_page()
    assert [name for name in (*TOP, *DEBUG) if f"| `{name}` |" not in settings and name != "debug"] == []
    assert all(row.count(" | ") >= 3 for row in settings.splitlines() if row.startswith("| `"))


def test_the_page_of_metrics_names_those_that_are_served() -> None:
    """The names are read without vLLM; test_integration_serve.py scrapes them from a server."""
    page = site_pages.metrics_page()
    for name in ("vllm:ndp_pairs_total", "vllm:ndp_simulated_tpot_seconds", "vllm:ndp_measured_tpot_seconds"):
        assert f"`{name}`" in page


def test_links_to_what_a_site_does_not_have_become_paths() -> None:
    class Page:
        class file:
            src_uri = "protocol.md"

    text = "[a](../examples/x.py) [b](templates/y.j2) [c](timing.md) [d](https://e)"
    assert site_pages.on_page_markdown(text, Page()) == (
        "a (`examples/x.py`) b (`docs/templates/y.j2`) [c](timing.md) [d](https://e)"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "examples").iterdir()), ids=lambda path: path.name)
def test_every_example_is_shown_in_a_page_and_says_how_it_is_run(path: Path) -> None:
    assert f"examples/{path.name}" in (DOCS / "howto.md").read_text()
    assert f" examples/{path.name}" in path.read_text()
