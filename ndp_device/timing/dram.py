"""How long the DRAM takes to stream bytes that begin at a given moment of the refresh interval."""

from __future__ import annotations

from dataclasses import dataclass

from ndp_device.timing.spec import DramSpec
from ndp_device.timing.units import PS_PER_S, ceil_div


@dataclass(frozen=True)
class Stream:
    """One sequential read on the most loaded channel."""

    total_ps: int  # first line offered to last data returned
    refresh_stall_ps: int
    activations: int  # rows opened, all channels


def channel_lines(dram: DramSpec, num_bytes: int) -> int:
    """Lines of the most loaded channel for an allocation that begins on a stripe."""
    full, rest = divmod(num_bytes, dram.channels * dram.stripe_bytes)
    return full * (dram.stripe_bytes // dram.line_bytes) + ceil_div(min(rest, dram.stripe_bytes), dram.line_bytes)


def stream(dram: DramSpec, lines: int, start_ps: int) -> Stream:
    """Read `lines` consecutive lines on every channel, beginning at absolute simulated time start_ps."""
    if lines == 0:
        return Stream(0, 0, 0)
    if dram.kind == "ideal":
        num_bytes = lines * dram.line_bytes * dram.channels
        return Stream(ceil_div(num_bytes * PS_PER_S, dram.ideal_bytes_per_s), 0, 0)
    tck = dram.tck_fs
    cycle = start_ps * 1000 // tck
    activates = min(lines, dram.bank_groups)
    busy = max(lines * dram.burst, (activates - 1) * max(dram.rrd_s, dram.faw // 4) + dram.burst)
    cycles = dram.rcd + dram.cl + busy
    stall = 0
    if dram.refresh != "off":
        lost = dram.rp_ab + dram.rfc + dram.rcd
        end = cycle + cycles
        next_refresh = ceil_div(cycle, dram.refi) * dram.refi
        while next_refresh < end:
            end += lost
            stall += lost
            next_refresh += dram.refi
    rows = ceil_div(lines, dram.lines_per_row)
    return Stream(dram.cycles_to_ps(cycles + stall), dram.cycles_to_ps(stall), rows * dram.channels)
