"""docs/map.svg from docs/measured/map.json: by model and memory, the device's speed over the fastest other system's.

Blue where the device wins, orange where it does not, paler near 1. Labels follow the reader's dark mode. Knows cells of
the map. Does not know how they were found.
"""

from __future__ import annotations

from math import log2

from map_page import AS_FITTED, Map
from measured_figures import Figures

_CELL, _ROW, _LEFT, _TOP = 62, 34, 118, 64
_WINS, _LOSES, _NOTHING = (76, 155, 232), (232, 160, 76), "#9993"
_STYLE = """<style>text{font:11px sans-serif;text-anchor:middle}.label{fill:#24292f}.cell{fill:#111}
.left{text-anchor:end}@media (prefers-color-scheme: dark){.label{fill:#e6edf3}}</style>"""


def picture(source: Figures) -> str:
    """A panel for each limit of loss, a row for each model, a column for each size of memory."""
    known = Map(source)
    limits, models, sizes = (list(source.figures[name]) for name in ("limits", "models", "cards"))
    height = len(models) * _ROW + _TOP
    width = _LEFT + len(sizes) * _CELL + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height * len(limits) + 24}" width="{width}">',
        f"<title>Speed with the device over the fastest system without it</title>{_STYLE}",
    ]
    for panel, limit in enumerate(limits):
        top = panel * height
        said = f"with the device / fastest without, tokens/s; loss of {limit} at most"
        parts.append(_text(width / 2, top + 20, said, "label"))
        parts += [_text(_x(at), top + 48, f"{size} GB", "label") for at, size in enumerate(sizes)]
        for row, model in enumerate(models):
            y = top + _TOP + row * _ROW
            parts.append(_text(_LEFT - 8, y + 18, model, "label left"))
            parts += [
                _cell(_x(at), y, known.ratio(AS_FITTED, model, int(size), limit)) for at, size in enumerate(sizes)
            ]
    legend = "blue: faster with the device; orange: no gain, or slower; grey: nothing fits"
    parts.append(_text(width / 2, height * len(limits) + 14, legend, "label"))
    return "\n".join([*parts, "</svg>", ""])


def _x(column: int) -> float:
    return _LEFT + (column + 0.5) * _CELL


def _cell(x: float, y: float, ratio: float | None) -> str:
    box = f'<rect x="{x - _CELL / 2 + 1:g}" y="{y}" width="{_CELL - 2}" height="{_ROW - 4}" rx="3"'
    if ratio is None:
        return f'{box} fill="{_NOTHING}"/>'
    return f'{box} fill="{_colour(ratio)}"/>{_text(x, y + 19, f"{ratio:.2f}", "cell")}'


def _colour(ratio: float) -> str:
    """Full from twice as fast, or half as fast, on."""
    share = 0.2 + 0.8 * min(abs(log2(ratio)), 1.0)
    mixed = (round(255 + share * (part - 255)) for part in (_WINS if ratio > 1 else _LOSES))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _text(x: float, y: float, said: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{said}</text>'
