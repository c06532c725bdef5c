"""Types of the C++ module (csrc/module.cpp)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_PADDED_GROUP: int

def supported_isas() -> list[str]: ...
def kernel_group(group_size: int, cols: int) -> int: ...

class Component:
    @property
    def nbytes(self) -> int: ...
    def tobytes(self) -> bytes: ...

class PackedMatrix:
    @property
    def nbytes(self) -> int: ...
    @property
    def meta_nbytes(self) -> int: ...

class PreparedExpert:
    @property
    def nbytes(self) -> int: ...
    def masked(self, w13: Sequence[Component], w2: Sequence[Component]) -> PreparedExpert: ...
    def with_activation(
        self,
        linear: float,
        cubic: float,
        up_bias: float,
        limit: float,
        b1: NDArray[np.float32],
        b3: NDArray[np.float32],
        b2: NDArray[np.float32],
    ) -> PreparedExpert: ...

def quantized_expert(w13: PackedMatrix, w2: PackedMatrix, limbs: int) -> PreparedExpert: ...
def full_expert(
    dtype: int,
    w1: NDArray[Any],
    w3: NDArray[Any],
    w2: NDArray[Any],
    s1: NDArray[np.float32],
    s3: NDArray[np.float32],
    s2: NDArray[np.float32],
    rows: int,
    cols: int,
) -> PreparedExpert: ...

class Engine:
    def __init__(self, isa: str, threads: int) -> None: ...
    def stay_awake(self, awake: bool) -> None: ...
    def pack(self, planes: NDArray[np.uint8], halves: int, group: int) -> Component: ...
    def assemble(
        self,
        components: Sequence[Component],
        rows: int,
        cols: int,
        halves: int,
        group: int,
        scale: NDArray[np.uint16],
        offset: NDArray[np.uint16],
        group_size: int,
        perm: NDArray[np.int32],
    ) -> PackedMatrix: ...
    def fp4_matrix(
        self, codes: NDArray[np.uint8], scales: NDArray[np.uint8], of_rows: NDArray[np.float32], halves: int
    ) -> PackedMatrix: ...
    def bytes_matrix(
        self, dtype: int, codes: NDArray[np.uint8], scales: NDArray[np.float32], block_rows: int, block_cols: int
    ) -> PackedMatrix: ...
    def pack_bytes(self, source: PreparedExpert, limbs: int) -> PreparedExpert: ...
    def execute(
        self,
        x: NDArray[np.float32],
        experts: Sequence[PreparedExpert],
        pair_rows: NDArray[np.int32],
        pair_experts: NDArray[np.int32],
        gates: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> None: ...
    def multiply(self, x: NDArray[np.float32], matrix: PackedMatrix, limbs: int, y: NDArray[np.float32]) -> None: ...
    def read_stream(self, data: NDArray[np.uint8], streams: int, prefetch_bytes: int) -> int: ...
