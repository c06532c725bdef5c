"""The quantized formats that are read, as one table: names and dtypes of their tensors, and who makes values of them.

    X_blocks, X_scales                               MXFP4 of gpt-oss: 32 values of 4 bits under one power of two
    X.weight_packed or X.weight, and a scale         MXFP4, NVFP4, MXFP8, FP8, int8: by the dtypes of the two
    X.weight_packed, X.weight_scale, X.weight_shape  compressed-tensors, pack-quantized
    X.qweight, X.scales, X.qzeros, X.g_idx           GPTQ, AWQ and auto-round, which writes either
    X.weight, X.weight.absmax, X.weight.quant_map    bitsandbytes, nf4 and fp4; X.SCB: its int8

The tensors decide; config.json's quantization_config adds what they do not show. Knows shapes and dtypes; values are
made in values.py. A format that is missing here is refused by the names of its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.checkpoint import values
from ndp_device.checkpoint.headers import TensorInfo
from ndp_device.checkpoint.values import Packed
from ndp_device.errors import ConfigError, ReplicaError

_WORDS, _NUMBERS = ("I32",), ("I32", "I64")
_FLOATS = ("F32", "F16", "BF16")
_E8M0 = ("U8", "F8_E8M0")
_SCALE_NAMES = ("weight_scale", "weight_scale_inv", "scale")
_WIDTHS = range(2, 9)
_LARGE_BLOCK = (128, 128)
"""Block of modelopt's FP8_PB_WO, which config.json does not name."""

_Size = Annotated[int, msgspec.Meta(ge=1)]


class Weights(msgspec.Struct):
    """One group of weights in compressed-tensors' config_groups."""

    num_bits: int | None = None
    symmetric: bool | None = True
    group_size: int | None = None
    block_structure: tuple[_Size, _Size] | str | None = None


class Group(msgspec.Struct):
    weights: Weights | None = None


class Settings(msgspec.Struct):
    """The part of config.json's quantization_config that the code reads."""

    quant_method: str = ""
    bits: int | None = None  # GPTQ and AWQ
    w_bit: int | None = None  # AWQ, older
    version: str | None = None  # AWQ
    checkpoint_format: str | None = None  # GPTQ
    packing_format: str | None = None  # auto-round
    weight_block_size: tuple[_Size, _Size] | None = None  # FP8
    format: str | None = None  # compressed-tensors
    config_groups: dict[str, Group] | None = None  # likewise

    @property
    def weights(self) -> list[Weights]:
        return [group.weights for group in (self.config_groups or {}).values() if group.weights is not None]


class Parts:
    """The stored tensors of one quantized tensor, looked at one by one."""

    def __init__(
        self,
        prefix: str,
        names: Mapping[str, str],
        tensors: Mapping[str, TensorInfo],
        model: str,
        small: Callable[[TensorInfo], NDArray[Any]],
    ) -> None:
        self.names, self._tensors, self._small = names, tensors, small
        self.where = f"{model}: {prefix[:-1]}"

    def shape(self, part: str, dtypes: Sequence[str], *dimensions: int) -> tuple[int, ...]:
        """Shape of one part; refuses a part that is missing, has another dtype or another number of dimensions."""
        if part not in self.names:
            others = " and ".join(sorted(self.names))
            raise ReplicaError(f"{self.where}: its {part} is missing beside {others}: the checkpoint is incomplete")
        info = self._tensors[self.names[part]]
        if info.dtype not in dtypes or len(info.shape) not in dimensions or 0 in info.shape:
            raise ReplicaError(
                f"{self.where}: its {part} is {info.dtype} {list(info.shape)}, and we read {' or '.join(dtypes)} with "
                f"{' or '.join(map(str, dimensions))} dimensions: it is damaged or of another version"
            )
        return info.shape

    def dtype(self, part: str) -> str:
        return self._tensors[self.names[part]].dtype

    def contents(self, part: str) -> NDArray[Any]:
        """Values of a part of a few bytes, which its shape is known from."""
        return self._small(self._tensors[self.names[part]])

    def agree(self, shapes: bool) -> None:
        if not shapes:
            found = ", ".join(f"{part} {list(self._tensors[name].shape)}" for part, name in sorted(self.names.items()))
            raise ReplicaError(
                f"{self.where}: its tensors do not belong together ({found}): it is damaged or of another version"
            )

    def named(self, **roles: str) -> dict[str, str]:
        """Role -> tensor, for the parts that are there."""
        return {role: self.names[part] for role, part in roles.items() if part in self.names}


Describe = Callable[["Format", Parts, Settings], Packed]


@dataclass(frozen=True)
class Format:
    """One row: a tensor is of the first format whose codes and scale it has, by names and dtypes."""

    name: str
    codes: str
    stored: tuple[str, ...]
    """Dtypes of the codes."""
    scale: tuple[str, ...]
    """Names of the scale; one of them is there."""
    scaled: tuple[str, ...]
    """Dtypes of the scale."""
    describe: Describe
    elements: str = ""
    group: int = 0
    """Columns under one scale; 0 where settings and shapes say it."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Role -> name of what may lie beside."""

    def scale_of(self, parts: Parts) -> str | None:
        return next((one for one in self.scale if one in parts.names and parts.dtype(one) in self.scaled), None)


def describe(parts: Parts, settings: Settings) -> Packed:
    """How the values of one tensor are read. Raises ConfigError for a format that is not."""
    near = [row for row in FORMATS if row.codes in parts.names]
    fitting = [row for row in near if parts.dtype(row.codes) in row.stored]
    for row in fitting:
        if row.scale_of(parts) is not None:
            return row.describe(row, parts, settings)
    rows = fitting or near
    if not rows:
        raise _unknown(parts, settings)
    if not fitting:
        parts.shape(rows[0].codes, sorted(set(chain(*(row.stored for row in rows)))), 2, 3, 4)
    wanted = next((name for row in rows for name in row.scale if name in parts.names), rows[0].scale[0])
    parts.shape(wanted, sorted(set(chain(*(row.scaled for row in rows if wanted in row.scale)))), 0, 1, 2, 3, 4)
    raise _unknown(parts, settings)


def _unknown(parts: Parts, settings: Settings) -> ConfigError:
    return ConfigError(
        f"{parts.where}: its experts are stored in a quantized format ({min(parts.names.values())}, quant_method "
        f"{settings.quant_method or 'not given'}), which is not read: give the checkpoint in bfloat16, or in "
        f"{', '.join(dict.fromkeys(row.name for row in FORMATS))}"
    )


# -- one code and one scale per block ----------------------------------------------------------------------------------


def _describe_blocks(row: Format, parts: Parts, settings: Settings) -> Packed:
    *outer, groups, half = parts.shape("blocks", row.stored, 4)
    parts.agree(half == 16 and parts.shape("scales", row.scaled, 3) == (*outer, groups))
    names = parts.named(codes="blocks", scale="scales")
    return Packed(values.scaled, (*outer, groups * 2 * half), "BF16", names, "fp4", "U8", block=(1, 32))


def _describe_scaled(row: Format, parts: Parts, settings: Settings) -> Packed:
    name = row.scale_of(parts) or ""
    stored = parts.shape(row.codes, row.stored, 2, 3)
    shape = (*stored[:-1], stored[-1] * 2) if row.elements == "fp4" else stored
    scale = parts.shape(name, row.scaled, *range(len(shape) + 3))
    for part in (row.more[role] for role in ("divisor", "factor") if role in row.more):
        parts.agree(set(parts.shape(part, ("F32",), 0, 1, 2, 3)) <= {1, *shape[:-2]})
    names = parts.named(codes=row.codes, scale=name, **row.more)
    dtype = parts.dtype(name) if row.elements.startswith("int8") else "BF16"
    block = _block(row, shape, scale, settings, parts)
    if "zero" in names:
        parts.agree(parts.shape("weight_zero_point", ("I8",), 1, 2) == scale)
    return Packed(values.scaled, shape, dtype, names, row.elements, parts.dtype(name), 8, block)


def _block(
    row: Format, shape: tuple[int, ...], scale: tuple[int, ...], settings: Settings, parts: Parts
) -> tuple[int, int]:
    """Rows and columns under one scale: fixed, as config.json says, as the shapes allow, a row each, or all of them."""
    rows, columns = shape[-2:]
    if row.group:
        parts.agree(scale == (*shape[:-1], columns // row.group) and columns % row.group == 0)
        return 1, row.group
    sizes = [size for size in scale if size > 1]
    if not sizes or (len(shape) == 3 and sizes == [shape[0]]):
        return rows, columns
    given = [one.block_structure for one in settings.weights if isinstance(one.block_structure, tuple)]
    groups = [(1, one.group_size) for one in settings.weights if one.group_size and one.group_size > 0]
    exponents = [(1, 32)] if parts.dtype(row.scale_of(parts) or "") in _E8M0 else []
    modelopt = [_LARGE_BLOCK] if settings.quant_method == "modelopt" else []
    said = [settings.weight_block_size] if settings.weight_block_size else []
    for of_rows, of_columns in [*said, *given, *groups, *exponents, *modelopt, (1, columns)]:
        grid = (-(-rows // of_rows), -(-columns // of_columns))
        if [*shape[:-2], *grid] == list(scale) or [one for one in (*shape[:-2], *grid) if one > 1] == sizes:
            return of_rows, of_columns
    what = "weight_block_size is of another model" if said or given else "weight_block_size is missing"
    wanted = (said or given or [(1, columns)])[0]
    raise ReplicaError(
        f"{parts.where}: its weight {list(shape)} and its scales {list(scale)} do not belong together in blocks of "
        f"{list(wanted)}: config.json's {what}"
    )


# -- words of codes ----------------------------------------------------------------------------------------------------


def _describe_compressed(row: Format, parts: Parts, settings: Settings) -> Packed:
    rows, num_words = parts.shape("weight_packed", row.stored, 2)
    num_rows, num_groups = parts.shape("weight_scale", row.scaled, 2)
    parts.agree(num_rows == rows and parts.shape("weight_shape", _NUMBERS, 1) == (2,))
    bits = _width(parts, settings, num_words)
    each = 32 // bits
    chosen = [one for one in settings.weights if one.num_bits == bits]
    group = next((one.group_size for one in chosen if (one.group_size or 0) > 0), None)
    columns = num_groups * group if group else int(parts.contents("weight_shape")[-1])  # words may be padded
    parts.agree(-(-columns // each) == num_words)
    if all(one.symmetric is False for one in chosen) or "weight_zero_point" in parts.names:
        zeros = parts.shape("weight_zero_point", _WORDS, 2)
        parts.agree(zeros == (-(-rows // each), num_groups))
    if "weight_g_idx" in parts.names:
        parts.agree(parts.shape("weight_g_idx", _NUMBERS, 1) == (columns,))
    names = parts.named(codes="weight_packed", scale="weight_scale", **row.more)
    return Packed(values.words, (rows, columns), parts.dtype("weight_scale"), names, bits=bits)


def _width(parts: Parts, settings: Settings, num_words: int) -> int:
    """Bits of a code: config.json's; where it gives several, the one that `weight_shape` and the words agree with."""
    given = sorted({one.num_bits for one in settings.weights if one.num_bits is not None})
    widths = [bits for bits in given if bits in _WIDTHS]
    if len(given) > 1 and widths:
        columns = int(parts.contents("weight_shape")[-1])
        widths = [bits for bits in widths if -(-columns // (32 // bits)) == num_words]
    if len(widths) != 1:
        raise ConfigError(
            f"{parts.where}: config.json gives its weight_packed {' and '.join(map(str, given)) or 'no number of'} "
            f"bits, of which {len(widths)} fit its {num_words} words: pack-quantized is read at 2 to 8 bits"
        )
    return widths[0]


def _describe_words(row: Format, parts: Parts, settings: Settings) -> Packed:
    """GPTQ and AWQ name their tensors alike."""
    method, is_v1 = _packer(settings)
    num_words, width = parts.shape("qweight", row.stored, 2)
    groups, num_scales = parts.shape("scales", row.scaled, 2)
    zeros, dtype = parts.shape("qzeros", _WORDS, 2), parts.dtype("scales")
    bits, names = settings.bits or settings.w_bit or 4, parts.named(codes="qweight", scale="scales", **row.more)
    if method == "awq" and bits == 4 and (settings.version or "gemm").lower() == "gemm":
        parts.agree(num_scales == width * 8 and zeros == (groups, width))
        return Packed(values.awq, (width * 8, num_words), dtype, names)
    widths = _WIDTHS if settings.packing_format else (2, 3, 4, 8)
    if method != "gptq" or bits not in widths:
        version = f", version {settings.version}" if settings.version else ""
        raise ConfigError(
            f"{parts.where}: config.json says that its qweight is of quant_method {method or 'not given'} with {bits} "
            f"bits{version}; we read gptq of 2, 3, 4 and 8 bits, auto-round of 2 to 8, and awq of 4 bits, version gemm"
        )
    bits = own if (own := zeros[1] * 32 // width) in widths else bits  # a layer may have its own
    columns = num_words * 32 // bits
    parts.agree(num_scales == width and num_words * 32 % bits == 0 and zeros == (groups, width * bits // 32))
    if "g_idx" in parts.names:
        parts.agree(parts.shape("g_idx", _NUMBERS, 1) == (columns,))
    return Packed(values.gptq, (width, columns), dtype, names, bits=bits, zero_is_less_one=is_v1)


def _packer(settings: Settings) -> tuple[str, bool]:
    """gptq or awq, and whether zero points are stored less one, as auto-gptq does and gptqmodel does not."""
    method, packing = settings.quant_method, settings.packing_format or "auto_round:auto_gptq"
    if method not in ("auto-round", "intel/auto-round"):
        return method, settings.checkpoint_format != "gptq_v2"
    if "awq" in packing:
        return "awq", True
    return "gptq", "gptq" in packing and "gptqmodel" not in packing


# -- bitsandbytes ------------------------------------------------------------------------------------------------------


def _describe_four_bit(row: Format, parts: Parts, settings: Settings) -> Packed:
    state_part = next(name for name in row.scale if name in parts.names)
    state = values.four_bit_state(parts.contents(state_part), parts.names[state_part])
    rows, columns = state.shape
    count = parts.shape("weight", row.stored, 2)
    blocks = -(-rows * columns // state.blocksize)
    parts.agree(count[0] * count[1] * 2 == rows * columns and rows * columns % state.blocksize == 0)
    parts.agree(parts.shape("weight.quant_map", ("F32",), 1) == (16,))
    nested = "weight.nested_absmax" in parts.names
    parts.agree(parts.shape("weight.absmax", ("U8",) if nested else ("F32",), 1, 2)[0] == blocks)
    if nested:
        parts.agree(parts.shape("weight.nested_quant_map", ("F32",), 1) == (256,))
        wanted = -(-blocks // (state.nested_blocksize or 256))
        parts.agree(parts.shape("weight.nested_absmax", ("F32",), 1) == (wanted,))
    dtypes = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    if state.dtype not in dtypes:
        raise ConfigError(f"{parts.where}: its bitsandbytes state names the dtype {state.dtype}, which is not read")
    names = parts.named(codes="weight", state=state_part, **row.more)
    return Packed(values.four_bit, (rows, columns), dtypes[state.dtype], names)


# -- the table ---------------------------------------------------------------------------------------------------------

_NF4_PARTS = {
    "scale": "weight.absmax", "table": "weight.quant_map",
    "nested_scale": "weight.nested_absmax", "nested_table": "weight.nested_quant_map",
}  # fmt: skip
_NF4_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_OF_WORDS = {"zero": "qzeros", "group_of": "g_idx"}
_OF_PACKED = {"shape": "weight_shape", "zero": "weight_zero_point", "group_of": "weight_g_idx"}

FORMATS = (
    Format("MXFP4", "blocks", ("U8",), ("scales",), ("U8",), _describe_blocks),
    Format("MXFP4", "weight_packed", ("U8",), ("weight_scale",), _E8M0, _describe_scaled, "fp4", 32),
    Format("MXFP4", "weight", ("U8", "I8"), _SCALE_NAMES, _E8M0, _describe_scaled, "fp4", 32),
    Format("NVFP4", "weight_packed", ("U8",), ("weight_scale",), ("F8_E4M3",), _describe_scaled, "fp4", 16,
           {"divisor": "weight_global_scale"}),
    Format("NVFP4", "weight", ("U8",), ("weight_scale",), ("F8_E4M3",), _describe_scaled, "fp4", 16,
           {"factor": "weight_scale_2"}),
    Format("FP8", "weight", ("F8_E4M3",), _SCALE_NAMES, _FLOATS, _describe_scaled, "e4m3"),
    Format("MXFP8", "weight", ("F8_E4M3",), _SCALE_NAMES, _E8M0, _describe_scaled, "e4m3"),
    Format("int8", "weight", ("I8",), ("weight_scale",), _FLOATS, _describe_scaled, "int8",
           more={"zero": "weight_zero_point"}),
    Format("bitsandbytes", "weight", ("I8",), ("SCB",), ("F32",), _describe_scaled, "int8 of 127"),
    Format("bitsandbytes", "weight", ("U8",), _NF4_STATES, ("U8",), _describe_four_bit, more=_NF4_PARTS),
    Format("pack-quantized", "weight_packed", _WORDS, ("weight_scale",), _FLOATS, _describe_compressed,
           more=_OF_PACKED),
    Format("GPTQ, AWQ and auto-round", "qweight", _WORDS, ("scales",), _FLOATS, _describe_words, more=_OF_WORDS),
)  # fmt: skip
"""Formats in the order in which they are tried: among those with the same codes, the first whose scale is there."""

_NOT_OF_WEIGHTS = ("input_scale", "input_global_scale", "weight_format")
PARTS = tuple(dict.fromkeys(chain(*((row.codes, *row.scale, *row.more.values()) for row in FORMATS), _NOT_OF_WEIGHTS)))
"""Every name behind a tensor's prefix that belongs to a quantized one."""


def small_values(stored: bytes, info: TensorInfo) -> NDArray[Any]:
    """A small tensor from its bytes."""
    dtype = {"U8": "u1", "I32": "<i4", "I64": "<i8"}[info.dtype]
    if len(stored) != np.dtype(dtype).itemsize * math.prod(info.shape):
        raise ReplicaError(
            f"{info.file.name} is damaged: {len(stored)} bytes are read of a tensor {info.dtype} {list(info.shape)}"
        )
    return np.frombuffer(stored, dtype)
