"""Where each expert is, one number each: a slot of this worker, or why it has none. One table per plan.

    slot >= 0    in GPU memory, here             WARM         decode rows: on the host's CPU
    DEVICE       decode rows: on the device      ELSEWHERE    in GPU memory of another rank

Prompt rows of experts without a slot are streamed, or sent to the device where that ends sooner: split.py decides so
layer by layer. Slots are filled while the engine runs; the code that fills one says so here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DEVICE, WARM, ELSEWHERE, STREAM = -1, -2, -3, -4
"""Places that are no slots. STREAM is one of pairs only."""


NOBODY = -1


class Owners:
    """Which GPU holds a hot expert of E in each of L layers, where GPUs hold whole ones (expert parallelism).

    An expert that stays keeps its GPU. One that becomes hot goes to the GPU that holds fewest of its layer. Every rank,
    and replay, comes to the same answer by itself. At the start no expert is anybody's.
    """

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


class Tiers:
    """Tiers of E experts in L layers. `slots` [L, E] is read to split pairs; before the first plan all are cold."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        owners: Owners | None = None,
        rank: int | None = None,
    ) -> None:
        """owners: where GPUs hold whole experts. rank: the GPU of this worker, None where one table is of all GPUs."""
        shape = num_layers, num_experts
        self.where: NDArray[np.int32] = np.full(shape, DEVICE, np.int32)
        self.without_slot: NDArray[np.int32] = np.full(shape, DEVICE, np.int32)
        """Where an expert is while it has no slot."""
        self.own: NDArray[np.bool_] = np.zeros(shape, np.bool_)
        """Experts that are to have a slot here."""
        self.gpus: NDArray[np.int64] | None = None if owners is None else np.full(shape, -1, np.int64)
        """The GPU that holds each hot expert, -1: none."""
        self.hot_bits: NDArray[np.uint8] = np.zeros(shape, np.uint8)
        """Width of each hot expert if widths differ, else 0."""
        self.owners, self.rank = owners, rank

    def activate(
        self, hot: NDArray[np.bool_], warm: NDArray[np.bool_] | None = None, widths: NDArray[np.uint8] | None = None
    ) -> None:
        """A plan takes effect: hot and warm experts [L, E], and the bits of hot ones where each has its own.

        No expert has a slot then; each holder of experts names its slots again.
        """
        self.own[:] = hot
        self.without_slot[:] = DEVICE
        if warm is not None:
            self.without_slot[warm] = WARM
        if self.owners is not None and self.gpus is not None:
            for layer, row in enumerate(hot):
                self.gpus[layer] = self.owners.place(layer, row)
            if self.rank is not None:
                self.own[:] = self.gpus == self.rank
                self.without_slot[hot & ~self.own] = ELSEWHERE
        self.hot_bits[:] = 0 if widths is None else widths
        self.where[:] = self.without_slot

    def name_all(self) -> None:
        """Every hot expert has a slot, which is called by the expert's number: where nothing is computed."""
        layers, experts = np.nonzero(self.own)
        self.where[layers, experts] = experts
