"""`ndp-device time dram | idle | expert | hardware`: the timing model by hand; simulated time, nothing is measured.

Prints a table for people, then one JSON object as the last line of stdout.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ndp_device.errors import ConfigError, NdpError
from ndp_device.timing import dram as dram_timing
from ndp_device.timing.dram_map import PLACEMENTS
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.shapes import SHAPES, public_shape, single_expert_work
from ndp_device.timing.spec import (
    LAUNCH_PATHS,
    PE_MODES,
    REFRESH_MODES,
    Hardware,
    density_overrides,
    load_hardware,
    preset_table,
)
from ndp_device.timing.units import PS_PER_NS, PS_PER_US
from ndp_device.timing.work import Timing

app = typer.Typer(help="Simulated times of the hardware model.", no_args_is_help=True, add_completion=False)

PresetOption = Annotated[str, typer.Option(help="Hardware preset")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Hardware value: section.field=value")]
_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@app.command()
def dram(
    num_bytes: Annotated[str, typer.Option("--bytes", help="Bytes read in all: 65536, 64KiB, 352MB …")],
    preset: PresetOption = "h100-ndp512",
    streams: Annotated[int, typer.Option(help="Sequential streams that share the bytes")] = 1,
    placement: Annotated[str, typer.Option(help=" | ".join(PLACEMENTS))] = "natural",
    refresh: Annotated[str | None, typer.Option(help=" | ".join(REFRESH_MODES))] = None,
    bank_group_interleave: Annotated[str | None, typer.Option(help="on | off")] = None,
    outstanding: Annotated[int | None, typer.Option(help="Lines in flight per channel; 0 = a full queue")] = None,
    density: Annotated[int | None, typer.Option(help="Gbit of a DRAM part: 16 | 32")] = None,
    set_: SetOption = None,
) -> None:
    """Time of a read, over start times spread across one refresh interval."""
    options: dict[str, Any] = {
        **({} if density is None else density_overrides(preset, density)),
        "dram.refresh": refresh,
        "dram.bank_group_interleave": bank_group_interleave,
        "dram.outstanding": outstanding,
    }
    hardware = _hardware(preset, set_, options)
    size = _parse_size(num_bytes)
    transfer = dram_timing.transfer(hardware.dram, size, streams, placement)
    lines = dram_timing.channel_lines(hardware.dram, size)
    _table(
        f"{size} bytes from {hardware.dram.standard}, {hardware.dram.channels} channels",
        {
            "mean": f"{transfer.mean_ps / PS_PER_NS:,.1f} ns",
            "fastest": f"{transfer.min_ps / PS_PER_NS:,.1f} ns",
            "slowest": f"{transfer.max_ps / PS_PER_NS:,.1f} ns",
            "rate": f"{transfer.gb_per_s:,.1f} GB/s, {transfer.efficiency:.1%} of peak",
        },
    )
    _print({**asdict(transfer), "bytes": size, "channel_lines": lines, "config_hash": hardware.config_hash})


@app.command()
def idle(
    case: Annotated[str, typer.Option(help=" | ".join(dram_timing.IDLE_CASES))],
    preset: PresetOption = "h100-ndp512",
    set_: SetOption = None,
) -> None:
    """Latency of one line from an idle channel: its row open, its bank closed, or another row open."""
    hardware = _hardware(preset, set_, {})
    latency = dram_timing.idle_ps(hardware.dram, case)
    _print({"ps": latency, "case": case, "config_hash": hardware.config_hash})


@app.command()
def expert(
    bits: Annotated[int, typer.Option(help="1 | 2 | 3 | 4 | 8 | 16")],
    model: Annotated[str, typer.Option(help=" | ".join(SHAPES))] = "mixtral-8x7b",
    tokens: Annotated[int, typer.Option(help="Rows the expert serves")] = 1,
    pe_mode: Annotated[str | None, typer.Option(help=" | ".join(PE_MODES))] = None,
    launch: Annotated[str | None, typer.Option(help=" | ".join(LAUNCH_PATHS))] = None,
    group_size: Annotated[int, typer.Option(help="Weights per scale and offset")] = 128,
    scales: Annotated[bool, typer.Option(help="Count the scales and offsets")] = True,
    preset: PresetOption = "h100-ndp512",
    set_: SetOption = None,
) -> None:
    """One expert of a public model on the idle device, from launch to completion."""
    hardware = _hardware(preset, set_, {"array.pe_mode": pe_mode, "link.launch": launch})
    if tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, got {tokens}")
    work = single_expert_work(public_shape(model), bits, tokens, group_size, scales=scales)
    timing = DeviceModel(hardware).execute(work, 0)
    beside = {
        mode: DeviceModel(_hardware(preset, set_, {"array.pe_mode": mode, "link.launch": launch})).execute(work, 0)
        for mode in PE_MODES
    }
    _stage_table(f"{model}, one expert, {bits} bits, {tokens} tokens, {preset}", beside)
    _print(
        {
            "model": model,
            "bits": bits,
            "tokens": tokens,
            **timing.as_dict(),
            "total_ps_by_pe_mode": {mode: other.total_ps for mode, other in beside.items()},
        }
    )


@app.command()
def hardware(preset: PresetOption = "h100-ndp512", set_: SetOption = None) -> None:
    """Every number of a preset with its unit and source."""
    chosen = _hardware(preset, set_, {})
    table = Table("value", "", "unit", "source", title=preset)
    sources = preset_table(preset)
    values = chosen.values()
    for key, value in values.items():
        quantity = sources[key]
        source = quantity.source if value == quantity.value else f"set by hand, preset has {quantity.value}"
        table.add_row(key, str(value), quantity.unit, source)
    Console(width=100).print(table)
    _print({"preset": preset, "config_hash": chosen.config_hash, "values": values})


def main() -> None:
    try:
        app(standalone_mode=True)
    except NdpError as error:
        print(f"ndp-device: {error}", file=sys.stderr)
        sys.exit(2)


def _hardware(preset: str, assignments: list[str] | None, options: dict[str, Any]) -> Hardware:
    overrides = {}
    for text in assignments or ():
        key, separator, value = text.partition("=")
        if not (key and separator and value):
            raise ConfigError(f"--set needs section.field=value, got {text!r}")
        overrides[key] = value
    overrides.update({key: value for key, value in options.items() if value is not None})
    return load_hardware(preset, **overrides)


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d[\d_]*)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _SIZE_UNITS:
        raise ConfigError(f"--bytes must be a whole number with B, KB, MB, GB, KiB, MiB, GiB or no unit, got {text!r}")
    return int(match[1]) * _SIZE_UNITS[match[2].upper()]


def _stage_table(title: str, timings: dict[str, Timing]) -> None:
    table = Table("simulated us", *timings, title=title)
    for stage in ("launch", "link_in", "queue", "dram", "compute", "dequant", "vector", "overlap_saved", "link_out"):
        table.add_row(stage, *(f"{getattr(timing, f'{stage}_ps') / PS_PER_US:,.3f}" for timing in timings.values()))
    table.add_row("total", *(f"{timing.total_ps / PS_PER_US:,.3f}" for timing in timings.values()), style="bold")
    table.add_row("bound", *(timing.bound for timing in timings.values()))
    table.add_row("arrays busy", *(f"{timing.array_utilisation:.1%}" for timing in timings.values()))
    table.add_row("energy (indicative)", *(f"{timing.energy_pj / 1e6:,.1f} uJ" for timing in timings.values()))
    Console(width=100).print(table)


def _table(title: str, rows: dict[str, str]) -> None:
    table = Table("simulated", "", title=title)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(width=100).print(table)


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
