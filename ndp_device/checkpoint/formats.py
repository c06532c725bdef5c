"""The quantized formats that are read, as one table: names and dtypes of their tensors, and who makes values of them.

The tensors decide; config.json's quantization_config (stated.py) adds what they do not show. Where it contradicts them,
the checkpoint is refused. Knows shapes and dtypes; values are made in values.py. A format that is missing here is
refused by the names of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from numpy.typing import NDArray

from ndp_device.checkpoint import values
from ndp_device.checkpoint.files import TensorInfo
from ndp_device.checkpoint.stated import Settings, Weights
from ndp_device.checkpoint.values import Packed
from ndp_device.common.errors import ConfigError, ReplicaError

_WORDS, _NUMBERS = ("I32",), ("I32", "I64")
_FLOATS = ("F32", "F16", "BF16")
_E8M0 = ("U8", "F8_E8M0")
_SCALE_NAMES = ("weight_scale", "weight_scale_inv", "scale")
_WIDTHS = range(1, 9)


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
        self.module, self.where = prefix[:-1], f"{model}: {prefix[:-1]}"

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
            raise ReplicaError(
                f"{self.where}: its tensors do not belong together ({self._found}): it is damaged or of another version"
            )

    def contradicted(self, stated: object) -> ConfigError:
        """The refusal of a file that is not as config.json states it."""
        return ConfigError(
            f"{self.where}: config.json's quantization_config states {stated}, and its tensors say otherwise "
            f"({self._found}): take both from one checkpoint"
        )

    @property
    def _found(self) -> str:
        found = ((part, self._tensors[name]) for part, name in sorted(self.names.items()))
        return ", ".join(f"{part} {info.dtype} {list(info.shape)}" for part, info in found)

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
        if (scale := row.scale_of(parts)) is not None:
            _refuse_unread(row, scale, parts, settings)
            return row.describe(row, parts, settings)
    rows = fitting or near
    if not rows:
        raise _unknown(parts, settings)
    if not fitting:
        parts.shape(rows[0].codes, sorted(set(chain(*(row.stored for row in rows)))), 2, 3, 4)
    wanted = next((name for row in rows for name in row.scale if name in parts.names), rows[0].scale[0])
    parts.shape(wanted, sorted(set(chain(*(row.scaled for row in rows if wanted in row.scale)))), 0, 1, 2, 3, 4)
    raise _unknown(parts, settings)


def _refuse_unread(row: Format, scale: str, parts: Parts, settings: Settings) -> None:
    """Refuse what would change the values and is not of this format."""
    if settings.turns(parts.module):
        raise ConfigError(
            f"{parts.where}: config.json's transform_config turns what it reads or gives while it runs, which is not "
            "done: give a checkpoint without online transforms"
        )
    known = {row.codes, scale, *row.more.values(), *_NOT_OF_WEIGHTS}
    if row.elements == "e4m3":
        known.add("weight_zero_point")  # compressed-tensors once wrote zeros
    if unread := sorted(parts.names.keys() - known):
        raise ReplicaError(
            f"{parts.where}: its {unread[0]} is no part of {row.name}, as which its {row.codes} and {scale} are read: "
            "the checkpoint is of two formats, or of another version"
        )


def _unknown(parts: Parts, settings: Settings) -> ConfigError:
    return ConfigError(
        f"{parts.where}: its experts are stored in a quantized format ({min(parts.names.values())}, quant_method "
        f"{settings.quant_method or 'not given'}), which is not read: give the checkpoint in bfloat16, or in "
        f"{', '.join(dict.fromkeys(row.name for row in FORMATS))}"
    )


# -- one code and one scale per block ----------------------------------------------------------------------------------


def _describe_scaled(row: Format, parts: Parts, settings: Settings) -> Packed:
    name = row.scale_of(parts) or ""
    if row.codes == "blocks":  # a dimension of its own for the codes under one scale
        *outer, groups, half = parts.shape(row.codes, row.stored, 4)
        stored: tuple[int, ...] = (*outer, groups * half)
    else:
        stored = parts.shape(row.codes, row.stored, 2, 3)
    shape = (*stored[:-1], stored[-1] * 2) if row.elements == "fp4" else stored
    scale = parts.shape(name, row.scaled, *range(len(shape) + 3))
    for part in (row.more[role] for role in ("divisor", "factor") if role in row.more):
        parts.agree(set(parts.shape(part, ("F32",), 0, 1, 2, 3)) <= {1, *shape[:-2]})
    names = parts.named(codes=row.codes, scale=name, **row.more)
    dtype = parts.dtype(name) if row.elements.startswith("int8") else "BF16"
    stated = _stated_of(row, parts, settings)
    block = _block(row, shape, scale, stated, settings, parts)
    if "zero" in names:
        parts.agree(parts.shape("weight_zero_point", ("I8",), 1, 2) == scale)
    elif row.elements == "int8" and stated and all(one.symmetric is False for one in stated):
        raise parts.contradicted("zero points (symmetric: false)")
    symmetric = bool(stated) and all(bool(one.symmetric) for one in stated)
    return Packed(values.scaled, shape, dtype, names, row.elements, parts.dtype(name), 8, block, is_symmetric=symmetric)


_NUMBERS_OF = {"fp4": ("float", range(4, 5)), "e4m3": ("float", range(8, 9)), "int8": ("int", _WIDTHS)}
"""Elements -> type and widths of what is stated of them; whole numbers of fewer bits lie in bytes, too."""


def _stated_of(row: Format, parts: Parts, settings: Settings) -> list[Weights]:
    """What is stated of this tensor, where it can be meant; refuses other types, widths and fixed groups."""
    kind, widths = _NUMBERS_OF.get(row.elements, ("", range(0)))
    stated = settings.of(parts.module)
    meant = [
        one
        for one in stated
        if (not kind or ((one.type or kind) == kind and (one.num_bits is None or one.num_bits in widths)))
        and (not row.group or one.block_structure is not None or one.columns in (None, row.group))
    ]
    if not meant:
        raise parts.contradicted(f"{stated[0].type or 'codes'} of {stated[0]}")
    return meant


def _block(
    row: Format,
    shape: tuple[int, ...],
    scale: tuple[int, ...],
    stated: list[Weights],
    settings: Settings,
    parts: Parts,
) -> tuple[int, int]:
    """Rows and columns under one scale: fixed, or as config.json states it, or else as the shapes show it."""
    rows, columns = shape[-2:]
    if row.group:
        parts.agree(scale == (*shape[:-1], -(-columns // row.group)))
        return 1, row.group
    sizes = [size for size in scale if size > 1]
    said = [(block[0] or rows, block[1] or columns) for one in stated if (block := one.block) is not None]
    exponents = [(1, 32)] if parts.dtype(row.scale_of(parts) or "") in _E8M0 else []
    for of_rows, of_columns in said or [(rows, columns), *exponents, (1, columns)]:
        grid = (*shape[:-2], -(-rows // of_rows), -(-columns // of_columns))
        shown = [one for one in grid if one > 1]
        if grid == scale or (shown == sizes and (len(scale) != len(grid) or not sizes)):
            return of_rows, of_columns
    if said:
        raise parts.contradicted(f"blocks of {list(said[0])}")
    raise ReplicaError(
        f"{parts.where}: its weight {list(shape)} and its scales {list(scale)} do not belong together in blocks of "
        f"{[1, columns]}: config.json's weight_block_size is missing"
    )


# -- words of codes ----------------------------------------------------------------------------------------------------


def _columns_per_scale(stated: Weights, columns: int, groups: int) -> int | None:
    """As stated, the last group short; where nothing is, all, or a power of two that leaves no rest. None: neither."""
    if (size := stated.columns) is None:
        size = columns // groups
        return size if groups == 1 or (size * groups == columns and size & (size - 1) == 0) else None
    size = size or columns
    return size if -(-columns // size) == groups else None


def _describe_compressed(row: Format, parts: Parts, settings: Settings) -> Packed:
    """Codes of 3, 5, 6 and 7 bits lie dense, across words (compressed-tensors from 0.18 on), or none crosses a word."""
    *outer, rows, num_words = parts.shape("weight_packed", row.stored, 2, 3)  # 3: of all experts of a layer
    *scaled, num_groups = parts.shape("weight_scale", row.scaled, 2, 3)
    parts.agree(scaled == [*outer, rows] and parts.shape("weight_shape", _NUMBERS, 1) == (len(outer) + 2,))
    columns = int(parts.contents("weight_shape")[-1])  # words may be padded
    parts.agree(columns > 0)
    has_zeros = "weight_zero_point" in parts.names
    zeros = parts.shape("weight_zero_point", _WORDS, len(outer) + 2) if has_zeros else None
    stated = settings.of(parts.module)
    readings: dict[tuple[int, int, bool], Weights] = {}
    for one in stated:
        bits, group = one.num_bits, _columns_per_scale(one, columns, num_groups)
        if bits is None or bits not in _WIDTHS or group is None or one.type not in (None, "int"):
            continue
        for dense in (True, False) if 32 % bits else (True,):
            if num_words == _num_words(columns, bits, dense) and (
                zeros is None or zeros == (*outer, _num_words(rows, bits, dense), num_groups)
            ):
                readings[bits, group, dense] = one
    if not readings:
        raise parts.contradicted(stated[0])
    if len(readings) > 1:
        raise ConfigError(
            f"{parts.where}: config.json and its tensors allow more than one reading of its weight_packed ("
            f"{' or '.join(f'{bits} bits, {group} columns to a scale' for bits, group, _ in readings)}, dense or "
            "not): name it in the targets of one config group, or write it with compressed-tensors 0.18"
        )
    ((bits, group, dense), one) = next(iter(readings.items()))
    if one.symmetric is False:
        parts.shape("weight_zero_point", _WORDS, len(outer) + 2)
    _order(parts, "weight_g_idx", one, columns, num_groups)
    names = parts.named(codes="weight_packed", scale="weight_scale", **row.more)
    return Packed(
        values.words, (*outer, rows, columns), parts.dtype("weight_scale"), names,
        bits=bits, block=(1, group), is_dense=dense, is_symmetric=bool(one.symmetric),
        is_in_order=one.in_order,
    )  # fmt: skip


def _num_words(codes: int, bits: int, dense: bool) -> int:
    return -(-codes * bits // 32) if dense else -(-codes // (32 // bits))


def _order(parts: Parts, part: str, stated: Weights, columns: int, groups: int) -> None:
    """Refuses an order of columns that is stated and not there, or of another length."""
    if part in parts.names:
        parts.agree(parts.shape(part, _NUMBERS, 1) == (columns,))
    elif stated.actorder and not stated.in_order and groups > 1:
        raise parts.contradicted(f"another order of columns (desc_act or actorder), which {part} would hold")


def _describe_words(row: Format, parts: Parts, settings: Settings) -> Packed:
    """GPTQ and AWQ name their tensors alike."""
    method, less_one, borrows = _packer(settings, parts)
    num_words, width = parts.shape("qweight", row.stored, 2)
    groups, num_scales = parts.shape("scales", row.scaled, 2)
    zeros, dtype = parts.shape("qzeros", _WORDS, 2), parts.dtype("scales")
    (stated,), names = settings.of(parts.module)[:1], parts.named(codes="qweight", scale="scales", **row.more)
    bits, version = stated.num_bits or 4, settings.version or settings.checkpoint_format or "gemm"
    symmetric = bool(stated.symmetric)
    if method == "awq" and bits == 4 and version.lower() == "gemm":
        parts.agree(num_scales == width * 8 and zeros == (groups, width))
        if (group := _columns_per_scale(stated, num_words, groups)) is None:
            raise parts.contradicted(stated)
        return Packed(values.awq, (width * 8, num_words), dtype, names, block=(group, 1), is_symmetric=symmetric)
    widths = range(2, 9) if settings.packing_format else (2, 3, 4, 8)
    if method != "gptq" or bits not in widths:
        version = f", version {settings.version}" if settings.version else ""
        raise ConfigError(
            f"{parts.where}: config.json says that its qweight is of quant_method {method or 'not given'} with {bits} "
            f"bits{version}; we read gptq of 2, 3, 4 and 8 bits, auto-round of 2 to 8, and awq of 4 bits, version gemm"
        )
    bits = own if (own := zeros[1] * 32 // width) in widths else bits  # a layer may have its own
    columns = num_words * 32 // bits
    parts.agree(num_scales == width and num_words * 32 % bits == 0 and zeros == (groups, width * bits // 32))
    group = _columns_per_scale(stated, columns, groups)
    if group is None and ("g_idx" not in parts.names or stated.columns is not None):
        raise parts.contradicted(stated)
    _order(parts, "g_idx", stated, columns, groups)
    return Packed(
        values.gptq, (width, columns), dtype, names, bits=bits, block=(1, group or columns),
        zero_is_less_one=less_one, zeros_borrow=borrows, is_symmetric=symmetric, is_in_order=stated.in_order,
    )  # fmt: skip


def _packer(settings: Settings, parts: Parts) -> tuple[str, bool, bool]:
    """gptq or awq; whether zero points are stored less one, as auto-gptq does and gptqmodel need not; whether by words.

    gptqmodel writes a label, auto-gptq writes none.
    """
    method, packing = settings.quant_method, settings.packing_format or "auto_round:auto_gptq"
    if method in ("auto-round", "intel/auto-round"):
        if "awq" in packing:
            return "awq", False, False
        return "gptq", "gptq" in packing and "gptqmodel" not in packing, False
    labels = {settings.checkpoint_format, settings.format} - {None} if method == "gptq" else set()
    if len(labels) > 1 or not labels <= {"gptq", "gptq_v2"}:
        raise ConfigError(
            f"{parts.where}: config.json gives the checkpoint_format of its qweight as "
            f"{' and '.join(sorted(map(str, labels)))}; we read either gptq or gptq_v2"
        )
    return method, "gptq_v2" not in labels, "gptq" in labels


# -- bitsandbytes ------------------------------------------------------------------------------------------------------


def _describe_four_bit(row: Format, parts: Parts, settings: Settings) -> Packed:
    state_part = next(name for name in row.scale if name in parts.names)
    state = values.four_bit_state(parts.contents(state_part), parts.names[state_part])
    rows, columns = state.shape
    count = parts.shape("weight", row.stored, 2)
    blocks = -(-rows * columns // state.blocksize)
    parts.agree(count[0] * count[1] * 2 == rows * columns)
    if (kind := settings.bnb_4bit_quant_type) is not None and not state_part.endswith(f"__{kind}"):
        raise parts.contradicted(f"bnb_4bit_quant_type {kind}")
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
    Format("MXFP4", "blocks", ("U8",), ("scales",), ("U8",), _describe_scaled, "fp4", 32),
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
