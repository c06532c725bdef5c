"""`vllm-ndp lm-eval`: tasks of the lm-eval harness on a running server, at decode's precision. Knows options only."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ndp_device.common.command_line import command, print_json
from ndp_device.common.errors import ConfigError
from vllm_ndp.cli.options import SERVER

app = typer.Typer()


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
        f"vllm-ndp lm-eval {SERVER} --tasks hellaswag,arc_easy --limit 200",
        f"vllm-ndp lm-eval {SERVER} --tasks wikitext --decode-from 256",
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
    from vllm_ndp.operating.scoring import ScoringServer

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
