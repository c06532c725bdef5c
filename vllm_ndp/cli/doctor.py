"""`vllm-ndp doctor`: is this machine ready? Knows options and the table; operating/doctor.py looks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ndp_device.common.command_line import command, print_json

if TYPE_CHECKING:
    from vllm_ndp.operating.doctor import Check

app = typer.Typer()


@command(
    app,
    "doctor",
    shows=True,
    examples=("vllm-ndp doctor", "vllm-ndp doctor --mend", "vllm-ndp doctor --json --no-bandwidth"),
)
def doctor(
    device: Annotated[str | None, typer.Option(metavar="ADDR", help="A running device that must answer.")] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="This host's key file, where the device wants keys.")
    ] = None,
    mend: Annotated[
        bool, typer.Option("--mend", help="Mend what pip leaves broken beside vLLM's CPU wheel, and look at nothing.")
    ] = False,
    bandwidth: Annotated[bool, typer.Option(help="Measure how fast this machine reads memory.")] = True,
) -> None:
    """Check this machine, and say how to mend what is wrong.

    Exit code 1 if something would fail.
    """
    from vllm_ndp.cli.terminal import waiting
    from vllm_ndp.operating.doctor import Asked, Machine, examine, mend_environment

    if mend:
        done = mend_environment(Machine().version_of)
        for sentence in done or ["nothing to mend"]:
            print(f"vllm-ndp: {sentence}")
        print_json({"mended": done}, shown=True)
        return
    with waiting("looking at this machine"):
        checks = examine(Machine(), Asked(device, key, bandwidth))
    _print(checks)
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


def _print(checks: list[Check]) -> None:
    from rich.table import Table

    from vllm_ndp.cli.terminal import print_table

    table = Table(title="vllm-ndp doctor", title_justify="left")
    for name in ("check", "", "found", "what to do"):
        table.add_column(name)
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}
    for check in checks:
        table.add_row(check.name, f"[{styles[check.state]}]{check.state}[/]", check.found, check.fix)
    print_table(table, width=118)
