"""csrc/values.cpp."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

def fp4_to_bfloat16(codes: NDArray[np.uint8], scale: NDArray[np.float32], values: NDArray[Any]) -> None: ...
def holds_nan_of_e4m3(codes: NDArray[np.uint8]) -> bool: ...
def planes_of_nibbles(words: NDArray[np.uint32], planes: NDArray[np.uint8]) -> None: ...
