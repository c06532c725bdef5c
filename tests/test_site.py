"""The site of the docs: every page has its place, and the pages made from the code hold all that the code has.

`make site` builds it, and ends at a broken link. test_docs.py holds the links of every page without mkdocs.
"""

import sys
from typing import Any

import typer
import yaml
from paths import ROOT

from ndp_device.timing.public_models import PUBLIC_MODELS
from vllm_ndp.app import app
from vllm_ndp.config import DEBUG, TOP

sys.path.insert(0, str(ROOT / "docs"))

import site_pages

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


def test_the_pages_of_commands_settings_metrics_and_models_leave_none_out() -> None:
    commands = site_pages.commands_page()
    group: Any = typer.main.get_command(app)
    assert [name for name in group.commands if f"### vllm-ndp {name}\n" not in commands] == []
    settings = site_pages.settings_page()
    assert [name for name in (*TOP, *DEBUG) if f"| `{name}` |" not in settings and name != "debug"] == []
    assert all(row.count(" | ") >= 3 for row in settings.splitlines() if row.startswith("| `"))
    metrics = site_pages.metrics_page()  # read without vLLM; test_integration_serve.py scrapes them from a server
    for name in ("vllm:ndp_pairs_total", "vllm:ndp_simulated_tpot_seconds", "vllm:ndp_measured_tpot_seconds"):
        assert f"`{name}`" in metrics
    models = site_pages.models_page()
    assert [name for name in PUBLIC_MODELS if f"| {name} |" not in models] == []


def test_links_to_what_a_site_does_not_have_become_paths() -> None:
    class Page:
        class file:
            src_uri = "protocol.md"

    text = "[a](../examples/x.py) [b](templates/y.j2) [c](timing.md) [d](https://e)"
    assert site_pages.on_page_markdown(text, Page()) == (
        "a (`examples/x.py`) b (`docs/templates/y.j2`) [c](timing.md) [d](https://e)"
    )
