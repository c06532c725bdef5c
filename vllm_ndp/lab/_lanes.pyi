"""Types of the C++ module (csrc/lanes.cpp and stacks.cpp)."""

import numpy as np
from numpy.typing import NDArray

def two_caches(
    experts: NDArray[np.int64],
    need: NDArray[np.uint8],
    high: NDArray[np.bool_],
    low: NDArray[np.bool_],
    high_places: int,
    low_places: int,
    weights: NDArray[np.float64],
    flags: NDArray[np.uint8],
) -> None: ...
def stack_depths(
    ids: NDArray[np.uint16],
    rows: NDArray[np.int64],
    ends: NDArray[np.int64],
    num_experts: int,
    policy: str,
    early_tokens: int,
    counts: NDArray[np.int64],
    early: NDArray[np.int64],
) -> None: ...
