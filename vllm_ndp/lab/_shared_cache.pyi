"""Types of the C++ module (csrc/shared_cache.cpp)."""

import numpy as np
from numpy.typing import NDArray

def run(
    experts: NDArray[np.int64],
    rows: NDArray[np.int64],
    start: NDArray[np.int64],
    num_experts: int,
    places: int,
    one_pool: bool,
    before: NDArray[np.float64],
    beside: NDArray[np.float64],
    active: NDArray[np.int64],
    gpu: NDArray[np.float64],
    host: NDArray[np.float64],
    hop: NDArray[np.float64],
    opening: float,
    copy: float,
    copies: bool,
    computes: bool,
    fills: bool,
    done: NDArray[np.uint8],
    ends: NDArray[np.float64],
    filled: NDArray[np.int64],
) -> None: ...
