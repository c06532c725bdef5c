"""`vllm-ndp arrivals`: requests that arrive, wait and join a running batch, on one device for all hosts.

Knows options and the last line. lab/serving/ computes, tables.py prints.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ndp_device.common.command_line import command, print_json
from ndp_device.common.errors import ConfigError
from ndp_device.common.outputs import A_NEW_FILE
from vllm_ndp.cli.options import ArrivalOptions, HardwareOptions, ServerOptions, policy_options
from vllm_ndp.lab.cli.recorded import BUNDLED, losses_chosen, losses_of_run

if TYPE_CHECKING:
    from vllm_ndp.lab.serving.host import ServedRequest
    from vllm_ndp.lab.serving.latency import Tokens
    from vllm_ndp.lab.serving.run import ServingSettings

app = typer.Typer()
LATENCIES = ("TTFT", "TPOT")


@command(
    app,
    "arrivals",
    examples=(
        f"vllm-ndp arrivals {BUNDLED} --rate 0.5 --requests 3",
        f"vllm-ndp arrivals {BUNDLED} --process bursty --rate 2 --requests 4 --max-num-seqs 2 --csv tokens.csv",
        f"vllm-ndp arrivals {BUNDLED} {BUNDLED} --process together --requests 1 --execution paper",
    ),
)
def arrivals(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Directories; a host for each.")],
    when: ArrivalOptions,
    where: HardwareOptions,
    server: ServerOptions,
    csv_file: Annotated[
        Path | None, A_NEW_FILE, typer.Option("--csv", help="Write every token with its causes here.")
    ] = None,
) -> None:
    """Serve requests as they arrive; tail latencies by cause.

    Hosts share one device. All times are simulated.
    """
    from vllm_ndp.cli.terminal import waiting
    from vllm_ndp.lab.cli.tables import print_latencies
    from vllm_ndp.lab.serving.latency import percentiles, tokens_of
    from vllm_ndp.lab.serving.run import serve, serve_again
    from vllm_ndp.planning.policies import read_prior
    from vllm_ndp.traces.trace import Trace

    if len(traces) > 1 and (when.process == "steps" or server.replicas is not None):
        raise ConfigError(f"steps and --replicas belong to one trace, {len(traces)} were given")
    started = time.perf_counter()
    settings = _settings(when, where, server)
    recorded = [Trace.load(path) for path in traces]
    identical = None
    if when.process == "steps":
        served = [serve_again(recorded[0], losses_of_run(recorded[0], server.replicas))]
        identical = _as_recorded(served[0], recorded[0])
    else:
        loss = losses_chosen(recorded[0], server.replicas, server.policy_option)
        prior = None if server.prior is None else read_prior(server.prior)
        with waiting(f"serving {when.process} arrivals"):
            served = serve(recorded, settings, prior=prior, loss=loss)
    tokens = [tokens_of(one) for one in served]
    found = [
        {kind: list(percentiles(some)) for kind, some in zip(LATENCIES, (one.first(), one.later()), strict=True)}
        for one in tokens
    ]
    print_latencies(found, f"simulated latency, ms, and what it was spent on; {when.process} arrivals")
    if csv_file is not None:
        _write_tokens(tokens, csv_file)
    last: dict[str, Any] = {
        "hosts": [_summary(one, some, kinds) for one, some, kinds in zip(served, tokens, found, strict=True)],
        "measured_seconds": round(time.perf_counter() - started, 3),
    }
    print_json(last if identical is None else last | {"identical": identical}, shown=True)
    if identical is False:
        raise typer.Exit(1)


def _settings(when: ArrivalOptions, where: HardwareOptions, server: ServerOptions) -> ServingSettings:
    from vllm_ndp.lab.serving.run import ServingSettings
    from vllm_ndp.lab.serving.scheduler import SchedulerRules

    blocks = None if server.kv_tokens is None else server.kv_tokens // max(server.block_size, 1)
    return ServingSettings(
        model=where.model,
        hardware=where.hardware,
        overrides=where.overrides(),
        process=when.process,
        rate_per_s=when.rate,
        burstiness=when.burstiness,
        speed=when.speed,
        num_requests=when.requests,
        seed=when.seed,
        policy=server.policy,
        policy_options=policy_options(server.policy_option),
        num_hot=server.hot_experts,
        avg_bits=server.avg_bits,
        execution=server.execution,
        migration=server.migration,
        scheduling=SchedulerRules(server.max_num_batched_tokens, server.max_num_seqs, server.block_size, blocks),
    )


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


def _as_recorded(served: ServedRequest, trace: Any) -> bool:
    times = [(step.run.time.start_ps, step.run.time.total_ps) for step in served.steps]
    return times == list(zip(*(column.tolist() for column in trace.simulated_steps()), strict=True))


def _write_tokens(hosts: list[Tokens], path: Path) -> None:
    from vllm_ndp.lab.serving.latency import CAUSES

    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = [f"{cause.replace(' ', '_')}_ps" for cause in CAUSES]
        writer.writerow(["host", "request", "token", "simulated_at_ps", *names])
        for number, tokens in enumerate(hosts):
            columns = (tokens.request, tokens.index, tokens.at_ps, *tokens.causes_ps.T)
            writer.writerows([number, *row] for row in zip(*(column.tolist() for column in columns), strict=True))
