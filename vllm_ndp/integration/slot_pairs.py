"""The hot pairs of a split as tensors, in the form that the slots of this worker take. Knows no layers or steps."""

from __future__ import annotations

import torch

from vllm_ndp.integration.hot_slots import HotSlots, SlotPairs
from vllm_ndp.layer.split import HotArrays, Split, Splitter

_MOST_KNOWN = 4096
"""Forms of hot pairs whose tensors are kept: to make them costs more than to split few rows."""


class HotViews:
    """On a CPU views of what the splitter has written, valid until the next split; on a GPU a copy."""

    def __init__(self, splitter: Splitter, device: torch.device) -> None:
        self._splitter, self._on_gpu = splitter, device.type != "cpu"
        self._arrays: HotArrays | None = None
        self._known: dict[tuple[int, int, bool], SlotPairs] = {}

    def of(self, split: Split, slots: HotSlots, topk_ids: torch.Tensor, applied: torch.Tensor) -> SlotPairs | None:
        """topk_ids [T, k]; applied f32 [T, k]: what outputs are multiplied with. None where no pair is hot here."""
        splitter, num_hot, num_rows = self._splitter, split.num_hot, topk_ids.shape[0]
        if not num_hot:
            return None
        if self._on_gpu:
            if not splitter.native.moved():  # the table says it all, where the GPU has it
                return SlotPairs(slots.expert_map[topk_ids], applied)
            where = torch.from_numpy(splitter.hot.where[: topk_ids.numel()]).to(topk_ids.device)
            return SlotPairs(where.view(topk_ids.shape), applied)
        if split.num_columns:
            pairs = self._of(num_rows, split.num_columns)
            return pairs._replace(idle_rows=split.idle_rows) if split.idle_rows else pairs
        if num_hot == num_rows * splitter.top_k:
            return self._of(num_rows, splitter.top_k)
        return self._of(num_hot, 1, are_listed=True)

    def _of(self, num_rows: int, num_columns: int, *, are_listed: bool = False) -> SlotPairs:
        """Pairs that the splitter has written, as a table of so many rows or one after the other."""
        arrays, key = self._splitter.hot, (num_rows, num_columns, are_listed)
        if self._arrays is not arrays or len(self._known) > _MOST_KNOWN:  # a step needed more room
            self._arrays, self._known = arrays, {}
        if (known := self._known.get(key)) is None:
            size, shape = num_rows * num_columns, key[:2]
            slots, weights = (torch.from_numpy(each[:size]) for each in (arrays.slots, arrays.topk_weights))
            rows = torch.from_numpy(arrays.rows[:size]) if are_listed else None
            known = self._known[key] = SlotPairs(slots.view(shape), weights.view(shape), rows)
        return known
