"""Types of the C++ module (csrc/split.cpp)."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIAS_PAIRS: int
PLACES: tuple[int, int, int, int]
NUM_KINDS: int

def gather(x: int, row_bytes: int, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None: ...
def add_rows(out: int, num_rows: int, sums: NDArray[np.float32], rows: NDArray[np.int64], bfloat16: bool) -> None: ...

class Splitter:
    def __init__(
        self,
        where: Sequence[NDArray[np.int32]],  # [L] of [E]
        top_k: int,
        aliases: bool,
        weighs_input: bool,
        gathers_prompts: bool,
        prompts_anywhere: bool,
        prompt_bits: int,
        owners: Sequence[NDArray[np.int64]],  # [L] of [E]
        hot_bits: Sequence[NDArray[np.uint8]],  # [L] of [E]
        bytes_of_width: Sequence[int],  # [256], or none
    ) -> None: ...
    def note_into(self, ids: NDArray[np.int16], weights: NDArray[np.float32]) -> None: ...  # [L, N, k]
    def price(
        self,
        offload_bits: int,
        beside: float,
        gpu_ps: Callable[[int], float],  # (rows), each asked once; 0: a layer's launch
        message_ps: Callable[[int, int], float],  # (rows, pairs)
        device_ps: Callable[[int, int], float],  # (bits, rows)
        shared_ps: Callable[[int], float],  # (rows)
    ) -> None: ...
    def price_host(self, rows_ps: Callable[[int], int], expert_ps: Callable[[int], int]) -> None: ...
    def use_hot(
        self,
        where: NDArray[np.int32],
        slots: NDArray[np.int32],
        weights: NDArray[np.float32],
        rows: NDArray[np.int64],
    ) -> None: ...
    def use(
        self,
        place: int,
        sent: NDArray[np.int64],
        local: NDArray[np.int32],
        experts: NDArray[np.int32],
        bits: NDArray[np.uint8],
        weights: NDArray[np.float32],
    ) -> None: ...
    def begin_step(
        self,
        entries: NDArray[np.int64] | None,
        owners: NDArray[np.int32],
        is_decode: NDArray[np.uint8],
        bits: list[NDArray[np.uint8]],
        from_weights: list[NDArray[np.float32] | None],
        counts: NDArray[np.int64],
    ) -> None: ...
    def split(
        self,
        layer: int,
        topk_ids: int,
        topk_weights: int,
        offload: bool | Callable[..., Iterable[int]],
        prompts: Callable[..., Iterable[int]] | None,
    ) -> tuple[Any, ...]: ...  # (rows, pairs) of device, warm, stream; then split.Split from num_hot on
    def finder(self) -> Any: ...  # a capsule: ndp_device/transport/csrc/find_pairs.h
    def found(self) -> tuple[Any, ...]: ...
    def fall_back(self) -> int: ...
    def moved(self) -> list[int]: ...
