"""Analysis against traces whose answer is known, and the report as a browser shows it."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from paths import DATA

from ndp_device.common.errors import TraceError
from vllm_ndp.lab.analysis import Interval, analyse, calibration_sensitivity
from vllm_ndp.lab.compare import CompareSettings
from vllm_ndp.lab.report import write_report, write_timeline
from vllm_ndp.lab.systems import SYSTEMS
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace
from vllm_ndp.traces.trace import Trace

TRACE = Trace.load(DATA / "tiny-mixtral-trace")


def synthetic(**settings) -> Trace:
    sizes = {"num_layers": 3, "num_experts": 16, "top_k": 2, "num_requests": 24, "prompt_len": 64, "decode_len": 64}
    return synthetic_trace(SyntheticSettings(**{**sizes, **settings}))


def test_on_the_null_the_cosine_lies_in_its_band_and_the_prompt_gains_nothing():
    result = analyse(synthetic(signal=0.0), 8)
    inside = [
        low - 0.01 <= c <= high + 0.01
        for low, c, high in zip(result.cosine_null_low, result.cosine, result.cosine_null_high, strict=True)
    ]
    assert all(inside)
    assert result.over_static["prefill"].high < 0.02


def test_with_signal_the_prompt_covers_more_than_popularity_with_certainty():
    result = analyse(synthetic(signal=1.5), 8)
    assert result.over_static["prefill"].low > 0.05
    assert result.layers_outside_null == 3
    assert all(c > a for c, a in zip(result.cosine, result.cosine_across, strict=True))


def test_the_oracle_is_above_everything_and_random_covers_its_share():
    result = analyse(TRACE, 4)
    means = {name: value.mean for name, value in result.coverage.items()}
    assert means["oracle"] == max(means.values())
    assert means["random"] == pytest.approx(0.5, abs=0.08)
    assert all(v.low <= v.mean <= v.high for v in result.coverage.values())


def test_refreshing_more_often_follows_a_drift():
    result = analyse(synthetic(signal=1.5, drift=1.0, decode_len=256), 8)
    assert result.refresh[8].mean > result.refresh[128].mean > result.coverage["prefill"].mean


def test_a_prior_helps_where_the_prompt_is_one_token_long():
    result = analyse(synthetic(signal=0.3, concentration=1.0), 8)
    assert result.first_tokens_and_prior[1].low > result.first_tokens[1].high


def test_every_request_has_its_domain_and_length():
    result = analyse(TRACE, 4)
    assert set(result.by_domain) == {"python", "c", "prose", "dict", "sqldoc", "german", "japanese", "xml"}
    assert set(result.by_prompt_len) == {"128-511"}


def test_an_interval_narrows_with_more_requests():
    generator = np.random.default_rng(0)
    few, many = (Interval.of(generator.normal(size=n)) for n in (10, 1000))
    assert many.high - many.low < 0.2 < few.high - few.low


def test_two_equal_calibrations_agree_and_a_shuffled_one_changes_bits():
    loss = LossTable(np.sort(np.random.default_rng(0).exponential(size=(4, 8, 4)), axis=2)[:, :, ::-1])
    other = LossTable(loss.mse[:, np.random.default_rng(1).permutation(8)])
    same = calibration_sensitivity(TRACE, loss, loss, Budget(2, 2.0))
    shuffled = calibration_sensitivity(TRACE, loss, other, Budget(2, 2.0))
    assert same.rank_correlation == pytest.approx([1, 1, 1, 1])
    assert same.bits_changed == 0
    assert max(shuffled.rank_correlation) < 0.9
    assert shuffled.bits_changed > 0


def test_one_request_is_not_enough():
    with pytest.raises(TraceError, match="at least 2 requests"):
        analyse(TRACE.select([0, 1]), 4)


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


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    result = write_report(TRACE, CompareSettings(), out)
    assert result["systems"] == len(SYSTEMS)
    return out


# Moves the mouse to a point of the data and says what the page then shows. Plots lie in shadow roots.
HOVER = """
const every = root => [...root.querySelectorAll('*')].flatMap(e => [e, ...(e.shadowRoot ? every(e.shadowRoot) : [])]);
let plots = [];
const labelled = text => plots.find(v => v.model.below.some(axis => axis.axis_label === text));
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
  plots = [...Bokeh.index.roots].filter(view => view.model.type === 'Figure');
  say('plots', plots.length);
  hover(titled('prompts'), 5, 1);
  const coverage = labelled('share of decode choices covered');
  const source = coverage.model.renderers[0].data_source.data;
  hover(coverage, source.mean[1], source.name[1]);
  setTimeout(() => say('tips', every(document)
    .filter(e => e.classList.contains('bk-Tooltip'))
    .map(e => every(e.shadowRoot).filter(inner => inner.tagName === 'SPAN').map(span => span.textContent).join(' '))
    .join(' | ')), 500);
}, 1000);
"""


@pytest.mark.slow
def test_the_report_is_one_file_that_loads_nothing(report):
    html = report.read_text(encoding="utf-8")
    page = Page(html)
    assert page.sources == []
    assert "@import" not in html
    assert page.tags.count("h2") >= 5
    assert len(html) < 2_500_000


@pytest.mark.slow
def test_a_browser_draws_every_plot_and_shows_values_under_the_mouse(report, browser):
    """The values are those of the analysis, not of the pixels."""
    document = browser.document(report, HOVER)
    plots, tips = (re.search(rf'<pre id="{name}">(.*?)</pre>', document, re.DOTALL) for name in ("plots", "tips"))
    assert plots is not None
    assert tips is not None
    assert int(plots[1]) >= 12
    everyone = np.sum([TRACE.stats(s).counts for s in TRACE.sequences if len(s.prompt_ids)], axis=0)
    share = 100 * everyone[1, 5] / everyone[1].sum()
    assert "1, 5" in tips[1]
    assert f"{share:.2f}" in tips[1]
    static = analyse(TRACE, 4).coverage["random"]
    assert f"random {static.mean:.3f}" in tips[1]
    assert f"{static.low:.3f} to {static.high:.3f}" in tips[1]


@pytest.mark.slow
def test_a_browser_shows_the_report(report, browser, tmp_path):
    raw = browser.screenshot(report, tmp_path / "report.png").read_bytes()
    assert raw.startswith(b"\x89PNG")
    assert len(raw) > 100_000  # an empty page of this size compresses to a few kilobytes


@pytest.mark.slow
def test_names_in_a_trace_cannot_become_part_of_the_page(tmp_path, browser):
    """Labels of requests come from files that others wrote."""
    evil = "</script><script>document.title='changed'</script><b>"
    labels = [evil if label == TRACE.labels[0] else label for label in TRACE.labels]
    trace = dataclasses.replace(TRACE, labels=labels)
    write_report(trace, CompareSettings(systems=("context_aware",), policies=("prefill",)), tmp_path / "page.html")
    document = browser.document(tmp_path / "page.html")
    assert "<title>changed</title>" not in document


def test_the_timeline_covers_its_steps_on_both_sides_of_the_link(tmp_path):
    out = tmp_path / "timeline.json"
    steps = write_timeline(TRACE, CompareSettings(model="mixtral-8x7b"), out, LossTable.nominal(4, 8), 6)
    events = json.loads(out.read_text())["traceEvents"]
    assert steps == 6
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["args"]["step"] for e in slices} == set(range(6))
    assert {"attention", "hot experts", "stream experts", "activations", "partial sums", "head"} <= {
        e["name"] for e in slices
    }
    assert any(e["name"].startswith("cold experts") for e in slices)
    assert all(e["dur"] >= 0 for e in slices)
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"simulated", "GPU", "NDP", "link to device", "link from device"} <= names
