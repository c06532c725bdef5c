"""Types of the C++ module (csrc/stacks.cpp)."""

import numpy as np
from numpy.typing import NDArray

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
