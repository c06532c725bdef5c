from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def distinct(
    rows: NDArray[np.int32],
    experts: NDArray[np.int32],
    bits: NDArray[np.uint8],
    flags: NDArray[np.uint8],
    flag_of_bits: NDArray[np.uint8],
    num_rows: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], list[int], list[int], list[int]] | None: ...

class Dram:
    def __init__(
        self,
        *,
        channels: int,
        line_bytes: int,
        lines_per_row: int,
        tck_fs: int,
        ideal_bytes_per_s: int,
        ramp: Sequence[int],
        pace: tuple[int, int],
        first_pass: int,
        later_pace: tuple[int, int],
        loss: tuple[int, int],
        data_cycles: int,
        refresh_interval: int,
        blocked: int,
        rows_reopened: int,
    ) -> None: ...
    @property
    def refresh_interval(self) -> int: ...
    def read(self, lines: int, start_ps: int) -> tuple[int, int, int]: ...

class Commands:
    def __init__(self, dram: Dram, double_buffered: bool, tile_bytes: int, buffer_bytes: int) -> None: ...
    def add(self, expert: Sequence[int], gate_up: Sequence[int], down: Sequence[int]) -> None: ...
    def run(
        self,
        hidden: int,
        intermediate: int,
        bits: Sequence[int],
        tokens: Sequence[int],
        dram_bytes: Sequence[int],
        start_ps: int,
        bulk_until_ps: int,
        bulk_dram_ps: int,
        bulk_total_ps: int,
        /,
    ) -> int | tuple[int, int, int, int, int, int, int, int, int]: ...
