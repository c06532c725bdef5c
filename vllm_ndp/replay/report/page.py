"""One self-contained HTML page about a trace: what it routes, what can be predicted, what systems make of it.

Composes analysis and comparison into figures; no script, no file beside it. Knows what is worth showing and in which
words. Does not know how anything was computed.
"""

from __future__ import annotations

from html import escape

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.planning.bitwidths import LossTable, select_bitwidths
from vllm_ndp.planning.importance import importance
from vllm_ndp.planning.placement import top_experts
from vllm_ndp.planning.plan import Budget
from vllm_ndp.replay.analysis import Analysis
from vllm_ndp.replay.compare import CompareSettings, Comparison
from vllm_ndp.replay.report.svg import FAINT, PALETTE, Chart, heatmap, number, stacked_bars
from vllm_ndp.replay.systems import SYSTEMS
from vllm_ndp.replay.vectorised.batches import Batches
from vllm_ndp.replay.vectorised.outcome import Outcome, Summary, step_times
from vllm_ndp.simulation.costs import Costs
from vllm_ndp.traces.trace import Trace

_STYLE = """
body{font:14px/1.5 system-ui,"DejaVu Sans",sans-serif;color:#222;margin:0;background:#f6f6f4}
main{max-width:1060px;margin:0 auto;padding:28px 24px 60px;background:#fff}
h1{font-size:25px;margin:0 0 2px}h2{font-size:17px;margin:34px 0 4px;border-top:1px solid #ddd;padding-top:20px}
p{margin:4px 0 10px;max-width:78ch}.faint{color:#666}svg{max-width:100%;height:auto}svg text{font-size:11px}
.tiles{display:flex;gap:12px;flex-wrap:wrap;margin:18px 0}.tile{background:#f2f5f8;padding:10px 14px;min-width:128px}
.tile b{display:block;font-size:21px}.row{display:flex;gap:14px;flex-wrap:wrap}
table{border-collapse:collapse;font-size:12px;width:100%}
td,th{padding:3px 7px;text-align:right;border-bottom:1px solid #eee}
td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}tr:hover{background:#f6f9fc}th{font-weight:600;color:#444}
ul{font-size:12px;color:#555;columns:2;padding-left:18px}
"""
_POLICY_COLORS = dict(zip(("prefill", "prefill_prior", "static", "random", "oracle"), PALETTE, strict=False))


def render(
    trace: Trace,
    analysis: Analysis,
    comparison: Comparison,
    sweep: list[Summary],
    settings: CompareSettings,
    costs: Costs,
) -> str:
    """sweep: rows of other average widths, for the trade-off between speed and precision."""
    p = trace.provenance
    budget = Budget(analysis.num_hot, settings.avg_bits)
    but = " but the last figure" if len(trace.events.get("step", ())) else ""
    body = [
        f"<h1>Routing of {escape(p.model)}</h1>",
        f'<p class="faint">{len(trace.prompt_len)} requests, {len(trace.step):,} tokens, {p.num_layers} layers of '
        f"{p.num_experts} experts, top-{p.top_k}; {escape(p.source)}. Replayed as {escape(settings.model)} on "
        f"{escape(settings.hardware)} ({comparison.config_hash}): every time on this page{but} is "
        "<b>simulated</b>.</p>",
        _tiles(analysis, comparison.rows),
        "<h2>Which experts, when</h2>",
        "<p>Share of a layer's choices that went to each expert, in prompts and in decode; what decode prefers (blue) "
        "or avoids (orange) compared with the prompts; and where the paper's policy would keep each expert.</p>",
        _heatmaps(trace, budget),
        "<h2>Can the prompt predict the decode?</h2>",
        "<p>Similarity of a prompt's and its decode's counts proves little: the band is what tokens without any "
        "request-level signal give. What counts is the share of decode choices that a hot set covers.</p>",
        f'<div class="row">{_cosine_chart(analysis)}{_coverage_chart(analysis)}</div>',
        f'<div class="row">{_tokens_chart(analysis)}{_domain_chart(analysis)}</div>',
        "<h2>Where a layer's time goes</h2>",
        f"<p>Milliseconds per layer and decode step at batch {comparison.rows[0].batch}, attention and experts.</p>",
        _stage_bars(comparison, costs),
        "<h2>Speed against precision</h2>",
        "<p>Up and to the left is better. Loss is gate weight times the relative error of the width each choice ran "
        "at. Shapes are average widths of cold experts.</p>",
        f'<div class="row">{_pareto(sweep)}{_latency_cdf(comparison, costs)}</div>',
        "<h2>All systems on this trace</h2>",
        _table(comparison.rows),
        f"<p>Assumptions</p><ul>{_assumptions(settings)}</ul>",
        _live_section(trace),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Routing of {escape(p.model)}</title>'
        f"<style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _tiles(analysis: Analysis, rows: list[Summary]) -> str:
    tiles = [
        (f"{100 * analysis.coverage[name].mean:.1f} %", f"of decode covered, {text}")
        for name, text in (("static", "static hot set"), ("prefill", "hot set from the prompt"), ("oracle", "oracle"))
    ]
    labels = {
        ("monde", "H cost"): "MoNDE",
        ("context_aware", "prefill"): "the paper's policy",
        ("balanced", "prefill, spill 3"): "the same, balanced (3-bit spill)",
    }
    for row in rows:
        if row.batch == rows[0].batch and (row.system, row.policy) in labels:
            text = labels[row.system, row.policy]
            tiles.append((number(row.decode_tokens_per_s), f"tokens/s, {text}"))
    return (
        '<div class="tiles">' + "".join(f'<div class="tile"><b>{v}</b>{escape(t)}</div>' for v, t in tiles) + "</div>"
    )


def _heatmaps(trace: Trace, budget: Budget) -> str:
    sequences = trace.sequences
    prompts = [trace.stats(s) for s in sequences if len(s.prompt_ids)]
    decodes = [trace.stats(s, "decode") for s in sequences if len(s.decode_ids)]

    def share(stats: list[NDArray[np.int64]]) -> NDArray[np.float64]:
        total = np.sum(stats, axis=0).astype(np.float64)
        out: NDArray[np.float64] = 100 * total / np.maximum(total.sum(axis=1, keepdims=True), 1)
        return out

    prefill, decode = share([s.counts for s in prompts]), share([s.counts for s in decodes])
    scores = [importance(s) for s in prompts]
    placements = [top_experts(score.values, budget.num_hot) for score in scores]
    hot = np.mean([placement.hot for placement in placements], axis=0)
    loss = LossTable.nominal(*hot.shape)
    plans = [select_bitwidths(s, placed, loss, budget).bits for s, placed in zip(scores, placements, strict=True)]
    bits = np.sum(plans, axis=0) / np.where(hot < 1, (1 - hot) * len(plans), np.nan)
    maps = [
        heatmap(prefill, "prompts", unit=" %"),
        heatmap(decode, "decode", unit=" %"),
        heatmap(decode - prefill, "decode minus prompts", diverging=True, unit=" points"),
        heatmap(100 * hot, f"kept hot, {budget.num_hot} per layer", unit=" % of requests"),
        heatmap(bits, f"bits where cold, {budget.avg_bits:g} on average"),
    ]
    return f'<div class="row">{"".join(maps)}</div>'


def _cosine_chart(analysis: Analysis) -> str:
    layers = list(range(len(analysis.cosine)))
    everything = [*analysis.cosine, *analysis.cosine_across, *analysis.cosine_null_low]
    chart = Chart(
        500, 270, (-0.5, len(layers) - 0.5), (min(everything) - 0.05, 1.0), "layer", "mean cosine", legend_width=126
    )
    edges = [-0.5, *layers[1:-1], len(layers) - 0.5] if len(layers) > 2 else layers
    low = np.interp(edges, layers, analysis.cosine_null_low).tolist()
    high = np.interp(edges, layers, analysis.cosine_null_high).tolist()
    chart.band(edges, low, high, FAINT, "null, 95 %")
    for layer in layers:
        chart.dot(
            layer,
            analysis.cosine[layer],
            PALETTE[0],
            f"layer {layer}: {analysis.cosine[layer]:.3f}",
            name="same request",
        )
        chart.dot(
            layer,
            analysis.cosine_across[layer],
            PALETTE[1],
            f"layer {layer}: {analysis.cosine_across[layer]:.3f}",
            "diamond",
            "other request",
        )
    return chart.svg()


def _coverage_chart(analysis: Analysis) -> str:
    names = list(analysis.coverage)[::-1]
    values = [analysis.coverage[name] for name in names]
    labels = [f"{name} {value.mean:.3f}" for name, value in zip(names, values, strict=True)]
    span = (min(v.low for v in values) - 0.03, min(max(v.high for v in values) + 0.05, 1.0))
    chart = Chart(
        500, 270, span, (-0.5, len(names) - 0.5), "share of decode choices covered", "", left=122, y_names=labels
    )
    for row, (name, value) in enumerate(zip(names, values, strict=True)):
        color = _POLICY_COLORS.get(name, PALETTE[6])
        chart.line([value.low, value.high], [row, row], color)
        chart.dot(value.mean, row, color, f"{name}: {value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]")
    return chart.svg()


def _tokens_chart(analysis: Analysis) -> str:
    counts = list(analysis.first_tokens)
    curves = {
        "first n tokens": (analysis.first_tokens, PALETTE[0]),
        "first n and prior": (analysis.first_tokens_and_prior, PALETTE[1]),
        "last n tokens": (analysis.last_tokens, PALETTE[2]),
    }
    levels = [bound for curve, _ in curves.values() for v in curve.values() for bound in (v.low, v.high)]
    levels += [analysis.coverage[name].mean for name in ("static", "oracle")]
    span = (min(levels) - 0.02, max(levels) + 0.02)
    chart = Chart(
        500, 270, (1, max(counts[-1], 2)), span, "prompt tokens used", "decode covered", x_log=True, legend_width=126
    )
    for name, (curve, color) in curves.items():
        chart.band(counts, [curve[n].low for n in counts], [curve[n].high for n in counts], color)
        chart.line(counts, [curve[n].mean for n in counts], color, name)
    chart.level(analysis.coverage["static"].mean, PALETTE[6], "static")
    chart.level(analysis.coverage["oracle"].mean, PALETTE[4], "oracle")
    return chart.svg()


def _domain_chart(analysis: Analysis) -> str:
    domains = list(analysis.by_domain)[:10][::-1]
    if len(domains) < 2:
        return ""
    names = ("static", "prefill", "oracle")
    values = [analysis.by_domain[domain][name] for domain in domains for name in names]
    chart = Chart(
        500,
        270,
        (min(values) - 0.04, min(max(values) + 0.04, 1.0)),
        (-0.5, len(domains) - 0.5),
        "share covered, by domain",
        "",
        left=96,
        legend_width=76,
        y_names=[domain[:14] for domain in domains],
    )
    for row, domain in enumerate(domains):
        here = [analysis.by_domain[domain][name] for name in names]
        chart.line([min(here), max(here)], [row, row], "#ccc")
        for name, value in zip(names, here, strict=True):
            chart.dot(value, row, _POLICY_COLORS[name], f"{domain}, {name}: {value:.3f}", name=name)
    return chart.svg()


def _interesting(comparison: Comparison) -> list[tuple[Outcome, Batches, Summary]]:
    """One line per system, more for those that follow a policy; the first batch size only."""
    first = comparison.rows[0].batch
    wanted = ("prefill", "static", "oracle", "prefill_prior, spill 3", "prefill_prior then decayed")
    out = []
    for (outcome, batches), row in zip(comparison.outcomes, comparison.rows, strict=True):
        if row.batch == first and (not SYSTEMS[row.system].follows_policy or row.policy in wanted):
            out.append((outcome, batches, row))
    return sorted(out, key=lambda item: item[2].moe_ms_per_layer)


def _stage_bars(comparison: Comparison, costs: Costs) -> str:
    labels: list[str] = []
    parts: dict[str, list[float]] = {
        name: [] for name in ("attention", "GPU and device", "GPU only", "device only", "waiting for copies or CPU")
    }
    for outcome, batches, row in _interesting(comparison):
        running = batches.rows > 0
        gpu, device, moe = (a[running] / 1e9 for a in (outcome.gpu_ps, outcome.device_ps, outcome.moe_ps))
        gpu = np.minimum(gpu, moe)
        attention = costs.attention_ps(1, batches.kv_tokens[running]).mean() / 1e9
        shares = (
            attention,
            np.minimum(gpu, device).mean(),
            np.maximum(gpu - device, 0).mean(),
            np.maximum(device - gpu, 0).mean(),
            np.maximum(moe - np.maximum(gpu, device), 0).mean(),
        )
        labels.append(f"{row.system}: {row.policy}")
        for name, value in zip(parts, shares, strict=True):
            parts[name].append(float(value))
    colors = dict(zip(parts, ("#bbb", PALETTE[2], PALETTE[0], PALETTE[1], PALETTE[3]), strict=True))
    totals = [sum(values[i] for values in parts.values()) for i in range(len(labels))]
    near = [i for i, total in enumerate(totals) if total <= 4 * min(totals)]
    far = [i for i in range(len(labels)) if i not in near]
    panels = [
        stacked_bars([labels[i] for i in some], {k: [v[i] for i in some] for k, v in parts.items()}, colors, "ms")
        for some in (near, far)
        if some
    ]
    note = "<p>The rest, to a scale of their own:</p>"
    return note.join(panels)


def _pareto(sweep: list[Summary]) -> str:
    rows = [r for r in sweep if r.loss == r.loss and r.loss > 0]
    if not rows:
        return ""
    losses, speeds = [r.loss for r in rows], [r.decode_tokens_per_s for r in rows]
    widths = sorted({float(r.policy.split("@")[1]) for r in rows})
    shapes = dict(zip(widths, ("circle", "square", "diamond", "circle"), strict=False))
    families = {"context_aware": PALETTE[0], "balanced": PALETTE[1], "adaptive": PALETTE[2]}
    chart = Chart(
        520,
        320,
        (min(losses) / 1.3, max(losses) * 1.3),
        (0.95 * min(speeds), 1.05 * max(speeds)),
        "loss (log)",
        "decode tokens/s",
        x_log=True,
        legend_width=110,
    )
    for row in rows:
        policy, width = row.policy.split("@")
        title = f"{row.system}, {policy}, {width} bits: {row.decode_tokens_per_s:.0f} tokens/s, loss {row.loss:.4f}"
        chart.dot(row.loss, row.decode_tokens_per_s, families[row.system], title, shapes[float(width)], row.system)
    chart.legend += [(f"{width:g} bits: {shapes[width]}", "#fff") for width in widths]
    return chart.svg()


def _latency_cdf(comparison: Comparison, costs: Costs) -> str:
    curves: list[tuple[str, NDArray[np.float64]]] = []
    for outcome, batches, row in _interesting(comparison):  # fastest first: one line per system
        if row.policy in ("oracle", "static") or any(name.startswith(row.system) for name, _ in curves):
            continue
        times = np.sort(step_times(outcome, batches, costs)[batches.rows > 0]) / 1e9
        curves.append((f"{row.system}, {row.policy}"[:34], times))
    low, high = min(t[0] for _, t in curves), max(t[-1] for _, t in curves)
    chart = Chart(
        520,
        320,
        (low / 1.1, high * 1.1),
        (0, 1),
        "time per output token, ms (log)",
        "share of steps",
        x_log=True,
        legend_width=212,
    )
    for index, (name, times) in enumerate(curves):
        points = np.linspace(0, len(times) - 1, 120).astype(int)
        dash = "" if index < len(PALETTE) else "4 3"
        chart.line(
            times[points].tolist(), ((points + 1) / len(times)).tolist(), PALETTE[index % len(PALETTE)], name, dash
        )
    return chart.svg()


def _table(rows: list[Summary]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0].cells())
    lines = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.cells().values()) + "</tr>" for row in rows]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _assumptions(settings: CompareSettings) -> str:
    return "".join(
        f"<li><b>{escape(name)}</b> {escape(text)}</li>"
        for name in settings.systems
        for text in SYSTEMS[name].assumptions
    )


def _live_section(trace: Trace) -> str:
    """Both clocks of a recorded run, in two figures that share nothing."""
    if not len(trace.events.get("step", ())):
        return ""
    simulated = trace.events["simulated_step_ps"] / 1e6
    measured = trace.events["measured_step_s"] * 1e3
    charts = []
    for values, label, color in (
        (simulated, "simulated step, us", PALETTE[0]),
        (measured, "measured step, ms", PALETTE[3]),
    ):
        ordered = np.sort(values)
        chart = Chart(
            500,
            240,
            (float(max(ordered[0], 1e-6)) / 1.1, float(ordered[-1]) * 1.1),
            (0, 1),
            label,
            "share of steps",
            x_log=True,
        )
        chart.line(ordered.tolist(), (np.arange(1, len(ordered) + 1) / len(ordered)).tolist(), color)
        charts.append(chart.svg())
    fallback = int(trace.events["fallback_pairs"].sum())
    return (
        "<h2>The recorded run, on its two clocks</h2>"
        f"<p>{len(simulated)} steps; pairs computed here because the device did not answer: {fallback}.</p>"
        f'<div class="row">{"".join(charts)}</div>'
    )
