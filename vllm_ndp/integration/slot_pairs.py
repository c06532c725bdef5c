"""The hot pairs of a split as tensors, in the form that the slots of this worker take. Knows no layers or steps."""

from __future__ import annotations

import torch

from vllm_ndp.integration.hot_slots import HotSlots, SlotPairs
from vllm_ndp.layer.split import HotArrays, Split, Splitter


class HotViews:
    """On a CPU views of what the splitter has written, valid until the next split; on a GPU a copy."""

    def __init__(self, splitter: Splitter, device: torch.device) -> None:
        self._splitter, self._device = splitter, device
        self._arrays: HotArrays | None = None
        self._slots, self._weights = torch.empty(0, dtype=torch.int32), torch.empty(0)
        self._rows = torch.empty(0, dtype=torch.int64)
        self._tables: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, split: Split, slots: HotSlots, topk_ids: torch.Tensor, applied: torch.Tensor) -> SlotPairs | None:
        """topk_ids [T, k]; applied f32 [T, k]: what outputs are multiplied with. None where no pair is hot here."""
        splitter, num_hot, num_rows = self._splitter, split.num_hot, len(topk_ids)
        if not num_hot:
            return None
        if self._device.type != "cpu":
            if not splitter.native.moved():  # the table says it all, where the GPU has it
                return SlotPairs(slots.expert_map[topk_ids], applied)
            where = torch.from_numpy(splitter.hot.where[: topk_ids.numel()]).to(self._device)
            return SlotPairs(where.view(topk_ids.shape), applied)
        if self._arrays is not splitter.hot:
            self._follow(splitter.hot)
        if not splitter.native.is_listed:
            return SlotPairs(*self._table(num_rows, splitter.native.num_columns), None, splitter.native.idle_rows)
        if num_hot == num_rows * splitter.top_k:
            return SlotPairs(*self._table(num_rows, splitter.top_k))
        listed = self._slots[:num_hot].unsqueeze(1), self._weights[:num_hot].unsqueeze(1)
        return SlotPairs(*listed, self._rows[:num_hot])

    def _follow(self, arrays: HotArrays) -> None:
        """A step needed more room."""
        self._arrays = arrays
        self._slots, self._weights = torch.from_numpy(arrays.slots), torch.from_numpy(arrays.topk_weights)
        self._rows = torch.from_numpy(arrays.rows)
        self._tables.clear()

    def _table(self, num_rows: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots i32 and weights f32 [T, C]."""
        key = num_rows, num_columns
        if key not in self._tables:
            size = num_rows * num_columns
            self._tables[key] = self._slots[:size].view(key), self._weights[:size].view(key)
        return self._tables[key]
