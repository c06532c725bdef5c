"""The router's choices, paged like the KV cache: one entry per KV slot, so they live exactly as long as the KV does.

Chunked prefill, prefix-cache hits, preemption and recompute therefore all give the counts of one uncached pass. The
pass that wrote the KV of a position wrote its routing too. KV that a connector loads has no routing: its entries count
as none until a pass writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ndp.integration.batch import slot_mapping


def bytes_per_entry(num_layers: int, top_k: int) -> int:
    """Bytes of one KV entry in a sidecar."""
    return num_layers * top_k * (torch.int16.itemsize + torch.float32.itemsize)


class Routed(NamedTuple):
    """The rows of a layer, and what its router chose for them."""

    x: torch.Tensor  # [T, H]
    topk_weights: torch.Tensor  # [T, k]
    topk_ids: torch.Tensor  # [T, k], global expert ids


class Note(NamedTuple):
    """Where a layer's routing lies beside the KV cache."""

    entries: torch.Tensor  # i64 [T]
    ids: torch.Tensor  # i16 [all entries, k]
    weights: torch.Tensor  # f32 [all entries, k]

    def write(self, routed: Routed) -> None:
        self.ids.index_copy_(0, self.entries, routed.topk_ids.to(torch.int16))
        self.weights.index_copy_(0, self.entries, routed.topk_weights.to(torch.float32))


class RoutingSidecar:
    """Memory for the choices of L layers with k experts per token, beside a KV cache of so many blocks."""

    def __init__(self, num_layers: int, top_k: int, device: torch.device, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        shape = (num_layers, num_blocks * block_size, top_k)
        # Not zeroed: pages become resident as KV entries are used, and only written entries are ever read.
        self._ids = torch.empty(shape, dtype=torch.int16, device=device)
        self._weights = torch.empty(shape, dtype=torch.float32, device=device)
        self._of_layer = list(zip(self._ids.unbind(), self._weights.unbind(), strict=True))
        self._lacks: NDArray[np.bool_] | None = None
        """[entries], whose KV came without routing; None as long as no KV did, which is free in every step."""

    @property
    def on_host(self) -> tuple[NDArray[np.int16], NDArray[np.float32]] | None:
        """Memory of ids and weights [L, entries, k] for native writers; None if it lies on a GPU."""
        return (self._ids.numpy(), self._weights.numpy()) if self._ids.is_cpu else None

    @property
    def num_bytes(self) -> int:
        return int(self._ids.nbytes + self._weights.nbytes)

    def note(self, layer: int, slot_mapping: torch.Tensor) -> Note:
        """Where the routing of these entries lies, i64 [T]."""
        return Note(slot_mapping, *self._of_layer[layer])

    def forget(self, blocks: Sequence[int]) -> None:
        """The KV of these blocks comes from elsewhere: none of their entries has routing, until a pass writes it."""
        if self._lacks is None:
            self._lacks = np.zeros(self._ids.shape[1], np.bool_)
        self._lacks.reshape(-1, self.block_size)[blocks] = True

    @property
    def lacks_some(self) -> bool:
        """Whether any KV ever came without routing, so that passes must say what they write."""
        return self._lacks is not None

    def note_written(self, entries: NDArray[np.int64]) -> None:
        """A pass writes the KV and the routing of these entries."""
        if self._lacks is not None:
            self._lacks[entries] = False

    def noted(self, blocks: Sequence[int], num_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of a request's first tokens those that have routing: their positions and their entries."""
        positions = np.arange(num_tokens)
        entries = slot_mapping(blocks, positions, self.block_size)
        if self._lacks is None:
            return positions, entries
        noted = ~self._lacks[entries]
        return positions[noted], entries[noted]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """vLLM copies the KV of blocks (from, to), which some requests begin with: their routing goes along."""
        of_block = np.arange(self.block_size)
        source, target = (np.array(copies)[:, :, None] * self.block_size + of_block).swapaxes(0, 1).reshape(2, -1)
        from_, to = (torch.from_numpy(entries).to(self._ids.device) for entries in (source, target))
        for values in (self._ids, self._weights):
            values.index_copy_(1, to, values.index_select(1, from_))
        if self._lacks is not None:
            self._lacks[target] = self._lacks[source]

    def ids_at(self, entries: torch.Tensor) -> torch.Tensor:
        """i16 [L, T, k], a fresh tensor where the sidecar lies, for entries i64 [T] that lie there too."""
        return self._ids.index_select(1, entries)

    def read(
        self, slot_mapping: NDArray[np.int64], layer: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Expert ids i64 [T, L, k] and router weights f32 [T, L, k] of these entries; L is 1 when a layer is named."""
        index = torch.from_numpy(slot_mapping).to(self._ids.device)
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        ids = self._ids[layers].index_select(1, index).transpose(0, 1)
        weights = self._weights[layers].index_select(1, index).transpose(0, 1)
        return ids.to("cpu", torch.int64).contiguous().numpy(), weights.cpu().contiguous().numpy()
