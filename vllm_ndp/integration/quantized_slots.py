"""Hot slots at 1 to 4 bits: K experts of a layer as replicas in the engine's own memory, run by the device's kernel.

A slot of 4 bits takes about a quarter of one in 16, so the same GPU memory holds more experts. Only decode and prompt
rows of hot experts run here; what streams is in full precision as ever. Knows replicas and a kernel. Does not know
requests, plans or the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.errors import ConfigError
from ndp_device.kernels.kernel import Kernel
from ndp_device.replicas.format import ReplicaFiles
from vllm_ndp.integration.hot_slots import CpuSlotKernel, CudaSlotKernel, HotSlots, SlotPairs, SlotWeights


class QuantizedSlots(HotSlots):
    """Of one layer. `held` has no slots of its own: it says dtype and place of tensors."""

    def __init__(
        self, kernel: CpuSlotKernel | CudaSlotKernel, held: SlotWeights, num_experts: int, num_slots: int
    ) -> None:
        super().__init__(kernel, held, num_experts)
        self.expert_in = np.full(num_slots, -1)
        self._experts: list[Any] = [None] * num_slots  # prepared
        self._low: Kernel | None = None

    @property
    def num_bytes(self) -> int:
        return sum(expert.nbytes for expert in self._experts if expert is not None)

    @property
    def takes_few_rows(self) -> bool:
        return False

    def put(self, slot: int, kernel: Kernel, prepared: Any) -> None:
        self._low = kernel
        self._experts[slot] = prepared

    def run(self, x: torch.Tensor, pairs: SlotPairs) -> torch.Tensor:
        if not pairs.counts:
            return torch.zeros_like(x)
        return self._run(x, pairs.topk_weights.numpy(), pairs.slots.numpy())

    def run_anything(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        if any(expert is None for expert in self._experts):  # vLLM profiles before the first placement
            return torch.zeros_like(x)
        slots = (topk_ids % max(len(self._experts), 1)).numpy()
        return self._run(x, topk_weights.numpy(), slots) if self._experts else torch.zeros_like(x)

    def _run(self, x: torch.Tensor, weights: NDArray[np.float32], slots: NDArray[Any]) -> torch.Tensor:
        """x [T, H]; weights [T, k]; slots [T, k], -1 = elsewhere."""
        assert self._low is not None
        rows, columns = np.nonzero(slots >= 0)
        used, places = np.unique(slots[rows, columns], return_inverse=True)
        sums = self._low.execute(
            x.detach().float().numpy(),
            [self._experts[slot] for slot in used.tolist()],
            rows.astype(np.int32),
            places.astype(np.int32),
            weights[rows, columns].astype(np.float32),
        )
        return torch.from_numpy(sums).to(x.dtype)


class ReplicaFill:
    """Puts replicas of one width into slots, as a streamer puts full-precision experts there."""

    def __init__(
        self, replicas: Path, digest: str, bits: int, kernel: Kernel, layers: range, slots: dict[int, HotSlots]
    ) -> None:
        """layers: of the model, which this worker counts from 0; slots: of each of them."""
        self._files, self._bits, self._kernel = ReplicaFiles(replicas, model_digest=digest), bits, kernel
        self._layers, self._slots = layers, slots
        if bits not in self._files.manifest.bits:
            raise ConfigError(
                f"ndp setting 'slot_bits' is {bits}, the replicas in {replicas} have {list(self._files.manifest.bits)} "
                "bits: run `vllm-ndp quantize` with --bits 1,2,3,4"
            )

    def fill(self, layer: int, expert: int, to: SlotWeights, slot: int) -> None:
        slots, of_model = self._slots[layer], self._layers[layer]
        assert isinstance(slots, QuantizedSlots)
        prepared = self._kernel.prepare(self._files.expert(of_model, expert, self._bits))
        self._files.check(of_model)
        self._files.release(of_model)
        slots.put(slot, self._kernel, prepared)
