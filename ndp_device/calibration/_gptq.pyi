"""Types of the C++ module (csrc/gptq.cpp)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
