"""A page of plots about a comparison: one file that loads nothing, drawn by Bokeh.

Every mark says its value under the mouse; a click in a legend hides a series.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from bokeh.embed import file_html
from bokeh.layouts import column, row
from bokeh.models import Div, HoverTool
from bokeh.palettes import Colorblind
from bokeh.plotting import figure
from bokeh.resources import Resources

from vllm_ndp.lab.compare import Compared, columns, named
from vllm_ndp.lab.options import CompareSettings

Plot = Any
"""A Bokeh figure."""
Curves = dict[str, tuple[Sequence[float], Sequence[float]]]
"""Name -> (x, y)."""

_ENTRY_PX, _BESIDE_PX = 21, 70
"""Height of a legend's entry, and of what else is above and below one."""


def write_comparison(path: Path, title: str, found: Compared) -> None:
    """All rows over loss, memory, bits and batch."""
    rows = [(at, one) for at, comparison in found.points for one in comparison.rows]
    by_system = {
        name: [(at, one) for at, one in rows if one.system == name] for name in dict.fromkeys(r.system for _, r in rows)
    }
    speeds: Curves = {
        name: ([one.loss for _, one in of], [one.decode_tokens_per_s for _, one in of])
        for name, of in by_system.items()
    }
    said = {name: [f"{one.policy}, batch {one.batch}; {named(at)}" for at, one in of] for name, of in by_system.items()}
    page = [[dots("speed and loss", "loss", "decode tokens/s", speeds, said)]]
    over = {
        axis: fastest
        for axis in ("memory_gb", "asked_bits", "batch")
        if (fastest := _fastest_by(axis, rows)) and any(len(xs) > 1 for xs, _ in fastest.values())
    }
    page.append([lines("fastest of each system", axis, "decode tokens/s", curves) for axis, curves in over.items()])
    head = Div(text=f"<h2>{escape(title)}</h2>All times are simulated. Left is more precise, up is faster.")
    plots = [row(*part, sizing_mode="stretch_width") for part in page if part]
    whole = column(head, *plots, sizing_mode="stretch_width")
    path.write_text(file_html(whole, Resources(mode="inline"), title=title), encoding="utf-8")


def _fastest_by(axis: str, rows: Iterable[tuple[CompareSettings, Any]]) -> Curves:
    best: dict[str, dict[float, float]] = {}
    for at, one in rows:
        x = {**columns(at), "batch": one.batch}[axis]
        if x is not None and not one.policy.startswith("oracle"):
            of = best.setdefault(one.system, {})
            of[x] = max(of.get(x, 0.0), one.decode_tokens_per_s)
    return {name: (sorted(of), [of[x] for x in sorted(of)]) for name, of in best.items()}


# -- plots -------------------------------------------------------------------------------------------------------------


def lines(title: str, x_label: str, y_label: str, curves: Curves) -> Plot:
    plot = _plot(title, x_label, y_label, y_axis_type="log")
    for (name, (xs, ys)), color in zip(curves.items(), cycle(Colorblind[8])):
        line = plot.line(xs, ys, color=color, line_width=2, legend_label=name)
        _hover(plot, [line], (name, "@y{0.000}"), (x_label, "@x{0.[000]}"))
    return _with_legend(plot)


def dots(title: str, x_label: str, y_label: str, curves: Curves, said: Mapping[str, Sequence[str]]) -> Plot:
    """said: of each dot, what else the mouse shows."""
    plot = _plot(title, x_label, y_label)
    for (name, (xs, ys)), color in zip(curves.items(), cycle(Colorblind[8])):
        source = {"x": xs, "y": ys, "said": said[name]}
        marks = plot.scatter("x", "y", source=source, color=color, size=9, legend_label=name)
        _hover(plot, [marks], (name, "@said"), (x_label, "@x{0.0000}"), (y_label, "@y"))
    return _with_legend(plot)


def _plot(title: str, x_label: str, y_label: str, **options: Any) -> Plot:
    options = {"height": 300, "sizing_mode": "stretch_width"} | options
    plot = figure(title=title, x_axis_label=x_label, y_axis_label=y_label, tools="pan,box_zoom,reset,save", **options)
    plot.toolbar.autohide, plot.toolbar.logo = True, None
    return plot


def _with_legend(plot: Plot) -> Plot:
    """The legend beside the data, and the plot as high as it."""
    for legend in plot.legend[:1]:
        plot.add_layout(legend, "right")
        legend.click_policy, legend.label_text_font_size, legend.spacing = "hide", "11px", 1
        plot.height = max(plot.height, _BESIDE_PX + _ENTRY_PX * len(legend.items))
    return plot


def _hover(plot: Plot, renderers: list[Any], *tooltips: tuple[str, str]) -> None:
    plot.add_tools(HoverTool(renderers=renderers, tooltips=list(tooltips), visible=False))
