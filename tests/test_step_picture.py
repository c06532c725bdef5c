"""docs/decode-step.svg shows each span of a measured decode step at its place, and names the machine and its load."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

from paths import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from measured_figures import Figures
from step_picture import picture

RECT = "{http://www.w3.org/2000/svg}rect"


def small(device_end: float) -> Figures:
    step = {"engine": [["step", 0.0, 1000.0], ["wait", 500.0, 750.0]], "device": [["cold experts", 250.0, device_end]]}
    machine = {"processor": "p", "cores": 3, "load": [0.5, 7.4]}
    return Figures(
        question="", command="", origin="", date="2026-01-02", commit="", machine=machine, figures={"step": step}
    )


def spans(text: str) -> dict[str, tuple[float, float]]:
    """Title of each span -> (left edge, width)."""
    found = {}
    for box in ElementTree.fromstring(text).iter(RECT):
        for title in box:
            found[title.text or ""] = (float(box.attrib["x"]), float(box.attrib["width"]))
    return found


def test_a_span_lies_at_its_time_and_is_as_wide_as_it_is_long() -> None:
    drawn = spans(picture(small(750.0)))
    left, whole = drawn["step: 1000 us"]
    assert abs(drawn["wait: 250 us"][0] - (left + whole / 2)) < 0.2
    assert abs(drawn["cold experts: 500 us"][1] - whole / 2) < 0.2
    assert drawn["cold experts: 500 us"] != spans(picture(small(800.0)))["cold experts: 550 us"]


def test_the_picture_says_its_machine_and_load_and_follows_dark_mode() -> None:
    text = picture(small(750.0))
    assert "p, 3 cores, load 7, 2026-01-02" in text
    assert "prefers-color-scheme: dark" in text
