"""What config.json's quantization_config states of one stored tensor, whichever maker wrote it: one form for all.

GPTQ, AWQ, auto-round and FP8 state it once for the whole model, with entries for single modules (`dynamic`,
`extra_config`); compressed-tensors and modelopt state it by group of modules; modelopt also names an algorithm, of the
model or of each layer. Each entry is found as its maker's own package or vLLM finds it. Knows no tensor: formats.py
holds a statement against the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from math import gcd
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from ndp_device.checkpoint.values import CODE_BITS, MXFP4, NVFP4, StoredForm
from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import BYTE_BITS

_Size = Annotated[int, msgspec.Meta(ge=1)]
_Block = tuple[_Size, _Size]
_OFF = (False, "weight", "static")
"""Values of compressed-tensors' actorder that leave the columns in the order of their groups."""
_NUMBERED = re.compile(r"(\.experts)\.\d+\.")
_OF_A_PATTERN = set(r"*+?^$()[]{}|\\")
"""auto-round takes a key with one of these characters for a pattern."""


_EXPERTS = re.compile(r"(?<!shared_)experts")
_METHODS = (
    *("gptq", "awq", "auto-round", "intel/auto-round", "compressed-tensors"),
    *("modelopt", "modelopt_fp4", "modelopt_mxfp8", "fp8", "mxfp4"),
)
"""Values of quant_method whose tensors formats.py reads."""


class Weights(msgspec.Struct):
    """Statements about one module's weights, in the words of compressed-tensors; None: not stated."""

    num_bits: int | None = None
    type: str | None = None
    symmetric: bool | None = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: _Block | str | None = None
    actorder: bool | str | None = None

    @property
    def columns(self) -> int | None:
        """Columns under one scale; 0: all of them; None: not stated."""
        if self.group_size is not None:
            return max(self.group_size, 0)
        return 0 if self.strategy in ("channel", "tensor") else None

    @property
    def block(self) -> _Block | None:
        """Rows and columns under one scale, 0: all of them; None: not stated."""
        if isinstance(self.block_structure, str):  # compressed-tensors' older spelling, 128x128
            sizes = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", self.block_structure)
            return None if sizes is None else (int(sizes[1]), int(sizes[2]))
        if self.block_structure is not None:
            return self.block_structure
        return None if self.columns is None else (0 if self.strategy == "tensor" else 1, self.columns)

    @property
    def in_order(self) -> bool:
        """Whether it is stated that the columns lie in the order of their groups."""
        return self.actorder in _OFF

    def __str__(self) -> str:
        block, bits = self.block, f"{self.num_bits or 'no number of'} bits"
        if block is None:
            return f"{bits}, no group size"
        rows, columns = (size or "all" for size in block)
        return f"{bits}, {columns} columns to a scale" if rows == 1 else f"{bits}, blocks of {rows} x {columns}"


_FP8_BLOCKS = Weights(8, "float", None, block_structure=(128, 128))
_NVFP4 = Weights(4, "float", None, group_size=16)
_ALGORITHMS: Mapping[str, Weights] = MappingProxyType(
    {
        "FP8": Weights(8, "float", None, "tensor"),
        "FP8_PER_CHANNEL_PER_TOKEN": Weights(8, "float", None, "channel"),
        "FP8_PB_WO": _FP8_BLOCKS,
        "FP8_BLOCK_SCALES": _FP8_BLOCKS,
        "NVFP4": _NVFP4,
        "W4A16_NVFP4": _NVFP4,
        "MXFP8": Weights(8, "float", None, group_size=32),
    }
)
"""modelopt's algorithms that vLLM reads -> what their names state."""


class Layer(msgspec.Struct):
    """modelopt's entry for one layer."""

    quant_algo: str
    group_size: _Size | None = None


class Group(msgspec.Struct):
    weights: Weights | None = None
    targets: list[str] = []


class Transform(msgspec.Struct):
    """Where compressed-tensors turns weights or inputs, such as by a Hadamard matrix."""

    targets: list[str] | str = []
    ignore: list[str] | str = []
    location: str = ""


class Transforms(msgspec.Struct):
    apply: list[Transform] = []


class TransformConfig(msgspec.Struct):
    config_groups: dict[str, Transforms] = {}


class Entry(msgspec.Struct):
    """Statements about single modules, in GPTQ's words."""

    bits: int | None = None
    group_size: int | _Block | None = None
    sym: bool | None = None
    desc_act: bool | None = None


class Settings(msgspec.Struct):
    """The part of config.json's quantization_config that the code reads."""

    quant_method: str = ""
    bits: int | None = None  # GPTQ and AWQ
    w_bit: int | None = None  # AWQ, older
    group_size: int | _Block | None = None  # GPTQ, AWQ, auto-round, modelopt
    q_group_size: int | None = None  # AWQ, older
    sym: bool | None = None  # GPTQ, auto-round
    zero_point: bool | None = None  # AWQ
    desc_act: bool | None = None  # GPTQ
    dynamic: dict[str, Entry] | None = None  # GPTQ: patterns of modules
    extra_config: dict[str, Entry] | None = None  # auto-round: modules and patterns of them
    version: str | None = None  # AWQ
    checkpoint_format: str | None = None  # GPTQ, and AWQ by gptqmodel
    packing_format: str | None = None  # auto-round
    weight_block_size: _Block | None = None  # FP8
    format: str | None = None  # compressed-tensors; gptqmodel's second word for checkpoint_format
    config_groups: dict[str, Group] | None = None  # compressed-tensors and modelopt
    transform_config: TransformConfig | None = None  # compressed-tensors
    quant_algo: str | None = None  # modelopt
    quantized_layers: dict[str, Layer] | None = None  # modelopt: its algorithm MIXED_PRECISION
    bnb_4bit_quant_type: str | None = None  # bitsandbytes
    ignore: Any = None  # these four, whatever the maker: modules that are left as they are
    modules_to_not_convert: Any = None
    ignored_layers: Any = None
    exclude_modules: Any = None

    def of(self, module: str) -> list[Weights]:
        """What is stated of one module: one entry, or one for each group of which none names the module."""
        if self.quantized_layers is not None or self.quant_algo == "MIXED_PRECISION":
            return [self._of_algorithm(module, self._layer(module))]
        groups = [group for group in (self.config_groups or {}).values() if group.weights is not None]
        if not groups and self.quant_algo is not None:
            size = self.group_size if isinstance(self.group_size, int) and self.group_size > 0 else None
            return [self._of_algorithm(module, Layer(self.quant_algo, size))]
        if not groups:
            return [self._of_all(next(self._entries(module), Entry()))]
        targets = {target: group.weights for group in groups for target in group.targets if group.weights is not None}
        patterns = sorted(target for target in targets if target.startswith("re:"))
        named = next((one for one in patterns if _matches(one[3:], module)), "Linear")  # as its package orders them
        found = targets.get(module) or targets.get(named)
        return [group.weights for group in groups if group.weights is not None] if found is None else [found]

    def form_of_experts(self, *columns: int) -> StoredForm | None:
        """How a kernel may take all experts, by what is stated alone; None where anything is said of some of them, or
        of a way to store them that is not known here. columns: of their matrices."""
        one = self._of_every_expert()
        if one is None or self.quant_method not in _METHODS:
            return None
        _, group = one.block or (1, None)
        if self.quant_method == "fp8" or (one.num_bits, one.type) == (BYTE_BITS, "float"):
            return StoredForm("float8", group if group is not None and group < 128 else 0)
        if (one.num_bits, self.format, one.symmetric) == (BYTE_BITS, "int-quantized", True):
            return StoredForm("int8", 0)
        if one.num_bits != CODE_BITS or group is None or any(some % (group or 1) for some in columns):
            return None
        if one.type == "float":
            return next((form for form in (MXFP4, NVFP4) if form.group == group), None)
        labels = {self.checkpoint_format, (self.version or "gemm").lower()}
        is_known = labels <= {None, "gptq", "gptq_v2", "gemm"} and "llm_compressor" not in (self.packing_format or "")
        size = group or gcd(*columns)
        return StoredForm("int4", size) if is_known and size % 8 == 0 else None

    def _of_every_expert(self) -> Weights | None:
        groups = [group for group in (self.config_groups or {}).values() if group.weights is not None]
        targets = [target for group in groups for target in group.targets]
        named = [self.ignore, self.modules_to_not_convert, self.ignored_layers, self.exclude_modules]
        named += [*(self.dynamic or ()), *(self.extra_config or ())]
        is_of_some = self.quantized_layers is not None or len(groups) > 1 or _EXPERTS.search(str(named))
        is_of_others = targets and "Linear" not in targets and not _EXPERTS.search(str(targets))
        if is_of_some or is_of_others:
            return None
        if self.quant_method == "mxfp4":
            return Weights(CODE_BITS, "float", None, group_size=MXFP4.group)
        try:
            if self.quant_algo is not None:
                return self._of_algorithm("", Layer(self.quant_algo))
            (one,) = self.of("")
        except ConfigError:
            return None
        return None if self.turns("") else one

    def turns(self, module: str) -> bool:
        """Whether the module's inputs or outputs are turned while it runs; what is turned in the file is done."""
        groups = self.transform_config.config_groups.values() if self.transform_config is not None else ()
        return any(
            _is_among(module, one.targets) and not _is_among(module, one.ignore)
            for group in groups
            for one in group.apply
            if one.location not in ("weight_input", "weight_output")
        )

    def _layer(self, module: str) -> Layer:
        """The entry of the module, of a module around it, or of all experts' matrices of its kind."""
        layers = self.quantized_layers or {}
        without_number = _NUMBERED.sub(r"\1.", module)
        for name in (module, without_number, without_number.replace(".experts.", ".")):
            for swapped in (name, _inside_out(name)):
                parts = swapped.split(".")
                for end in range(len(parts), 0, -1):
                    if (layer := layers.get(".".join(parts[:end]))) is not None:
                        return layer
        experts, found, _ = module.partition(".experts.")  # one tensor for all experts, and an entry for each
        each = {layer.quant_algo: layer for key, layer in layers.items() if key.startswith(f"{experts}{found}")}
        if found and module == without_number and len(each) == 1:
            return next(iter(each.values()))
        raise ConfigError(
            f"{module}: config.json's quantized_layers has {'no' if not each else 'more than one'} algorithm for it, "
            "and its tensors are quantized: take both from one checkpoint"
        )

    @staticmethod
    def _of_algorithm(module: str, layer: Layer) -> Weights:
        stated = _ALGORITHMS.get(layer.quant_algo.upper())
        if stated is None:
            raise ConfigError(
                f"{module}: config.json's quantization_config states modelopt's algorithm {layer.quant_algo}, which is "
                f"not read: give the checkpoint in bfloat16, or in one of {', '.join(_ALGORITHMS)}"
            )
        if layer.group_size is None or stated.block is None or stated.columns == 0:
            return stated
        if stated.block_structure is not None:
            return msgspec.structs.replace(stated, block_structure=(layer.group_size, layer.group_size))
        return msgspec.structs.replace(stated, group_size=layer.group_size)

    def _entries(self, module: str) -> Iterator[Entry]:
        for pattern, entry in (self.dynamic or {}).items():
            if _matches(pattern.removeprefix("-:").removeprefix("+:"), module):
                yield Entry() if pattern.startswith("-:") else entry
        entries = self.extra_config or {}
        if module in entries:
            yield entries[module]
        yield from (entry for key, entry in entries.items() if module.endswith(f".{key}"))
        for key, entry in entries.items():
            if not _OF_A_PATTERN.isdisjoint(key) and _matches(key, module, re.search):
                yield entry

    def _of_all(self, own: Entry) -> Weights:
        sym = own.sym if own.sym is not None else self.sym
        if sym is None and self.zero_point is not None:
            sym = not self.zero_point
        desc_act = own.desc_act if own.desc_act is not None else self.desc_act
        size = next((one for one in (own.group_size, self.group_size, self.q_group_size) if one is not None), None)
        block = self.weight_block_size or (size if isinstance(size, tuple) else None)
        return Weights(
            num_bits=own.bits or self.bits or self.w_bit,
            symmetric=sym,
            group_size=size if isinstance(size, int) else None,
            block_structure=block,
            actorder="group" if desc_act else desc_act,
        )


def _is_among(module: str, targets: list[str] | str) -> bool:
    names = [targets] if isinstance(targets, str) else targets
    return any(name in (module, "Linear") or (name[:3] == "re:" and _matches(name[3:], module)) for name in names)


def _inside_out(module: str) -> str:
    """The other order of the two words before a multimodal model's layers."""
    one, other = "model.language_model.", "language_model.model."
    return module.replace(one, other, 1) if module.startswith(one) else module.replace(other, one, 1)


def _matches(pattern: str, module: str, how: Callable[[str, str], Any] = re.match) -> bool:
    try:
        return how(pattern, module) is not None
    except re.error as error:
        raise ConfigError(f"config.json's quantization_config has the pattern {pattern!r}: {error}") from None
