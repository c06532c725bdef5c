"""Linear layers that the checkpoint stores quantized, where vLLM has no kernel for them on this processor.

FP8 needs AMX there, 4 bits AVX-512. Their values are made while the checkpoint loads. Such a layer is then like one
that is stored plainly: at `linear_bits`, or in the model's type. Knows names of tensors and their formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ndp_device.checkpoint.opening import packed_linears
from ndp_device.checkpoint.values import Packed
from ndp_device.replicas.checkpoint import StoredTensors


class StoredLinears:
    """Of one worker. Names of layers are vLLM's; the checkpoint has others where several are fused."""

    def __init__(self, model_dir: Path, quantized_experts: Iterable[str] = ()) -> None:
        """quantized_experts: their weights' names."""
        self._model_dir = model_dir
        self._unknown = tuple(name.removesuffix("weight") for name in quantized_experts if ".experts." not in name)
        self.names: set[str] = set()
        """Of the layers without a kernel."""
        self.kept: set[str] = set()
        """Of those that vLLM computes as they are stored."""
        self.vllms_name: Callable[[str], str | None] = lambda name: name

    def values_in(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors as vLLM reads them; those of these layers as one weight each.

        Quantized experts that are not called so (Granite's) are left out: vLLM's models do not know their parts.
        """
        stream = ((name, tensor) for name, tensor in stream if not name.startswith(self._unknown))
        if not self.names:
            yield from stream
            return
        stored, packed = StoredTensors(self._model_dir), self._packed()
        of_layer = {part: name for name, one in packed.items() for part in one.parts.values()}
        left_out = tuple({name.removesuffix("weight") for name in packed})
        for name, tensor in stream:
            if (whole := of_layer.get(name)) is None:
                if not name.startswith(left_out) or name.endswith(".bias"):
                    yield name, tensor
            elif name == packed[whole].parts["codes"]:
                yield whole, _tensor(packed[whole].values(stored.tensor, None), packed[whole].dtype)

    def _packed(self) -> dict[str, Packed]:
        beside = {name.rpartition(".")[0] for name in self.names}

        def is_asked(module: str) -> bool:
            """A layer of another name is part of a fused one in the same module."""
            name = self.vllms_name(module) or ""
            return name in self.names or (name not in self.kept and name.rpartition(".")[0] in beside)

        return packed_linears(self._model_dir, is_asked)


def _tensor(values: Any, dtype: str) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(values))
    return made.view(torch.bfloat16) if dtype == "BF16" else made
