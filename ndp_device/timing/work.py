"""Work for the device, in sizes, and its times: integer picoseconds, rounded up because no work is free. Values only.

Knows no hardware and no clock: `model.py` turns a Work into a Timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import ModelShape
from ndp_device.common.widths import FULL_PRECISION_BITS, PLAN_BITS

PS_PER_S = 10**12
PS_PER_US = 10**6
PS_PER_NS = 10**3
FS_PER_PS = 1000


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def transfer_ps(num_bytes: int, bytes_per_s: int) -> int:
    return ceil_div(num_bytes * PS_PER_S, bytes_per_s)


def cycles_ps(cycles: int, clock_hz: int) -> int:
    return ceil_div(cycles * PS_PER_S, clock_hz)


BOUNDS = ("link", "dram", "compute", "queue")

PAIR_BYTES = 4 + 4 + 1 + 4
"""Bytes of one (row, expert) pair in a message: row int32, expert int32, bits uint8, router weight float32."""


def execute_bytes(tokens: int, pairs: int, hidden_size: int, activation_bytes: int) -> tuple[int, int]:
    """(bytes in, bytes out) that one Execute moves over the simulated link: activations in the model's dtype both
    ways, and the pair list inwards. Padding, checks and our float32 replies belong to the emulation, not to it."""
    activations = tokens * hidden_size * activation_bytes
    return activations + pairs * PAIR_BYTES, activations


@dataclass(frozen=True)
class Work:
    """Sizes of one Execute of H x I experts: what goes in, what comes out, and its experts in reading order."""

    hidden_size: int
    intermediate_size: int
    bytes_in: int
    bytes_out: int
    experts: tuple[tuple[int, int, int], ...]
    """Bits, rows that it serves, bytes that its packed weights, scales and offsets cost the DRAM."""


def expert_bytes(hidden: int, intermediate: int, bits: int, group_size: int, *, scales: bool = True) -> int:
    """Bytes of one replica: bit planes, and a float16 scale and offset per group of inputs unless scales is False."""
    if bits not in PLAN_BITS:
        raise ConfigError(f"bits must be one of {sorted(PLAN_BITS)}, got {bits}")
    if group_size < 1:
        raise ConfigError(f"group size must be at least 1, got {group_size}")
    codes = ceil_div(3 * hidden * intermediate * bits, 8)
    if bits == FULL_PRECISION_BITS or not scales:
        return codes
    groups = 2 * intermediate * ceil_div(hidden, group_size) + hidden * ceil_div(intermediate, group_size)
    return codes + 4 * groups


def single_expert_work(shape: ModelShape, bits: int, tokens: int, group_size: int, *, scales: bool = True) -> Work:
    """One expert serving `tokens` rows; 16-bit activations in, float32 partial sums out."""
    num_bytes = expert_bytes(shape.hidden_size, shape.intermediate_size, bits, group_size, scales=scales)
    return Work(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        bytes_in=2 * shape.hidden_size * tokens,
        bytes_out=4 * shape.hidden_size * tokens,
        experts=((bits, tokens, num_bytes),),
    )


class Timing(msgspec.Struct, frozen=True):
    """One command on the device. Every *_ps is simulated.

    total_ps = launch + link_in + queue + (dram + compute + dequant + vector - overlap_saved) + link_out + completion
    """

    submit_ps: int  # the host hands the command over
    start_ps: int  # the device begins to read weights
    done_ps: int  # the host holds the result
    launch_ps: int
    link_in_ps: int
    queue_ps: int
    dram_ps: int
    compute_ps: int
    dequant_ps: int
    vector_ps: int
    overlap_saved_ps: int
    link_out_ps: int
    completion_ps: int
    total_ps: int
    bound: str  # one of BOUNDS: the largest share of total_ps
    weight_bytes: int  # read from DRAM, re-reads included
    bytes_in: int
    bytes_out: int
    row_activations: int  # on all channels
    refresh_stall_ps: int  # part of dram_ps the most loaded channel spent refreshing
    array_utilisation: float  # useful multiply-accumulates / what the arrays could do while the device was busy
    dram_efficiency: float  # weight bytes / (dram_ps x peak)
    energy_pj: int  # indicative: DRAM, link and scratchpad events only
    pe_mode: str
    config_hash: str
