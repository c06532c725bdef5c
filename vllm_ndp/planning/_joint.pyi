"""Types of the C++ module (csrc/joint.cpp)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class Problem:
    def __init__(
        self,
        side_of: NDArray[np.int64],  # [C], in the order in which sides are folded
        openings: Sequence[float],  # [C], of a layer's message or launch
        ps: NDArray[np.float64],  # [C, L, E], as loss, moving and turns
        loss: NDArray[np.float64],
        moving: NDArray[np.float64],
        turns: NDArray[np.float64],
        used: NDArray[np.float64],  # [L, E]
        takes: Sequence[NDArray[np.float64]],  # of each budget [C] or [C * L * E]
        budgets: Sequence[float],
    ) -> None: ...
    def times(self, plans: NDArray[np.int64], out: NDArray[np.float64]) -> None: ...  # [K, L * E], [K, L]
    def changes(self, chosen: NDArray[np.int64], out: NDArray[np.float64]) -> None: ...  # [L * E], [C, L, E]
    def tried(self, most: float, out: NDArray[np.int64]) -> None: ...  # [L * E]
    def searched(self, most: float, known: Sequence[NDArray[np.int64]], out: NDArray[np.int64]) -> None: ...
