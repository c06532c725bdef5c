"""docs/demo.svg from docs/measured/demo.json: the table that `make demo` prints.

Letters follow the reader's dark mode. Knows the cells. Does not know how they were measured.
"""

from __future__ import annotations

from html import escape

from measured_figures import Figures

_LEFT, _TOP, _ROW = 12, 66, 22
_WIDTHS = (62, 76, 76, 56, 96, 96, 100, 100, 240)
_WIDTH = _LEFT * 2 + sum(_WIDTHS)
_MEASURED, _SIMULATED = "#e8a04c", "#4c9be8"
_STYLE = """<style>text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#24292f;text-anchor:end}
.left{text-anchor:start}.head{font-weight:bold}.note{font-size:11px}
@media (prefers-color-scheme: dark){text{fill:#e6edf3}}</style>"""


def picture(source: Figures) -> str:
    """Each row a request; columns of the two clocks on two colours."""
    head, rows, machine = source.figures["head"], source.figures["rows"], source.machine
    height = _TOP + len(rows) * _ROW + 34
    at = f"{machine['processor']}, {machine['cores']} cores, commit {source.commit}, {source.date}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}">',
        f"<title>The table of make demo</title>{_STYLE}",
        _text(_LEFT, 20, f"$ make demo        {len(rows)} requests in one batch, bundled model: {at}", "left note"),
    ]
    for column, name in enumerate(head):
        colour = next(
            (c for word, c in (("measured", _MEASURED), ("simulated", _SIMULATED)) if name.startswith(word)), ""
        )
        if colour:
            left = _LEFT + sum(_WIDTHS[:column]) + 6
            box = f'<rect x="{left}" y="30" width="{_WIDTHS[column] - 4}" height="{_TOP + len(rows) * _ROW - 32}"'
            parts.append(f'{box} rx="3" fill="{colour}" fill-opacity="0.22"/>')
        first, _, second = name.partition(" ")
        words = (first, second) if colour or column in (1, 2) else (name,)
        parts += [_cell(column, 44 + 15 * line, word, "head") for line, word in enumerate(words)]
    for line, row in enumerate(rows):
        parts += [_cell(column, _TOP + line * _ROW + 15, said, "") for column, said in enumerate(row)]
    parts.append(_text(_LEFT, height - 12, source.figures["caption"], "left note"))
    return "\n".join([*parts, "</svg>", ""])


def _cell(column: int, y: float, said: str, kind: str) -> str:
    left = _LEFT + sum(_WIDTHS[:column])
    if column in (0, len(_WIDTHS) - 1):
        return _text(left + (14 if column else 0), y, said, f"left {kind}".strip())
    return _text(left + _WIDTHS[column] - 4, y, said, kind)


def _text(x: float, y: float, said: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" xml:space="preserve">{escape(said)}</text>'
