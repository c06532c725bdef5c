"""Commands before a server: plan says what of a model fits where, doctor whether this machine is ready."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ndp_device.common.command_line import SetOption, command, print_json
from vllm_ndp.cli.shared import hardware_values, print_table, waiting

if TYPE_CHECKING:
    from vllm_ndp.operating.doctor import Check
    from vllm_ndp.operating.proposal import Proposal

app = typer.Typer()


@dataclass(frozen=True)
class DemandOptions:
    """Memory of the machine, and the load that the server must carry."""

    gpu_memory: Annotated[str | None, typer.Option(help="Such as 24GB; default: serve on the host's cores.")] = None
    host_memory: Annotated[str | None, typer.Option(help="Such as 64GB; default: what this machine has free.")] = None
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of a request, prompt and answer; at most the model's own.")
    ] = 4096
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1


@command(
    app,
    "plan",
    shows=True,
    examples=(
        "vllm-ndp plan mixtral-8x7b --gpu-memory 24GB --host-memory 64GB --context 8192 --batch 4",
        "vllm-ndp plan models/tiny-mixtral/config.json --host-memory 8GB --json",
        "vllm-ndp plan models/tiny-mixtral --host-memory 8GB --probe",
    ),
)
def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Checkpoint directory, config.json, public shape, or id of the hub."),
    ],
    asked: DemandOptions,
    hardware: Annotated[
        str | None,
        typer.Option(help="What simulated times are for (ndp-device time hardware); default: by --gpu-memory."),
    ] = None,
    set_: SetOption = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure this machine for a few seconds: expected wall time.")
    ] = False,
) -> None:
    """Say what fits where, how fast, and the line that serves it.

    Reads sizes only. Exit code 2 with one sentence where nothing fits.
    """
    from ndp_device.common.machine_memory import required_memory
    from ndp_device.timing.spec import load_hardware, nearest_card
    from vllm_ndp.cost_model.costs import Costs
    from vllm_ndp.operating.proposal import propose
    from vllm_ndp.operating.sizing import Sizing, parse_bytes
    from vllm_ndp.operating.sources import source_named
    from vllm_ndp.operating.speed import measure

    source = source_named(model)
    form, linear_form = source.stored_form, source.linear_form
    sizing = Sizing(
        source.model,
        host_bytes=required_memory().room
        if asked.host_memory is None
        else parse_bytes(asked.host_memory, "--host-memory"),
        gpu_bytes=None if asked.gpu_memory is None else parse_bytes(asked.gpu_memory, "--gpu-memory"),
        context=min(asked.context, source.longest or asked.context),
        batch=asked.batch,
        stored_bytes=source.stored_bytes,
        stored_form=form,
        linear_form=linear_form,
    )
    costs = Costs(load_hardware(hardware or nearest_card(sizing.gpu_bytes), **hardware_values(set_)), source.model)
    with waiting("measuring this machine" if probe else "laying out the model"):
        proposal = propose(
            source, sizing, costs, partial(measure, source.model, form=form, linear_form=linear_form) if probe else None
        )
    _print(proposal)
    if sizing.context < asked.context:
        print(f"The context is {sizing.context} tokens, the model's longest, not {asked.context}.")
    elif source.longest is None and sizing.context > DemandOptions.context:
        print(f"The model's longest context is not known here: vLLM refuses {sizing.context} tokens if it is shorter.")
    print_json(proposal.as_dict(), shown=True)


def _print(proposal: Proposal) -> None:
    from rich.console import Console
    from rich.table import Table

    from vllm_ndp.operating.sizing import human
    from vllm_ndp.operating.speed import PROMPT

    sizing, model, best = proposal.sizing, proposal.sizing.model, proposal.ways[0].option
    count, stored = model.num_parameters, proposal.source.stored_bytes
    parameters = f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    as_stored = "" if stored is None else f"{human(stored)} as stored, "
    console = Console(width=118, highlight=False, markup=False, emoji=False)
    console.print(
        f"{model.name} ({proposal.source.read_from}): {parameters} parameters, {as_stored}"
        f"{human(sizing.checkpoint_bytes)} as {model.dtype}; {model.num_layers} MoE layers with {model.num_experts} "
        f"experts of {human(model.expert_bytes)}, {model.top_k} per token"
    )
    ways = Table(
        title=f"ways that fit; times for batch {sizing.batch}, {sizing.context} tokens each",
        title_justify="left",
    )
    memory = ("experts up to\n(read on average)", "hot experts\nper layer", "KV tokens\nleft", "checkpoint\nin memory")
    times = ("simulated\nTPOT us", "simulated\ntokens/s", "simulated\nTTFT ms")
    for name in (*memory, *times, *(["expected here\nTPOT ms, at best"] if proposal.measured else [])):
        ways.add_column(name, justify="right")
    for way in proposal.ways:
        option, step_s = way.option, way.measured_decode_step_s
        measured = () if step_s is None else (f"{1e3 * step_s:.2f}",)
        ways.add_row(
            f"{option.widest} bit ({option.read_bits:g})",
            f"{option.num_hot} of {model.num_experts}" + (f" at {option.slot_bits}" if option.slot_bits < 16 else ""),
            str(option.kv_tokens_left),
            f"{100 * option.pool_cached:.0f} %",
            f"{way.simulated.decode_step_ps / 1e6:.1f}",
            f"{way.simulated.decode_tokens_per_s:.1f}",
            f"{way.simulated.prefill_ps / 1e9:.2f}",
            *measured,
        )
    console.print(ways)
    if alike := [way.option.widest for way in proposal.ways if way.option.read_bits == best.read_bits][1:]:
        console.print(
            f"Up to {best.widest} bits are read at {best.read_bits:g} on average: experts that matter more get "
            f"{best.widest}, others fewer. At the same speed the predicted loss is at most that of up to {alike[0]}."
        )
    parts = Table(title="the first of them", title_justify="left")
    for name in ("where", "what", "size"):
        parts.add_column(name, justify="right" if name == "size" else "left")
    mapped = {"checkpoint's experts": sizing.mapped_experts} if not best.is_in_slots else {}
    places = ("GPU", best.gpu), ("host", best.host), ("mapped, page cache", mapped), ("moves", sizing.moved(best))
    for where, held in places:
        for what, num_bytes in held.items():
            parts.add_row(where, what, human(num_bytes))
    console.print(parts)
    console.print(
        f"Simulated: {proposal.hardware} with its CXL device, even routing (the worst case for a hot set), "
        f"{best.read_bits:g} bits on average (--hardware names another). No time of this machine."
    )
    if proposal.is_as_stored:
        served = "Experts are served" if best.is_in_slots else "Experts that are not hot are served"
        console.print(f"{served} at {best.widest} bits as the checkpoint stores them: no replicas are needed.")
    elif not proposal.needs_replicas:
        console.print("Every expert is hot: no replicas are needed.")
    if proposal.measured is not None:
        probed = proposal.measured
        console.print(
            f"Measured now: {human(probed.read_bytes_per_s)}/s read; one expert at {probed.bits} bits "
            f"{1e3 * probed.expert_s:.3f} ms ({probed.isa})."
        )
    if (first_s := proposal.ways[0].measured_first_token_s) is not None:
        console.print(f"Expected: the first token of a prompt of {PROMPT} after {first_s:.2g} s.")
    if proposal.too_few_bits:
        console.print(f"Too few bits: {proposal.too_few_bits}.")
    if proposal.advice:
        console.print(f"{proposal.advice}.")
    for line in proposal.lines.values():
        if line is not None:
            print(f"$ {line}")


@command(
    app,
    "doctor",
    shows=True,
    examples=("vllm-ndp doctor", "vllm-ndp doctor --mend", "vllm-ndp doctor --json --no-bandwidth"),
)
def doctor(
    mend: Annotated[
        bool, typer.Option("--mend", help="Mend what pip leaves broken beside vLLM's CPU wheel, and look at nothing.")
    ] = False,
    bandwidth: Annotated[bool, typer.Option(help="Measure how fast this machine reads memory.")] = True,
) -> None:
    """Check this machine, and say how to mend what is wrong.

    Exit code 1 if something would fail.
    """
    from vllm_ndp.operating.doctor import Machine, examine, mend_environment

    if mend:
        done = mend_environment(Machine().version_of)
        for sentence in done or ["nothing to mend"]:
            print(f"vllm-ndp: {sentence}")
        print_json({"mended": done}, shown=True)
        return
    with waiting("looking at this machine"):
        checks = examine(Machine(), bandwidth=bandwidth)
    _print_checks(checks)
    failed = [check.name for check in checks if check.state == "fail"]
    print_json(
        {
            "ok": not failed,
            "failed": failed,
            "warned": [check.name for check in checks if check.state == "warn"],
            "checks": [vars(check) for check in checks],
        },
        shown=True,
    )
    if failed:
        raise typer.Exit(1)


def _print_checks(checks: list[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="vllm-ndp doctor", title_justify="left")
    for name in ("check", "", "found", "what to do"):
        table.add_column(name)
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}
    for check in checks:
        table.add_row(check.name, Text(check.state, styles[check.state]), check.found, check.fix)
    print_table(table, width=118)
