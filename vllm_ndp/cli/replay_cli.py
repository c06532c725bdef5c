"""The lab's commands: import or synthesise traces, replay them, compare systems, reproduce figures, analyse, report.

Mounted into `vllm-ndp` by main.py. Every command prints one JSON object as its last line. Knows options and tables.
Does not know how anything is computed, and needs no vLLM.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ndp_device.cache import default_cache_dir
from ndp_device.errors import ConfigError
from ndp_device.replicas.loss_table import load_loss_table
from ndp_device.widths import WIDTHS
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, read_prior
from vllm_ndp.replay.analysis import analyse, calibration_sensitivity
from vllm_ndp.replay.compare import ALL_POLICIES, CompareSettings, compare, popularity
from vllm_ndp.replay.exact.live import replay_live
from vllm_ndp.replay.report import write_report, write_timeline
from vllm_ndp.replay.reproduce import (
    Reproduction,
    reproduce_cxl_expert,
    reproduce_hobbit,
    reproduce_moepic,
    reproduce_paper,
)
from vllm_ndp.replay.systems import SYSTEMS, ReplayOptions
from vllm_ndp.traces.importers import IMPORTERS, ImportSettings, import_trace
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace
from vllm_ndp.traces.trace import Trace

SOURCES = ("paper", "cxl-expert", "hobbit", "moepic")

TraceOption = Annotated[Path, typer.Option("--trace", help="Trace directory.")]
ModelOption = Annotated[str, typer.Option(help="Public model shape, or a checkpoint directory.")]
HardwareOption = Annotated[str, typer.Option(help="Hardware preset.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Hardware override, e.g. array.pe_mode=fp16_dequant.")
]
HotOption = Annotated[int | None, typer.Option(help="Hot experts per layer; default half.")]
AvgBitsOption = Annotated[float, typer.Option(help="Average bits of cold experts.")]
PriorOption = Annotated[Path | None, typer.Option(help=".npy of popularity, layers x experts.")]
ReplicasOption = Annotated[Path | None, typer.Option(help="Replica directory whose loss table is used.")]


def lab_commands(app: typer.Typer) -> None:
    """Mount every command of this file."""
    app.command("trace-import")(trace_import)
    app.command("trace-synth")(trace_synth)
    app.command("replay")(replay_command)
    app.command("compare")(compare_command)
    app.command("reproduce")(reproduce_command)
    app.command("analyze")(analyze_command)
    app.command("report")(report_command)


def trace_import(
    source: Annotated[Path, typer.Argument(help="File or directory that somebody else recorded.")],
    out: Annotated[Path, typer.Option(help="Trace directory to write.")],
    kind: Annotated[str, typer.Option("--format", help=f"One of {', '.join(IMPORTERS)}.")],
    model: Annotated[str, typer.Option(help="Name of the model, for the provenance.")] = "unknown",
    num_experts: Annotated[int, typer.Option(help="Experts per layer; 0 = largest id seen plus one.")] = 0,
    sequence_len: Annotated[int, typer.Option(help="Tokens per sequence where the source has no requests.")] = 512,
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens of those sequences.")] = 256,
) -> None:
    """Read routing recorded by vLLM, SGLang, Megatron, FLAME-MoE or from .npz into a trace."""
    trace = import_trace(source, kind, ImportSettings(model, num_experts, sequence_len, prompt_len))
    trace.save(out)
    _finish(_describe(trace, out))


def trace_synth(
    out: Annotated[Path, typer.Option(help="Trace directory to write.")],
    model: Annotated[str, typer.Option(help="Public model shape.")] = "mixtral-8x7b",
    requests: Annotated[int, typer.Option(help="How many.")] = 32,
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens of each.")] = 256,
    decode_len: Annotated[int, typer.Option(help="Decode tokens of each.")] = 256,
    concentration: Annotated[float, typer.Option(help="Popularity: small is skewed, large is even.")] = 5.0,
    signal: Annotated[float, typer.Option(help="Request-level signal; 0 is the null.")] = 1.0,
    drift: Annotated[float, typer.Option(help="0..1, how far a request's taste turns by its end.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same trace.")] = 0,
) -> None:
    """Make a trace with known skew, request signal and drift."""
    settings = SyntheticSettings.of_shape(
        model,
        num_requests=requests,
        prompt_len=prompt_len,
        decode_len=decode_len,
        concentration=concentration,
        signal=signal,
        drift=drift,
        seed=seed,
    )
    trace = synthetic_trace(settings, model)
    trace.save(out)
    _finish(_describe(trace, out))


def replay_command(trace: TraceOption, replicas: ReplicasOption = None) -> None:
    """Replay a recorded run of the plugin under its own policy and check its simulated times to the picosecond."""
    recorded = Trace.load(trace)
    replayed = replay_live(recorded, _losses(recorded, replicas, nominal=_is_identity(recorded)))
    off = (replayed.step_ps != replayed.recorded_step_ps) | (replayed.start_ps != replayed.recorded_start_ps)
    _finish(
        {
            "steps": len(replayed.steps),
            "steps_identical": int((~off).sum()),
            "plan_mismatches": replayed.plan_mismatches,
            "fallback_steps": replayed.fallback_steps,
            "simulated_ps": int(replayed.start_ps[-1] + replayed.step_ps[-1]),
            "identical": replayed.identical,
        }
    )
    if not replayed.identical:
        raise typer.Exit(1)


def compare_command(
    trace: TraceOption,
    systems: Annotated[str, typer.Option(help="Names, comma-separated, or all.")] = "all",
    policies: Annotated[str, typer.Option(help="Names, comma-separated, or all.")] = "all",
    model: ModelOption = "mixtral-8x7b",
    hardware: HardwareOption = "h100-ndp512",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    hot: HotOption = None,
    avg_bits: AvgBitsOption = 2.0,
    bits: Annotated[str, typer.Option(help="How bits are chosen: importance, mse or uniform.")] = "importance",
    bits_for: Annotated[str, typer.Option(help="Bits of each request alone, or the same for its batch.")] = "request",
    batch_rule: Annotated[str, typer.Option(help="sum, max, tokens or fairness.")] = "sum",
    affinity: Annotated[bool, typer.Option(help="Batch requests whose prompts route alike.")] = False,
    migration: Annotated[str, typer.Option(help="free, once, difference, kept or budgeted.")] = "kept",
    moves: Annotated[
        int, typer.Option(help="budgeted: exchanges per layer and prefill.")
    ] = ReplayOptions.migration_budget,
    hysteresis: Annotated[
        float, typer.Option(help="budgeted, adaptive: how much more important a newcomer must be.")
    ] = ReplayOptions.hysteresis,
    prior: PriorOption = None,
    prior_tokens: Annotated[float, typer.Option(help="Tokens the prior is worth.")] = PolicySettings.prior_tokens,
    replicas: ReplicasOption = None,
    set_: SetOption = None,
    option: Annotated[list[str] | None, typer.Option(help="Of a system, e.g. spill_bits=2, frequency=lru.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the table here.")] = None,
) -> None:
    """Every system and policy on one trace and one modelled hardware. All times are simulated."""
    recorded = Trace.load(trace)
    settings = CompareSettings(
        model=model,
        hardware=hardware,
        overrides=_overrides(set_),
        options=_options(option),
        affinity=affinity,
        systems=_names(systems, tuple(SYSTEMS)),
        policies=_names(policies, ALL_POLICIES),
        batches=_integers(batch, "--batch"),
        num_hot=hot,
        avg_bits=avg_bits,
        bits=bits,
        batch_rule=batch_rule,
        bits_for=bits_for,
        prior_tokens=prior_tokens,
        migration=migration,
        migration_budget=moves,
        hysteresis=hysteresis,
    )
    started = time.perf_counter()
    loss = None if replicas is None else _losses(recorded, replicas)
    result = compare(recorded, settings, prior=None if prior is None else read_prior(prior), loss=loss)
    table = Table(
        title=f"{model} on {hardware} ({result.config_hash}), {result.num_requests} requests; simulated times"
    )
    for name in result.rows[0].cells():
        table.add_column(name, justify="left" if name in ("system", "policy") else "right")
    for row in result.rows:
        table.add_row(*row.cells().values())
    Console(width=200).print(table)
    for name in settings.systems:
        for assumption in SYSTEMS[name].assumptions:
            print(f"  {name}: {assumption}")
    for note in result.skipped:
        print(f"  skipped {note}")
    if csv_file is not None:
        with csv_file.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(result.rows[0].as_dict()))
            writer.writeheader()
            writer.writerows(row.as_dict() for row in result.rows)
    _finish(
        {
            "trace": str(trace),
            "model": model,
            "hardware": hardware,
            "config_hash": result.config_hash,
            "num_requests": result.num_requests,
            "rows": [row.as_dict() for row in result.rows],
            "skipped": result.skipped,
            "measured_decisions_per_s": [
                round(batches.num_decisions / seconds)
                for (_, batches), seconds in zip(result.outcomes, result.measured_seconds, strict=True)
            ],
            "measured_seconds": round(time.perf_counter() - started, 3),
        }
    )


def reproduce_command(
    source: Annotated[str, typer.Argument(help=f"One of {', '.join(SOURCES)}.")],
    physical: Annotated[bool, typer.Option(help="cxl-expert: real bytes instead of the stated ones.")] = False,
    trace: Annotated[Path | None, typer.Option(help="paper, hobbit: also trace-driven figures.")] = None,
) -> None:
    """Published figures, ours and the assumptions, row by row."""
    if physical and source != "cxl-expert":
        raise ConfigError(f"--physical belongs to cxl-expert, got it with {source!r}: leave it out")
    if trace is not None and source not in ("paper", "hobbit"):
        raise ConfigError(f"--trace belongs to paper and hobbit, got it with {source!r}: leave it out")
    recorded = None if trace is None else Trace.load(trace)
    if source == "paper":
        result = reproduce_paper(recorded)
    elif source == "cxl-expert":
        result = reproduce_cxl_expert(physical)
    elif source == "hobbit":
        result = reproduce_hobbit(recorded)
    elif source == "moepic":
        result = reproduce_moepic()
    else:
        raise ConfigError(f"reproduce knows {', '.join(SOURCES)}, got {source!r}")
    _print_reproduction(result)
    _finish({"source": result.source, "rows": [row.as_dict() for row in result.rows], "notes": list(result.notes)})


def analyze_command(
    trace: TraceOption,
    hot: HotOption = None,
    prior: PriorOption = None,
    prior_out: Annotated[Path | None, typer.Option(help="Write this trace's popularity here, for policies.")] = None,
    calibrations: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Two replica directories: how much do losses and bits agree?")
    ] = None,
    avg_bits: Annotated[float, typer.Option(help="Budget of the calibration comparison.")] = 2.0,
) -> None:
    """What a trace's prompts say about its decode: against a null, a prior and an oracle, with intervals."""
    recorded = Trace.load(trace)
    if prior_out is not None:
        np.save(prior_out, popularity(recorded).values)
    result = analyse(recorded, hot, prior=None if prior is None else read_prior(prior))
    table = Table(title=f"per layer, {result.num_requests} requests")
    for name in ("layer", "gini", "cosine prefill-decode", "null 95 %", "cosine to other requests"):
        table.add_column(name, justify="right")
    for layer, cosine in enumerate(result.cosine):
        band = f"{result.cosine_null_low[layer]:.3f}-{result.cosine_null_high[layer]:.3f}"
        table.add_row(
            str(layer), f"{result.gini[layer]:.3f}", f"{cosine:.3f}", band, f"{result.cosine_across[layer]:.3f}"
        )
    Console(width=140).print(table)
    coverage = Table(title=f"share of decode choices in {result.num_hot} hot experts, 95 % interval over requests")
    coverage.add_column("hot set from")
    for name in ("covered", "interval", "minus static", "interval "):
        coverage.add_column(name, justify="right")
    for name, value in result.coverage.items():
        over = result.over_static.get(name)
        paired = ("", "") if over is None else (f"{over.mean:+.4f}", f"{over.low:+.4f} {over.high:+.4f}")
        coverage.add_row(name, f"{value.mean:.4f}", f"{value.low:.4f} {value.high:.4f}", *paired)
    for title, curve in (
        ("first {} prompt tokens", result.first_tokens),
        ("first {} and prior", result.first_tokens_and_prior),
        ("last {} prompt tokens", result.last_tokens),
        ("refreshed every {} decode tokens", result.refresh),
        ("prior worth {} tokens", result.prior_tokens),
    ):
        for tokens, value in curve.items():
            coverage.add_row(title.format(tokens), f"{value.mean:.4f}", f"{value.low:.4f} {value.high:.4f}", "", "")
    Console(width=140).print(coverage)
    summary = {**dataclasses.asdict(result), "layers_outside_null": result.layers_outside_null}
    if calibrations is not None:
        first, second = (_losses(recorded, path) for path in calibrations)
        agreement = calibration_sensitivity(recorded, first, second, Budget(result.num_hot, avg_bits))
        summary["calibration"] = dataclasses.asdict(agreement)
        correlations = ", ".join(
            f"{value:.3f} at {width} bit" for width, value in zip(WIDTHS, agreement.rank_correlation, strict=True)
        )
        changed = f"{100 * agreement.bits_changed:.1f} % of cold experts get other bits"
        print(f"calibrations: rank correlation of losses {correlations}; {changed}")
    _finish({"trace": str(trace), **summary})


def report_command(
    trace: Annotated[Path, typer.Argument(help="Trace directory of a run.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    model: ModelOption = "mixtral-8x7b",
    hardware: HardwareOption = "h100-ndp512",
    hot: HotOption = None,
    avg_bits: AvgBitsOption = 2.0,
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated; figures show the first.")] = "1",
    replicas: ReplicasOption = None,
    set_: SetOption = None,
    perfetto: Annotated[Path | None, typer.Option(help="Also write the first steps for ui.perfetto.dev.")] = None,
    steps: Annotated[int, typer.Option(help="Steps in the Perfetto file.")] = 64,
) -> None:
    """One self-contained page of pictures about a trace, and a timeline if asked for."""
    if steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}")
    recorded = Trace.load(trace)
    settings = CompareSettings(
        model=model,
        hardware=hardware,
        overrides=_overrides(set_),
        batches=_integers(batch, "--batch"),
        num_hot=hot,
        avg_bits=avg_bits,
    )
    nominal = replicas is None and (recorded.provenance.live is None or _is_identity(recorded))
    loss = _losses(recorded, replicas, nominal=nominal)
    result = write_report(recorded, settings, out, loss)
    if perfetto is not None:
        result["perfetto"] = str(perfetto)
        result["steps"] = write_timeline(recorded, settings, perfetto, loss, steps)
    _finish(result)


def _print_reproduction(result: Reproduction) -> None:
    table = Table(title=result.source)
    for name in ("row", "quantity", "published", "ours", "unit", "off by", "assumptions"):
        table.add_column(name, justify="right" if name in ("published", "ours", "off by") else "left")
    for row in result.rows:
        off = "" if row.deviation is None else f"{100 * row.deviation:+.1f} %"
        published = "" if row.published is None else f"{row.published:g}"
        table.add_row(row.name, row.quantity, published, f"{row.ours:.4g}", row.unit, off, row.assumptions)
    Console(width=200).print(table)
    for note in result.notes:
        print(f"  note: {note}")


def _losses(trace: Trace, replicas: Path | None, *, nominal: bool = False) -> LossTable:
    """Of the given replicas, else of those the run used, else of the cache."""
    p = trace.provenance
    if replicas is None and not nominal:
        used = p.settings.get("replicas")
        replicas = Path(used) if used else default_cache_dir(p.model_digest)
    if nominal or replicas is None:
        return LossTable.nominal(p.num_layers, p.num_experts)
    loss = LossTable.from_measured(load_loss_table(replicas)[0])
    if loss.mse.shape[:2] != (p.num_layers, p.num_experts):
        raise ConfigError(
            f"the replicas in {replicas} have [layers, experts] {list(loss.mse.shape[:2])}, the trace "
            f"[{p.num_layers}, {p.num_experts}]: give the replicas of the trace's model"
        )
    return loss


def _is_identity(trace: Trace) -> bool:
    return trace.provenance.settings.get("cold_precision") == "full"


def _describe(trace: Trace, directory: Path) -> dict[str, Any]:
    p = trace.provenance
    return {
        "trace": str(directory),
        "model": p.model,
        "requests": len(trace.prompt_len),
        "rows": len(trace.step),
        "layers": p.num_layers,
        "experts": p.num_experts,
        "top_k": p.top_k,
        "weights": p.weights,
    }


def _overrides(pairs: list[str] | None) -> dict[str, str | int]:
    out: dict[str, str | int] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set must be name=value, got {pair!r}")
        out[name] = int(value) if value.lstrip("-").isdigit() else value
    return out


def _options(pairs: list[str] | None) -> dict[str, float | str]:
    out: dict[str, float | str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--option must be name=value, got {pair!r}")
        try:
            out[name] = float(value)
        except ValueError:
            out[name] = value
    return out


def _integers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} must be whole numbers separated by commas, got {text!r}") from None


def _names(text: str, every: tuple[str, ...]) -> tuple[str, ...]:
    return every if text == "all" else tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _finish(result: dict[str, Any]) -> None:
    print(json.dumps(result, allow_nan=False), flush=True)
