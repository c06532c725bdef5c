"""Pages of plots, as a browser shows them, and the timeline."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from in_this_process import run_here
from paths import DATA

from vllm_ndp.lab.analysis import analyse
from vllm_ndp.traces.trace import Trace

BUNDLED = DATA / "tiny-mixtral-trace"
TRACE = Trace.load(BUNDLED)
pytestmark = pytest.mark.slow  # together


class Page(HTMLParser):
    """Headings, and whatever would load something from outside."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def drawn(tmp_path: Path, *words: object) -> Path:
    page = tmp_path / "page.html"
    done = run_here("vllm-ndp", *words, "--html", page)
    assert done.returncode == 0, done.stderr
    return page


# Moves the mouse to a point of the data and says what the page then shows. Plots lie in shadow roots.
HOVER = """
const every = root => [...root.querySelectorAll('*')].flatMap(e => [e, ...(e.shadowRoot ? every(e.shadowRoot) : [])]);
const below = view => [view, ...(view.child_views || []).flatMap(below)];
let plots = [];
const titled = text => plots.find(v => v.model.title && v.model.title.text.startsWith(text));
const hover = (view, x, y) => {
  const area = every(view.shadow_el).find(e => e.classList.contains('bk-events'));
  const box = area.getBoundingClientRect();
  const mouse = {pointerType: 'mouse', isPrimary: true, bubbles: true, composed: true};
  const at = {clientX: box.x + view.frame.x_scale.compute(x), clientY: box.y + view.frame.y_scale.compute(y)};
  for (const kind of ['pointerenter', 'pointermove'])
    area.dispatchEvent(new PointerEvent(kind, {...mouse, ...at}));
};
const say = (id, text) => {
  const element = document.createElement('pre');
  element.id = id;
  element.textContent = text;
  document.body.append(element);
};
setTimeout(() => {  // Bokeh draws after the page has loaded
  plots = [...Bokeh.index.roots].flatMap(below).filter(view => view.model.type === 'Figure');
  say('plots', plots.length);
  hover(titled('prompts, '), 5, 1);
  const coverage = titled('share of decode choices covered');
  const source = coverage.model.renderers[0].data_source.data;
  hover(coverage, source.mean[1], source.name[1]);
  setTimeout(() => say('tips', every(document)
    .filter(e => e.classList.contains('bk-Tooltip'))
    .map(e => every(e.shadowRoot).filter(inner => inner.tagName === 'SPAN').map(span => span.textContent).join(' '))
    .join(' | ')), 500);
}, 1000);
"""


@pytest.mark.parametrize(
    "words",
    [
        ["compare", BUNDLED, "--systems", "monde,fiddler", "--fit", "--avg-bits", "2,3"],
        ["analyze", BUNDLED],
    ],
    ids=lambda words: words[0],
)
def test_a_page_is_one_file_that_loads_nothing(words, tmp_path, browser):
    page = drawn(tmp_path, *words)
    html = page.read_text(encoding="utf-8")
    assert Page(html).sources == []
    assert "@import" not in html
    assert len(html) < 3_500_000
    document = browser.document(page, HOVER)
    plots = re.search(r'<pre id="plots">(.*?)</pre>', document)
    assert plots is not None
    assert int(plots[1]) >= 3
    raw = browser.screenshot(page, tmp_path / "page.png").read_bytes()
    assert len(raw) > 30_000  # an empty page of this size compresses to a few kilobytes
    if words[0] == "analyze":
        assert_values_under_the_mouse_are_those_of_the_analysis(document)


def assert_values_under_the_mouse_are_those_of_the_analysis(document: str) -> None:
    """Not of the pixels."""
    tips = re.search(r'<pre id="tips">(.*?)</pre>', document, re.DOTALL)
    assert tips is not None
    everyone = np.sum([TRACE.stats(s).counts for s in TRACE.sequences if len(s.prompt_ids)], axis=0)
    share = 100 * everyone[1, 5] / everyone[1].sum()
    assert "1, 5" in tips[1]
    assert f"{share:.2f}" in tips[1]
    random = analyse(TRACE, 4).coverage["random"]
    assert f"random {random.mean:.3f}" in tips[1]
    assert f"{random.low:.3f} to {random.high:.3f}" in tips[1]


def test_names_in_a_trace_cannot_become_part_of_the_page(tmp_path, browser):
    """Labels of requests and names of models come from files that others wrote."""
    evil = "</script><script>document.title='changed'</script><b>"
    known = TRACE.provenance
    named = type(known)(**{name: getattr(known, name) for name in known.__struct_fields__} | {"model": evil})
    labels = [evil if label == TRACE.labels[0] else label for label in TRACE.labels]
    dataclasses.replace(TRACE, labels=labels, provenance=named).save(tmp_path / "trace")
    document = browser.document(drawn(tmp_path, "analyze", tmp_path / "trace"))
    assert "<title>changed</title>" not in document


def test_the_timeline_covers_its_steps_on_both_sides_of_the_link(tmp_path):
    out = tmp_path / "timeline.json"
    words = ("--process", "together", "--requests", "3", "--execution", "paper", "--perfetto", out, "--steps", "6")
    assert run_here("vllm-ndp", "arrivals", BUNDLED, *words).returncode == 0
    events = json.loads(out.read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["args"]["step"] for e in slices} == set(range(6))
    assert {"attention", "hot experts", "stream experts", "activations", "partial sums", "head"} <= {
        e["name"] for e in slices
    }
    assert any(e["name"].startswith("cold experts") for e in slices)
    assert all(e["dur"] >= 0 for e in slices)
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"simulated", "GPU", "NDP", "link to device", "link from device"} <= names
