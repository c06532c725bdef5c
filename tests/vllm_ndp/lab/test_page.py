"""Pages of plots, as a browser shows them."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from in_this_process import run_here
from paths import DATA

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
