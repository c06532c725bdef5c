"""`vllm-ndp quantize`: options and last lines; ndp_device/calibration/ works."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ndp_device.common.command_line import command, print_json
from ndp_device.common.errors import ConfigError
from ndp_device.common.outputs import REPLICAS
from vllm_ndp.cli.shared import integers, print_table

if TYPE_CHECKING:
    from ndp_device.replicas.format import Manifest

app = typer.Typer()


@dataclass(frozen=True)
class SolverOptions:
    """Widths of the replicas, and the solver that makes them."""

    bits: Annotated[
        str | None,
        typer.Option(help="Widths with commas between them, such as 1,2,3,4,8; default: the solver's, without 8."),
    ] = None
    solver: Annotated[
        Literal["nested", "independent", "auto-gptq"],
        typer.Option(help="nested stores 4 bit planes for widths to 4, the others 10; 8 bits are 8 more."),
    ] = "nested"
    group_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale; default: 128, or 64 for small models.")
    ] = None
    shrink: Annotated[
        float,
        typer.Option(
            metavar="X", min=0, help="Distrust the text by this much: 0.3 if what is served is of other subjects."
        ),
    ] = 0.0
    effort: Annotated[
        Literal["fast", "default", "best"],
        typer.Option(help="With text: time against loss; best takes half as long again as fast."),
    ] = "default"


@dataclass(frozen=True)
class PassOptions:
    """How a text passes through the model."""

    sequence_length: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per sequence.")] = 512
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where it computes; auto: on a GPU where there is one.")
    ] = "auto"
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Chooses the text, and what else is drawn.")] = 0


@command(
    app,
    "quantize",
    examples=(
        "vllm-ndp quantize models/tiny-mixtral --out replicas --bits 1,2",
        "vllm-ndp quantize models/tiny-mixtral --out calibrated --calibration models/tiny-mixtral/calibration.txt",
    ),
    shows=True,
)
def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint directory, or id of the hub.")],
    out: Annotated[
        Path, REPLICAS, typer.Option(help="Directory of the replicas; an interrupted job continues where it stopped.")
    ],
    by: SolverOptions,
    way: PassOptions,
    calibration: Annotated[
        Path | None, typer.Option(help="UTF-8 text to calibrate with; default: replicas from the weights alone.")
    ] = None,
    samples: Annotated[
        int, typer.Option(metavar="N", min=8, help="Calibration sequences; every 8th is held out.")
    ] = 128,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GB", min=0, help="With text: memory to stay within; default: 0.8 of the machine's."),
    ] = None,
) -> None:
    """Quantize every expert of a model.

    To 1, 2, 3 and 4 bits, and measures what each width loses; with text also how much that matters in each layer.
    """
    from ndp_device.calibration.build import build_calibrated, build_data_free
    from ndp_device.common.widths import WIDTHS
    from vllm_ndp.config import as_options
    from vllm_ndp.operating.sources import checkpoint_dir

    started, before, asked = time.monotonic(), _files(out), model
    model = checkpoint_dir(str(model))
    widths = None if by.bits is None else integers(by.bits, "--bits")
    if calibration is None:
        for given, why in (
            (by.solver != "nested", f"--solver {by.solver} needs text"),
            (by.shrink, "--shrink says how far to distrust a text"),
            (by.effort != "default", "--effort is about solving for a text"),
            (memory is not None, "--memory is for calibration on text"),
        ):
            if given:
                raise ConfigError(f"{why}: add --calibration FILE")
        manifest = build_data_free(model, out, bits=widths or WIDTHS, group_size=by.group_size)
    else:
        manifest = build_calibrated(
            model,
            out,
            calibration,
            bits=widths,
            group_size=by.group_size,
            solver=by.solver,
            num_sequences=samples,
            sequence_length=way.sequence_length,
            seed=way.seed,
            shrink=by.shrink,
            effort=by.effort,
            device_name=way.device,
            memory_bytes=None if memory is None else int(memory * 1e9),
        )
    _print_summary(manifest, out, started)
    if before == _files(out):
        print(f"vllm-ndp: nothing to do: {out} holds these replicas", file=sys.stderr)
    words = ["vllm", "serve", str(asked), "--quantization", "ndp", *as_options({"replicas": str(out)})]
    print(f"vllm-ndp: serve it with: {shlex.join(words)}", file=sys.stderr)


def _files(directory: Path) -> dict[str, int]:
    """Files of experts by name, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in directory.glob("experts-*")}


def _print_summary(manifest: Manifest, out: Path, started: float) -> None:
    import numpy as np
    from rich.table import Table

    from ndp_device.common.widths import REPLICA_WIDTHS
    from ndp_device.replicas.format import load_losses
    from vllm_ndp.operating.sizing import human

    seconds, size = time.monotonic() - started, sum(file.num_bytes for file in manifest.layers.values())
    experts = manifest.model.num_layers * manifest.model.num_experts
    relative, _, _ = load_losses(out, "relative")
    lost = {bits: float(np.mean(relative[..., REPLICA_WIDTHS.index(bits)])) for bits in manifest.bits}
    print(f"{experts} experts, {manifest.source}, {human(size)} in {out}, {seconds:.1f} s")
    table = Table()
    table.add_column("bits", justify="right")
    table.add_column("lost of an expert's output", justify="right")
    for bits, share in lost.items():
        table.add_row(str(bits), f"{100 * share:.2f} %")
    print_table(table, width=100)
    print_json(
        {
            "experts": experts,
            "seconds": round(seconds, 3),
            "relative_loss": {str(bits): float(f"{share:.4g}") for bits, share in lost.items()},
            "nats_per_loss": manifest.nats_per_loss,
            "bytes": size,
            "source": manifest.source,
            "out": str(out),
        },
        shown=True,
    )
