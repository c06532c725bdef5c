"""Which of several GPUs holds a hot expert, where each of them holds whole ones (expert parallelism). Values only.

An expert that stays keeps its GPU, so that a change of the hot set moves no expert between two of them. An expert
that becomes hot goes to the GPU that holds fewest of its layer. Every rank, and replay, comes to the same answer by
itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NOBODY = -1


class Owners:
    """Owners of E experts in each of L layers; at the start no expert is anybody's."""

    def __init__(self, num_gpus: int, num_layers: int, num_experts: int) -> None:
        self.num_gpus = num_gpus
        self._of = np.full((num_layers, num_experts), NOBODY, np.int64)

    def of(self, layer: int) -> NDArray[np.int64]:
        """[E], the GPU of each expert, NOBODY where it is cold."""
        row: NDArray[np.int64] = self._of[layer]
        return row

    def place(self, layer: int, hot: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Make these experts [E] of a layer hot. Returns the GPU of each [E], NOBODY for cold experts."""
        owners = np.where(hot, self._of[layer], NOBODY)
        held = np.bincount(owners[owners != NOBODY], minlength=self.num_gpus)
        for expert in np.flatnonzero(hot & (owners == NOBODY)).tolist():
            owners[expert] = gpu = int(held.argmin())  # the first of those with fewest
            held[gpu] += 1
        self._of[layer] = owners
        return owners

    def streaming(self, layer: int) -> NDArray[np.int64]:
        """[E], the GPU that computes each expert while it passes through: the one where it is to stay, else in turn."""
        owners = self._of[layer]
        return np.where(owners == NOBODY, np.arange(len(owners)) % self.num_gpus, owners)


def slots_per_gpu(num_hot: int, num_gpus: int) -> int:
    """How many hot experts of a layer one GPU may have to hold."""
    return -(-num_hot // num_gpus)
