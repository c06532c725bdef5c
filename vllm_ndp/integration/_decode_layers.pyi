"""Types of the C++ module (csrc/decode_layers.cpp)."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

MOST_PAIRS: int
ALIAS_PAIRS: int

class DecodeLayers:
    def __init__(
        self,
        routing_ids: NDArray[np.int16],  # [L, N, k]
        routing_weights: NDArray[np.float32],  # [L, N, k]
        expert_maps: list[NDArray[np.int32]],  # [L] of [E]
        hot_ps: NDArray[np.int64],  # [experts touched, pairs]
        overhead_ps: int,
        slots: NDArray[np.int32],
        topk_weights: NDArray[np.float32],
        sent_rows: NDArray[np.int64],
        pair_rows: NDArray[np.int32],
        pair_experts: NDArray[np.int32],
        pair_bits: NDArray[np.uint8],
        pair_weights: NDArray[np.float32],
        activations: NDArray[np.uint8],  # [pairs, bytes of a row]
        hot_rows: NDArray[np.int64],
        weighs_input: bool = False,
    ) -> None: ...
    def price(
        self,
        offload_bits: int,
        gpu_ps: NDArray[np.float64],  # [rows]
        message_ps: NDArray[np.float64],  # [rows, pairs]
        device_ps: Callable[[int, int], float],  # (bits, rows), asked once for each
    ) -> None: ...
    def begin_step(
        self,
        entries: list[int],
        owners: list[int],
        bits: list[NDArray[np.uint8]],
        now_ps: int,
        before_ps: Sequence[int],  # [L]
        shared_ps: int,
    ) -> None: ...
    def split(self, layer: int, topk_ids: int, topk_weights: int, offload: bool) -> int: ...
    def gather(self, x: int, row_bytes: int) -> None: ...
    def add(self, out: int, sums: NDArray[np.float32], bfloat16: bool) -> None: ...
    def end_layer(self, device_ps: int, stream_ps: int, answered: bool) -> None: ...
    def counts(self) -> list[list[int]]: ...
    def moved(self) -> list[int]: ...
    @property
    def now_ps(self) -> int: ...
    @property
    def submit_ps(self) -> int: ...
    @property
    def is_listed(self) -> bool: ...
    @property
    def num_hot(self) -> int: ...
    @property
    def num_sent(self) -> int: ...
    @property
    def num_columns(self) -> int: ...
    @property
    def idle_rows(self) -> list[int]: ...
