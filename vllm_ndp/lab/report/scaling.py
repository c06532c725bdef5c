"""One self-contained page of plots about scaling: devices, GPUs, batches and hosts that share a pool. Drawn by Bokeh.

Knows points and pools of lab/scaling.py and what is worth showing of them. Does not know how they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from bokeh.embed import components
from bokeh.layouts import gridplot
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool
from bokeh.plotting import figure
from bokeh.resources import Resources

from vllm_ndp.lab.report.figures import PALETTE
from vllm_ndp.lab.scaling import PARTS, PAYS, Pool, ScalingPoint, stops_paying

BOUND_COLORS = dict(zip(PARTS, (*PALETTE[:6], "#c9a9e8", "#444444"), strict=True))
_WIDTH, _HEIGHT = 300, 235


def render(points: Sequence[ScalingPoint], pools: Sequence[Pool], hardware: str) -> str:
    """A column per model. Rows: over devices by batch, over GPUs by batch, and a pool by its size."""
    models = list(dict.fromkeys(point.model for point in points))
    rows = [
        [_over_devices(model, [one for one in points if one.model == model]) for model in models],
        [_over_gpus([one for one in points if one.model == model]) for model in models],
        [_over_pool(next((one for one in pools if one.model == model), None)) for model in models],
    ]
    script, div = components(gridplot(rows, toolbar_location=None))
    library = Resources(mode="inline", components=["bokeh"]).render()
    legend = " ".join(f'<span style="color:{color}">&#9679;</span> {name}' for name, color in BOUND_COLORS.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Scaling, simulated</title>'
        '<style>body{font:13px/1.5 system-ui,"DejaVu Sans",sans-serif;color:#222;margin:18px 22px}'
        "h1{font-size:19px;margin:0}p{margin:2px 0 8px}</style>"
        f"{library}</head><body><h1>Simulated decode tokens/s on {escape(hardware)}</h1><p>Above: over devices, a line "
        "per batch size, on the fewest GPUs that hold it. Middle: over GPUs with most devices. Below: hosts that share "
        f"a pool. A ring: one more device brings less than {PAYS:.0%}. What takes most of a step: {legend}</p>"
        f"{div}{script}</body></html>\n"
    )


def _plot(title: str, x_label: str, **options: Any) -> Any:
    plot = figure(width=_WIDTH, height=_HEIGHT, title=title, y_axis_type="log", toolbar_location=None, **options)
    plot.xaxis.axis_label, plot.yaxis.axis_label = x_label, "tokens/s"
    plot.title.text_font_size = "11px"
    return plot


def _lines(plot: Any, points: Sequence[ScalingPoint], x: str, ringed: int | None = None) -> None:
    ordered = sorted(points, key=lambda point: getattr(point, x))
    values, speeds = [getattr(point, x) for point in ordered], [point.tokens_per_s for point in ordered]
    source = ColumnDataSource(
        {
            "x": values,
            "y": speeds,
            "color": [BOUND_COLORS[point.bound] for point in ordered],
            "bound": [f"{point.bound} {point.shares[point.bound]:.0%}" for point in ordered],
            "hot": [point.num_hot for point in ordered],
            "copies": [point.num_copies for point in ordered],
            "batch": [point.batch for point in ordered],
        }
    )
    plot.line("x", "y", source=source, color="#bbbbbb")
    dots = plot.scatter("x", "y", source=source, color="color", size=8)
    if ringed is not None:
        at = values.index(ringed)
        plot.scatter([ringed], [speeds[at]], size=15, fill_alpha=0, line_color="#222222")
    tips = [("tokens/s", "@y{0.0}"), ("batch", "@batch"), ("most", "@bound"), ("hot", "@hot"), ("copies", "@copies")]
    plot.add_tools(HoverTool(renderers=[dots], tooltips=tips, visible=False))
    plot.text([values[-1]], [speeds[-1]], [f" {ordered[-1].batch}"], text_font_size="10px", text_baseline="middle")


def _over_devices(model: str, points: Sequence[ScalingPoint]) -> Any:
    most = max(point.num_devices for point in points)
    plot = _plot(model, "devices", x_range=(0.5, 1.15 * most + 1))
    for batch in sorted({point.batch for point in points}):
        of_batch = [point for point in points if point.batch == batch]
        fewest = min(point.num_gpus for point in of_batch)
        line = [point for point in of_batch if point.num_gpus == fewest]
        _lines(plot, line, "num_devices", stops_paying(line))
    return plot


def _over_gpus(points: Sequence[ScalingPoint]) -> Any:
    most = max(point.num_devices for point in points)
    plot = _plot(f"with {most} devices", "GPUs (tensor parallel)", x_range=(0.5, 9.2))
    plot.xaxis.ticker = FixedTicker(ticks=[1, 2, 4, 8])
    for batch in sorted({point.batch for point in points}):
        line = [point for point in points if point.batch == batch and point.num_devices == most]
        if line:
            _lines(plot, line, "num_gpus")
    return plot


def _over_pool(pool: Pool | None) -> Any:
    if pool is None or not pool.shared:
        return None
    private = pool.num_hosts * pool.num_private
    plot = _plot(
        f"{pool.num_hosts} hosts of {pool.shared[0].num_gpus} GPU; dashed: {private} devices",
        f"devices in the pool ({'not enough' if pool.enough is None else f'{pool.enough} are enough'})",
        x_range=(0.5, max(point.num_devices for point in pool.shared) + 1.2),
    )
    _lines(plot, pool.shared, "num_devices")
    plot.line([0.5, plot.x_range.end], [pool.private_tokens_per_s] * 2, line_dash="dashed", color="#222222")
    return plot
