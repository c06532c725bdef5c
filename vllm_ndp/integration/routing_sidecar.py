"""The router's choices, paged like the KV cache: one entry per KV slot, so they live exactly as long as the KV does.

Chunked prefill, prefix-cache hits, preemption and recompute therefore all give the counts of one uncached pass:
whatever wrote the KV of a position wrote its routing too. Knows slots and block tables, not requests or policies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


class RoutingSidecar:
    def __init__(self, num_layers: int, num_blocks: int, block_size: int, top_k: int, device: torch.device) -> None:
        self.block_size = block_size
        num_slots = num_blocks * block_size
        # Not zeroed: pages become resident as KV slots are used, and only written slots are ever read.
        self._ids = torch.empty((num_layers, num_slots, top_k), dtype=torch.int16, device=device)
        self._weights = torch.empty((num_layers, num_slots, top_k), dtype=torch.float32, device=device)
        self._host = (self._ids.numpy(), self._weights.numpy()) if device.type == "cpu" else None

    @property
    def num_bytes(self) -> int:
        return self._ids.nbytes + self._weights.nbytes

    def write(self, layer: int, slots: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """slots i64 [T], ids [T, k] global expert ids, weights f32 [T, k]."""
        if self._host is not None:  # a few rows: numpy's assignment costs a third of torch's
            index = slots.numpy()
            self._host[0][layer][index] = ids.numpy()
            self._host[1][layer][index] = weights.numpy()
            return
        self._ids[layer].index_copy_(0, slots, ids.to(torch.int16))
        self._weights[layer].index_copy_(0, slots, weights.to(torch.float32))

    def slots(self, blocks: Sequence[int], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """KV slots of a request's positions, from its block table."""
        table = np.asarray(blocks, dtype=np.int64)
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def read(self, slots: NDArray[np.int64], layer: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Expert ids i64 [T, L, k] and router weights f32 [T, L, k] of these slots; L is 1 when a layer is named."""
        index = torch.from_numpy(slots).to(self._ids.device)
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        ids = self._ids[layers].index_select(1, index).transpose(0, 1)
        weights = self._weights[layers].index_select(1, index).transpose(0, 1)
        return ids.to("cpu", torch.int64).contiguous().numpy(), weights.cpu().contiguous().numpy()
