"""docs/decode-step.svg from docs/measured/decode_step.json: a measured decode step of the engine and of the device.

Time runs to the right. Labels follow the reader's dark mode. Knows spans on one clock. Does not know how they were
measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from measured_figures import Figures

_WIDTH, _LEFT, _TOP, _ROW = 760, 110, 50, 30
_LANES = {"step": 0, "layer": 1, "send": 2, "hot experts": 2, "wait": 2, "cold experts": 3}
"""Row of each kind of span; the device's is the last."""
_NAMES = ("vLLM's step", "MoE layers", "in a layer", "device")
_COLOURS = {
    "step": "#8b949e",
    "layer": "#a5b4c4",
    "send": "#b07cd8",
    "hot experts": "#e8a04c",
    "wait": "#d0d7de",
    "cold experts": "#4c9be8",
}
_STYLE = """<style>text{font:11px sans-serif;fill:#24292f}.end{text-anchor:end}.middle{text-anchor:middle}
line{stroke:#8b949e66}@media (prefers-color-scheme: dark){text{fill:#e6edf3}}</style>"""


def picture(source: Figures) -> str:
    """A row for the step, its layers, the parts of a layer and the device's work."""
    step = source.figures["step"]
    spans = [*step["engine"], *step["device"]]
    length = max(end for _, _, end in spans)
    scale = (_WIDTH - _LEFT - 20) / length
    height = _TOP + len(_NAMES) * _ROW + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}">',
        f"<title>A measured decode step: {length:.0f} us</title>{_STYLE}",
        _text(_WIDTH / 2, 18, f"One decode step of {length / 1000:.2f} ms, measured: {_machine(source)}", "middle"),
        *_axis(length, scale, height),
        *(_text(_LEFT - 8, _TOP + row * _ROW + 17, name, "end") for row, name in enumerate(_NAMES)),
        *(_span(name, start, end, scale) for name, start, end in spans),
        *_legend(height - 12),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _machine(source: Figures) -> str:
    machine: dict[str, Any] = source.machine
    return f"{machine['processor']}, {machine['cores']} cores, load {max(machine['load']):.0f}, {source.date}"


def _axis(length: float, scale: float, height: float) -> Iterable[str]:
    """A line and a time every 100, 200, 500 .. us, ten at most."""
    every = next(
        step for power in range(2, 9) for step in (10**power, 2 * 10**power, 5 * 10**power) if length <= 10 * step
    )
    for time in range(0, int(length) + 1, every):
        x = _LEFT + time * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height - 44}"/>'
        yield _text(x, _TOP - 12, f"{time} us", "middle")


def _span(name: str, start: float, end: float, scale: float) -> str:
    x, y = _LEFT + start * scale, _TOP + _LANES[name] * _ROW
    width = max((end - start) * scale, 0.8)
    box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 6}" rx="2" fill="{_COLOURS[name]}">'
    return f"{box}<title>{name}: {end - start:.0f} us</title></rect>"


def _legend(y: float) -> Iterable[str]:
    for place, name in enumerate(name for name in _COLOURS if name not in ("step", "layer")):
        x = _LEFT + place * 130
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" rx="2" fill="{_COLOURS[name]}"/>'
        yield _text(x + 18, y, name, "")


def _text(x: float, y: float, said: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:g}" class="{kind}">{said}</text>'
