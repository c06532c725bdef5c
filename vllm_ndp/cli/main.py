"""`vllm-ndp`: every command, where it lives, and how it ends.

The last line of stdout is one JSON object; an error is one sentence on stderr and exit code 2. Commands that need vLLM
import it when they run, so the others work without it.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ndp_device.errors import NdpError
from vllm_ndp.cli.quantize import quantize
from vllm_ndp.cli.replay_cli import lab_commands

app = typer.Typer(
    help="Context-aware Mixture-of-Experts placement for vLLM, with an emulated CXL-NDP device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def print_json(result: dict[str, Any]) -> None:
    """The last line of a command."""
    print(json.dumps(result), flush=True)


def _integration(module: str) -> Any:
    try:
        return importlib.import_module(f"vllm_ndp.integration.{module}")
    except ModuleNotFoundError as error:
        raise NdpError(
            f"this command needs vLLM, which cannot be imported ({error}): pip install 'vllm-ndp[cpu]' or '[cuda]'"
        ) from None


@app.command()
def demo(
    model: Annotated[Path, typer.Option(help="Checkpoint directory.")] = Path("models/tiny-mixtral"),
    replicas: Annotated[Path | None, typer.Option(help="Replica directory; default: MODEL-replicas if there.")] = None,
    hot_experts: Annotated[int, typer.Option(help="Experts per layer on the GPU.")] = 2,
    avg_bits: Annotated[float, typer.Option(help="Average bits of cold experts.")] = 2.0,
    tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 48,
) -> None:
    """Serve a few prompts through vLLM, the plugin and a real device process, and show both clocks."""
    print_json(_integration("demo").run(model, replicas, hot_experts, avg_bits, tokens))


@app.command()
def verify(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")],
    hot_experts: Annotated[int | None, typer.Option(help="K; default half of the experts.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 32,
) -> None:
    """Compare with stock vLLM token by token (fp32, greedy, full-precision device), eager and compiled."""
    result = _integration("verify").run(model, hot_experts, tokens)
    print_json(result)
    if result["tokens_identical"] != result["tokens_total"] or result["sidecar_mismatches"]:
        raise typer.Exit(1)


@app.command()
def record(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")],
    prompts: Annotated[Path, typer.Option(help="UTF-8 text; blank lines separate prompts.")],
    out: Annotated[Path, typer.Option(help="Directory of the trace; must be empty or absent.")],
    hot_experts: Annotated[int | None, typer.Option(help="K; default all: routing only, no placement.")] = None,
    avg_bits: Annotated[float, typer.Option(help="Average bits of cold experts.")] = 3.0,
    tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences running at once.")] = 8,
) -> None:
    """Run prompts through vLLM and keep every routing decision as a trace."""
    print_json(_integration("record").run(model, prompts, out, hot_experts, avg_bits, tokens, batch))


app.command()(quantize)
lab_commands(app)


def main() -> None:
    try:
        app()
    except NdpError as error:
        print(f"vllm-ndp: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"vllm-ndp: {error.filename} cannot be used: {error.strerror}", file=sys.stderr)
        sys.exit(2)
