"""One self-contained HTML page about a trace: what it routes, what can be predicted, what systems make of it.

Plots (figures.py), tables and the sentences between them; Bokeh's script lies in the page, so it needs no network and
no file beside it. Does not know how anything was computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources

from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.lab.analysis import Analysis
from vllm_ndp.lab.compare import CompareSettings, Comparison
from vllm_ndp.lab.frontier import DEVICE, Cell
from vllm_ndp.lab.report import figures
from vllm_ndp.lab.systems import SYSTEMS
from vllm_ndp.lab.vectorised.outcome import Summary
from vllm_ndp.planning.plan import Budget
from vllm_ndp.traces.trace import Trace

_STYLE = """
body{font:14px/1.5 system-ui,"DejaVu Sans",sans-serif;color:#222;margin:0;background:#f6f6f4}
main{max-width:1060px;margin:0 auto;padding:28px 24px 60px;background:#fff}
h1{font-size:25px;margin:0 0 2px}h2{font-size:17px;margin:34px 0 4px;border-top:1px solid #ddd;padding-top:20px}
p{margin:4px 0 10px;max-width:78ch}.faint{color:#666}
.tiles{display:flex;gap:12px;flex-wrap:wrap;margin:18px 0}.tile{background:#f2f5f8;padding:10px 14px;min-width:128px}
.tile b{display:block;font-size:21px}
.row{display:flex;gap:14px;flex-wrap:wrap}.row>div{flex:1 1 460px;min-width:0}.third>div{flex:1 1 300px;max-width:346px}
table{border-collapse:collapse;font-size:12px;width:100%}
td,th{padding:3px 7px;text-align:right;border-bottom:1px solid #eee}
td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}tr:hover{background:#f6f9fc}th{font-weight:600;color:#444}
ul{font-size:12px;color:#555;columns:2;padding-left:18px}
"""
_ELSEWHERE = (
    "<p>Other models, with synthetic routing of their shapes, one request at a time: tokens/s of the fastest system "
    "that loses no more than 3 bits everywhere, on the card that has so much memory, and below it the device's where "
    "another one is faster. All of the GPU's memory is used; the memories of device and host hold every model.</p>"
)
_HEATMAPS = ("prompts", "decode", "difference", "kept_hot", "bits")


@dataclass(frozen=True)
class Findings:
    """Results computed from one trace, for the page."""

    analysis: Analysis
    comparison: Comparison
    sweep: list[Summary]
    """Rows of other average widths, for speed against precision."""
    cells: list[Cell]
    """GPUs of other sizes."""
    shapes: list[Cell]
    """The same for public models."""


def render(trace: Trace, found: Findings, settings: CompareSettings, costs: Costs) -> str:
    p, analysis, comparison, cells = trace.provenance, found.analysis, found.comparison, found.cells
    plots: dict[str, Any] = {
        **figures.routing_heatmaps(trace, Budget(analysis.num_hot, settings.avg_bits)),
        "cosine": figures.cosine(analysis),
        "coverage": figures.coverage(analysis),
        "prompt_tokens": figures.prompt_tokens(analysis),
        "domains": figures.domains(analysis),
        **figures.layer_bars(comparison, costs),
        "speed_and_loss": figures.speed_and_loss(found.sweep),
        "latencies": figures.latencies(comparison, costs),
        "where_it_pays": figures.where_it_pays(cells),
        "winners": figures.winners(found.shapes),
        **figures.clocks(trace),
    }
    script, divs = components({name: plot for name, plot in plots.items() if plot is not None})

    def row(*names: str, kind: str = "row") -> str:
        return f'<div class="{kind}">{"".join(f"<div>{divs[name]}</div>" for name in names if name in divs)}</div>'

    but = " but the last figure" if "measured" in plots else ""
    far = "<p>The rest, to a scale of their own:</p>" + row("long_layer_bars") if "long_layer_bars" in divs else ""
    elsewhere = _ELSEWHERE + row("winners") if "winners" in divs else ""
    body = [
        f"<h1>Routing of {escape(p.model)}</h1>",
        f'<p class="faint">{len(trace.prompt_len)} requests, {len(trace.step):,} tokens, {p.num_layers} layers of '
        f"{p.num_experts} experts, top-{p.top_k}; {escape(p.source)}. Replayed as {escape(settings.model)} on "
        f"{escape(settings.hardware)} ({comparison.config_hash}): every time on this page{but} is "
        "<b>simulated</b>. Plots show values under the mouse; a click in a legend hides a series.</p>",
        _tiles(analysis, comparison.rows),
        "<h2>Which experts, when</h2>",
        "<p>Share of a layer's choices that went to each expert, in prompts and in decode; what decode prefers (blue) "
        "or avoids (orange) compared with the prompts; and where the paper's policy would keep each expert.</p>",
        row(*_HEATMAPS, kind="row third"),
        "<h2>Can the prompt predict the decode?</h2>",
        "<p>Similarity of a prompt's and its decode's counts proves little: the band is what tokens without any "
        "request-level signal give. What counts is the share of decode choices that a hot set covers.</p>",
        row("cosine", "coverage"),
        row("prompt_tokens", "domains"),
        "<h2>Where a layer's time goes</h2>",
        f"<p>Milliseconds per layer and decode step at batch {comparison.rows[0].batch}, attention and experts.</p>",
        row("layer_bars"),
        far,
        "<h2>Speed against precision</h2>",
        "<p>Up and to the left is better. Loss is router weight times the relative error of the width each choice ran "
        "at. Shapes are average widths of cold experts.</p>",
        row("speed_and_loss", "latencies"),
        "<h2>Where near-data computing pays, and where it does not</h2>",
        "<p>What attention and KV cache leave of each GPU holds experts. Quantizing all of them and serving with stock "
        "vLLM needs no device; an expert cache beside a host that computes needs none either. "
        f"{escape(_verdict(cells))}</p>",
        row("where_it_pays"),
        elsewhere,
        "<h2>All systems on this trace</h2>",
        _table(comparison.rows),
        f"<p>Assumptions</p><ul>{_assumptions(settings)}</ul>",
    ]
    if "measured" in plots:
        fallback = int(trace.events["fallback_pairs"].sum())
        body += [
            "<h2>The recorded run, on its two clocks</h2>",
            f"<p>{len(trace.events['step'])} steps; pairs computed here because the device did not answer: "
            f"{fallback}.</p>",
            f"<p>{escape(trace.lacks)}</p>" if trace.lacks else "",
            row(*(clock for clock in ("simulated", "measured") if clock in plots)),
        ]
    library = Resources(mode="inline", components=["bokeh"]).render()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Routing of {escape(p.model)}</title>'
        f"<style>{_STYLE}</style>{library}</head><body><main>{''.join(body)}</main>{script}</body></html>\n"
    )


def _verdict(cells: list[Cell]) -> str:
    """Say at which sizes the device is the fastest of what loses no more than it."""
    wins = [cell.memory_gb for cell in cells if (best := cell.fastest_alike) is not None and best.system in DEVICE]
    others = {
        cell.memory_gb: best for cell in cells if (best := cell.fastest_alike) is not None and best.system not in DEVICE
    }
    listed = (
        f"The device is the fastest at the loss of 3 bits with {', '.join(map(str, wins))} GB."
        if wins
        else "The device is nowhere the fastest at the loss of 3 bits."
    )
    if not others:
        return listed
    first, best = next(iter(others.items()))
    where = "Elsewhere" if wins else f"From {first} GB on"
    return f"{listed} {where} it is {best.system} ({best.policy})."


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
            tiles.append((figures.number(row.decode_tokens_per_s), f"tokens/s, {text}"))
    return (
        '<div class="tiles">' + "".join(f'<div class="tile"><b>{v}</b>{escape(t)}</div>' for v, t in tiles) + "</div>"
    )


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
