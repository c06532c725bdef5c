"""Linear layers beside the experts at 8 or 4 bits: attention projections, dense and shared MLPs, the output matrix.

On CPU they run in the engine's process, by the device's kernel. Each is quantized where vLLM would pack its weights,
from the checkpoint's values, which are then freed; codes of 4 or 8 bits are taken as the checkpoint holds them. Routers
stay as they are: their choices decide which experts run.

Every parameter of vLLM's model must come out of the checkpoint. vLLM asks that of unquantized models only, and not of
linear layers and embeddings. Here a linear layer's weights are no numbers until the checkpoint gives them, so that a
fused one may lack no part. Experts are checked where they are read (ndp_device/checkpoint).
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.library import Library
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.utils.torch_utils import direct_register_custom_op

from ndp_device.calibration.data_free import quantize_nested, round_to_bytes
from ndp_device.checkpoint.files import read_config
from ndp_device.checkpoint.names import ExpertLayout
from ndp_device.checkpoint.opening import PackedLinears
from ndp_device.checkpoint.values import Packed, Read
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.widths import BYTE_BITS
from ndp_device.experts.expert import ByteMatrix, Fp4Matrix, QuantizedMatrix
from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.checkpoint import StoredTensors
from vllm_ndp.integration import vllm_private

GROUP_SIZE = 128
_AT_ONCE = 1 << 22
"""Weights that one thread quantizes at once: float32 copies of a whole output matrix would double a start's memory."""

Codes = QuantizedMatrix | Fp4Matrix | ByteMatrix
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
        self.bits, self._stored = bits, Counter[int]()
        self.num_bytes = self.full_bytes = 0
        """Of all, as they are held and in full precision."""
        self._load_kernel, self._cores, self._num_experts = load_kernel, cores, num_experts
        self.names: list[str] = []
        self._has_head = False

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
        self, layer: Any, prefix: str, matrix: Codes, dtype: torch.dtype, *, stored_bits: int | None = None
    ) -> None:
        """Have a layer of vLLM's compute by this matrix, the checkpoint's own if it has bits; dtype: of its inputs."""
        if stored_bits is not None:
            self._stored[stored_bits] += 1
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
        stored = "".join(f"{number} at {bits} bits as stored, " for bits, number in self._stored.items())
        sizes = f"{self.num_bytes / 2**20:.1f} MiB instead of {self.full_bytes / 2**20:.1f}"
        return f"{stored}{len(self.names) - self._stored.total()} at {self.bits} bits, {sizes}"


class WholeLinearMethod(UnquantizedLinearMethod):
    """A linear layer, maybe fused of several."""

    def __init__(self, prefix: str, layers: LinearLayers | None = None) -> None:
        """layers: where it is to be quantized."""
        super().__init__()
        self._prefix, self._layers = prefix, layers
        self.supports_pre_processed_weights = layers is None

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        layer.weight.data.fill_(torch.nan)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.require_whole(layer)
        if self._layers is None or not self._layers.take(layer, self._prefix):
            super().process_weights_after_loading(layer)

    def require_whole(self, layer: torch.nn.Module) -> None:
        if bool(layer.weight.isnan().any()):
            raise _lacking([f"{self._prefix}.weight, or a part of it"])


class _Coded(WholeLinearMethod):
    """Its matrix is the checkpoint's, of one part or of several fused ones. vLLM's loader gets nothing of it."""

    def __init__(self, layers: LinearLayers, prefix: str, parts: Sequence[Packed], read: Read, bits: int) -> None:
        super().__init__(prefix, layers)
        self._bits = bits
        self._serve, self._parts, self._read = layers.serve, parts, read

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None: ...

    def process_weights_after_loading(self, layer: Any) -> None:
        skipped = vllm_private.reads_its_weights_itself(layer)
        if skipped or (matrix := matrix_of([part.codes(self._read, None) for part in self._parts])) is None:
            values = [_tensor(part.values(self._read, None), part.dtype) for part in self._parts]
            layer.weight = torch.nn.Parameter(torch.cat(values).to(layer.params_dtype), requires_grad=False)
            super().process_weights_after_loading(layer)
        else:
            self._serve(layer, self._prefix, matrix, layer.params_dtype, stored_bits=self._bits)


def matrix_of(parts: Sequence[object]) -> Codes | None:
    """The codes of one matrix, or of several that lie one above the other; None where they are not of one kind."""
    both, *others = parts
    for other in others:
        if type(both) is not type(other) or not isinstance(both, Codes):
            return None
        both = both.above(other)  # type: ignore[arg-type]
    return both if isinstance(both, Codes) else None


class QuantizedHead(UnquantizedEmbeddingMethod):
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


_BESIDE_CODES = (".bias", ".k_scale", ".v_scale", ".q_scale", ".kv_scale")
"""Ends of names with a layer's prefix that are not of its matrix; the scales are of a KV cache in FP8."""


_FUSED: Mapping[str, Sequence[str]] = {"gate_up_proj": ["gate_proj", "up_proj"]}
"""Where a model of vLLM says so only once it is made, as Qwen3-MoE's with dense layers."""
_OF_QUERIES_AND_KEYS = frozenset({"q_proj", "k_proj", "qkv_proj", "qk_proj"})


class StoredLinears:
    """Linear layers of one worker that the checkpoint stores quantized, where vLLM has no kernel for them here.

    FP8 needs AMX, 4 bits AVX-512. Their values are made while the checkpoint loads; such a layer is then like a plain
    one. Names of layers are vLLM's; the checkpoint has others where several are fused.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._of_experts = re.compile("(?!)")  # how the names of their tensors begin; at first of none
        self.names: set[str] = set()
        """Of the layers without a kernel."""
        self.kept: set[str] = set()
        """Of those that vLLM computes as they are stored."""
        self.vllms_name: Callable[[str], str | None] = lambda name: name
        self._coded: list[str] = []  # modules whose codes are taken as they are

    def method_of_codes(
        self, layers: LinearLayers, layer: LinearBase, prefix: str, fused: Mapping[str, Sequence[str]]
    ) -> QuantizeMethodBase | None:
        """For a whole layer that the checkpoint holds as codes that a kernel of ours takes; None for any other. fused:
        the layers that vLLM makes one of, by its name."""
        module, _, name = prefix.rpartition(".")
        try:
            usual = {} if prefix in self._by_vllms_name else _FUSED
            names = [f"{module}.{part}" for part in fused.get(name) or usual.get(name, [name])]
            parts = [self._packed[self._by_vllms_name[each]] for each in names]
        except (KeyError, ConfigError, ReplicaError):  # vLLM's method says what is wrong
            return None
        if self._moves_rows and not _OF_QUERIES_AND_KEYS.isdisjoint(each.rpartition(".")[2] for each in names):
            return None
        forms, shapes = {part.stored_form for part in parts}, [part.shape for part in parts]
        form, sizes = forms.pop(), (sum(rows for rows, _ in shapes), shapes[0][1])
        if forms or form is None or sizes != (layer.output_size, layer.input_size):
            return None
        self._coded += [f"{self._by_vllms_name[each]}." for each in names]
        return _Coded(layers, prefix, parts, self._tensors.tensor, form.bits)

    @cached_property
    def _moves_rows(self) -> bool:
        """Whether vLLM puts rows of queries and keys into another order while it loads them."""
        return str(read_config(self._model_dir).get("model_type")).startswith(("llama4", "k2_horizon"))

    @cached_property
    def _packed(self) -> PackedLinears:
        return PackedLinears(self._model_dir)

    @cached_property
    def _tensors(self) -> StoredTensors:
        return StoredTensors(self._model_dir)

    @cached_property
    def _by_vllms_name(self) -> dict[str, str]:
        return {self.vllms_name(module) or "": module for module in self._packed}

    def leave_out(self, experts: ExpertLayout) -> None:
        """Give vLLM's loader nothing of the experts, which are read from the pool when a plan asks for them."""
        sources = [source for layer in experts.layers for source in (*layer.weights.values(), *layer.biases.values())]
        names = {re.escape(source.name.removesuffix("weight")).replace(r"\{\}", r"\d+") for source in sources}
        self._of_experts = re.compile("|".join(names))

    def values_in(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors as vLLM reads them, but the experts; those of these layers as one weight each."""
        coded = tuple(self._coded)
        stream = (
            (name, tensor)
            for name, tensor in stream
            if not self._of_experts.match(name) and (name.endswith(_BESIDE_CODES) or not name.startswith(coded))
        )
        if not self.names:
            yield from stream
            return
        packed = self._dequantized()
        of_layer = {part: name for name, one in packed.items() for part in one.parts.values()}
        left_out = tuple({name.removesuffix("weight") for name in packed})
        for name, tensor in stream:
            if (whole := of_layer.get(name)) is None:
                if not name.startswith(left_out) or name.endswith(_BESIDE_CODES):
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


# -- whether the checkpoint is whole -----------------------------------------------------------------------------------


@contextmanager
def checked_as_unquantized(of_draft: Callable[[], bool]) -> Iterator[None]:
    """Let vLLM's loader compare names as for a model without our method, and say what lacks in one sentence.

    For a quantized model it would also ask for parameters that a module holds under a second name. While a draft loads
    (`of_draft`), its embeddings may lack: it takes the model's.
    """

    def as_unquantized(
        stock: Callable[..., None], loader: Any, model: torch.nn.Module, loaded: set[str] | None
    ) -> None:
        if loaded is not None and not of_draft() and (lacking := _embeddings(model) - loaded):
            raise _lacking(list(lacking))
        try:
            stock(loader, model, loaded)
        except ValueError as error:
            raise _lacking(re.findall(r"'([^']+)'", str(error))) from None

    with vllm_private.weights_tracked_by(as_unquantized):
        yield


_SHOWN = 4
"""Names in a message."""


def _embeddings(model: torch.nn.Module) -> set[str]:
    """Names of words' weights, one of each tensor: a head may share the embedding's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    holders = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    return {names[id(parameter)] for module in holders for parameter in module.parameters()}


def _lacking(names: list[str]) -> ConfigError:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ConfigError(
        f"the checkpoint lacks {', '.join(sorted(names)[:_SHOWN])}{more} (vLLM's names): it is incomplete, take the "
        "missing tensors from where it comes from"
    )
