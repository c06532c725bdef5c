"""csrc/values.cpp."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def holds_nan_of_e4m3(codes: NDArray[np.uint8]) -> bool: ...
def planes_of_nibbles(words: NDArray[np.uint32], planes: NDArray[np.uint8]) -> None: ...
def words_of_awq(stored: NDArray[np.uint32], words: NDArray[np.uint32]) -> None: ...
def values_of_nibbles(
    words: NDArray[np.uint32],
    levels: NDArray[np.float32],
    scale: NDArray[np.float32],
    zero: NDArray[np.float32],
    values: NDArray[Any],
    is_bfloat16: bool,
) -> None: ...
