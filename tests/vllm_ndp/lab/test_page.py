"""Pages of plots, as a browser shows them."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_this_process import run_here
from paths import DATA

from vllm_ndp.lab.compare import Compared, Comparison
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.lab.page import write_comparison
from vllm_ndp.traces.trace import Trace

BUNDLED = DATA / "tiny-mixtral-trace"
TRACE = Trace.load(BUNDLED)
pytestmark = pytest.mark.slow  # together


class Page(HTMLParser):
    """Whatever would load something from outside."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def drawn(tmp_path: Path, *words: object) -> Path:
    page = tmp_path / "page.html"
    done = run_here("vllm-ndp", *words, "--html", page)
    assert done.returncode == 0, done.stderr
    return page


def plots_of(page: Path) -> dict[tuple[str, str], dict[str, list]]:
    """(title, axis) of each plot -> name of a series -> its columns."""
    (told,) = re.findall(
        r'<script type="application/json"[^>]*>(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL
    )
    ((root,),) = [document["roots"] for document in json.loads(told).values()]
    found = {}
    for each in (plot for line in root["attributes"]["children"][1:] for plot in line["attributes"]["children"]):
        of = each["attributes"]
        (legend,) = (one for one in of["right"] if one["name"] == "Legend")
        names = [item["attributes"]["label"]["value"] for item in legend["attributes"]["items"]]
        data = [dict(one["attributes"]["data_source"]["attributes"]["data"]["entries"]) for one in of["renderers"]]
        axis = of["below"][0]["attributes"]["axis_label"]
        found[of["title"]["attributes"]["text"], axis] = dict(zip(names, data, strict=True))
    return found


def test_a_page_has_every_row_and_the_fastest_of_each_system_over_what_varies(tmp_path):
    def row(system: str, speed: float, loss: float, batch: int, policy: str = "p") -> Any:
        row = SimpleNamespace(system=system, decode_tokens_per_s=speed, loss=loss, policy=policy, batch=batch)
        return SimpleNamespace(row=row)

    at = CompareSettings(systems=("monde",), policies=("prefill",))
    rows = {
        3.0: [row("a", 5.0, 0.1, 4), row("a", 2.0, 0.2, 1), row("b", 7.0, 0.3, 1), row("a", 99.0, 0.0, 1, "oracle, x")],
        2.0: [row("a", 3.0, 0.4, 1), row("a", 1.0, 0.5, 1)],
    }
    points = [(replace(at, avg_bits=bits), Comparison(of, [], "", 1)) for bits, of in rows.items()]
    write_comparison(tmp_path / "page.html", "title", Compared(points, [], None))
    plots = plots_of(tmp_path / "page.html")
    speeds = plots.pop(("speed and loss", "loss"))
    assert (speeds["a"]["x"], speeds["a"]["y"]) == ([0.1, 0.2, 0.0, 0.4, 0.5], [5.0, 2.0, 99.0, 3.0, 1.0])
    assert (speeds["b"]["x"], speeds["b"]["said"]) == ([0.3], ["p, batch 1; mixtral-8x7b, h100-ndp512, 3.0"])
    fastest = "fastest of each system"
    assert plots == {
        (fastest, "asked_bits"): {"a": {"x": [2.0, 3.0], "y": [3.0, 5.0]}, "b": {"x": [3.0], "y": [7.0]}},
        (fastest, "batch"): {"a": {"x": [1, 4], "y": [3.0, 5.0]}, "b": {"x": [1], "y": [7.0]}},
    }


# Says how many plots the page shows, and what it says of a point under the mouse. Plots lie in shadow roots.
HOVER = """
const every = root => [...root.querySelectorAll('*')].flatMap(e => [e, ...(e.shadowRoot ? every(e.shadowRoot) : [])]);
const below = view => [view, ...(view.child_views || []).flatMap(below)];
const say = (id, text) => {
  const element = document.createElement('pre');
  element.id = id;
  element.textContent = text;
  document.body.append(element);
};
setTimeout(() => {  // Bokeh draws after the page has loaded
  const plots = [...Bokeh.index.roots].flatMap(below).filter(view => view.model.type === 'Figure');
  say('plots', plots.length);
  const view = plots.find(v => v.model.title.text.startsWith('speed and loss'));
  const area = every(view.shadow_el).find(e => e.classList.contains('bk-events'));
  const source = view.model.renderers[0].data_source.data, box = area.getBoundingClientRect();
  const at = {clientX: box.x + view.frame.x_scale.compute(source.x[0]), clientY: box.y +
    view.frame.y_scale.compute(source.y[0])};
  for (const kind of ['pointerenter', 'pointermove'])
    area.dispatchEvent(new PointerEvent(kind, {pointerType: 'mouse', isPrimary: true, bubbles: true, composed: true,
      ...at}));
  setTimeout(() => say('tips', every(document)
    .filter(e => e.classList.contains('bk-Tooltip'))
    .map(e => every(e.shadowRoot).filter(inner => inner.tagName === 'SPAN').map(span => span.textContent).join(' '))
    .join(' | ')), 500);
}, 1000);
"""


def test_a_page_is_one_file_that_loads_nothing_and_says_values_under_the_mouse(tmp_path, browser):
    page = drawn(tmp_path, "compare", BUNDLED, "--systems", "monde,fiddler", "--fit", "--avg-bits", "2,3")
    html = page.read_text(encoding="utf-8")
    assert Page(html).sources == []
    assert "@import" not in html
    assert len(html) < 3_500_000
    document = browser.document(page, HOVER)
    plots, tips = (re.search(rf'<pre id="{name}">(.*?)</pre>', document, re.DOTALL) for name in ("plots", "tips"))
    assert plots is not None
    assert int(plots[1]) == 2
    assert tips is not None
    assert "batch 1; mixtral-8x7b, h100-ndp512, 2.0" in tips[1]
    raw = browser.screenshot(page, tmp_path / "page.png").read_bytes()
    assert len(raw) > 30_000  # an empty page of this size compresses to a few kilobytes


def test_names_of_traces_cannot_become_part_of_the_page(tmp_path, browser):
    evil = tmp_path / "<b><script>document.title='changed'<"
    TRACE.select(range(4)).save(evil)
    document = browser.document(drawn(tmp_path, "compare", evil, "--systems", "fiddler"))
    assert "<title>changed</title>" not in document
