"""The live page: one self-contained HTML file that asks /v1/ndp/status and /v1/ndp/experts every two seconds.

Bokeh draws here, with no data in it; page.js puts what the server answers into its sources, so nothing is reloaded. The
two clocks have figures of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.models import BasicTicker, ColorBar, ColumnDataSource, FixedTicker, HoverTool, LinearColorMapper, Range1d
from bokeh.palettes import interp_palette
from bokeh.plotting import figure
from bokeh.resources import Resources

_WHITE_TO_BLUE = interp_palette(["#ffffff", "#00528c"], 256)
_WIDTHS = ("#00528c", "#f2d7b3", "#e9a65c", "#cf6f1d", "#8f3f00")
"""Hot (0 bits of its own: full precision in a slot), then 1 to 4 bits."""
_SIMULATED, _MEASURED = "#0072B2", "#D55E00"


def render() -> str:
    """The page as a browser gets it; takes a second, since Bokeh's script goes in."""
    experts = ColumnDataSource({name: [] for name in ("x", "y", "importance", "bits", "hot", "width")}, name="experts")
    requests = ColumnDataSource(
        {name: [] for name in ("at", "id", "measured_ttft", "measured_tpot", "simulated_ttft", "simulated_tpot")},
        name="requests",
    )
    clocks = {
        f"{clock}_{what}": _bars(requests, clock, what, unit, color)
        for clock, unit, color in (("measured", "ms", _MEASURED), ("simulated", "us", _SIMULATED))
        for what in ("ttft", "tpot")
    }
    importance, width = _heatmaps(experts)
    script, divs = components({"importance": importance, "width": width} | clocks)

    def row(*names: str) -> str:
        return f'<div class="row">{"".join(f"<div>{divs[name]}</div>" for name in names)}</div>'

    body = (
        '<h1 id="model">vllm-ndp</h1><p class="faint" id="about">Waiting for the server.</p>'
        '<div class="tiles" id="tiles"></div>'
        "<h2>Who is hot where</h2><p>Share of each layer's importance by expert, as the prompts of the plan in force "
        "had it; framed experts are hot: in slots of the engine. Beside it the width of every cold one.</p>"
        f"{row('importance', 'width')}"
        "<h2>The last requests, on their two clocks</h2><p>Orange is <b>measured</b> on this machine; blue is "
        "<b>simulated</b>, on the hardware named above. The two share no axis and no sum.</p>"
        f"{row('measured_tpot', 'simulated_tpot')}{row('measured_ttft', 'simulated_ttft')}"
        '<table><thead id="head"></thead><tbody id="rows"></tbody></table>'
    )
    library = Resources(mode="inline", components=["bokeh"]).render()
    style, logic = (Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>vllm-ndp</title>'
        f"<style>{style}</style>{library}</head><body><main>{body}</main>{script}<script>{logic}</script></body></html>\n"
    )


def _heatmaps(source: Any) -> tuple[Any, Any]:
    """Importance with hot experts framed, and widths; they share their ranges."""
    x_range, y_range = Range1d(-0.5, 7.5, name="experts-range"), Range1d(7.5, -0.5, name="layers-range")
    shades = LinearColorMapper(palette=_WHITE_TO_BLUE, low=0, high=1, name="shades")
    widths = LinearColorMapper(palette=_WIDTHS, low=-0.5, high=4.5)
    plots = []
    for name, mapper, title in (("importance", shades, "importance, share of its layer"), ("width", widths, "bits")):
        plot = _plot(x_range=x_range, y_range=y_range, height=380, title=title)
        plot.xaxis.axis_label, plot.yaxis.axis_label = "expert", "layer"
        plot.xaxis.ticker = plot.yaxis.ticker = BasicTicker(min_interval=1, num_minor_ticks=0)
        cells = plot.rect(
            "x", "y", 0.96, 0.92, source=source, fill_color={"field": name, "transform": mapper}, line_color=None
        )
        bar = ColorBar(color_mapper=mapper, height=8, padding=4)
        if name == "importance":
            plot.rect("x", "y", 0.9, 0.84, source=source, fill_color=None, line_color="#d11149", line_width="hot")
        else:
            bar.ticker = FixedTicker(ticks=[0, 1, 2, 3, 4])
            bar.major_label_overrides = {0: "hot"}
        plot.add_layout(bar, "below")
        plot.grid.visible = False
        tips = [("layer, expert", "@y, @x"), ("importance", "@importance{0.000}"), ("bits", "@bits{0.0} (0: hot)")]
        plot.add_tools(HoverTool(renderers=[cells], tooltips=tips))
        plots.append(plot)
    return plots[0], plots[1]


def _bars(source: Any, clock: str, what: str, unit: str, color: str) -> Any:
    names = {"ttft": "time to first token", "tpot": "time per token"}
    plot = _plot(height=190, title=f"{clock} {names[what]}, {unit}; the newest to the right")
    bars = plot.vbar("at", 0.8, f"{clock}_{what}", source=source, color=color)
    plot.y_range.start = 0
    plot.xaxis.visible = False
    plot.xgrid.visible = False
    plot.add_tools(HoverTool(renderers=[bars], tooltips=[("request", "@id"), (unit, f"@{clock}_{what}{{0.000}}")]))
    return plot


def _plot(**options: Any) -> Any:
    plot = figure(sizing_mode="stretch_width", toolbar_location=None, tools="", **options)
    plot.outline_line_color = None
    return plot
