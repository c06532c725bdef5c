"""Where each expert is, one number each: a slot of this worker, or why it has none. One table per plan.

    slot >= 0    in GPU memory, here             WARM         decode rows: on the host's CPU
    DEVICE       decode rows: on the device      ELSEWHERE    in GPU memory of another rank

Prompt rows of experts without a slot are streamed, or sent to the device where that ends sooner: split.py decides so
layer by layer. Slots are filled while the engine runs; the code that fills one says so here. Knows a placement. Does
not know tensors, requests or how a plan was made.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ndp.planning.owners import Owners

DEVICE, WARM, ELSEWHERE, STREAM = -1, -2, -3, -4
"""Places that are no slots. STREAM is one of pairs only."""


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
