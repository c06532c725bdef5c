"""`vllm-ndp quantize`: make the replicas of a model. Knows arguments and the last line; the work is ndp_device's."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ndp_device.calibration.build import SolverName, build_calibrated, build_data_free
from ndp_device.errors import ConfigError
from ndp_device.replicas.loss_table import load_loss_table
from ndp_device.widths import WIDTHS


def quantize(
    model: Annotated[Path, typer.Argument(help="directory of a Hugging Face Mixtral checkpoint")],
    out: Annotated[Path, typer.Option(help="directory for the replicas; an interrupted job goes on where it stopped")],
    calibration: Annotated[Path | None, typer.Option(help="UTF-8 text; without it: data-free replicas")] = None,
    bits: Annotated[str | None, typer.Option(help="widths, such as 1,2,3,4; default: all the solver can")] = None,
    solver: Annotated[SolverName, typer.Option(help="nested stores 4 planes for all widths, the others 10")] = "nested",
    group_size: Annotated[int | None, typer.Option(help="weights per scale; default 128, small models 64")] = None,
    samples: Annotated[int, typer.Option(min=8, help="calibration sequences; every 8th is held out")] = 128,
    sequence_length: Annotated[int, typer.Option(min=1, help="tokens per calibration sequence")] = 512,
    seed: Annotated[int, typer.Option(help="which sequences are drawn")] = 0,
) -> None:
    """Quantize every expert of MODEL to 1, 2, 3 and 4 bits and measure what each width loses."""
    started = time.monotonic()
    widths = parse_bits(bits)
    if calibration is None:
        if solver != "nested":
            raise ConfigError(f"--solver {solver} needs text: add --calibration FILE")
        manifest = build_data_free(model, out, bits=widths or WIDTHS, group_size=group_size)
    else:
        manifest = build_calibrated(
            model,
            out,
            calibration,
            bits=widths,
            group_size=group_size,
            solver=solver,
            num_sequences=samples,
            sequence_length=sequence_length,
            seed=seed,
        )
    _, relative = load_loss_table(out)
    report = {
        "experts": manifest.model.num_layers * manifest.model.num_experts,
        "seconds": round(time.monotonic() - started, 3),
        "relative_loss": {str(b): float(f"{np.mean(relative[..., b - 1]):.4g}") for b in manifest.bits},
        "bytes": sum(file.num_bytes for file in manifest.layers.values()),
        "source": manifest.source,
        "out": str(out),
    }
    print(json.dumps(report))


def parse_bits(text: str | None) -> tuple[int, ...] | None:
    """ "1,2,3" -> (1, 2, 3)."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--bits must be widths with commas between them, such as 1,2,3,4, got {text!r}") from None
