"""Commands that start a real vLLM: demo, verify, record; and lm-eval, which asks one that runs."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ndp_device.common.command_line import command, print_json
from ndp_device.common.errors import ConfigError, NdpError
from vllm_ndp.cli.shared import CheckpointArgument, OutOption, judge_bits

app = typer.Typer()


ServedBitsOption = Annotated[
    float | None,
    typer.Option(
        help="Average bits of cold experts; default: 3, or as a quantized checkpoint stores them.",
        callback=lambda bits: None if bits is None else judge_bits(bits),
    ),
]


@command(
    app,
    "demo",
    shows=True,
    examples=("vllm-ndp demo", "vllm-ndp demo models/tiny-mixtral --hot-experts 4 --avg-bits 3"),
)
def demo(
    model: CheckpointArgument = Path("models/tiny-mixtral"),
    replicas: Annotated[
        Path | None, typer.Option(help="Replica directory; default: MODEL-replicas if there is one.")
    ] = None,
    hot_experts: Annotated[int, typer.Option(help="Hot experts per layer.")] = 2,
    avg_bits: ServedBitsOption = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens to generate per prompt.")] = 48,
) -> None:
    """Serve a few prompts and show both clocks.

    Runs vLLM with the plugin and a real device process.
    """
    print_json(_commands().demo(model, replicas, hot_experts, avg_bits, tokens), shown=True)


@command(app, "verify", examples=("vllm-ndp verify models/tiny-mixtral --tokens 16",))
def verify(
    model: CheckpointArgument,
    hot_experts: Annotated[int | None, typer.Option(help="Hot experts per layer; default: half of them.")] = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to generate per prompt.")] = 32,
) -> None:
    """Compare with stock vLLM, token by token.

    In fp32, greedy, with a full-precision device, eager and compiled. Exit code 1 if any token differs.
    """
    result = _commands().verify(model, hot_experts, tokens)
    print_json(result)
    if result["tokens_identical"] != result["tokens_total"] or result["sidecar_mismatches"]:
        raise typer.Exit(1)


@command(
    app,
    "record",
    examples=(
        "vllm-ndp record models/tiny-mixtral --prompts models/tiny-mixtral/calibration.txt --out recorded",
        "vllm-ndp record models/tiny-mixtral --prompts prompts.txt --out recorded --hot-experts 4 --batch 4",
    ),
)
def record(
    model: CheckpointArgument,
    prompts: Annotated[Path, typer.Option(help="UTF-8 text; blank lines separate prompts.")],
    out: OutOption,
    hot_experts: Annotated[
        int | None, typer.Option(help="Hot experts per layer; default: all, which records routing only.")
    ] = None,
    avg_bits: ServedBitsOption = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to generate per prompt.")] = 128,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences that run at once.")] = 8,
) -> None:
    """Run prompts through vLLM and keep their routing as a trace."""
    print_json(_commands().record(model, prompts, out, hot_experts, avg_bits, tokens, batch))


def _commands() -> Any:
    """Import what starts vLLM; that alone takes ten seconds, the first time twenty."""
    print("vllm-ndp: starting vLLM and a device; half a minute, the first time a minute", file=sys.stderr, flush=True)
    try:
        return importlib.import_module("vllm_ndp.integration.commands")
    except ModuleNotFoundError as error:
        raise NdpError(
            f"this command needs vLLM, which cannot be imported ({error}): pip install 'vllm-ndp[cpu]' or '[cuda]'"
        ) from None


@dataclass(frozen=True)
class TaskOptions:
    """Tasks of lm-eval to run."""

    tasks: Annotated[str, typer.Option(help="Names of lm-eval's tasks, with commas between them.")]
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="So many examples of each task.")] = None
    fewshot: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Examples in each context; default: the task's.")
    ] = None
    include: Annotated[Path | None, typer.Option(help="Directory with tasks of your own.")] = None


@command(
    app,
    "lm-eval",
    examples=(
        "vllm-ndp lm-eval http://127.0.0.1:8000 --tasks hellaswag,arc_easy --limit 200",
        "vllm-ndp lm-eval http://127.0.0.1:8000 --tasks wikitext --decode-from 256",
    ),
)
def lm_eval(
    server: Annotated[str, typer.Argument(metavar="ADDR", help="http:// of vllm serve with --logits-processors.")],
    what: TaskOptions,
    decode_from: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Rows from this position on are decode's; default: a context's last token."
        ),
    ] = None,
    concurrent: Annotated[int, typer.Option(metavar="N", min=1, help="Requests at once, which share hot slots.")] = 1,
    tokenizer: Annotated[str | None, typer.Option(help="Directory or id; default: the served checkpoint's.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="VLLM_API_KEY", help="The server's key.")] = None,
) -> None:
    """Run tasks of lm-eval against a server.

    Scored tokens are forced through decode, so figures are those of the widths that are served. A stock vLLM started
    with the same logits processor gives the figures to compare with.
    """
    from vllm_ndp.operating.server import ScoringServer

    asked = ScoringServer(server, api_key)
    try:
        harness = importlib.import_module("vllm_ndp.operating.lm_eval_model")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this command needs lm-eval, which cannot be imported ({error}): pip install 'vllm-ndp[lm-eval]'"
        ) from None
    model = harness.NdpServer(asked, decode_from=decode_from, concurrent=concurrent, tokenizer=tokenizer)
    names = [name for name in what.tasks.split(",") if name]
    how = {"include": what.include, "limit": what.limit, "num_fewshot": what.fewshot}
    results: dict[str, Any] = harness.evaluate(model, names, **how)
    for task, values in results.items():
        print(task, *(f"{name} {value}" for name, value in values.items()), sep="  ")
    if late := model.counts["fallback_pairs"]:
        print(
            f"vllm-ndp: {late} pairs were computed in full precision because the device was late: these figures are "
            "flattered, give the server a larger deadline_ms",
            file=sys.stderr,
        )
    print_json({"tasks": results, "model": model.server.model, "decode_from": decode_from} | dict(model.counts))
