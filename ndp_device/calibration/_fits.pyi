"""Types of the C++ module (csrc/module.cpp)."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

def fit_matrix(
    weights: NDArray[Any],
    dtype: str,
    group_size: int,
    widths: Sequence[int],
    costs: Sequence[float],
    planes: NDArray[np.uint8],
    scale: NDArray[np.uint16],
    offset: NDArray[np.uint16],
    threads: int,
    isa: Literal["auto", "avx2", "portable"] = "auto",
) -> None: ...
def dequantize_matrix(
    planes: NDArray[Any],
    scale: NDArray[Any],
    offset: NDArray[Any],
    group_size: int,
    values: NDArray[np.float32],
    isa: Literal["auto", "avx2", "portable"],
) -> None: ...
def solve_group(
    widths: Sequence[int],
    costs: Sequence[float],
    weights: NDArray[np.float32],
    product: NDArray[np.float32],
    square: NDArray[np.float32],
    feedback: NDArray[np.float32] | None,
    importance: NDArray[np.float32] | None,
    codes: NDArray[np.uint8],
    scale: NDArray[np.float32],
    offset: NDArray[np.float32],
    sweeps: int,
    threads: int,
    isa: Literal["auto", "avx2", "portable"] = "auto",
) -> None: ...
