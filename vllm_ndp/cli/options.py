"""Options that several commands share, in groups that are handed on as one value. Imports nothing that takes time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ndp_device.common.command_line import assignments
from ndp_device.common.errors import ConfigError
from ndp_device.common.outputs import A_NEW_FOLDER

SERVER = "http://127.0.0.1:8000"
TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE", help="Directory of the trace.")]
CheckpointArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint directory.")]
OutOption = Annotated[
    Path, A_NEW_FOLDER, typer.Option(help="Directory of the trace to write; must be empty or absent.")
]


def judge_bits(avg_bits: float) -> float:
    """Say on stderr that so few bits are of no use, where they are not."""
    from vllm_ndp.planning.bitwidths import verdict_on

    if verdict := verdict_on(avg_bits):
        typer.echo(f"vllm-ndp: {verdict}", err=True)
    return avg_bits


AvgBitsOption = Annotated[float, typer.Option(help="Average bits of cold experts.", callback=judge_bits)]


def hardware_values(pairs: list[str] | None) -> dict[str, str | int]:
    """Read the values of --set."""
    given = assignments(pairs, "--set", "section.field=value")
    return {name: int(value) if value.lstrip("-").isdigit() else value for name, value in given.items()}


def integers(text: str, option: str, *, least: int | None = None) -> tuple[int, ...]:
    """Read "1,4,16" as (1, 4, 16)."""
    try:
        read = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{option} must be whole numbers with commas between them, such as 1,2,3,4, got {text!r}"
        ) from None
    if least is not None and min(read) < least:
        raise ConfigError(f"{option} must be at least {least}, got {min(read)}")
    return read
