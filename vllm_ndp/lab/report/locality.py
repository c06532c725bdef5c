"""The picture of a trace's locality: one self-contained HTML page of four plots. Knows curves. Computes nothing."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
from bokeh.embed import file_html
from bokeh.layouts import gridplot
from bokeh.models import HoverTool
from bokeh.plotting import figure
from bokeh.resources import Resources

from vllm_ndp.lab.locality import Locality
from vllm_ndp.lab.report.figures import PALETTE, Plot

_SIZE: dict[str, Any] = {"width": 520, "height": 360}
_SHARE: dict[str, Any] = {**_SIZE, "y_range": (0, 1)}


def page(found: Locality, model: str) -> str:
    plots = [[_hits(found), _by_layer(found)], [_gaps(found), _concentration(found)]]
    library = Resources(mode="inline")
    return str(file_html(gridplot(plots), library, title=f"Locality of {escape(model)}"))


def _hits(found: Locality) -> Plot:
    """Hit curves, mean over layers."""
    plot = figure(
        title="choices found in a cache",
        x_axis_label="experts per layer",
        y_axis_label="share",
        y_range=(0, 1),
        **_SIZE,
    )
    sizes = np.arange(found.num_experts + 1)
    for (rule, curve), color in zip(found.hits.items(), PALETTE, strict=False):
        line = plot.line(sizes, curve.mean(axis=0), color=color, line_width=2, legend_label=rule)
        plot.add_tools(HoverTool(renderers=[line], tooltips=[(rule, "@x experts"), ("found", "@y{0.000}")]))
    return _legend(plot)


def _by_layer(found: Locality) -> Plot:
    """Repeats of each layer over the same tokens shuffled."""
    plot = figure(
        title="choices that the token before made too",
        x_axis_label="layer",
        y_axis_label="share",
        y_range=(0, 1),
        **_SIZE,
    )
    layers = np.arange(len(found.repeats))
    for name, shares, color in (("as recorded", found.repeats, PALETTE[0]), ("shuffled", found.shuffled, PALETTE[1])):
        dots = plot.scatter(layers, shares, color=color, size=7, legend_label=name)
        plot.add_tools(HoverTool(renderers=[dots], tooltips=[(name, "layer @x"), ("share", "@y{0.000}")]))
    return _legend(plot)


def _gaps(found: Locality) -> Plot:
    """Share of choices by tokens since the last use."""
    plot = figure(
        title="tokens since the last use", x_axis_label="tokens", y_axis_label="share", x_axis_type="log", **_SIZE
    )
    shares = found.gaps.mean(axis=0)
    line = plot.line(np.arange(1, len(shares)), np.cumsum(shares[1:]), color=PALETTE[0], line_width=2)
    plot.add_tools(HoverTool(renderers=[line], tooltips=[("at most", "@x tokens"), ("share", "@y{0.000}")]))
    return plot


def _concentration(found: Locality) -> Plot:
    """Share of a request's choices that its most used experts take."""
    plot = figure(
        title="share of a request's most used experts", x_axis_label="experts", y_axis_label="share", **_SHARE
    )
    curve = found.concentration.mean(axis=0)
    line = plot.line(np.arange(len(curve)), curve, color=PALETTE[2], line_width=2)
    plot.add_tools(HoverTool(renderers=[line], tooltips=[("experts", "@x"), ("share", "@y{0.000}")]))
    return plot


def _legend(plot: Plot) -> Plot:
    plot.legend.location = "bottom_right"
    plot.legend.click_policy = "hide"
    return plot
