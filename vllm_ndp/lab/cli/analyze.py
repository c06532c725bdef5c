"""`vllm-ndp analyze`: what a trace's routing tells by itself. Knows options; lab/ computes, tables.py prints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ndp_device.common.command_line import command, print_json
from ndp_device.common.errors import TraceError
from ndp_device.common.outputs import A_NEW_FILE
from vllm_ndp.cli.options import TraceArgument
from vllm_ndp.lab.options import BUNDLED, HotOption, PageOption, PriorOption, TableOption

if TYPE_CHECKING:
    from vllm_ndp.lab.analysis import Analysis
    from vllm_ndp.lab.locality import Locality

app = typer.Typer()


@command(
    app,
    "analyze",
    shows=True,
    examples=(
        f"vllm-ndp analyze {BUNDLED}",
        f"vllm-ndp analyze {BUNDLED} --hot-experts 2 --prior-out prior.npy --html routing.html",
        f"vllm-ndp analyze {BUNDLED} --out layers.parquet",
    ),
)
def analyze(
    trace: TraceArgument,
    hot_experts: HotOption = None,
    prior: PriorOption = None,
    prior_out: Annotated[
        Path | None, A_NEW_FILE, typer.Option(help="Write the popularity of this trace's experts to this .npy file.")
    ] = None,
    out: TableOption = None,
    html: PageOption = None,
) -> None:
    """Say what prompts tell of decode, and what caches would hit.

    Against a null, a prior and an oracle, with intervals. Repeats stand beside the same tokens shuffled, and chance.
    --out: every layer's curves. No time is simulated.
    """
    import numpy as np

    from vllm_ndp.cli.terminal import waiting
    from vllm_ndp.lab.analysis import analyse
    from vllm_ndp.lab.cli.tables import print_analysis, print_locality, write_rows
    from vllm_ndp.lab.compare import popularity
    from vllm_ndp.lab.locality import default_places, locality
    from vllm_ndp.lab.vectorised.prediction import found_ahead
    from vllm_ndp.planning.policies import read_prior
    from vllm_ndp.traces.trace import Trace

    recorded = Trace.load(trace)
    p = recorded.provenance
    sizes = default_places(p.num_experts)
    known = None if prior is None else read_prior(prior)
    summary: dict[str, Any] = {"trace": str(trace), "model": p.model}
    analysis: Analysis | None = None
    with waiting(f"analysing {len(recorded.prompt_len)} requests"):
        found = locality(recorded)
        try:
            analysis = analyse(recorded, hot_experts, prior=known)
            summary |= {**dataclasses.asdict(analysis), "layers_outside_null": analysis.layers_outside_null}
        except TraceError as error:  # repeats can be said of a single request
            summary["not_analysed"] = str(error)
    summary["locality"] = found.as_dict(sizes) | {"predicted": found_ahead(recorded)}
    if analysis is not None:
        print_analysis(analysis)
    else:
        print(f"what prompts tell is not said: {summary['not_analysed']}")
    print_locality(found, sizes)
    if prior_out is not None:
        np.save(prior_out, popularity(recorded).values)
    if out is not None:
        write_rows(_by_layer(found), out)
    if html is not None:
        from vllm_ndp.lab.page import of_routing, write_page

        write_page(html, f"Routing of {p.model}", of_routing(recorded, found, analysis))
    print_json(summary, shown=True)


def _by_layer(found: Locality) -> list[dict[str, Any]]:
    """A row per layer and size of a cache."""
    return [
        {
            "layer": layer,
            "places": size,
            "repeats": float(found.repeats[layer]),
            "shuffled": float(found.shuffled[layer]),
            "concentration": float(found.concentration[layer, size]),
            **{rule: float(curve[layer, size]) for rule, curve in found.hits.items()},
        }
        for layer in range(len(found.repeats))
        for size in range(found.num_experts + 1)
    ]
