"""Commands on recorded routing: replay, compare, reproduce, analyze, arrivals. They need no vLLM."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ndp_device.common.command_line import command, print_json
from ndp_device.common.errors import ConfigError
from ndp_device.common.outputs import A_NEW_FILE
from ndp_device.common.widths import FULL_PRECISION_BITS
from vllm_ndp.cli.shared import TraceArgument, waiting
from vllm_ndp.lab.options import (
    BUNDLED,
    CompareSettings,
    GridOptions,
    HotOption,
    LoadSettings,
    PageOption,
    PriorOption,
    ReplicasOption,
    TableOption,
)

if TYPE_CHECKING:
    from vllm_ndp.lab.load.latency import Tokens
    from vllm_ndp.lab.load.run import ServedRequest
    from vllm_ndp.lab.reproduce import Reproduction
    from vllm_ndp.planning.bitwidths import LossTable
    from vllm_ndp.traces.trace import Trace

app = typer.Typer()
LATENCIES = ("TTFT", "TPOT")


def load(path: Path) -> Trace:
    """A trace from its directory. Says on stderr where its recording has not ended."""
    from vllm_ndp.traces.trace import Trace

    trace = Trace.load(path)
    if not trace.complete:
        found = f"{len(trace.prompt_len)} requests and {len(trace.step)} rows on disk are used"
        print(f"vllm-ndp: the recording {path} has no end, it runs or was cut off; its {found}", file=sys.stderr)
    return trace


@command(app, "replay", examples=("vllm-ndp replay recorded",))
def replay(trace: TraceArgument, replicas: ReplicasOption = None) -> None:
    """Replay a recorded run and check its simulated times.

    Under its own policy, to the picosecond. Exit code 1 if any step differs.
    """
    from vllm_ndp.lab.exact.live import replay_live

    recorded = load(trace)
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
    shows=True,
    examples=(
        f"vllm-ndp compare {BUNDLED} --systems context_aware,monde --batch 1,4",
        f"vllm-ndp compare {BUNDLED} --systems balanced --option spill_bits=2 --out rows.parquet",
        f"vllm-ndp compare {BUNDLED} --systems all --jobs all --html page.html",
        f"vllm-ndp compare {BUNDLED} --systems fiddler --prior models/tiny-mixtral/prior.npy --set dram.kind=ideal",
        f"vllm-ndp compare {BUNDLED} --model mixtral-8x7b,mixtral-8x22b --memory 24,80 --fit --systems fiddler,monde",
    ),
)
def compare(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Directories of traces, one per routing shape.")
    ],
    what: CompareSettings,
    over: GridOptions,
    prior: PriorOption = None,
    replicas: ReplicasOption = None,
    out: TableOption = None,
    html: PageOption = None,
    jobs: Annotated[str, typer.Option(help="Processes that share the work: a number, or all (one per core).")] = "1",
    notes: Annotated[bool, typer.Option("--notes", help="Also say what each system and time rests on.")] = False,
) -> None:
    """Run systems and policies on one trace and one hardware.

    All times are simulated. Several models, hardware, memory sizes or widths: every combination, and its fastest
    systems. docs/systems.md explains systems and policies.
    """
    from vllm_ndp.lab.cli.tables import print_comparison, print_winners, write_rows
    from vllm_ndp.lab.compare import beside_fastest, columns, compare_all, processes
    from vllm_ndp.planning.policies import read_prior

    if replicas is not None and len(traces) > 1:
        raise ConfigError(f"--replicas belong to one trace, {len(traces)} were given: compare them one by one")
    workers, started = processes(jobs), time.perf_counter()
    recorded = [load(path) for path in traces]
    kind = what.policy_options.get("losses")
    if replicas is None and kind is not None:
        raise ConfigError("--policy-option losses=... chooses among losses of replicas: give --replicas too")
    loss = None if replicas is None else losses(recorded[0], replicas, str(kind or "relative"))
    known = None if prior is None else read_prior(prior)
    points = over.points(what)
    with waiting(f"replaying {sum(len(one.prompt_len) for one in recorded)} requests"):
        found = compare_all(recorded, points, prior=known, loss=loss, jobs=workers)
    if len(points) == 1:
        print_comparison(found, recorded[0].provenance.model, notes=notes)
    else:
        print_winners(found)
    if out is not None:
        write_rows(found.rows(), out)
    if html is not None:
        from vllm_ndp.lab.page import write_comparison

        write_comparison(html, f"{', '.join(map(str, traces))} under any system", found)
    print_json(
        {
            "trace": ",".join(map(str, traces)),
            "model": ",".join(over.model),
            "hardware": ",".join(over.hardware),
            "config_hash": ",".join(dict.fromkeys(comparison.config_hash for _, comparison in found.points)),
            "num_requests": max(comparison.num_requests for _, comparison in found.points),
            "rows": found.rows(),
            "beside_fastest": [
                one and dataclasses.asdict(one)
                for _, comparison in found.points
                for one in beside_fastest(comparison.replayed)
            ],
            "skipped": found.skipped,
            "refused": [{**columns(at), "why": why} for at, why in found.refused],
            "measured_seconds": round(time.perf_counter() - started, 3),
        },
        shown=True,
    )


@command(
    app,
    "reproduce",
    shows=True,
    examples=(
        "vllm-ndp reproduce paper",
        f"vllm-ndp reproduce hobbit {BUNDLED}",
    ),
)
def reproduce(
    source: Annotated[
        Literal["paper", "cxl-expert", "hobbit", "freetoken", "locality", "silicon"],
        typer.Argument(metavar="SOURCE", help="Whose figures."),
    ],
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="TRACE", help="hobbit: directory of a trace, for its mix of precisions."),
    ] = None,
) -> None:
    """Print published figures beside ours, with assumptions."""
    from vllm_ndp.lab.cli.tables import print_reproduction
    from vllm_ndp.lab.reproduce import paper, rivals, silicon

    if trace is not None and source != "hobbit":
        raise ConfigError(f"a trace belongs to hobbit, got one with {source!r}: leave it out")
    recorded = None if trace is None else load(trace)
    made = {"paper": paper.reproduce, "locality": rivals.routing, "silicon": silicon.reproduce}
    made |= {"cxl-expert": rivals.cxl_expert, "freetoken": rivals.freetoken}
    with waiting(f"computing the figures of {source}"):
        result: Reproduction = rivals.hobbit(recorded) if source == "hobbit" else made[source]()
    print_reproduction(result)
    if result.summary:
        print(json.dumps(result.summary))
    rows = [row.as_dict() for row in result.rows]
    print_json({"source": result.source, **result.summary, "rows": rows, "notes": list(result.notes)}, shown=True)


@command(
    app,
    "analyze",
    shows=True,
    examples=(
        f"vllm-ndp analyze {BUNDLED}",
        f"vllm-ndp analyze {BUNDLED} --hot-experts 2 --prior-out prior.npy",
    ),
)
def analyze(
    trace: TraceArgument,
    hot_experts: HotOption = None,
    prior_out: Annotated[
        Path | None, A_NEW_FILE, typer.Option(help="Write the popularity of this trace's experts to this .npy file.")
    ] = None,
) -> None:
    """Say what prompts tell of decode, and what caches would hit.

    Beside popularity and an oracle, with intervals. Repeats stand beside the same tokens shuffled, and chance.
    No time is simulated.
    """
    import numpy as np

    from vllm_ndp.lab.cli.tables import print_locality
    from vllm_ndp.lab.compare import popularity
    from vllm_ndp.lab.locality import default_places, locality
    from vllm_ndp.lab.vectorised.cache import found_ahead

    recorded = load(trace)
    p = recorded.provenance
    sizes = default_places(p.num_experts)
    with waiting(f"analysing {len(recorded.prompt_len)} requests"):
        found = locality(recorded, hot_experts)
        summary = found.as_dict(sizes) | {"predicted": found_ahead(recorded)}
    print_locality(found, sizes)
    if prior_out is not None:
        np.save(prior_out, popularity(recorded).values)
    print_json({"trace": str(trace), "model": p.model, **summary}, shown=True)


@command(
    app,
    "arrivals",
    shows=True,
    examples=(
        f"vllm-ndp arrivals {BUNDLED} --rate 0.5 --requests 3",
        f"vllm-ndp arrivals {BUNDLED} --process bursty --rate 2 --requests 4 --max-num-seqs 2 --out tokens.csv",
        f"vllm-ndp arrivals {BUNDLED} {BUNDLED} --process together --requests 1 --execution paper --devices 2",
    ),
)
def arrivals(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Directories; a host for each.")],
    asked: LoadSettings,
    replicas: ReplicasOption = None,
    out: TableOption = None,
) -> None:
    """Serve requests as they arrive; tail latencies by cause.

    Hosts share the devices. All times are simulated. --out: every token with its causes.
    """
    from vllm_ndp.lab.cli.tables import print_latencies, write_rows
    from vllm_ndp.lab.load.latency import as_bench_serve, percentiles, tokens_of
    from vllm_ndp.lab.load.run import serve, serve_again

    if len(traces) > 1 and (asked.process == "steps" or replicas is not None):
        raise ConfigError(f"steps and --replicas belong to one trace, {len(traces)} were given")
    started = time.perf_counter()
    recorded = [load(path) for path in traces]
    identical = None
    if asked.process == "steps":
        served = [serve_again(recorded[0], losses_of_run(recorded[0], replicas))]
        times = [(step.run.time.start_ps, step.run.time.total_ps) for step in served[0].steps]
        identical = times == list(zip(*(of.tolist() for of in recorded[0].simulated_steps()), strict=True))
    else:
        loss = None if replicas is None else losses(recorded[0], replicas)
        with waiting(f"serving {asked.process} arrivals"):
            served = serve(recorded, asked, loss=loss)
    tokens = [tokens_of(one) for one in served]
    found = [
        {kind: list(percentiles(some)) for kind, some in zip(LATENCIES, (one.first(), one.later()), strict=True)}
        for one in tokens
    ]
    print_latencies(found, f"simulated latency, ms, and what it was spent on; {asked.process} arrivals")
    if out is not None:
        write_rows(_rows(tokens), out)
    last: dict[str, Any] = {
        "hosts": [
            _summary(one, some, kinds) | {"simulated_bench_serve": as_bench_serve(some, one, asked.goodput)}
            for one, some, kinds in zip(served, tokens, found, strict=True)
        ],
        "measured_seconds": round(time.perf_counter() - started, 3),
    }
    for number, one in enumerate(last["hosts"]):
        figures = {"steps": one["steps"]} | one["simulated_bench_serve"]
        print(f"host {number}, simulated: " + ", ".join(f"{name} {value:.6g}" for name, value in figures.items()))
    print_json(last if identical is None else last | {"identical": identical}, shown=True)
    if identical is False:
        raise typer.Exit(1)


def _summary(served: ServedRequest, tokens: Tokens, kinds: dict[str, list[Any]]) -> dict[str, Any]:
    span_ps = int(tokens.at_ps.max()) - int(served.arrivals_ps.min())
    return {
        "requests": len(served.arrivals_ps),
        "steps": len(served.steps),
        "tokens": len(tokens.at_ps),
        "preemptions": served.preemptions,
        "simulated_tokens_per_s": len(tokens.at_ps) / (span_ps / 1e12),
        **{
            f"{kind.lower()}_p{one.percent:g}": {"simulated_ps": one.latency_ps, "causes_ps": one.causes_ps}
            for kind, found in kinds.items()
            for one in found
        },
    }


def _rows(hosts: list[Tokens]) -> list[dict[str, Any]]:
    from vllm_ndp.lab.load.latency import CAUSES

    names = ["request", "token", "simulated_at_ps", *(f"{cause.replace(' ', '_')}_ps" for cause in CAUSES)]
    return [
        {"host": number, **dict(zip(names, values, strict=True))}
        for number, tokens in enumerate(hosts)
        for values in zip(
            *(column.tolist() for column in (tokens.request, tokens.index, tokens.at_ps, *tokens.causes_ps.T)),
            strict=True,
        )
    ]


def losses(trace: Trace, replicas: Path, kind: str = "relative") -> LossTable:
    """Load losses, relative or absolute, of the replicas of the trace's model."""
    from ndp_device.replicas.format import load_losses
    from vllm_ndp.planning.bitwidths import LossTable

    p = trace.provenance
    loss = LossTable.from_measured(*load_losses(replicas, kind))
    if (live := p.live) is not None and live.num_stages > 1 and len(loss.mse) > p.num_layers:
        loss = loss.of_layers(slice(live.first_layer, live.first_layer + p.num_layers))
    if loss.mse.shape[:2] != (p.num_layers, p.num_experts):
        raise ConfigError(
            f"the replicas in {replicas} have [layers, experts] {list(loss.mse.shape[:2])}, the trace "
            f"[{p.num_layers}, {p.num_experts}]: give the replicas of the trace's model"
        )
    return loss


def losses_of_run(trace: Trace, replicas: Path | None) -> LossTable:
    """Load the losses that a live run planned with, of the given replicas, else of those it used, else of the cache;
    nominal ones where it planned without, or was none."""
    from ndp_device.common.kept import default_cache_dir
    from vllm_ndp.planning.bitwidths import LossTable

    p, live, settings = trace.provenance, trace.provenance.live, trace.provenance.settings
    is_identity = settings.get("cold_precision") == "full"
    if live is None or is_identity or not set(live.expert_bytes) - {FULL_PRECISION_BITS}:
        return LossTable.nominal(p.num_layers, p.num_experts)
    if live.stored_bits and replicas is None:
        return LossTable.of_codes(p.num_layers, p.num_experts, live.stored_bits)
    if replicas is None:
        used, all_widths = settings.get("replicas"), default_cache_dir(p.model_digest)
        only = default_cache_dir(f"{p.model_digest}-{settings.get('slot_bits')}")  # of a server with one width alone
        replicas = Path(used) if used else only if only.exists() and not all_widths.exists() else all_widths
    return losses(trace, replicas, settings["policy_options"]["losses"])
