"""Pages of plots about a comparison or a trace's routing: each one file that loads nothing, drawn by Bokeh.

Every mark says its value under the mouse; a click in a legend hides a series. Knows results. Computes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.embed import file_html
from bokeh.layouts import column, row
from bokeh.models import ColorBar, Div, FactorRange, FixedTicker, HoverTool, LinearColorMapper, NumeralTickFormatter
from bokeh.palettes import interp_palette
from bokeh.plotting import figure
from bokeh.resources import Resources
from numpy.typing import NDArray

from vllm_ndp.lab.analysis import Analysis, Interval
from vllm_ndp.lab.compare import LAYER_PARTS
from vllm_ndp.lab.grid import Compared, columns, named
from vllm_ndp.lab.locality import Locality
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.lab.systems import SYSTEMS
from vllm_ndp.planning.bitwidths import nominal_loss
from vllm_ndp.planning.importance import importance
from vllm_ndp.planning.plan import highest
from vllm_ndp.traces.trace import Trace

Plot = Any
"""A Bokeh figure."""
Values = Sequence[Any] | NDArray[Any]
Curves = dict[str, tuple[Values, Values]]
"""Name -> (x, y)."""

# Okabe and Ito: distinguishable with every common colour blindness.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C", "#6A3D9A", "#B2A100")
WHITE_TO_BLUE = interp_palette(["#ffffff", "#00528c"], 256)
ORANGE_TO_BLUE = interp_palette(["#c45c00", "#ffffff", "#00528c"], 255)
_ENTRY_PX, _BESIDE_PX = 21, 70
"""Height of a legend's entry, and of what else is above and below one."""


# -- pages -------------------------------------------------------------------------------------------------------------


def of_comparison(found: Compared) -> list[str | list[Plot]]:
    """What `compare --html` draws: all rows over loss, memory and bits; of each point where a layer's time goes."""
    rows = [(at, one) for at, comparison in found.points for one in comparison.rows]
    page: list[str | list[Plot]] = ["All times are simulated. Left is more precise, up is faster."]
    by_system = {
        name: [(at, one) for at, one in rows if one.system == name] for name in dict.fromkeys(r.system for _, r in rows)
    }
    speeds: Curves = {
        name: ([one.loss for _, one in of], [one.decode_tokens_per_s for _, one in of])
        for name, of in by_system.items()
    }
    said = {name: [f"{one.policy}, batch {one.batch}; {named(at)}" for at, one in of] for name, of in by_system.items()}
    tails: Curves = {
        name: ([one.tpot_p50_ms for _, one in of], [one.tpot_p99_ms for _, one in of]) for name, of in by_system.items()
    }
    page.append(
        [
            dots("speed and loss", "loss", "decode tokens/s", speeds, said),
            dots("time per output token", "p50, ms", "p99, ms", tails, said, log="xy"),
        ]
    )
    for title, limit in (("fastest of each system", np.inf), ("that loses no more than 3 bits", nominal_loss(3))):
        over = {
            axis: fastest
            for axis in ("memory_gb", "asked_bits", "batch")
            if (fastest := _fastest_by(axis, rows, limit)) and any(len(xs) > 1 for xs, _ in fastest.values())
        }
        page.append([lines(title, axis, "decode tokens/s", curves, log="y") for axis, curves in over.items()])
    for at, comparison in found.points:
        first = comparison.rows[0].batch
        bars = {
            f"{done.row.system}: {done.row.policy}": [done.layer_ms[part] for part in LAYER_PARTS]
            for done in sorted(comparison.replayed, key=lambda done: done.row.moe_ms_per_layer)
            if done.row.batch == first
            and (not SYSTEMS[done.row.system].follows_policy or done.row.policy[:6] == "prefil")
        }
        page.append([stacked(f"a layer's time at batch {first}; {named(at)}", "ms", LAYER_PARTS, bars)])
    return page


def _fastest_by(axis: str, rows: Iterable[tuple[CompareSettings, Any]], limit: float) -> Curves:
    best: dict[str, dict[float, float]] = {}
    for at, one in rows:
        x = {**columns(at), "batch": one.batch}[axis]
        if x is not None and one.loss <= limit * (1 + 1e-6) and not one.policy.startswith("oracle"):
            of = best.setdefault(one.system, {})
            of[x] = max(of.get(x, 0.0), one.decode_tokens_per_s)
    return {name: (sorted(of), [of[x] for x in sorted(of)]) for name, of in best.items()}


def of_routing(trace: Trace, found: Locality, analysis: Analysis | None) -> list[str | list[Plot]]:
    """What `analyze --html` draws: choices, what prompts tell, what caches hit, and a live run's two clocks."""
    p = trace.provenance
    page: list[str | list[Plot]] = [
        f"{len(trace.prompt_len)} requests, {len(trace.step):,} tokens, {p.num_layers} layers of {p.num_experts} "
        f"experts, top-{p.top_k}; {p.source}. Nothing here is a time but the clocks of a live run.",
        _heatmaps(trace, p.num_experts // 2 if analysis is None else analysis.num_hot),
    ]
    if analysis is not None:
        page += [
            "Similarity of a prompt's and its decode's counts proves little: the null is what tokens without any "
            "request-level signal give. What counts is the share of decode choices that a hot set covers.",
            _predictions(analysis),
        ]
    sizes, layers = list(range(found.num_experts + 1)), list(range(len(found.repeats)))
    hits: Curves = {rule: (sizes, curve.mean(axis=0)) for rule, curve in found.hits.items()}
    gaps = np.cumsum(found.gaps.mean(axis=0)[1:])
    page.append(
        [
            lines("choices found in a cache", "experts per layer", "share", hits),
            dots(
                "choices that the token before made too",
                "layer",
                "share",
                {"as recorded": (layers, found.repeats), "shuffled": (layers, found.shuffled)},
            ),
            lines("tokens since the last use, at most", "tokens", "share", {"": (range(1, len(gaps) + 1), gaps)}, "x"),
            lines("of a request's most used experts", "experts", "share", {"": (sizes, found.concentration.mean(0))}),
        ]
    )
    return [*page, _clocks(trace)]


def _heatmaps(trace: Trace, num_hot: int) -> list[Plot]:
    prompts = [trace.stats(s) for s in trace.sequences if len(s.prompt_ids)]
    counts = [trace.stats(s, "decode").counts for s in trace.sequences if len(s.decode_ids)]
    plots = []
    if prompts:
        prefill = _share([stats.counts for stats in prompts])
        hot = np.mean([highest(importance(stats).values, num_hot) for stats in prompts], axis=0)
        plots += [heatmap("prompts, % of choices", prefill)]
        plots += [heatmap(f"kept hot by prompts, {num_hot} per layer, % of requests", 100 * hot)]
    if counts:
        plots += [heatmap("decode, % of choices", _share(counts))]
    if prompts and counts:
        plots += [heatmap("decode minus prompts, points", _share(counts) - prefill, diverging=True)]
    return plots


def _predictions(analysis: Analysis) -> list[Plot]:
    layers = list(range(len(analysis.cosine)))
    curves = {
        "first n tokens": analysis.first_tokens,
        "first n and prior": analysis.first_tokens_and_prior,
        "last n tokens": analysis.last_tokens,
    }
    plots = [
        dots(
            "cosine of prompt and decode",
            "layer",
            "mean cosine",
            {
                "same request": (layers, analysis.cosine),
                "other request": (layers, analysis.cosine_across),
                "null, 97.5 %": (layers, analysis.cosine_null_high),
                "null, 2.5 %": (layers, analysis.cosine_null_low),
            },
        ),
        intervals("share of decode choices covered", analysis.coverage),
        lines(
            "prompt tokens used",
            "tokens",
            "decode covered",
            {name: (list(curve), [one.mean for one in curve.values()]) for name, curve in curves.items()},
            "x",
        ),
    ]
    if len(analysis.by_domain) > 1:
        domains = list(analysis.by_domain)[:10]
        covered: Curves = {
            policy: ([analysis.by_domain[name][policy] for name in domains], [name[:24] for name in domains])
            for policy in ("static", "prefill", "oracle")
        }
        plots.append(dots("share covered, by domain", "", "", covered, y_range=FactorRange(*covered["oracle"][1])))
    return plots


def _clocks(trace: Trace) -> list[Plot]:
    """Both clocks of a recorded run, in plots that share nothing; of each, if it was recorded."""
    if not len(trace.events.get("step", ())):
        return []
    shown = {"measured step, ms": trace.events["measured_step_s"] * 1e3}
    if not trace.lacks:
        shown["simulated step, us"] = trace.simulated_steps()[1] / 1e6
    return [
        lines(name, name, "share of steps", {"": (np.sort(values), np.arange(1, len(values) + 1) / len(values))}, "x")
        for name, values in shown.items()
    ]


def write_page(path: Path, title: str, page: Sequence[str | list[Plot]]) -> None:
    """Text and rows of plots, below each other."""
    parts = [
        Div(text=escape(part)) if isinstance(part, str) else row(*part, sizing_mode="stretch_width")
        for part in page
        if part
    ]
    whole = column(Div(text=f"<h2>{escape(title)}</h2>"), *parts, sizing_mode="stretch_width")
    path.write_text(file_html(whole, Resources(mode="inline"), title=title), encoding="utf-8")


# -- plots -------------------------------------------------------------------------------------------------------------


def lines(title: str, x_label: str, y_label: str, curves: Curves, log: str = "") -> Plot:
    plot = _plot(title, x_label, y_label, log)
    for (name, (xs, ys)), color in zip(curves.items(), cycle(PALETTE)):
        named_as = {"legend_label": name} if name else {}
        line = plot.line(list(xs), list(ys), color=color, line_width=2, **named_as)
        _hover(plot, [line], (name or y_label, "@y{0.000}"), (x_label, "@x{0.[000]}"))
    return _with_legend(plot)


def dots(
    title: str,
    x_label: str,
    y_label: str,
    curves: Curves,
    said: Mapping[str, Sequence[str]] | None = None,
    log: str = "",
    **options: Any,
) -> Plot:
    """said: of each dot, what else the mouse shows."""
    plot = _plot(title, x_label, y_label, log, **options)
    for (name, (xs, ys)), color in zip(curves.items(), cycle(PALETTE)):
        source = {"x": list(xs), "y": list(ys), "said": [""] * len(xs) if said is None else list(said[name])}
        marks = plot.scatter("x", "y", source=source, color=color, size=9, legend_label=name)
        _hover(plot, [marks], (name, "@said"), (x_label, "@x{0.0000}"), (y_label, "@y"))
    return _with_legend(plot)


def intervals(title: str, values: Mapping[str, Interval]) -> Plot:
    labels = [f"{name} {value.mean:.3f}" for name, value in values.items()][::-1]
    ordered = list(values.values())[::-1]
    source = {"name": labels, **{end: [getattr(one, end) for one in ordered] for end in ("low", "mean", "high")}}
    plot = _plot(title, "", "", y_range=FactorRange(*labels))
    plot.segment("low", "name", "high", "name", source=source, line_width=2)
    _hover(
        plot,
        [plot.scatter("mean", "name", source=source, size=9)],
        ("covered", "@name"),
        ("95 %", "@low{0.000} to @high{0.000}"),
    )
    return plot


def stacked(title: str, unit: str, parts: Sequence[str], bars: Mapping[str, Sequence[float]]) -> Plot:
    labels = list(bars)[::-1]
    source = {"label": labels} | {name: [bars[label][i] for label in labels] for i, name in enumerate(parts)}
    plot = _plot(title, unit, "", y_range=FactorRange(*labels), height=90 + 24 * len(bars))
    stacks = plot.hbar_stack(
        list(parts), y="label", height=0.75, color=PALETTE[: len(parts)], source=source, legend_label=list(parts)
    )
    _hover(plot, stacks, ("bar", "@label"), ("$name", f"@$name{{0.0000}} {unit}"))
    return _with_legend(plot)


def heatmap(title: str, values: NDArray[np.float64], *, diverging: bool = False) -> Plot:
    """[layers, experts] as coloured cells: layers downwards, experts to the right."""
    layers, experts = values.shape
    top = float(np.abs(values).max()) or 1.0
    palette = ORANGE_TO_BLUE if diverging else WHITE_TO_BLUE
    colors = LinearColorMapper(palette=palette, low=-top if diverging else 0.0, high=top)
    plot = _plot(title, "expert", "layer", x_range=(-0.5, experts - 0.5), y_range=(layers - 0.5, -0.5))
    cells = plot.image(
        [values.astype(np.float32)], x=-0.5, y=-0.5, dw=experts, dh=layers, color_mapper=colors, origin="bottom_left"
    )
    plot.add_layout(ColorBar(color_mapper=colors, height=8, padding=4), "below")
    _hover(plot, [cells], ("layer, expert", "$y{0}, $x{0}"), ("", "@image{0.00}"))
    return plot


def _plot(title: str, x_label: str, y_label: str, log: str = "", **options: Any) -> Plot:
    """log: which of x and y are logarithmic."""
    options = {"height": 300, "sizing_mode": "stretch_width"} | options
    options |= {f"{axis}_axis_type": "log" for axis in log}
    plot = figure(title=title, x_axis_label=x_label, y_axis_label=y_label, tools="pan,box_zoom,reset,save", **options)
    plot.toolbar.autohide, plot.toolbar.logo = True, None
    if "x" in log:
        plot.xaxis.formatter = NumeralTickFormatter(format="0.[0000]")  # 0.01, not a power of ten
        plot.xaxis.ticker = FixedTicker(ticks=[step * 10.0**power for power in range(-6, 7) for step in (1, 3)])
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


def _share(counts: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    total = np.sum(counts, axis=0).astype(np.float64)
    return np.asarray(100 * total / np.maximum(total.sum(axis=1, keepdims=True), 1))
