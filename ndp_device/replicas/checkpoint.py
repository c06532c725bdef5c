"""Full-precision experts straight from a safetensors checkpoint, as a memory map. No torch.

Nothing is read until an expert is used, and the page cache decides what stays: this is the pool. `checkpoint/` finds
where an expert lies. An expert that does not lie row by row (transposed, interleaved) is a strided view; the code that
computes with it makes a copy. Each request for a quantized expert dequantizes it.
"""

from __future__ import annotations

import math
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.checkpoint.files import weight_files
from ndp_device.checkpoint.names import DTYPES, Source
from ndp_device.checkpoint.opening import open_checkpoint
from ndp_device.checkpoint.values import CODE_BITS, StoredForm, StoredMatrix
from ndp_device.common.errors import ReplicaError
from ndp_device.experts.expert import (
    Biases,
    ByteExpert,
    ByteMatrix,
    Fp4Expert,
    Fp4Matrix,
    FullExpert,
    QuantizedExpert,
    QuantizedMatrix,
    StoredExpert,
    to_float32,
)
from ndp_device.replicas.mapped import MappedFile

_LARGEST_OF_REPLICAS = float(np.finfo(np.float16).max) / 2
"""A scale may be as large as the distance of two weights."""
_DAMAGED = "the checkpoint is damaged or its training diverged, give it another"


class StoredTensors:
    """Tensors of a checkpoint's mapped files by their names."""

    def __init__(self, model_dir: Path) -> None:
        # resolve(): the Hugging Face cache keeps checkpoints as links into its blob store
        self.files = {path: MappedFile(path.resolve()) for path in weight_files(model_dir)}

    def tensor(self, name: str) -> NDArray[Any]:
        for file in self.files.values():
            if name in file:
                return file.tensor(name)
        raise ReplicaError(f"the checkpoint holds no tensor {name}: it is incomplete")


class CheckpointExperts:
    """The experts of one checkpoint: `expert(layer, expert) -> FullExpert`, views of the mapped files.

    Layers are counted by their experts: dense decoder layers do not count.
    """

    def __init__(self, model_dir: Path) -> None:
        opened = open_checkpoint(model_dir)
        self.shape, self.layout, self.tensors, self.packed = opened
        self._is_usable = np.zeros((self.shape.num_layers, self.shape.num_experts), np.bool_)
        stored = StoredTensors(model_dir)
        self._files, self._stored = stored.files, stored.tensor
        self.expert(0, 0)  # a file that is cut short is refused here, not in mid-decode

    def expert(self, layer: int, expert: int) -> FullExpert:
        """Raises ReplicaError for an expert that is not there, and for one with a NaN or an infinity."""
        if not (0 <= layer < self.shape.num_layers and 0 <= expert < self.shape.num_experts):
            raise ReplicaError(
                f"{self.shape.name} has {self.shape.num_layers} layers of {self.shape.num_experts} experts, "
                f"not an expert {expert} of layer {layer}"
            )
        found = self.layout.layers[layer]
        sources = [found.weights[part] for part in ("gate", "up", "down")]
        dequantized = {
            source.name: self.packed[name].values(self._stored, source.index(expert))
            for source in {source.name: source for source in sources}.values()  # gate and up may be one
            if (name := source.tensor(expert)) in self.packed
        }
        weights = []
        for source in sources:
            dtype, found_here = DTYPES[self.tensors[source.tensor(expert)].dtype], source.name in dequantized
            values = source.of(dequantized[source.name]) if found_here else self._values(source, expert)
            weights.append(values if dtype == self.layout.dtype else to_float32(values, dtype))
        w1, w3, w2 = weights
        biases = self._biases(layer, expert)
        full = FullExpert(self.layout.dtype, w1, w3, w2, biases=biases, activation=found.activation)
        if not self._is_usable[layer, expert]:  # once: the files are checked for changes
            if not math.isfinite(largest_magnitude(full)):
                raise ReplicaError(f"{self._named(layer, expert)} holds NaN or infinity: {_DAMAGED}")
            self._is_usable[layer, expert] = True
        return full

    def _biases(self, layer: int, expert: int) -> Biases | None:
        found = self.layout.layers[layer]
        if not found.biases:
            return None
        sources = [found.biases[part] for part in ("gate", "up", "down")]
        dtypes = [DTYPES[self.tensors[source.tensor(expert)].dtype] for source in sources]
        return Biases(*(to_float32(self._values(s, expert), of) for s, of in zip(sources, dtypes, strict=True)))

    @cached_property
    def stored_form(self) -> StoredForm | None:
        """How all experts seem to be stored where `as_stored` gives them; else None."""
        return self._common_form if self._common_form is not None and self.as_stored(0, 0) is not None else None

    @cached_property
    def _common_form(self) -> StoredForm | None:
        """Integers in groups of several sizes, such as whole rows, have the groups that divide all of them."""
        forms = {
            self.packed[name].stored_form if name in self.packed else None
            for found in self.layout.layers
            for name in found.tensors(self.shape.num_experts)
        }
        if all(form is not None and form.numbers == "int4" for form in forms):
            return StoredForm("int4", math.gcd(*(form.group for form in forms if form is not None)))
        return forms.pop() if len(forms) == 1 else None

    def as_stored(self, layer: int, expert: int) -> QuantizedExpert | StoredExpert | None:
        """The expert whose codes of 4 or 8 bits and scales are the checkpoint's; None where it is stored in another
        way."""
        found = self.layout.layers[layer]
        parts: list[StoredMatrix | None] = []
        for source in (found.weights[part] for part in ("gate", "up", "down")):
            packed, index = self.packed.get(source.tensor(expert)), source.index(expert)
            if packed is None or source.transposed or (codes := packed.codes(self._stored, index)) is None:
                return None
            parts.append(codes.at_rows(source.rows))
        biases, activation = self._biases(layer, expert), found.activation
        match parts:
            case [Fp4Matrix() as gate, Fp4Matrix() as up, Fp4Matrix() as down]:
                both = gate.above(up)
                return None if both is None else Fp4Expert(both, down, biases, activation)
            case [ByteMatrix() as gate, ByteMatrix() as up, ByteMatrix() as down]:
                return ByteExpert(gate, up, down, biases, activation)
            case [QuantizedMatrix() as gate, QuantizedMatrix() as up, QuantizedMatrix() as down]:
                if self._common_form is None:
                    return None
                gate, up, down = (one.in_groups_of(self._common_form.group) for one in (gate, up, down))
                w13 = gate.above(up)
                return None if w13 is None else QuantizedExpert(CODE_BITS, w13, down, biases, activation)
        return None

    def codes(self, layer: int, expert: int) -> QuantizedExpert | StoredExpert:
        """`as_stored`, where `stored_form` says that all experts are. Raises ReplicaError for one that is not."""
        if (stored := self.as_stored(layer, expert)) is None:
            raise ReplicaError(
                f"{self._named(layer, expert)} is stored in another way than the first: make replicas with `vllm-ndp "
                "quantize` and name them in 'replicas'"
            )
        return stored

    def refuse_large(self, layer: int, expert: int, full: FullExpert) -> None:
        """Raise ReplicaError for an expert whose replicas' scales would not fit into float16."""
        if (largest := largest_magnitude(full)) > _LARGEST_OF_REPLICAS:
            raise ReplicaError(
                f"{self._named(layer, expert)} holds {largest:.3g}, and replicas are made of weights up to "
                f"{_LARGEST_OF_REPLICAS:.0f}: {_DAMAGED}"
            )

    def _named(self, layer: int, expert: int) -> str:
        return f"{self.shape.name}: expert {expert} of layer {self.layout.layers[layer].decoder_layer}"

    @property
    def lies_in_place(self) -> bool:
        """Whether a kernel reads experts where they lie: row by row and unquantized. Others are copied for it."""
        first = self.expert(0, 0)
        dtypes = {
            DTYPES[self.tensors[name].dtype]
            for found in self.layout.layers
            for name in found.tensors(self.shape.num_experts)
        }
        return not self.packed and dtypes == {self.layout.dtype} and all(w.flags.c_contiguous for w in first.matrices)

    def check(self, layer: int) -> None:
        """Raise ReplicaError where a file that this layer's experts lie in has changed since it was opened."""
        for file in self._files_of(layer):
            file.check()

    def norm_weight(self, layer: int) -> NDArray[np.float32]:
        """Factors of the norm before the layer's experts, [H]; ones where there is no such norm."""
        name = self.layout.layers[layer].norm
        if name is None:
            return np.ones(self.shape.hidden_size, np.float32)
        if (dtype := self.tensors[name].dtype) not in DTYPES:
            raise ReplicaError(f"{name} of {self.shape.name} is {dtype}, which is not read")
        weight = to_float32(self._stored(name), DTYPES[dtype])
        return weight + np.float32(self.layout.norm_offset) if self.layout.norm_offset else weight

    def release(self) -> None:
        """Give back the pages that were read, for who reads each expert once."""
        for file in self._files.values():
            file.release()

    @cache  # noqa: B019  # one entry per layer, for as long as the checkpoint is used
    def _files_of(self, layer: int) -> tuple[MappedFile, ...]:
        names = self.layout.layers[layer].tensors(self.shape.num_experts, biases=True)
        parts = {part for name in names & self.packed.keys() for part in self.packed[name].parts.values()}
        stored = parts | (names - self.packed.keys())
        return tuple(file for _, file in sorted(self._files.items()) if any(name in file for name in stored))

    def _values(self, source: Source, expert: int) -> NDArray[Any]:
        values, index = self._stored(source.tensor(expert)), source.index(expert)
        part: NDArray[Any] = source.of(values if index is None else values[index])
        return part


def largest_magnitude(expert: FullExpert) -> float:
    """The largest magnitude among an expert's weights and biases; infinity where one is infinite or no number."""
    return max(
        *(_magnitude(weights, expert.dtype) for weights in expert.matrices),
        *(_magnitude(bias, "float32") for bias in expert.biases or ()),
    )


def _magnitude(values: NDArray[Any], dtype: str) -> float:
    """Of floats, by their bits as whole numbers, whose order is that of the magnitudes: no copy of the values."""
    size = values.dtype.itemsize
    positive = max(int(values.view(f"i{size}").max()), 0)
    negative = int(values.view(f"u{size}").max()) & ((1 << (8 * size - 1)) - 1)
    largest = float(to_float32(np.array([max(positive, negative)], f"u{size}").view(values.dtype), dtype)[0])
    return largest if math.isfinite(largest) else math.inf
