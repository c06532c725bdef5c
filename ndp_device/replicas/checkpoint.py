"""Full-precision experts straight from a safetensors checkpoint, as a memory map. Knows Mixtral's tensor names.

Nothing is read until an expert is used, and the page cache decides what stays: this is the pool. No torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ndp_device.errors import ReplicaError
from ndp_device.model_shape import ModelShape, checkpoint_files
from ndp_device.replicas.mapped import MappedFile
from ndp_device.replicas.replica import FullExpert

_DTYPES = ("float32", "float16", "bfloat16")


class CheckpointExperts:
    """The experts of one checkpoint: `expert(layer, expert) -> FullExpert`, views of the mapped files."""

    def __init__(self, model_dir: Path) -> None:
        self.shape = ModelShape.from_checkpoint(model_dir)
        self._model_dir = model_dir
        # resolve(): the Hugging Face cache keeps checkpoints as links into its blob store
        files = [MappedFile(path.resolve()) for path in checkpoint_files(model_dir)]
        self._file_of = {name: file for file in files for name in file.names}
        self.expert(0, 0)  # a checkpoint whose names we do not know is refused here, not in mid-decode

    def expert(self, layer: int, expert: int) -> FullExpert:
        prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
        hidden, intermediate = self.shape.hidden_size, self.shape.intermediate_size
        w1, dtype = self._tensor(f"{prefix}.w1.weight", intermediate, hidden)
        w3, w3_dtype = self._tensor(f"{prefix}.w3.weight", intermediate, hidden)
        w2, w2_dtype = self._tensor(f"{prefix}.w2.weight", hidden, intermediate)
        if not dtype == w3_dtype == w2_dtype:
            raise ReplicaError(
                f"{prefix} in {self._model_dir} must be of one dtype, got {dtype}, {w3_dtype} and {w2_dtype}"
            )
        return FullExpert(dtype, w1, w3, w2)

    def norm_weight(self, layer: int) -> tuple[NDArray[Any], str]:
        """Weight [H] of the norm whose output the layer's experts read, and its dtype."""
        return self._tensor(f"model.layers.{layer}.post_attention_layernorm.weight", self.shape.hidden_size)

    def _tensor(self, name: str, *shape: int) -> tuple[NDArray[Any], str]:
        file = self._file_of.get(name)
        if file is None:
            raise ReplicaError(f"{self._model_dir} holds no tensor {name}: it is incomplete or not a Mixtral")
        values, dtype = file.tensor(name), file.dtype(name)
        if values.shape != shape or dtype not in _DTYPES:
            raise ReplicaError(
                f"{file.path.name}: {name} must be {list(shape)} of {' | '.join(_DTYPES)}, "
                f"got {list(values.shape)} of {dtype}"
            )
        return values, dtype
