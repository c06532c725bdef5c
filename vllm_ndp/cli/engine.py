"""Commands that start a real vLLM: demo, verify, record."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ndp_device.common.command_line import command, print_json
from ndp_device.common.errors import NdpError
from ndp_device.common.widths import DEFAULT_AVG_BITS
from vllm_ndp.cli.shared import AvgBitsOption, CheckpointArgument, OutOption

app = typer.Typer()


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
    avg_bits: AvgBitsOption = DEFAULT_AVG_BITS,
    tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 48,
) -> None:
    """Serve a few prompts and show both clocks.

    Runs vLLM with the plugin and a real device process.
    """
    print_json(_commands().demo(model, replicas, hot_experts, avg_bits, tokens), shown=True)


@command(app, "verify", examples=("vllm-ndp verify models/tiny-mixtral --tokens 16",))
def verify(
    model: CheckpointArgument,
    hot_experts: Annotated[int | None, typer.Option(help="Hot experts per layer; default: half of them.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 32,
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
    avg_bits: AvgBitsOption = DEFAULT_AVG_BITS,
    tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences that run at once.")] = 8,
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
