"""Integer picoseconds and how to reach them: always rounded up, because no work is free. Knows no hardware."""

from __future__ import annotations

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
