"""Linear layers beside the experts at 8 or 4 bits: attention projections, dense and shared MLPs, the output matrix.

On CPU they run in the engine's process, by the device's kernel. Each is quantized where vLLM would pack its weights,
from the checkpoint's values, which are then freed; codes of 4 bits are taken as the checkpoint holds them. Routers stay
as they are: their choices decide which experts run.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.library import Library
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.utils.torch_utils import direct_register_custom_op

from ndp_device.calibration.data_free import quantize_nested, round_to_bytes
from ndp_device.checkpoint.opening import PackedLinears
from ndp_device.checkpoint.values import CODE_BITS, Packed, Read
from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import BYTE_BITS
from ndp_device.experts.expert import QuantizedMatrix
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.checkpoint import StoredTensors
from vllm_ndp.integration import vllm_private
from vllm_ndp.integration.whole_weights import WholeLinearMethod

GROUP_SIZE = 128
_AT_ONCE = 1 << 22
"""Weights that one thread quantizes at once: float32 copies of a whole output matrix would double a start's memory."""

Multiply = Callable[[torch.Tensor], torch.Tensor]
_LAYERS: dict[str, Multiply] = {}
"""Layers by the name that the operator is called with."""
_numbers = itertools.count()  # the same in every process of a model: torch.compile keeps graphs with these names
_LIBRARY = Library("vllm_ndp", "FRAGMENT")  # operators live as long as this object


def _linear(x: torch.Tensor, rows: int, name: str) -> torch.Tensor:
    return _LAYERS[name](x)


def _linear_fake(x: torch.Tensor, rows: int, name: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))


# On CPU torch.compile traces into apply(), and could not trace into the kernel.
direct_register_custom_op("linear", _linear, fake_impl=_linear_fake, target_lib=_LIBRARY)


class LinearLayers:
    """Linear layers of one worker."""

    def __init__(self, bits: int, load_kernel: Callable[[], NativeKernel], cores: set[int], num_experts: int) -> None:
        """bits: 8 or 4. num_experts: a layer of no more outputs is a router or a gate."""
        self.bits, self.num_stored = bits, 0
        self.num_bytes = self.full_bytes = 0
        """Of all, as they are held and in full precision."""
        self._load_kernel, self._cores, self._num_experts = load_kernel, cores, num_experts
        self.names: list[str] = []
        self._has_head = False

    def method_of(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """A method of ours; None where the layer stays as it is."""
        if isinstance(layer, ParallelLMHead):
            return _Head(self, prefix)
        return _Linear(self, prefix) if self.may_take(layer) else None

    def may_take(self, layer: torch.nn.Module) -> TypeGuard[LinearBase]:
        """Whether it is a linear layer, and no router."""
        return isinstance(layer, LinearBase) and layer.output_size > self._num_experts

    def take_plain_head(self, layer: Any) -> bool:
        """Quantize an output matrix whose model asks nobody for a method, as gpt-oss does; a draft's comes later and
        stays. That a checkpoint names it as not converted is said of the checkpoint's own format."""
        return not self._has_head and self.take(layer, "lm_head")

    def take(self, layer: Any, prefix: str) -> bool:
        """Quantize a layer whose weights are loaded, and free them; False where the kernel cannot run it."""
        weight = layer.weight.data
        skipped = vllm_private.reads_its_weights_itself(layer)
        if skipped or weight.is_meta or weight.ndim != 2 or weight.shape[1] % 8:
            return False
        with ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, frozenset(self._cores))) as thread:
            matrix = thread.submit(quantize, weight, self.bits, len(self._cores)).result()
        self.serve(layer, prefix, matrix, weight.dtype)
        return True

    def serve(
        self, layer: Any, prefix: str, matrix: QuantizedMatrix, dtype: torch.dtype, *, is_stored: bool = False
    ) -> None:
        """Have a layer of vLLM's compute by this matrix, the checkpoint's if is_stored; dtype: of its inputs."""
        self.num_stored += is_stored
        kernel = self._load_kernel()
        prepared = kernel.prepare_matrix(matrix)
        self.num_bytes += prepared.nbytes
        self.full_bytes += math.prod(matrix.shape) * dtype.itemsize
        name, rows = f"{next(_numbers)}:{prefix}", matrix.shape[0]

        def multiply(x: torch.Tensor) -> torch.Tensor:
            y = kernel.multiply(x.reshape(-1, x.shape[-1]).float().numpy(), prepared)
            return torch.from_numpy(y).to(x.dtype).reshape(*x.shape[:-1], rows)

        def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            compiling = torch.compiler.is_compiling()
            y = torch.ops.vllm_ndp.linear(x, rows, name) if compiling else multiply(x)
            return y if bias is None else y + bias

        _LAYERS[name] = multiply
        self.names.append(name)
        self._has_head |= isinstance(layer, ParallelLMHead)
        layer.cpu_linear = cpu_linear  # vLLM's methods on CPU call this
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    def close(self) -> None:
        for name in self.names:
            del _LAYERS[name]
        self.names.clear()

    @property
    def description(self) -> str:
        if not self.names:
            return f"none fits {self.bits} bits"
        stored = f"{self.num_stored} at {CODE_BITS} bits as stored, " if self.num_stored else ""
        sizes = f"{self.num_bytes / 2**20:.1f} MiB instead of {self.full_bytes / 2**20:.1f}"
        return f"{stored}{len(self.names) - self.num_stored} at {self.bits} bits, {sizes}"


class _Linear(WholeLinearMethod):
    supports_pre_processed_weights = False

    def __init__(self, layers: LinearLayers, prefix: str) -> None:
        super().__init__(prefix)
        self._layers = layers

    def process_weights_after_loading(self, layer: Any) -> None:
        self.require_whole(layer)
        if not self._layers.take(layer, self._prefix):
            super().process_weights_after_loading(layer)


class _Coded(_Linear):
    """Its matrix is the checkpoint's, of one part or of several fused ones. vLLM's loader gets nothing of it."""

    def __init__(self, layers: LinearLayers, prefix: str, parts: Sequence[Packed], read: Read) -> None:
        super().__init__(layers, prefix)
        self._parts, self._read = parts, read

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self._dtype = params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        skipped = vllm_private.reads_its_weights_itself(layer)
        if skipped or (matrix := matrix_of([part.codes(self._read, None) for part in self._parts])) is None:
            values = [_tensor(part.values(self._read, None), part.dtype) for part in self._parts]
            layer.weight = torch.nn.Parameter(torch.cat(values).to(self._dtype), requires_grad=False)
            super().process_weights_after_loading(layer)
        else:
            self._layers.serve(layer, self._prefix, matrix, self._dtype, is_stored=True)


def matrix_of(parts: Sequence[object]) -> QuantizedMatrix | None:
    """The codes of one matrix, or of several that lie one above the other; None where they are not of one kind."""
    both, *others = parts
    for other in others:
        if not (isinstance(both, QuantizedMatrix) and isinstance(other, QuantizedMatrix)):
            return None
        both = both.above(other)
    return both if isinstance(both, QuantizedMatrix) else None


class _Head(UnquantizedEmbeddingMethod):
    supports_pre_processed_weights = False

    def __init__(self, layers: LinearLayers, prefix: str) -> None:
        super().__init__()
        self._layers, self._prefix = layers, prefix

    def process_weights_after_loading(self, layer: Any) -> None:
        if not self._layers.take(layer, self._prefix):
            super().process_weights_after_loading(layer)


def quantize(weight: torch.Tensor, bits: int, cores: int = 1) -> QuantizedMatrix:
    """W [N, C] -> the matrix at 8 or 4 bits."""
    rows, columns = weight.shape
    planes = np.empty((bits, rows, columns // 8), np.uint8)
    scale = np.empty((rows, -(-columns // GROUP_SIZE)), np.float16)
    offset = np.empty_like(scale)
    step = max(1, _AT_ONCE // columns)

    def fill(first: int) -> None:
        some = slice(first, first + step)
        values = weight[some].float().numpy()
        if bits == BYTE_BITS:
            made = round_to_bytes(values, GROUP_SIZE)
        else:
            made = quantize_nested(values, GROUP_SIZE, {bits: 1.0}).at(bits)
        planes[:, some], scale[some], offset[some] = made.planes, made.scale, made.offset

    with ThreadPoolExecutor(cores) as threads:
        list(threads.map(fill, range(0, rows, step)))
    return QuantizedMatrix(bits, planes, scale, offset, GROUP_SIZE)


class StoredLinears:
    """Linear layers of one worker that the checkpoint stores quantized, where vLLM has no kernel for them here.

    FP8 needs AMX, 4 bits AVX-512. Their values are made while the checkpoint loads; such a layer is then like a plain
    one. Names of layers are vLLM's; the checkpoint has others where several are fused.
    """

    def __init__(self, model_dir: Path, quantized_experts: Iterable[str] = ()) -> None:
        """quantized_experts: their weights' names."""
        self._model_dir = model_dir
        self._unknown = tuple(name.removesuffix("weight") for name in quantized_experts if ".experts." not in name)
        self.names: set[str] = set()
        """Of the layers without a kernel."""
        self.kept: set[str] = set()
        """Of those that vLLM computes as they are stored."""
        self.vllms_name: Callable[[str], str | None] = lambda name: name
        self._coded: list[str] = []  # modules whose codes are taken as they are

    def method_of_codes(
        self, layers: LinearLayers, layer: LinearBase, prefix: str, fused: Mapping[str, Sequence[str]]
    ) -> QuantizeMethodBase | None:
        """For a whole layer that the checkpoint holds as codes of 4 bits; None for any other. fused: the layers that
        vLLM makes one of, by its name."""
        module, _, name = prefix.rpartition(".")
        names = [f"{module}.{part}" for part in fused.get(name, [name])]
        try:
            parts = [self._packed[self._by_vllms_name[each]] for each in names]
        except (KeyError, ConfigError):  # vLLM's method says what is wrong
            return None
        forms, shapes = {part.stored_form for part in parts}, [part.shape for part in parts]
        form, sizes = forms.pop(), (sum(rows for rows, _ in shapes), shapes[0][1])
        if forms or form is None or form.numbers != "int4" or sizes != (layer.output_size, layer.input_size):
            return None
        self._coded += [f"{self._by_vllms_name[each]}." for each in names]
        return _Coded(layers, prefix, parts, self._tensors.tensor)

    @cached_property
    def _packed(self) -> PackedLinears:
        return PackedLinears(self._model_dir)

    @cached_property
    def _tensors(self) -> StoredTensors:
        return StoredTensors(self._model_dir)

    @cached_property
    def _by_vllms_name(self) -> dict[str, str]:
        return {self.vllms_name(module) or "": module for module in self._packed}

    def values_in(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors as vLLM reads them; those of these layers as one weight each.

        Quantized experts that are not called so (Granite's) are left out: vLLM's models do not know their parts.
        """
        unknown, coded = self._unknown, tuple(self._coded)
        stream = (
            (name, tensor)
            for name, tensor in stream
            if not name.startswith(unknown) and (name.endswith(".bias") or not name.startswith(coded))
        )
        if not self.names:
            yield from stream
            return
        packed = self._dequantized()
        of_layer = {part: name for name, one in packed.items() for part in one.parts.values()}
        left_out = tuple({name.removesuffix("weight") for name in packed})
        for name, tensor in stream:
            if (whole := of_layer.get(name)) is None:
                if not name.startswith(left_out) or name.endswith(".bias"):
                    yield name, tensor
            elif name == packed[whole].parts["codes"]:
                yield whole, _tensor(packed[whole].values(self._tensors.tensor, None), packed[whole].dtype)

    def _dequantized(self) -> dict[str, Packed]:
        """How layers without a kernel are read, by the names of their weights."""
        beside = {name.rpartition(".")[0] for name in self.names}

        def is_asked(module: str) -> bool:
            """A layer of another name is part of a fused one in the same module."""
            name = self.vllms_name(module) or ""
            return name in self.names or (name not in self.kept and name.rpartition(".")[0] in beside)

        return {f"{module}.weight": self._packed[module] for module in self._packed if is_asked(module)}


def _tensor(values: Any, dtype: str) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(values))
    return made.view(torch.bfloat16) if dtype == "BF16" else made
