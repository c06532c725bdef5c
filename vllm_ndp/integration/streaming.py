"""How full-precision experts leave the pool: into a hot slot, or through the kernel for rows that need them now.

Through the kernel they pass a staging slot, expert by expert. On a GPU two slots take turns, and one expert arrives
while another one computes. Knows pool, kernel layouts and pairs of one layer. Does not know requests or plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.experts.part import Part
from vllm_ndp.integration.cuda.streams import Event
from vllm_ndp.integration.experts_pool import ExpertsPool
from vllm_ndp.integration.hot_slots import CpuSlotKernel, CudaSlotKernel, HotSlots, SlotWeights
from vllm_ndp.layer.split import Pairs


class StagingStreamer:
    def __init__(self, pool: ExpertsPool, kernel: CpuSlotKernel | CudaSlotKernel, like: SlotWeights) -> None:
        """kernel: of any layer's slots; like: their layout and dtype."""
        self._pool, self._kernel = pool, kernel
        self._copies, self._like = kernel.copies if isinstance(kernel, CudaSlotKernel) else None, like
        self._staging = [like.empty_like(1) for _ in range(1 if self._copies is None else 2)]
        self._free: list[Event | None] = [None for _ in self._staging]  # passed when what lay there has been read
        self._turn = 0
        self.staging_bytes = sum(slot.num_bytes for slot in self._staging)
        self.description = "the checkpoint, read page by page"

    def release(self) -> None:
        """Give back memory that calls so far have filled, and that may never be needed again."""
        if self._copies is None:  # fresh pages take memory once they are written
            self._staging = [self._like.empty_like(1)]

    def fill(self, layer: int, expert: int, to: SlotWeights, slot: int) -> None:
        """Write one expert into slot `slot`."""
        self._load(layer, expert, None, None, to, slot)

    def _load(
        self, layer: int, expert: int, share: Part | None, after: Event | None, to: SlotWeights, slot: int
    ) -> None:
        """after: where on the stream the slot has been read, if that was noted."""
        weights = self._pool.expert(layer, expert, share)
        if isinstance(self._kernel, CudaSlotKernel):
            self._kernel.load(to, slot, weights, after)
        else:
            self._kernel.load(to, slot, weights)
        self._pool.check(layer)

    def run(
        self,
        layer: int,
        x: torch.Tensor,
        pairs: Pairs,
        slots: HotSlots,
        keep: Mapping[int, int],
        shares: Sequence[Part],
    ) -> torch.Tensor:
        """Weighted sum over the pairs of each row, f32 [T, H], in an order that the pairs alone decide. keep: expert ->
        the slot where it stays.

        shares: which parts of each expert; an expert that stays passes through in its own worker's part only.
        """
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if not pairs:  # every expert that is streamed is another rank's
            return total
        order = np.argsort(pairs.experts, kind="stable")  # each expert is read once per call
        all_rows, all_weights = self._upload([pairs.rows[order], pairs.topk_weights[order]], x.device)
        begin = self._record(x.device)
        experts, starts = np.unique(pairs.experts[order], return_index=True)
        ends = dict(zip(experts.tolist(), zip(starts, [*starts[1:], len(order)], strict=True), strict=True))

        def sums(expert: int, held: SlotWeights, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
            """The rows of an expert that lies in this slot, and what it gives each of them."""
            start, end = ends[expert]
            rows = all_rows[start:end]
            weights = all_weights[start:end].unsqueeze(1).clone()  # Triton compiles anew for addresses that are uneven
            index = torch.full((len(rows), 1), slot, dtype=torch.int32, device=x.device)
            return rows, slots.kernel.run(x.index_select(0, rows), held, weights, index)

        own = len(shares) == 1  # and not those of all ranks, one after the other
        here = {expert: slot for expert in ends if own and (slot := slots.whole_expert_in(expert)) is not None}
        first = {expert: sums(expert, slots.held, slot) for expert, slot in here.items() if slot in keep.values()}
        for expert in ends:  # in this order, wherever an expert lies: so does a row's sum
            if expert in here:
                rows, part = first.get(expert) or sums(expert, slots.held, here[expert])
                total.index_add_(0, rows, part.float())
                continue
            for share in shares:
                if (slot := keep.get(expert)) is not None:
                    slots.migrate(slot, expert, partial(self._load, layer, expert, None, begin))
                    rows, part = sums(expert, slots.held, slot)
                else:
                    self._turn = (self._turn + 1) % len(self._staging)
                    held = self._staging[self._turn]
                    self._load(layer, expert, share, self._free[self._turn], held, 0)
                    rows, part = sums(expert, held, 0)
                    self._free[self._turn] = self._record(x.device)
                total.index_add_(0, rows, part.float())
        return total

    def _upload(self, arrays: list[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
        if self._copies is None:
            return [torch.from_numpy(array).to(device) for array in arrays]
        return self._copies.of_this_thread(device).upload(arrays, device)

    def _record(self, device: torch.device) -> Event | None:
        return None if self._copies is None else self._copies.of_this_thread(device).record_main()
