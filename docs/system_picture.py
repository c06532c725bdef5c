"""docs/system.svg: who computes what, in which process, and which of the two clocks says how long it took.

Drawn by hand from here: nothing is measured. Letters follow the reader's dark mode.
"""

from __future__ import annotations

from html import escape

_WIDTH, _HEIGHT = 760, 330
_MEASURED, _SIMULATED, _PLAIN = "#e8a04c", "#4c9be8", "#8b949e"
_STYLE = """<style>text{font:12px sans-serif;fill:#24292f;text-anchor:middle}
.head{font-weight:bold}.small{font-size:11px}line{stroke:#8b949e;stroke-width:1.5;marker-end:url(#tip)}
@media (prefers-color-scheme: dark){text{fill:#e6edf3}}</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0L8 4L0 8z" fill="#8b949e"/></marker></defs>"""


def picture() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}">',
        f"<title>vLLM with the plugin, the device in another process, and the two clocks</title>{_STYLE}",
        *_box(10, 30, 330, 200, _PLAIN, "host: vLLM, unmodified, with the plugin"),
        *_box(
            25,
            60,
            145,
            155,
            _PLAIN,
            "GPU (or this CPU)",
            "router, attention,",
            "shared experts;",
            "hot experts in",
            "full precision",
        ),
        *_box(
            180,
            60,
            145,
            155,
            _PLAIN,
            "plugin",
            "plans from the prompt:",
            "which experts are hot,",
            "bits of the others;",
            "splits each layer,",
            "adds the sums",
        ),
        *_box(500, 30, 250, 200, _PLAIN, "ndp-device: another process"),
        *_box(515, 60, 220, 65, _MEASURED, "cold experts", "1 to 4 bits, really computed"),
        *_box(515, 145, 220, 70, _SIMULATED, "model of a CXL device", "DRAM, link, arrays:", "how long it would take"),
        *_arrow(340, 92, 500, 92, "rows of cold pairs"),
        *_arrow(500, 172, 340, 172, "sums, simulated time"),
        _text(420, 130, "shared memory", "small"),
        _text(420, 144, "or ZeroMQ", "small"),
        *_box(60, 262, 270, 52, _MEASURED, "measured_*", "wall time on this machine"),
        *_box(430, 262, 270, 52, _SIMULATED, "simulated_*", "time on the modelled hardware, in picoseconds"),
        _text(380, 292, "never added", "small"),
        '<line x1="175" y1="230" x2="175" y2="260"/>',
        '<line x1="625" y1="230" x2="625" y2="260"/>',
        _text(30, 20, "request", ""),
        '<line x1="60" y1="16" x2="97" y2="28"/>',
    ]
    return "\n".join([*parts, "</svg>", ""])


def _box(x: int, y: int, width: int, height: int, colour: str, head: str, *lines: str) -> list[str]:
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" fill-opacity="0.18"'
    middle = x + width / 2
    return [
        f'{box} stroke="{colour}"/>',
        _text(middle, y + 20, head, "head"),
        *(_text(middle, y + 40 + 17 * number, line, "small") for number, line in enumerate(lines)),
    ]


def _arrow(x1: int, y1: int, x2: int, y2: int, said: str) -> list[str]:
    return [f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>', _text((x1 + x2) / 2, y1 - 7, said, "small")]


def _text(x: float, y: float, said: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(said)}</text>'
