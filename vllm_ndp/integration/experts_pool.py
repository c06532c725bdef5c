"""Every expert in full precision, as a memory map of the checkpoint: the CXL memory that hot experts come from.

Reads pages only when an expert is migrated or streamed, so resident memory does not grow with the number of experts.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ndp_device.common.activation import Activation
from ndp_device.experts.expert import WHOLE, FullExpert, Part
from ndp_device.replicas.checkpoint import CheckpointExperts

_TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ExpertWeights(NamedTuple):
    """gate w1 and up w3 [I, H], down w2 [H, I], in the checkpoint's dtype, still on disk; biases b1, b3 [I], b2 [H].

    I is that of a share: the whole expert's where one process runs the model.
    """

    w1: torch.Tensor
    w3: torch.Tensor
    w2: torch.Tensor
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


class ExpertsPool:
    """Full-precision experts of this worker's layers, counted from 0. `shape` is of these layers, `model` of all."""

    def __init__(self, model_dir: Path, share: Part = WHOLE) -> None:
        """share: which part of each expert is read unless another one is asked for."""
        self.checkpoint = CheckpointExperts(model_dir)
        self.share = share
        self.shape, self.layout = self.checkpoint.shape, self.checkpoint.layout
        self.model, self._first_layer = self.shape, 0
        self.dtype = _TORCH[self.checkpoint.expert(0, 0).dtype]

    def restrict(self, layers: range) -> None:
        """Restrict the pool to the MoE layers of a pipeline stage."""
        self._first_layer = layers.start
        self.shape = replace(self.model, num_layers=len(layers))

    @property
    def mapped_bytes(self) -> int:
        return self.shape.num_layers * self.shape.num_experts * self.expert_bytes

    @property
    def stored_as(self) -> list[str]:
        """Kinds of tensors that values are read from: how long that takes depends on them."""
        packed = self.checkpoint.packed.values()
        return sorted({str(self.dtype), *(" ".join([*one.parts, one.elements, str(one.bits)]) for one in packed)})

    @property
    def expert_bytes(self) -> int:
        return self.shape.weights_per_expert * self.dtype.itemsize

    @property
    def code_bits(self) -> int | None:
        """Width of slots that may hold experts as they are stored; None: they may not."""
        form = self.checkpoint.stored_form
        return None if form is None else form.bits

    @property
    def stored_expert_bytes(self) -> int:
        """Of an expert as it is stored, for which there must be a slot."""
        stored = self.checkpoint.as_stored(0, 0)
        assert stored is not None
        return stored.nbytes

    @property
    def shares(self) -> list[Part]:
        """All parts of an expert, whose results add up to the expert's."""
        return [Part(index, self.share.count) for index in range(self.share.count)]

    def activation_of(self, layer: int) -> Activation:
        return self.layout.layers[self._first_layer + layer].activation

    def expert(self, layer: int, expert: int, share: Part | None = None) -> ExpertWeights:
        """Weights of one expert, or the part of it that `share` names; default: this worker's own part."""
        part = (share or self.share).of(self.checkpoint.expert(self._first_layer + layer, expert))
        assert isinstance(part, FullExpert)
        # a copy of what lies transposed or interleaved
        w1, w3, w2 = (tensor_over(np.ascontiguousarray(a), self.dtype) for a in (part.w1, part.w3, part.w2))
        if part.biases is None:
            return ExpertWeights(w1, w3, w2)
        gate, up, down = (torch.from_numpy(v) for v in (part.biases.gate, part.biases.up, part.biases.down))
        return ExpertWeights(w1, w3, w2, (gate, up, down))

    def check(self, layer: int) -> None:
        """After using experts of a layer: raise ReplicaError where what was read of them is no longer in their file."""
        self.checkpoint.check(self._first_layer + layer)


with warnings.catch_warnings():  # torch says once per process that an array is not writable; nobody writes into a map
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"0", np.uint8))


def tensor_over(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous, read-only array as a tensor, which keeps the map alive."""
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(dtype)
