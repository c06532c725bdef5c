"""`vllm-ndp arrivals`: requests that arrive, wait and join a running batch, on devices that all hosts share.

Knows options and the last line. lab/load/ computes, tables.py prints.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ndp_device.common.command_line import command, print_json
from ndp_device.common.errors import ConfigError
from vllm_ndp.cli.shared import waiting
from vllm_ndp.lab.cli.recorded import PerfettoOption, StepsOption, losses, losses_of_run, write_timeline
from vllm_ndp.lab.options import BUNDLED, LoadSettings, PriorOption, ReplicasOption, TableOption

if TYPE_CHECKING:
    from vllm_ndp.lab.load.host import ServedRequest
    from vllm_ndp.lab.load.latency import Tokens

app = typer.Typer()
LATENCIES = ("TTFT", "TPOT")


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
    prior: PriorOption = None,
    replicas: ReplicasOption = None,
    out: TableOption = None,
    perfetto: PerfettoOption = None,
    steps: StepsOption = 64,
) -> None:
    """Serve requests as they arrive; tail latencies by cause.

    Hosts share the devices. All times are simulated. --out: every token with its causes.
    """
    from vllm_ndp.lab.cli.tables import print_latencies, write_rows
    from vllm_ndp.lab.load.latency import as_bench_serve, percentiles, tokens_of
    from vllm_ndp.lab.load.run import serve, serve_again
    from vllm_ndp.planning.policies import read_prior
    from vllm_ndp.traces.trace import Trace

    if len(traces) > 1 and (asked.process == "steps" or replicas is not None):
        raise ConfigError(f"steps and --replicas belong to one trace, {len(traces)} were given")
    if asked.alike is not None and perfetto is not None:
        raise ConfigError("--perfetto draws steps that --alike leaves out: leave one of them out")
    started = time.perf_counter()
    recorded = [Trace.load(path) for path in traces]
    identical = None
    if asked.process == "steps":
        served = [serve_again(recorded[0], losses_of_run(recorded[0], replicas))]
        identical = _as_recorded(served[0], recorded[0])
    else:
        loss = None if replicas is None else losses(recorded[0], replicas)
        known = None if prior is None else read_prior(prior)
        with waiting(f"serving {asked.process} arrivals"):
            served = serve(recorded, asked, prior=known, loss=loss)
    tokens = [tokens_of(one) for one in served]
    found = [
        {kind: list(percentiles(some)) for kind, some in zip(LATENCIES, (one.first(), one.later()), strict=True)}
        for one in tokens
    ]
    print_latencies(found, f"simulated latency, ms, and what it was spent on; {asked.process} arrivals")
    if out is not None:
        write_rows(_rows(tokens), out)
    if perfetto is not None:
        write_timeline(perfetto, [step.run for step in served[0].steps[:steps]])
    last: dict[str, Any] = {
        "hosts": [
            _summary(one, some, kinds) | {"simulated_bench_serve": as_bench_serve(some, one, asked.goodput)}
            for one, some, kinds in zip(served, tokens, found, strict=True)
        ],
        "measured_seconds": round(time.perf_counter() - started, 3),
    }
    for number, one in enumerate(last["hosts"]):
        figures = {name: one[name] for name in ("steps", "simulated_steps")} | one["simulated_bench_serve"]
        print(f"host {number}, simulated: " + ", ".join(f"{name} {value:.6g}" for name, value in figures.items()))
    print_json(last if identical is None else last | {"identical": identical}, shown=True)
    if identical is False:
        raise typer.Exit(1)


def _summary(served: ServedRequest, tokens: Tokens, kinds: dict[str, list[Any]]) -> dict[str, Any]:
    span_ps = int(tokens.at_ps.max()) - int(served.arrivals_ps.min())
    return {
        "requests": len(served.arrivals_ps),
        "steps": len(served.steps),
        "simulated_steps": len({id(step.run.time) for step in served.steps}),
        "tokens": len(tokens.at_ps),
        "preemptions": served.preemptions,
        "simulated_tokens_per_s": len(tokens.at_ps) / (span_ps / 1e12),
        **{
            f"{kind.lower()}_p{one.percent:g}": {"simulated_ps": one.latency_ps, "causes_ps": one.causes_ps}
            for kind, found in kinds.items()
            for one in found
        },
    }


def _as_recorded(served: ServedRequest, trace: Any) -> bool:
    times = [(step.run.time.start_ps, step.run.time.total_ps) for step in served.steps]
    return times == list(zip(*(column.tolist() for column in trace.simulated_steps()), strict=True))


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
