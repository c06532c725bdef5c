"""`vllm-ndp locality`: how a trace's routing repeats itself. Knows options and tables; lab/locality.py computes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ndp_device.common.command_line import command, print_json
from ndp_device.common.errors import ConfigError
from ndp_device.common.outputs import A_NEW_FILE
from vllm_ndp.cli.options import TraceArgument, integers

if TYPE_CHECKING:
    from vllm_ndp.lab.locality import Locality
    from vllm_ndp.traces.trace import Trace

app = typer.Typer()
BUNDLED = "tests/data/tiny-mixtral-trace"


@command(
    app,
    "locality",
    examples=(
        f"vllm-ndp locality {BUNDLED}",
        f"vllm-ndp locality {BUNDLED} --places 2,4,6 --warm --html locality.html",
        f"vllm-ndp locality {BUNDLED} --against {BUNDLED}",
    ),
)
def show_locality(
    trace: TraceArgument,
    places: Annotated[
        str | None, typer.Option(help="Cache sizes to print, experts per layer; all are computed.")
    ] = None,
    phase: Annotated[str, typer.Option(help="Tokens that are looked at: decode or all.")] = "decode",
    warm: Annotated[bool, typer.Option("--warm", help="Begin caches with the prompt's experts; else empty.")] = False,
    fit: Annotated[bool, typer.Option("--fit", help="Find synthetic routing as local, for trace-synth.")] = False,
    against: Annotated[
        Path | None, typer.Option(help="Another trace: are the two as local, request by request?")
    ] = None,
    json_file: Annotated[
        Path | None, A_NEW_FILE, typer.Option("--json", help="Write every layer's curves to this file.")
    ] = None,
    html: Annotated[Path | None, A_NEW_FILE, typer.Option("--html", help="Draw the curves into this file.")] = None,
) -> None:
    """Show how routing repeats, and what caches of it would hit.

    Beside the same tokens shuffled, and chance. No time is simulated.
    """
    from vllm_ndp.cli.terminal import waiting
    from vllm_ndp.lab.locality import default_places, locality
    from vllm_ndp.lab.vectorised.prediction import found_ahead
    from vllm_ndp.traces.trace import Trace

    recorded = Trace.load(trace)
    experts = recorded.provenance.num_experts
    sizes = tuple(integers(places, "--places")) if places else default_places(experts)
    if min(sizes) < 0 or max(sizes) > experts:
        raise ConfigError(f"--places must lie in 0..{experts}, the experts of a layer, got {places}")
    with waiting("looking at choices"):
        found = locality(recorded, phase, warm=warm)
    result = {"trace": str(trace), "model": recorded.provenance.model, **found.as_dict(sizes)}
    result["predicted"] = found_ahead(recorded)
    if fit:
        from vllm_ndp.lab.routing_fit import fit_routing

        with waiting("fitting synthetic routing"):
            routing, result["fit_off_by"] = fit_routing(found, recorded.provenance.model)
        result["fit"] = {name: getattr(routing, name) for name in routing.__dataclass_fields__}
    _print(found, sizes)
    if against is not None:
        result["against"] = _set_against(recorded, Trace.load(against), phase)
    if json_file is not None:
        json_file.write_text(json.dumps(result) + "\n")
    if html is not None:
        from vllm_ndp.lab.report.locality import page

        html.write_text(page(found, recorded.provenance.model))
    print_json({name: value for name, value in result.items() if name != "layers"}, shown=True)


def _set_against(own: Trace, other: Trace, phase: str) -> dict[str, Any]:
    """Difference of means over requests, TOST and KS, of repeats and of LRU hits at a quarter of the experts."""
    from vllm_ndp.lab.differences import unpaired
    from vllm_ndp.lab.locality import by_request

    ours, theirs = (by_request(trace, max(trace.provenance.num_experts // 4, 1), phase) for trace in (own, other))
    found = {}
    for name, values in ours.items():
        one = unpaired(values, theirs[name])
        found[name] = dataclasses.asdict(one)
        verdict = "equal" if one.equal else "not shown equal"
        print(
            f"{name}: {one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f}) from the other trace's; {verdict} within "
            f"{one.margin:g} (TOST, 5 %); KS {one.ks:.2f}, p {one.ks_p:.2f}"
        )
    return found


def _print(found: Locality, places: tuple[int, ...]) -> None:
    """Means over layers, one row per rule."""
    from rich.table import Table

    from vllm_ndp.cli.terminal import print_table

    chance = found.top_k / found.num_experts
    table = Table(
        title=f"{found.num_tokens} {found.phase} tokens: {100 * found.repeats.mean():.1f} % of choices repeat, "
        f"{100 * found.shuffled.mean():.1f} shuffled, {100 * chance:.1f} by chance"
    )
    table.add_column("% of choices found in")
    for size in places:
        table.add_column(f"{size} of {found.num_experts}", justify="right")
    for rule in found.hits:
        table.add_row(rule, *(f"{100 * found.mean_hits(rule, size):.1f}" for size in places))
    for name, curve in (("lru misses, first 64 tokens", found.early_misses), ("later", found.later_misses)):
        table.add_row(name, *(f"{100 * curve[:, size].mean():.1f}" for size in places))
    table.add_row("most used, share", *(f"{100 * found.concentration[:, size].mean():.1f}" for size in places))
    print_table(table, width=120)
