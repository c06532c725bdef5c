"""`ndp-device time dram | idle | expert | hardware`: the timing model by hand; simulated time, nothing is measured.

Prints a table for people, then one JSON object as the last line of stdout.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ndp_device.common.command_line import HardwareOption, SetOption, assignments, command, print_json, program
from ndp_device.common.errors import ConfigError
from ndp_device.timing import dram as dram_timing
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.public_models import SHAPES, public_shape
from ndp_device.timing.spec import PE_MODES, PRESETS, Hardware, load_hardware, preset_table
from ndp_device.timing.work import PS_PER_NS, PS_PER_US, Timing, single_expert_work

if TYPE_CHECKING:
    from rich.table import Table

app = program("Simulated times of the hardware model.", examples=("ndp-device time expert mixtral-8x7b --bits 3",))

_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@command(
    app,
    "dram",
    shows=True,
    examples=("ndp-device time dram 352MB", "ndp-device time dram 64KiB --set dram.rfc=1315"),
)
def dram(
    num_bytes: Annotated[str, typer.Argument(metavar="BYTES", help="Bytes read in all: 65536, 64KiB, 352MB, …")],
    hardware: HardwareOption = "h100-ndp512",
    set_: SetOption = None,
) -> None:
    """Time a read from DRAM.

    Mean, fastest and slowest of start times that are spread across one refresh interval.
    """
    from rich.table import Table

    chosen = _hardware(hardware, set_)
    size = _parse_size(num_bytes)
    transfer = dram_timing.transfer(chosen.dram, size)
    lines = dram_timing.channel_lines(chosen.dram, size)
    table = Table("simulated", "", title=f"{size} bytes from {chosen.dram.standard}, {chosen.dram.channels} channels")
    table.add_row("mean", f"{transfer.mean_ps / PS_PER_NS:,.1f} ns")
    table.add_row("fastest", f"{transfer.min_ps / PS_PER_NS:,.1f} ns")
    table.add_row("slowest", f"{transfer.max_ps / PS_PER_NS:,.1f} ns")
    table.add_row("rate", f"{transfer.gb_per_s:,.1f} GB/s, {transfer.efficiency:.1%} of peak")
    _show(table)
    print_json(
        {**asdict(transfer), "bytes": size, "channel_lines": lines, "config_hash": chosen.config_hash}, shown=True
    )


@command(app, "idle", examples=("ndp-device time idle conflict",))
def idle(
    case: Annotated[str, typer.Argument(metavar="CASE", help=f"{', '.join(dram_timing.IDLE_CASES)}.")],
    hardware: HardwareOption = "h100-ndp512",
    set_: SetOption = None,
) -> None:
    """Time one line from an idle channel.

    hit: its row is open; closed: its bank is; conflict: another row is open.
    """
    chosen = _hardware(hardware, set_)
    latency = dram_timing.idle_ps(chosen.dram, case)
    print_json({"ps": latency, "case": case, "config_hash": chosen.config_hash})


@command(
    app,
    "expert",
    shows=True,
    examples=(
        "ndp-device time expert mixtral-8x7b --bits 3",
        "ndp-device time expert olmoe --bits 4 --tokens 8 --hardware h200-gen5 --set array.pe_mode=fp16_dequant",
    ),
)
def expert(
    bits: Annotated[int, typer.Option(help="1, 2, 3, 4, 8 or 16.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"Public shape: {', '.join(SHAPES)}.")] = "mixtral-8x7b",
    tokens: Annotated[int, typer.Option(help="Rows that the expert serves.")] = 1,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale and an offset.")] = 128,
    scales: Annotated[bool, typer.Option(help="Count the scales and offsets.")] = True,
    hardware: HardwareOption = "h100-ndp512",
    set_: SetOption = None,
) -> None:
    """Time one expert on the idle device, from launch to completion."""
    if tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, got {tokens}")
    work = single_expert_work(public_shape(model), bits, tokens, group_size, scales=scales)
    timing = DeviceModel(_hardware(hardware, set_)).execute(work, 0)
    beside = {mode: DeviceModel(_hardware(hardware, set_, mode)).execute(work, 0) for mode in PE_MODES}
    _stage_table(f"{model}, one expert, {bits} bits, {tokens} tokens, {hardware}", beside)
    print_json(
        {
            "model": model,
            "bits": bits,
            "tokens": tokens,
            **msgspec.structs.asdict(timing),
            "total_ps_by_pe_mode": {mode: other.total_ps for mode, other in beside.items()},
        },
        shown=True,
    )


@command(
    app,
    "hardware",
    shows=True,
    examples=("ndp-device time hardware h200-gen5", "ndp-device time hardware --set gpu.times=roofline"),
)
def hardware(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help=f"{', '.join(PRESETS)}.")] = "h100-ndp512",
    set_: SetOption = None,
) -> None:
    """Print every number of a preset with its unit and source."""
    from rich.table import Table

    chosen = _hardware(preset, set_)
    table = Table("value", "", "unit", "source", title=preset)
    sources = preset_table(preset)
    values = chosen.values()
    for key, value in values.items():
        quantity = sources[key]
        source = quantity.source if value == quantity.value else f"set by hand, preset has {quantity.value}"
        table.add_row(key, str(value), quantity.unit, source)
    _show(table)
    print_json({"preset": preset, "config_hash": chosen.config_hash, "values": values}, shown=True)


def _hardware(preset: str, set_: list[str] | None, pe_mode: str | None = None) -> Hardware:
    overrides = assignments(set_, "--set", "section.field=value")
    return load_hardware(preset, **overrides | ({} if pe_mode is None else {"array.pe_mode": pe_mode}))


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d[\d_]*)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _SIZE_UNITS:
        raise ConfigError(f"BYTES must be a whole number with B, KB, MB, GB, KiB, MiB, GiB or no unit, got {text!r}")
    return int(match[1]) * _SIZE_UNITS[match[2].upper()]


def _stage_table(title: str, timings: dict[str, Timing]) -> None:
    from rich.table import Table

    table = Table("simulated us", *timings, title=title)
    for stage in ("launch", "link_in", "queue", "dram", "compute", "dequant", "vector", "overlap_saved", "link_out"):
        table.add_row(stage, *(f"{getattr(timing, f'{stage}_ps') / PS_PER_US:,.3f}" for timing in timings.values()))
    table.add_row("total", *(f"{timing.total_ps / PS_PER_US:,.3f}" for timing in timings.values()), style="bold")
    table.add_row("bound", *(timing.bound for timing in timings.values()))
    table.add_row("arrays busy", *(f"{timing.array_utilisation:.1%}" for timing in timings.values()))
    table.add_row("energy (indicative)", *(f"{timing.energy_pj / 1e6:,.1f} uJ" for timing in timings.values()))
    _show(table)


def _show(table: Table) -> None:
    from rich.console import Console

    Console(width=100).print(table)
