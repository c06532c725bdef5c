"""Hot slots for the device's kernel: experts of a layer in the engine's process, as replicas of 1 to 8 bits.

A slot of 4 bits takes about a quarter of one in 16, so the same GPU memory holds more experts. A joint plan may give
every hot expert a width of its own. Experts of 16 bits are then read from the checkpoint as it lies in memory. Experts
that stream are in full precision as ever.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ndp_device.checkpoint.files import model_digest
from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.experts.expert import QuantizedExpert, StoredExpert
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.checkpoint import CheckpointExperts
from ndp_device.replicas.format import ReplicaFiles
from vllm_ndp.integration.hot_slots import (
    CpuSlotKernel,
    CudaSlotKernel,
    HotSlots,
    SlotPairs,
    SlotWeights,
    weighted_sums,
)

_WARM_UP_ROWS = 16


class QuantizedSlots(HotSlots):
    """Quantized slots of one layer. `held` has no slots of its own: it says dtype and place of tensors."""

    def __init__(
        self,
        kernel: CpuSlotKernel | CudaSlotKernel,
        held: SlotWeights,
        num_experts: int,
        num_slots: int,
        *tiers: NDArray[np.int32],
    ) -> None:
        super().__init__(kernel, held, num_experts, *tiers)
        self.expert_in = np.full(num_slots, -1)
        self._experts: list[Any] = [None] * num_slots  # prepared
        self._bits = np.zeros(num_experts, np.uint8)  # of each expert that is here or on its way
        self._low: NativeKernel | None = None

    @property
    def kernel_name(self) -> str:
        return "the device's, native"

    @property
    def num_bytes(self) -> int:
        """Bytes of quantized experts. Experts in full precision lie in the mapped checkpoint, which is the pool's."""
        return sum(expert.nbytes for expert in self._experts if expert is not None)

    @property
    def aliases(self) -> bool:
        return False

    def whole_expert_in(self, expert: int) -> None:
        """Experts in full precision are not in `held`, but in the checkpoint."""
        return None

    def bits_of(self, expert: int) -> int:
        """Width at which an expert is to be here; 0 = the setting's."""
        return int(self._bits[expert])

    def exchange_at(self, wanted: NDArray[np.bool_], widths: NDArray[np.uint8] | None) -> list[tuple[int, int]]:
        """(slot, expert) for the wanted experts [E] that are not here at these widths [E]; None: all have the same.

        Experts that are not wanted, or at another width, leave at once.
        """
        at = np.zeros(len(wanted), np.uint8) if widths is None else widths
        for slot, expert in enumerate(self.expert_in.tolist()):
            if expert >= 0 and not (wanted[expert] and self._bits[expert] == at[expert]):
                self._name(expert, -1)
                self.expert_in[slot], self._experts[slot] = -1, None
        self._bits = np.where(wanted, at, 0).astype(np.uint8)
        return self.exchange(wanted)

    def put(self, slot: int, kernel: NativeKernel, prepared: Any) -> None:
        self._low = kernel
        self._experts[slot] = prepared

    def run(self, x: torch.Tensor, pairs: SlotPairs | None) -> torch.Tensor:
        if pairs is None:
            return torch.zeros_like(x)
        slots, weights = pairs.slots.numpy(), pairs.topk_weights.numpy()
        if pairs.rows is not None:
            return self._sums(x, pairs.rows.numpy(), slots[:, 0], weights[:, 0])
        return self._run(x, weights, slots)

    def run_anything(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Some rows only: a whole step of a model of real size takes half a minute, and its answer is thrown away."""
        out = torch.zeros_like(x)
        if self._experts and all(expert is not None for expert in self._experts):  # else before the first placement
            some = slice(_WARM_UP_ROWS)
            slots = (topk_ids[some] % len(self._experts)).numpy()
            out[some] = self._run(x[some], topk_weights[some].numpy(), slots)
        return out

    def _run(self, x: torch.Tensor, weights: NDArray[np.float32], slots: NDArray[Any]) -> torch.Tensor:
        """x [T, H]; weights [T, k]; slots [T, k], -1 = elsewhere."""
        rows, columns = np.nonzero(slots >= 0)
        return self._sums(x, rows, slots[rows, columns], weights[rows, columns])

    def _sums(
        self, x: torch.Tensor, rows: NDArray[np.int64], slots: NDArray[Any], weights: NDArray[np.float32]
    ) -> torch.Tensor:
        """x [T, H]; rows, slots and weights of each pair [P]."""
        assert self._low is not None
        return weighted_sums(self._low, self._experts, x, rows, slots, weights)


class ReplicaFill:
    """Puts experts into slots at a width, as a streamer puts full-precision ones there."""

    def __init__(
        self,
        model_dir: Path,
        replicas: Path | None,
        bits: int,
        kernel: NativeKernel,
        layers: range,
        slots: dict[int, HotSlots],
    ) -> None:
        """replicas: None where the checkpoint holds codes of that width. bits: where a slot is not told its own.
        layers: of the model, which this worker counts from 0; slots: of each of them."""
        self._checkpoint, self._files = CheckpointExperts(model_dir), None
        self._bits, self._kernel = bits, kernel
        self._layers, self._slots = layers, slots
        if replicas is None:
            return
        self._files = ReplicaFiles(replicas, model_digest=model_digest(model_dir), once=True)
        if bits not in (*self._files.manifest.bits, FULL_PRECISION_BITS):
            wanted = ",".join(map(str, sorted({*self._files.manifest.bits, bits})))
            raise ConfigError(
                f"ndp setting 'slot_bits' is {bits}, the replicas in {replicas} have {list(self._files.manifest.bits)} "
                f"bits: run `vllm-ndp quantize` with --bits {wanted}"
            )

    def fill(self, layer: int, expert: int, to: SlotWeights, slot: int) -> None:
        slots, of_model = self._slots[layer], self._layers[layer]
        assert isinstance(slots, QuantizedSlots)
        slots.put(slot, self._kernel, self._prepared(of_model, expert, slots.bits_of(expert) or self._bits))

    def _prepared(self, layer: int, expert: int, bits: int) -> Any:
        if bits == FULL_PRECISION_BITS:
            return self._kernel.prepare(self._checkpoint.expert(layer, expert))
        if self._files is None:
            prepared = self._kernel.prepare(self._as_stored(layer, expert))
            self._checkpoint.check(layer)
            if expert == self._checkpoint.shape.num_experts - 1:
                self._checkpoint.release()  # its codes were copied
            return prepared
        prepared = self._kernel.prepare(self._files.expert(layer, expert, bits))
        self._files.check(layer)
        self._files.release(layer)
        return prepared

    def _as_stored(self, layer: int, expert: int) -> QuantizedExpert | StoredExpert:
        stored = self._checkpoint.as_stored(layer, expert)
        if stored is None:
            raise ConfigError(
                f"expert {expert} of layer {layer} is stored in another way than the first, which holds codes of "
                f"{self._bits} bits in the order of its columns: make replicas with `vllm-ndp quantize --bits "
                f"{self._bits}` and name them in 'replicas'"
            )
        return stored
