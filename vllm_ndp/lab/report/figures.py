"""The plots of the report, drawn by Bokeh. Knows what is worth showing of an analysis and a comparison, and how.

Every mark says its value when the mouse is on it. Does not know how anything was computed, nor the page around a plot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from bokeh.models import ColorBar, FixedTicker, HoverTool, LinearColorMapper, NumeralTickFormatter
from bokeh.palettes import interp_palette
from bokeh.plotting import figure
from numpy.typing import NDArray

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.analysis import Analysis, Interval
from vllm_ndp.lab.compare import Comparison
from vllm_ndp.lab.frontier import DEVICE, Cell
from vllm_ndp.lab.systems import SYSTEMS
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.outcome import Outcome, Summary, step_times
from vllm_ndp.planning.bitwidths import LossTable, select_bitwidths
from vllm_ndp.planning.importance import importance
from vllm_ndp.planning.placement import top_experts
from vllm_ndp.planning.plan import Budget
from vllm_ndp.traces.trace import Trace

Plot = Any
"""A Bokeh figure."""

# Okabe and Ito: distinguishable with every common colour blindness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C", "#6A3D9A", "#B2A100")
POLICY_COLORS = dict(zip(("prefill", "prefill_prior", "static", "random", "oracle"), PALETTE, strict=False))
FAINT, BLANK = "#666666", "#f0f0f0"
WHITE_TO_BLUE = interp_palette(["#ffffff", "#00528c"], 256)
ORANGE_TO_BLUE = interp_palette(["#c45c00", "#ffffff", "#00528c"], 255)
MARKERS = ("circle", "square", "diamond")
PARTS = dict(
    zip(
        ("attention", "GPU and device", "GPU only", "device only", "waiting for copies or CPU"),
        ("#bbbbbb", PALETTE[2], PALETTE[0], PALETTE[1], PALETTE[3]),
        strict=True,
    )
)
CHOICES = {
    "vllm_offload": PALETTE[6],
    "llama_cpp": PALETTE[4],
    "expert_cache": PALETTE[5],
    "ktransformers": PALETTE[2],
    "all experts quantized, fastest": PALETTE[3],
    "all experts quantized, at 3 bits' loss": PALETTE[1],
    "near-data": PALETTE[0],
}
"""Lines of where_it_pays; where two are one, the later is seen."""

WINNERS = {
    "near-data": PALETTE[0],
    "all experts on the GPU, quantized": PALETTE[1],
    "some experts on the CPU": PALETTE[4],
    "nothing fits": BLANK,
}
PALE = ("all experts on the GPU, quantized", "some experts on the CPU", "nothing fits")
"""Entries whose colours carry dark letters."""

_ENTRY_PX, _BESIDE_PX = 21, 70
"""Height of a legend's entry, and of what else is above and below one."""

NEAR = 4
"""Bars up to this many times the shortest share its scale; the others get one of their own."""


def routing_heatmaps(trace: Trace, budget: Budget) -> dict[str, Plot]:
    """Which experts prompts and decodes choose, and what the paper's policy makes of it."""
    sequences = trace.sequences
    prompts = [trace.stats(s) for s in sequences if len(s.prompt_ids)]
    decodes = [trace.stats(s, "decode") for s in sequences if len(s.decode_ids)]
    prefill, decode = _share([s.counts for s in prompts]), _share([s.counts for s in decodes])
    scores = [importance(s) for s in prompts]
    placements = [top_experts(score.values, budget.num_hot) for score in scores]
    hot = np.mean([placement.hot for placement in placements], axis=0)
    loss = LossTable.nominal(*hot.shape)
    plans = [select_bitwidths(s, placed, loss, budget).bits for s, placed in zip(scores, placements, strict=True)]
    bits = np.sum(plans, axis=0) / np.where(hot < 1, (1 - hot) * len(plans), np.nan)
    return {
        "prompts": heatmap(prefill, "prompts", "% of choices"),
        "decode": heatmap(decode, "decode", "% of choices"),
        "difference": heatmap(decode - prefill, "decode minus prompts", "points", diverging=True),
        "kept_hot": heatmap(100 * hot, f"kept hot, {budget.num_hot} per layer", "% of requests"),
        "bits": heatmap(bits, f"bits where cold, {budget.avg_bits:g} on average", "bits"),
    }


def cosine(analysis: Analysis) -> Plot:
    """Similarity of a prompt's and its decode's counts, per layer, over the null's band."""
    layers = np.arange(len(analysis.cosine))
    plot = _plot("layer", "mean cosine", x_range=(-0.5, len(layers) - 0.5))
    _whole_numbers(plot.xaxis)
    edges = np.clip(layers, -0.5, len(layers) - 0.5).astype(np.float64)
    edges[0], edges[-1] = -0.5, len(layers) - 0.5
    low = np.interp(edges, layers, analysis.cosine_null_low)
    high = np.interp(edges, layers, analysis.cosine_null_high)
    plot.varea(edges, low, high, color=FAINT, alpha=0.22, legend_label="null, 95 %")
    for name, values, color, marker in (
        ("same request", analysis.cosine, PALETTE[0], "circle"),
        ("other request", analysis.cosine_across, PALETTE[1], "diamond"),
    ):
        dots = plot.scatter(layers, values, size=10, color=color, marker=marker, legend_label=name)
        _hover(plot, [dots], (name, "layer @x"), ("cosine", "@y{0.000}"))
    return _legend_beside(plot)


def coverage(analysis: Analysis) -> Plot:
    """Share of decode choices that each hot set covers, with intervals."""
    names = list(analysis.coverage)[::-1]
    values = [analysis.coverage[name] for name in names]
    labels = [f"{name} {value.mean:.3f}" for name, value in zip(names, values, strict=True)]
    plot = _plot("share of decode choices covered", "", y_range=labels)
    source = _intervals(values) | {
        "name": labels,
        "color": [POLICY_COLORS.get(name, PALETTE[6]) for name in names],
    }
    return _dots_with_intervals(plot, source)


def prompt_tokens(analysis: Analysis) -> Plot:
    """How much of a prompt is needed: coverage over the number of its tokens that are used."""
    plot = _plot("prompt tokens used", "decode covered", x_axis_type="log")
    counts = list(analysis.first_tokens)
    for name, curve, color in (
        ("first n tokens", analysis.first_tokens, PALETTE[0]),
        ("first n and prior", analysis.first_tokens_and_prior, PALETTE[1]),
        ("last n tokens", analysis.last_tokens, PALETTE[2]),
    ):
        source = _intervals([curve[n] for n in counts]) | {"tokens": counts}
        plot.varea(counts, source["low"], source["high"], color=color, alpha=0.2, legend_label=name)
        line = plot.line("tokens", "mean", source=source, color=color, line_width=2, legend_label=name)
        _hover(plot, [line], (name, "@tokens"), ("covered", "@mean{0.000} (@low{0.000} to @high{0.000})"))
    for name, color in (("static", PALETTE[6]), ("oracle", PALETTE[4])):
        level = [analysis.coverage[name].mean] * len(counts)
        line = plot.line(counts, level, color=color, line_dash="dashed", line_width=2, legend_label=name)
        _hover(plot, [line], (name, "@y{0.000}"))
    return _legend_beside(plot)


def domains(analysis: Analysis) -> Plot | None:
    """Coverage for each domain of requests; empty if there is only one domain."""
    chosen = list(analysis.by_domain)[:10][::-1]
    if len(chosen) < 2:
        return None
    plot = _plot("share covered, by domain", "", y_range=[name[:24] for name in chosen])
    rows = [analysis.by_domain[name] for name in chosen]
    ends = [[row[policy] for policy in ("static", "prefill", "oracle")] for row in rows]
    low, high = [min(e) for e in ends], [max(e) for e in ends]
    plot.segment(low, plot.y_range.factors, high, plot.y_range.factors, color="#cccccc")
    for policy in ("static", "prefill", "oracle"):
        dots = plot.scatter(
            [row[policy] for row in rows],
            plot.y_range.factors,
            size=10,
            color=POLICY_COLORS[policy],
            legend_label=policy,
        )
        _hover(plot, [dots], ("domain", "@y"), (policy, "@x{0.000}"))
    return _legend_beside(plot)


def layer_bars(comparison: Comparison, costs: Costs) -> dict[str, Plot]:
    """Where a layer's time goes, per system; bars that are much longer in a plot of their own."""
    bars: dict[str, list[float]] = {}
    for outcome, batches, row in interesting(comparison):
        running = batches.rows > 0
        gpu, device, moe = (a[running] / 1e9 for a in (outcome.gpu_ps, outcome.device_ps, outcome.moe_ps))
        gpu = np.minimum(gpu, moe)
        bars[f"{row.system}: {row.policy}"] = [
            float(costs.attention_ps(1, batches.kv_tokens[running]).mean() / 1e9),
            float(np.minimum(gpu, device).mean()),
            float(np.maximum(gpu - device, 0).mean()),
            float(np.maximum(device - gpu, 0).mean()),
            float(np.maximum(moe - np.maximum(gpu, device), 0).mean()),
        ]
    shortest = min(sum(parts) for parts in bars.values())
    near = {label: parts for label, parts in bars.items() if sum(parts) <= NEAR * shortest}
    far = {label: parts for label, parts in bars.items() if label not in near}
    return {name: _stacked(some) for name, some in (("layer_bars", near), ("long_layer_bars", far)) if some}


def speed_and_loss(sweep: Sequence[Summary]) -> Plot | None:
    """Decode speed over loss at several average widths; nothing where no system has a loss."""
    rows = [row for row in sweep if row.loss == row.loss and row.loss > 0]
    if not rows:
        return None
    plot = _plot("loss (log)", "decode tokens/s", x_axis_type="log", height=320)
    families = {"context_aware": PALETTE[0], "balanced": PALETTE[1], "adaptive": PALETTE[2]}
    widths = sorted({float(row.policy.split("@")[1]) for row in rows})
    for system, color in families.items():
        for width, marker in zip(widths, MARKERS, strict=True):
            these = [r for r in rows if r.system == system and float(r.policy.split("@")[1]) == width]
            if not these:
                continue
            source = {
                "loss": [row.loss for row in these],
                "speed": [row.decode_tokens_per_s for row in these],
                "policy": [row.policy.split("@")[0] for row in these],
            }
            label = f"{system}, {width:g} bits"
            dots = plot.scatter("loss", "speed", source=source, size=10, color=color, marker=marker, legend_label=label)
            _hover(plot, [dots], (label, "@policy"), ("tokens/s", "@speed{0.0}"), ("loss", "@loss{0.00000}"))
    return _legend_beside(plot)


def where_it_pays(cells: Sequence[Cell]) -> Plot | None:
    """Decode speed over GPU memory: the device's fastest row, and what a user would pick, at the loss of 3 bits."""
    if not any(cell.rows for cell in cells):
        return None
    plot = _plot("GPU memory, GB", "decode tokens/s", x_axis_type="log", y_axis_type="log", height=360)
    plot.xaxis.ticker = FixedTicker(ticks=[cell.memory_gb for cell in cells if cell.memory_gb not in (12, 96)])
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0[.]0")
    for label, color in CHOICES.items():
        found = [(cell.memory_gb, row) for cell in cells if (row := _chosen(cell, label)) is not None]
        if not found:
            continue
        source = {
            "memory": [memory for memory, _ in found],
            "speed": [row.decode_tokens_per_s for _, row in found],
            "policy": [row.policy for _, row in found],
            "loss": [row.loss for _, row in found],
        }
        plot.line("memory", "speed", source=source, color=color, line_width=2, legend_label=label)
        dots = plot.scatter("memory", "speed", source=source, size=8, color=color, legend_label=label)
        _hover(
            plot, [dots], (label, "@policy"), ("GB", "@memory"), ("tokens/s", "@speed{0.0}"), ("loss", "@loss{0.0000}")
        )
    return _legend_beside(plot)


def _chosen(cell: Cell, label: str) -> Summary | None:
    """The row of a cell that a line of where_it_pays goes through."""
    if label == "near-data":
        return cell.device
    rows = [row for row in cell.rows if row.system == ("quantized" if label.startswith("all experts") else label)]
    if label != "all experts quantized, fastest":
        rows = [row for row in rows if row in cell.alike]
    return rows[0] if rows else None


def winners(cells: Sequence[Cell]) -> Plot | None:
    """Models by GPU memory: who decodes fastest within the limit of loss, and how fast."""
    if not cells:
        return None
    sizes = list(dict.fromkeys(f"{cell.memory_gb} GB" for cell in cells))
    models = list(dict.fromkeys(cell.model for cell in cells))
    plot = _plot("GPU memory", "", x_range=sizes, y_range=models[::-1], height=110 + 46 * len(models))
    for kind, color in WINNERS.items():
        here = [cell for cell in cells if winner(cell) == kind]
        if not here:
            continue
        best = [cell.fastest_alike for cell in here]
        source = {
            "memory": [f"{cell.memory_gb} GB" for cell in here],
            "model": [cell.model for cell in here],
            "who": [kind if row is None else f"{row.system}, {row.policy}" for row in best],
            "speed": ["" if row is None else number(row.decode_tokens_per_s) for row in best],
            "loss": [float("nan") if row is None else row.loss for row in best],
            "device": [_beside(cell) for cell in here],
        }
        boxes = plot.rect("memory", "model", 0.97, 0.94, source=source, color=color, line_color=None, legend_label=kind)
        _hover(
            plot, [boxes], ("@model", "@memory"), ("fastest", "@who"), ("tokens/s", "@speed"),
            ("loss", "@loss{0.0000}"), ("the device", "@device"),
        )  # fmt: skip
        ink = "#222222" if kind in PALE else "#ffffff"
        words = {"source": source, "text_align": "center", "text_color": ink}
        plot.text("memory", "model", "speed", text_font_size="13px", text_baseline="bottom", y_offset=1, **words)
        plot.text("memory", "model", "device", text_font_size="10px", text_baseline="top", y_offset=5, **words)
    plot.grid.visible = False
    plot.axis.major_tick_line_color = plot.axis.axis_line_color = None
    _legend_above(plot)
    return plot


def winner(cell: Cell) -> str:
    """Say which of WINNERS is the fastest within the cell's limit of loss."""
    best = cell.fastest_alike
    if best is None:
        return "nothing fits"
    if best.system in DEVICE:
        return "near-data"
    return "all experts on the GPU, quantized" if best.system == "quantized" else "some experts on the CPU"


def _beside(cell: Cell) -> str:
    """The device's own speed, where another one is faster."""
    device = cell.device
    return "" if device is None or cell.fastest_alike is device else f"device {number(device.decode_tokens_per_s)}"


def latencies(comparison: Comparison, costs: Costs) -> Plot:
    """Time per output token as a share of steps, the fastest policy of each system."""
    plot = _plot("time per output token, ms (log)", "share of steps", x_axis_type="log", height=320)
    shown: set[str] = set()
    for outcome, batches, row in interesting(comparison):
        if row.policy in ("oracle", "static") or row.system in shown:
            continue
        color = PALETTE[len(shown) % len(PALETTE)]
        dash = "solid" if len(shown) < len(PALETTE) else "dashed"
        shown.add(row.system)
        times = step_times(outcome, batches, costs)[batches.rows > 0] / 1e9
        _distribution(plot, times, color, f"{row.system}, {row.policy}"[:40], dash)
    return _legend_beside(plot)


def clocks(trace: Trace) -> dict[str, Plot]:
    """Both clocks of a recorded run, in two plots that share nothing; of each, if it was recorded."""
    if not len(trace.events.get("step", ())):
        return {}
    plots = {}
    shown = [("measured", trace.events["measured_step_s"] * 1e3, "measured step, ms (log)", PALETTE[3])]
    if not trace.lacks:
        simulated_us = trace.simulated_steps()[1] / 1e6
        shown.insert(0, ("simulated", simulated_us, "simulated step, us (log)", PALETTE[0]))
    for name, values, label, color in shown:
        plots[name] = _plot(label, "share of steps", x_axis_type="log", height=240)
        _distribution(plots[name], np.maximum(values, 1e-6), color, name)
        plots[name].legend.visible = False
    return plots


def interesting(comparison: Comparison) -> list[tuple[Outcome, Batches, Summary]]:
    """One row per system, more for those that follow a policy; the first batch size only; fastest first."""
    first = comparison.rows[0].batch
    wanted = ("prefill", "static", "oracle", "prefill_prior, spill 3", "prefill_prior then decayed")
    out = []
    for (outcome, batches), row in zip(comparison.outcomes, comparison.rows, strict=True):
        if row.batch == first and (not SYSTEMS[row.system].follows_policy or row.policy in wanted):
            out.append((outcome, batches, row))
    return sorted(out, key=lambda item: item[2].moe_ms_per_layer)


def heatmap(values: NDArray[np.float64], title: str, unit: str, *, diverging: bool = False) -> Plot:
    """[layers, experts] as coloured cells: layers downwards, experts to the right. NaN stays blank."""
    layers, experts = values.shape
    top = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    colors = LinearColorMapper(
        palette=ORANGE_TO_BLUE if diverging else WHITE_TO_BLUE,
        low=-(top or 1.0) if diverging else 0.0,
        high=top or 1.0,
        nan_color=BLANK,
    )
    plot = _plot(
        "expert",
        "layer",
        x_range=(-0.5, experts - 0.5),
        y_range=(layers - 0.5, -0.5),
        height=min(max(layers * 22, 60), 260) + 110,
        title=f"{title}, {unit}",
    )
    cells = plot.image(
        [values.astype(np.float32)], x=-0.5, y=-0.5, dw=experts, dh=layers, color_mapper=colors, origin="bottom_left"
    )
    plot.grid.visible = False
    _whole_numbers(plot.axis)
    plot.add_layout(ColorBar(color_mapper=colors, height=8, padding=4), "below")
    _hover(plot, [cells], ("layer, expert", "$y{0}, $x{0}"), (unit, "@image{0.00}"))
    return plot


def _plot(x_label: str, y_label: str, *, height: int = 270, **options: Any) -> Plot:
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        x_axis_label=x_label,
        y_axis_label=y_label,
        tools="pan,box_zoom,wheel_zoom,reset,save",
        **options,
    )
    plot.toolbar.autohide, plot.toolbar.logo = True, None
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.axis_label_text_color = FAINT
    plot.grid.grid_line_color = "#e4e4e4"
    plot.outline_line_color = None
    if options.get("x_axis_type") == "log":
        plot.xaxis.formatter = NumeralTickFormatter(format="0.[0000]")  # 0.01, not a power of ten
        plot.xaxis.ticker = FixedTicker(ticks=[step * 10.0**power for power in range(-6, 7) for step in (1, 3)])
    return plot


def _whole_numbers(axis: Any) -> None:
    """Put ticks at layers and experts only."""
    axis.ticker.min_interval, axis.ticker.num_minor_ticks = 1, 0


def _legend_beside(plot: Plot) -> Plot:
    """Move the legend out of the data; a click on an entry hides its series."""
    legend = plot.legend[0]
    plot.add_layout(legend, "right")
    legend.click_policy = "hide"
    plot.height = max(plot.height, _BESIDE_PX + _ENTRY_PX * len(legend.items))  # or it would hang out of the plot
    legend.label_text_font_size, legend.spacing, legend.padding, legend.border_line_color = "11px", 1, 4, None
    return plot


def _hover(plot: Plot, renderers: list[Any], *tooltips: tuple[str, str]) -> None:
    plot.add_tools(HoverTool(renderers=renderers, tooltips=list(tooltips), visible=False))


def _intervals(values: Iterable[Interval]) -> dict[str, list[Any]]:
    listed = list(values)
    return {
        "mean": [value.mean for value in listed],
        "low": [value.low for value in listed],
        "high": [value.high for value in listed],
    }


def _dots_with_intervals(plot: Plot, source: dict[str, list[Any]]) -> Plot:
    plot.segment("low", "name", "high", "name", source=source, color="color", line_width=2)
    dots = plot.scatter("mean", "name", source=source, color="color", size=10)
    _hover(plot, [dots], ("covered", "@name"), ("95 %", "@low{0.000} to @high{0.000}"))
    return plot


def _stacked(bars: dict[str, list[float]]) -> Plot:
    labels = list(bars)[::-1]
    parts = {name: [bars[label][i] for label in labels] for i, name in enumerate(PARTS)}
    totals = [sum(bars[label]) for label in labels]
    plot = _plot(
        "ms per layer, simulated", "", y_range=labels, x_range=(0, 1.08 * max(totals)), height=70 + 24 * len(bars)
    )
    source = {"label": labels, "total": totals, **parts}
    stacks = plot.hbar_stack(
        list(PARTS), y="label", height=0.75, color=list(PARTS.values()), source=source, legend_label=list(PARTS)
    )
    _hover(plot, stacks, ("@label", "$name"), ("ms", "@$name{0.0000}"), ("of", "@total{0.0000}"))
    shown = [number(total) for total in totals]
    plot.text(totals, labels, shown, x_offset=6, text_baseline="middle", text_font_size="11px", text_color=FAINT)
    _legend_above(plot)
    return plot


def _legend_above(plot: Plot) -> None:
    legend = plot.legend[0]
    plot.add_layout(legend, "above")
    legend.orientation, legend.border_line_color, legend.padding, legend.label_text_font_size = (
        "horizontal",
        None,
        2,
        "11px",
    )


def _distribution(plot: Plot, values: NDArray[np.float64], color: str, name: str, dash: str = "solid") -> None:
    """Share of values up to each value, at no more than 120 points."""
    ordered = np.sort(values)
    points = np.unique(np.linspace(0, len(ordered) - 1, 120).astype(int))
    line = plot.line(
        ordered[points], (points + 1) / len(ordered), color=color, line_width=2, line_dash=dash, legend_label=name
    )
    _hover(plot, [line], (name, "@x{0.0000}"), ("share of steps", "@y{0.000}"))


def _share(stats: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    total = np.sum(stats, axis=0).astype(np.float64)
    out: NDArray[np.float64] = 100 * total / np.maximum(total.sum(axis=1, keepdims=True), 1)
    return out


def number(value: float) -> str:
    """Write a value with three significant digits, thousands as k."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
