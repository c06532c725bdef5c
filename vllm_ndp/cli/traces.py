"""Commands on traces without vLLM: trace-import, -synth."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ndp_device.common.command_line import command, print_json
from vllm_ndp.cli.shared import OutOption

if TYPE_CHECKING:
    from vllm_ndp.traces.trace import Trace

app = typer.Typer()


@command(
    app,
    "trace-import",
    examples=("vllm-ndp trace-import models/tiny-mixtral/traces/sampled.npz --format npz --out imported",),
)
def trace_import(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="File or directory that another program recorded.")],
    out: OutOption,
    kind: Annotated[
        str,
        typer.Option("--format", help="Who wrote it, one of the formats above."),
    ],
    model: Annotated[str, typer.Option(help="Name of the model, kept with the trace.")] = "unknown",
    num_experts: Annotated[int, typer.Option(help="Experts per layer; 0: largest id seen plus one.")] = 0,
    sequence_len: Annotated[int, typer.Option(help="Tokens per sequence where the source has no requests.")] = 512,
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens of those sequences.")] = 256,
    top_k: Annotated[int, typer.Option(help="Experts a token, where the source does not say.")] = 0,
) -> None:
    """Read routing that another program recorded into a trace.

    Formats: vllm, sglang-answers, routelog, lattice, ik_llama, moe-trace, expert-selection, dynande, policylang, npz
    (docs/trace-format.md).
    """
    from vllm_ndp.traces.format import PHASES
    from vllm_ndp.traces.importers import ImportSettings, import_trace

    settings = ImportSettings(model, num_experts, sequence_len, prompt_len, top_k=top_k)
    trace = import_trace(source, kind, settings)
    _save(trace, out)
    if not (trace.phase == PHASES.index("decode")).any():
        print("vllm-ndp: 0 decode tokens, so nothing can be replayed: give --prompt-len", file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """Number of requests, and tokens of each."""

    requests: Annotated[int, typer.Option(help="How many requests.")] = 32
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens of each.")] = 256
    decode_len: Annotated[int, typer.Option(help="Decode tokens of each.")] = 256


@dataclasses.dataclass(frozen=True)
class TasteOptions:
    """Settings by which the synthetic router chooses experts."""

    concentration: Annotated[
        float | None, typer.Option(help="Popularity of experts: small is skewed, large is even (5).")
    ] = None
    signal: Annotated[float | None, typer.Option(help="How much requests differ; 0 is the null (1).")] = None
    persistence: Annotated[float | None, typer.Option(help="0 to 1: what a token keeps of those before.")] = None

    def given(self) -> dict[str, float]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@command(
    app,
    "trace-synth",
    examples=(
        "vllm-ndp trace-synth mixtral-8x7b --out synthetic --requests 8 --prompt-len 16 --decode-len 16",
        "vllm-ndp trace-synth olmoe --out null --signal 0 --requests 4 --prompt-len 16 --decode-len 16",
        "vllm-ndp trace-synth qwen3-30b-a3b --out sticky --routing auto --requests 2 --prompt-len 16 --decode-len 16",
    ),
)
def trace_synth(
    out: OutOption,
    asked: RequestOptions,
    taste: TasteOptions,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Public shape whose layers, experts and top-k are used.")
    ] = "mixtral-8x7b",
    routing: Annotated[
        str,
        typer.Option(help="Measured model to resemble: its name, or auto (MODEL's own)."),
    ] = "",
    drift: Annotated[float, typer.Option(help="0 to 1: how far a request's taste has turned by its end.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The same seed gives the same trace.")] = 0,
) -> None:
    """Make a trace of known skew, signal, persistence and drift.

    --routing: as a measured model has them.
    """
    from vllm_ndp.traces.synthetic import read_routing, synthetic_trace

    sizes = {"num_requests": asked.requests, "prompt_len": asked.prompt_len, "decode_len": asked.decode_len}
    settings = read_routing(routing, model).settings(model, **sizes, drift=drift, seed=seed)
    if changed := taste.given():
        settings = dataclasses.replace(settings, **changed, routing="fitted to nothing")  # type: ignore[arg-type]
    _save(synthetic_trace(settings, model), out)


def _save(trace: Trace, out: Path) -> None:
    trace.save(out)
    p = trace.provenance
    print_json(
        {
            "trace": str(out),
            "model": p.model,
            "requests": len(trace.prompt_len),
            "rows": len(trace.step),
            "layers": p.num_layers,
            "experts": p.num_experts,
            "top_k": p.top_k,
            "weights": p.weights,
            **{name: p.settings[name] for name in ("left_out",) if name in p.settings},
        }
    )
