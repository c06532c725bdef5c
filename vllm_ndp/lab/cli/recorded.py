"""Commands on recorded routing: replay, compare, sweep, reproduce, analyze, report. They need no vLLM.

Knows options and what each command puts into its last line. lab/ computes, tables.py prints.
"""

from __future__ import annotations

import csv
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ndp_device.common.command_line import command, print_json
from ndp_device.common.errors import ConfigError
from ndp_device.common.outputs import A_NEW_FILE, Output
from ndp_device.common.widths import DEFAULT_AVG_BITS
from vllm_ndp.cli.options import (
    AvgBitsOption,
    BatchOption,
    GridOptions,
    HardwareOptions,
    HotOption,
    JobsOption,
    PlanOptions,
    PriorOption,
    ReplicasOption,
    SystemOptions,
    TraceArgument,
    integers,
    names,
    policy_options,
)

if TYPE_CHECKING:
    from vllm_ndp.lab.compare import CompareSettings
    from vllm_ndp.planning.bitwidths import LossTable
    from vllm_ndp.traces.trace import Trace

app = typer.Typer()
BUNDLED = "tests/data/tiny-mixtral-trace"


@command(app, "replay", examples=("vllm-ndp replay recorded",))
def replay(trace: TraceArgument, replicas: ReplicasOption = None) -> None:
    """Replay a recorded run and check its simulated times.

    Under its own policy, to the picosecond. Exit code 1 if any step differs.
    """
    from vllm_ndp.cli.terminal import waiting
    from vllm_ndp.lab.exact.live import replay_live
    from vllm_ndp.traces.trace import Trace

    recorded = Trace.load(trace)
    with waiting("replaying the recorded steps"):
        replayed = replay_live(recorded, losses_of_run(recorded, replicas))
    print_json(
        {
            "steps": len(replayed.steps),
            "steps_identical": replayed.steps_identical,
            "plan_mismatches": replayed.plan_mismatches,
            "fallback_steps": replayed.fallback_steps,
            "changed_steps": replayed.changed_steps,
            "simulated_ps": int(replayed.start_ps[-1] + replayed.step_ps[-1]),
            "identical": replayed.identical,
            "lacks": replayed.lacks,
        }
    )
    if not replayed.identical:
        raise typer.Exit(1)


@command(
    app,
    "compare",
    examples=(
        f"vllm-ndp compare {BUNDLED} --systems context_aware,monde --batch 1,4",
        f"vllm-ndp compare {BUNDLED} --systems balanced --option spill_bits=2 --csv table.csv",
        f"vllm-ndp compare {BUNDLED} --systems all --jobs all",
        f"vllm-ndp compare {BUNDLED} --systems fiddler --prior models/tiny-mixtral/prior.npy --set dram.kind=ideal",
    ),
)
def compare(
    trace: TraceArgument,
    what: SystemOptions,
    where: HardwareOptions,
    plans: PlanOptions,
    csv_file: Annotated[
        Path | None, A_NEW_FILE, typer.Option("--csv", help="Write the table to this file too.")
    ] = None,
    jobs: JobsOption = "1",
) -> None:
    """Run systems and policies on one trace and one hardware.

    All times are simulated. docs/systems.md explains each column.
    """
    from vllm_ndp.cli.terminal import waiting
    from vllm_ndp.lab.cli.tables import print_comparison
    from vllm_ndp.lab.compare import beside_fastest
    from vllm_ndp.lab.sweep.jobs import parse_jobs
    from vllm_ndp.lab.sweep.run import compare_by
    from vllm_ndp.planning.policies import read_prior
    from vllm_ndp.traces.trace import Trace

    workers = parse_jobs(jobs)
    started = time.perf_counter()
    recorded = Trace.load(trace)
    settings = _settings(what, where, plans)
    loss = losses_chosen(recorded, plans.replicas, plans.policy_option)
    prior = None if plans.prior is None else read_prior(plans.prior)
    with waiting(f"replaying {len(recorded.prompt_len)} requests"):
        result = compare_by(workers, recorded, settings, prior=prior, loss=loss)
    print_comparison(result, settings)
    if csv_file is not None:
        _write_csv([row.as_dict() for row in result.rows], csv_file)
    print_json(
        {
            "trace": str(trace),
            "model": settings.model,
            "hardware": settings.hardware,
            "config_hash": result.config_hash,
            "num_requests": result.num_requests,
            "rows": [row.as_dict() for row in result.rows],
            "beside_fastest": [one and dataclasses.asdict(one) for one in beside_fastest(result.replayed)],
            "skipped": result.skipped,
            "measured_decisions_per_s": [round(done.num_decisions / done.measured_seconds) for done in result.replayed],
            "measured_seconds": round(time.perf_counter() - started, 3),
        },
        shown=True,
    )


@command(
    app,
    "sweep",
    examples=(
        f"vllm-ndp sweep {BUNDLED} --systems monde,balanced --policies prefill --memory 24,80 --out sweep",
        f"vllm-ndp sweep {BUNDLED} --model mixtral-8x7b,mixtral-8x22b --systems fiddler --jobs all --out sizes",
    ),
)
def sweep(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Directories, one per routing shape.")],
    grid: GridOptions,
    what: SystemOptions,
    plans: PlanOptions,
    out: Annotated[
        Path,
        Output(("sweep.jsonl", "sweep.csv")),
        typer.Option(help="Directory of the results; one of the same sweep is gone on with."),
    ],
    jobs: JobsOption = "all",
) -> None:
    """Run compare for every model, hardware and memory size.

    May be stopped and started again. All times are simulated.
    """
    from vllm_ndp.cli.terminal import progress
    from vllm_ndp.lab.cli.tables import print_sweep
    from vllm_ndp.lab.sweep.grid import Axes, Grid
    from vllm_ndp.lab.sweep.jobs import parse_jobs
    from vllm_ndp.lab.sweep.run import run_sweep
    from vllm_ndp.planning.policies import read_prior
    from vllm_ndp.traces.trace import Trace

    if plans.replicas is not None and len(traces) > 1:
        raise ConfigError(f"--replicas belong to one trace, {len(traces)} were given: sweep them one by one")
    workers = parse_jobs(jobs)
    started = time.perf_counter()
    memory = integers(grid.memory, "--memory") if grid.memory else ()
    axes = Axes(_listed(grid.model), _listed(grid.hardware), memory)
    first = HardwareOptions(axes.models[0], axes.hardware[0], grid.set_)
    recorded = [Trace.load(path) for path in traces]
    loss = losses_chosen(recorded[0], plans.replicas, plans.policy_option)
    prior = None if plans.prior is None else read_prior(plans.prior)
    tasks = Grid(recorded, axes, _settings(what, first, plans), prior=prior, loss=loss)
    with progress("rows") as advance:
        result = run_sweep(tasks, out, workers, advance)
    print_sweep(result)
    columns = [point.columns() | row.as_dict() for point, row in result.rows]
    _write_csv(columns, out / "sweep.csv")
    print_json(
        {
            "out": str(out),
            "rows": len(result.rows),
            "rows_found_before": result.found_before,
            "refused": [{**point.columns(), "why": why} for point, why in result.refused],
            "skipped": result.skipped,
            "measured_seconds": round(time.perf_counter() - started, 3),
        },
        shown=True,
    )


@command(
    app,
    "reproduce",
    examples=(
        "vllm-ndp reproduce paper",
        "vllm-ndp reproduce cxl-expert --physical",
        f"vllm-ndp reproduce hobbit {BUNDLED}",
    ),
)
def reproduce(
    source: Annotated[
        Literal["paper", "monde", "cxl-expert", "hobbit", "moepic", "locality"],
        typer.Argument(metavar="SOURCE", help="Whose figures."),
    ],
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="TRACE", help="paper, hobbit: directory of a trace, for figures that depend on one."),
    ] = None,
    physical: Annotated[bool, typer.Option(help="cxl-expert: real bytes instead of the stated ones.")] = False,
) -> None:
    """Print published figures beside ours, with assumptions."""
    from vllm_ndp.cli.terminal import waiting
    from vllm_ndp.lab import reproduce as figures
    from vllm_ndp.lab.cli.tables import print_reproduction
    from vllm_ndp.traces.trace import Trace

    if physical and source != "cxl-expert":
        raise ConfigError(f"--physical belongs to cxl-expert, got it with {source!r}: leave it out")
    if trace is not None and source not in ("paper", "hobbit"):
        raise ConfigError(f"a trace belongs to paper and hobbit, got one with {source!r}: leave it out")
    recorded = None if trace is None else Trace.load(trace)
    with waiting(f"computing the figures of {source}"):
        result = {
            "paper": lambda: figures.reproduce_paper(recorded),
            "cxl-expert": lambda: figures.reproduce_cxl_expert(physical),
            "hobbit": lambda: figures.reproduce_hobbit(recorded),
            "monde": figures.reproduce_monde,
            "moepic": figures.reproduce_moepic,
            "locality": figures.reproduce_locality,
        }[source]()
    print_reproduction(result)
    rows = [row.as_dict() for row in result.rows]
    print_json({"source": result.source, "rows": rows, "notes": list(result.notes)}, shown=True)


@command(
    app,
    "analyze",
    examples=(f"vllm-ndp analyze {BUNDLED}", f"vllm-ndp analyze {BUNDLED} --hot-experts 2 --prior-out prior.npy"),
)
def analyze(
    trace: TraceArgument,
    hot_experts: HotOption = None,
    prior: PriorOption = None,
    prior_out: Annotated[
        Path | None, A_NEW_FILE, typer.Option(help="Write the popularity of this trace's experts to this .npy file.")
    ] = None,
    calibrations: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Two replica directories: how much do their losses and bits agree?")
    ] = None,
    avg_bits: Annotated[float, typer.Option(help="calibrations: average bits of cold experts.")] = DEFAULT_AVG_BITS,
) -> None:
    """Say what prompts tell about their decode.

    Against a null, a prior and an oracle, with intervals.
    """
    import numpy as np

    from vllm_ndp.cli.terminal import waiting
    from vllm_ndp.lab.analysis import analyse, calibration_sensitivity
    from vllm_ndp.lab.cli.tables import print_agreement, print_analysis
    from vllm_ndp.lab.compare import popularity
    from vllm_ndp.planning.plan import Budget
    from vllm_ndp.planning.policies import read_prior
    from vllm_ndp.traces.trace import Trace

    recorded = Trace.load(trace)
    with waiting(f"analysing {len(recorded.prompt_len)} requests"):
        result = analyse(recorded, hot_experts, prior=None if prior is None else read_prior(prior))
    summary = {**dataclasses.asdict(result), "layers_outside_null": result.layers_outside_null}
    agreement = None
    if calibrations is not None:
        first, second = (losses(recorded, path) for path in calibrations)
        agreement = calibration_sensitivity(recorded, first, second, Budget(result.num_hot, avg_bits))
        summary["calibration"] = dataclasses.asdict(agreement)
    if prior_out is not None:
        np.save(prior_out, popularity(recorded).values)
    print_analysis(result)
    if agreement is not None:
        print_agreement(agreement)
    print_json({"trace": str(trace), **summary}, shown=True)


@dataclasses.dataclass(frozen=True)
class PageOptions:
    """Files that the command writes."""

    out: Annotated[Path, A_NEW_FILE, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html")
    shapes: Annotated[
        str | None,
        typer.Option(help="Also map these public models, or 'published' = five, on GPUs of 8 to 160 GB."),
    ] = None
    perfetto: Annotated[
        Path | None, A_NEW_FILE, typer.Option(help="Also write the first steps to this file, for ui.perfetto.dev.")
    ] = None
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps in that file.")] = 64


@command(
    app,
    "report",
    examples=(
        f"vllm-ndp report {BUNDLED}",
        f"vllm-ndp report {BUNDLED} --out page.html --shapes mixtral-8x7b --perfetto steps.json",
    ),
)
def report(
    trace: TraceArgument,
    where: HardwareOptions,
    page: PageOptions,
    hot_experts: HotOption = None,
    avg_bits: AvgBitsOption = DEFAULT_AVG_BITS,
    batch: BatchOption = "1",
    replicas: ReplicasOption = None,
) -> None:
    """Draw one self-contained page of plots about a trace.

    The plots show the first batch size.
    """
    from vllm_ndp.cli.terminal import waiting
    from vllm_ndp.lab.compare import CompareSettings
    from vllm_ndp.lab.frontier import SHAPES
    from vllm_ndp.lab.report import write_report, write_timeline
    from vllm_ndp.traces.trace import Trace

    recorded = Trace.load(trace)
    settings = CompareSettings(
        model=where.model,
        hardware=where.hardware,
        overrides=where.overrides(),
        batches=integers(batch, "--batch"),
        num_hot=hot_experts,
        avg_bits=avg_bits,
    )
    nominal = replicas is None and (recorded.provenance.live is None or _is_identity(recorded))
    loss = losses(recorded, replicas, nominal=nominal)
    every = page.shapes == "published"
    models = () if page.shapes is None else SHAPES if every else names(page.shapes, SHAPES)
    with waiting(f"replaying {len(recorded.prompt_len)} requests on every system"):
        result: dict[str, Any] = write_report(recorded, settings, page.out, loss, models)
        if page.perfetto is not None:
            result["perfetto"] = str(page.perfetto)
            result["steps"] = write_timeline(recorded, settings, page.perfetto, loss, page.steps)
    print_json(result)


def _settings(what: SystemOptions, where: HardwareOptions, plans: PlanOptions) -> CompareSettings:
    from vllm_ndp.lab.compare import ALL_POLICIES, CompareSettings
    from vllm_ndp.lab.systems import SYSTEMS

    return CompareSettings(
        model=where.model,
        hardware=where.hardware,
        overrides=where.overrides(),
        systems=names(what.systems, tuple(SYSTEMS)),
        policies=names(what.policies, ALL_POLICIES),
        batches=integers(what.batch, "--batch"),
        prefetch=what.prefetch,
        regret=what.regret,
        affinity=what.affinity,
        options=what.of_systems(),
        num_hot=plans.hot_experts,
        fit=plans.fit,
        avg_bits=plans.avg_bits,
        bits=plans.bit_rule,
        batch_rule=plans.batch_rule,
        bits_for=plans.bits_for,
        prior_tokens=plans.prior_tokens,
        policy_options=policy_options(plans.policy_option),
        migration=plans.migration,
        migration_budget=plans.moves,
        hysteresis=plans.hysteresis,
    )


def _listed(text: str) -> tuple[str, ...]:
    return names(text, ())


def _write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def losses_chosen(trace: Trace, replicas: Path | None, options: list[str] | None) -> LossTable | None:
    """Load the losses that the options name, of the given replicas; without any, None: nominal ones."""
    kind = policy_options(options).get("losses")
    if replicas is not None:
        return losses(trace, replicas, kind=str(kind or "relative"))
    if kind is not None:
        raise ConfigError("--policy-option losses=... chooses among losses of replicas: give --replicas too")
    return None


def losses(trace: Trace, replicas: Path | None, *, nominal: bool = False, kind: str = "relative") -> LossTable:
    """Load losses, relative or absolute: of the given replicas, else of those the run used, else of the cache."""
    from ndp_device.common.cache import default_cache_dir
    from ndp_device.replicas.loss_table import load_losses
    from vllm_ndp.planning.bitwidths import LossTable

    p = trace.provenance
    if replicas is None and not nominal:
        used = p.settings.get("replicas")
        replicas = Path(used) if used else default_cache_dir(p.model_digest)
    if nominal or replicas is None:
        return LossTable.nominal(p.num_layers, p.num_experts)
    loss = LossTable.from_measured(*load_losses(replicas, kind))
    if loss.mse.shape[:2] != (p.num_layers, p.num_experts):
        raise ConfigError(
            f"the replicas in {replicas} have [layers, experts] {list(loss.mse.shape[:2])}, the trace "
            f"[{p.num_layers}, {p.num_experts}]: give the replicas of the trace's model"
        )
    return loss


def losses_of_run(trace: Trace, replicas: Path | None) -> LossTable:
    """Load the losses that a live run planned with; nominal ones where it planned without, or was none."""
    is_nominal = trace.provenance.live is None or _is_identity(trace)
    kind = trace.provenance.settings["policy_options"]["losses"] if trace.provenance.live else "absolute"
    return losses(trace, replicas, nominal=is_nominal, kind=kind)


def _is_identity(trace: Trace) -> bool:
    return trace.provenance.settings.get("cold_precision") == "full"
