"""Experts that are stored quantized, as the full-precision tensors they stand for: which tensors, and how to read them.

    X_blocks, X_scales                               MXFP4 of gpt-oss: 32 values of 4 bits under one power of two
    X.weight (F8_E4M3), X.weight_scale_inv           FP8 in blocks (DeepSeek); X.weight_scale: for a row or for all
    X.weight_packed, X.weight_scale, X.weight_shape  compressed-tensors, pack-quantized
    X.qweight, X.scales, X.qzeros, X.g_idx           GPTQ as auto-gptq writes it; AWQ: same names, another order

`unpacked` shows each such group as one tensor X (or X.weight) with its shape and dtype when dequantized. So names.py
finds experts in it as in any other checkpoint. Values equal those of the formats' own libraries: bfloat16 for MXFP4,
where that is exact, and FP8, the dtype of the scales for the others. The error for any other format names the format.
Needs numpy only. Knows nothing of experts but the names of their tensors, and opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.checkpoint.headers import TensorInfo
from ndp_device.errors import ConfigError, ReplicaError

Read = Callable[[str], NDArray[Any]]
"""Name of a stored tensor -> its values; bfloat16 as uint16, FP8 as its bytes."""

_PART = re.compile(
    r"(.*\bexperts\b.*?)(?:_(blocks|scales)|\.(weight|weight_scale_inv|weight_scale|weight_packed|weight_shape"
    r"|weight_zero_point|weight_g_idx|input_scale|qweight|scales|qzeros|g_idx))"
)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the k-th value of a word lies among its nibbles: AWQ packs them in the order 0 2 4 6 1 3 5 7."""
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FP8 = ("F8_E4M3",)
_WORDS, _NUMBERS = ("I32",), ("I32", "I64")
_FLOATS = tuple(_DTYPES)

_Size = Annotated[int, msgspec.Meta(ge=1)]


class _Weights(msgspec.Struct):
    num_bits: int | None = None
    symmetric: bool | None = True


class _Group(msgspec.Struct):
    weights: _Weights | None = None


class _Settings(msgspec.Struct):
    """The part of config.json's quantization_config that the code reads."""

    quant_method: str = ""
    bits: int | None = None  # GPTQ and AWQ
    w_bit: int | None = None  # AWQ, older
    version: str | None = None  # AWQ
    checkpoint_format: str | None = None  # GPTQ
    weight_block_size: tuple[_Size, _Size] | None = None  # FP8
    format: str | None = None  # compressed-tensors
    config_groups: dict[str, _Group] | None = None  # likewise


@dataclass(frozen=True)
class Packed:
    """One tensor in the shape that its values have, and the stored tensors that hold them."""

    format: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    parts: Mapping[str, str]
    bits: int = 4
    zero_is_less_one: bool = False
    block: tuple[int, int] = (1, 1)
    """Rows and columns under one scale."""

    def values(self, read: Read, index: int | None) -> NDArray[Any]:
        """Dequantized, in `dtype` (bfloat16 as uint16); of a tensor of all experts only number `index`."""
        values = _DEQUANTIZE[self.format](self, lambda part: _one_of(read(self.parts[part]), index))
        return _as_stored(values, self.dtype)


def unpacked(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], *, name: str
) -> tuple[dict[str, TensorInfo], dict[str, Packed]]:
    """All tensors, those of quantized experts replaced by what they stand for; and how each of these is read."""
    groups: dict[str, dict[str, str]] = {}
    for tensor, info in tensors.items():
        match = _PART.fullmatch(tensor)
        if match is None or (match[3] == "weight" and not info.dtype.startswith("F8")):
            continue
        separator = "_" if match[2] else "."
        groups.setdefault(match[1] + separator, {})[match[2] or match[3]] = tensor
    if not groups:
        return dict(tensors), {}
    settings = _settings(config.get("quantization_config"), name)
    hidden = {tensor for parts in groups.values() for tensor in parts.values()}
    shown = {tensor: info for tensor, info in tensors.items() if tensor not in hidden}
    packed: dict[str, Packed] = {}
    for prefix, parts in groups.items():
        one = _describe(_Parts(prefix, parts, tensors, name), settings)
        shown_name = prefix[:-1] if prefix.endswith("_") else f"{prefix}weight"
        packed[shown_name] = one
        shown[shown_name] = TensorInfo(one.dtype, one.shape, tensors[next(iter(parts.values()))].file)
    return shown, packed


def _settings(given: object, name: str) -> _Settings:
    try:
        return msgspec.convert({} if given is None else given, _Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: config.json's quantization_config cannot be read: {error}") from None


class _Parts:
    """The stored tensors of one quantized tensor, looked at one by one."""

    def __init__(self, prefix: str, names: Mapping[str, str], tensors: Mapping[str, TensorInfo], model: str) -> None:
        self.names, self._tensors = names, tensors
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

    def agree(self, shapes: bool) -> None:
        if not shapes:
            found = ", ".join(f"{part} {list(self._tensors[name].shape)}" for part, name in sorted(self.names.items()))
            raise ReplicaError(
                f"{self.where}: its tensors do not belong together ({found}): it is damaged or of another version"
            )


def _describe(parts: _Parts, settings: _Settings) -> Packed:
    for part, describe in _DESCRIBE.items():
        if part in parts.names:
            return describe(parts, settings)
    some = min(parts.names.values())
    raise ConfigError(
        f"{parts.where}: its experts are stored in a quantized format ({some}, quant_method "
        f"{settings.quant_method or 'not given'}), which is not read: give the checkpoint in bfloat16, or in MXFP4, "
        "FP8, GPTQ, AWQ or pack-quantized"
    )


def _describe_mxfp4(parts: _Parts, settings: _Settings) -> Packed:
    *outer, groups, half = parts.shape("blocks", ("U8",), 4)
    parts.agree(half == 16 and parts.shape("scales", ("U8",), 3) == (*outer, groups))
    return Packed("mxfp4", (*outer, groups * 2 * half), "BF16", parts.names)


def _describe_fp8(parts: _Parts, settings: _Settings) -> Packed:
    shape = parts.shape("weight", _FP8, 2, 3)
    part = "weight_scale_inv" if "weight_scale_inv" in parts.names else "weight_scale"
    scale = parts.shape(part, _FLOATS, *range(len(shape) + 1))
    names = {"weight": parts.names["weight"], "scale": parts.names[part]}
    return Packed("fp8", shape, "BF16", names, 8, block=_fp8_block(shape, scale, settings, parts))


def _fp8_block(shape: tuple[int, ...], scale: tuple[int, ...], settings: _Settings, parts: _Parts) -> tuple[int, int]:
    """Rows and columns under one scale: in blocks as config.json says, a row each, or all of them."""
    if not scale or scale == (1,):
        return shape[-2], shape[-1]
    rows, columns = settings.weight_block_size or (1, shape[-1])
    if (-(-shape[-2] // rows), -(-shape[-1] // columns)) != scale[-2:]:
        what = "weight_block_size is of another model" if settings.weight_block_size else "weight_block_size is missing"
        raise ReplicaError(
            f"{parts.where}: its weight {list(shape)} and its scales {list(scale)} do not belong together in blocks of "
            f"{[rows, columns]}: config.json's {what}"
        )
    return rows, columns


def _describe_compressed(parts: _Parts, settings: _Settings) -> Packed:
    groups = [group.weights for group in (settings.config_groups or {}).values() if group.weights is not None]
    bits = {weights.num_bits for weights in groups if weights.num_bits is not None}
    symmetric = {weights.symmetric is not False for weights in groups}
    if settings.format != "pack-quantized" or len(symmetric) != 1 or len(bits) != 1 or not bits <= {4, 8}:
        raise ConfigError(
            f"{parts.where}: config.json says that its weight_packed is of compressed-tensors' format "
            f"{settings.format or '(not given)'} with {' and '.join(map(str, sorted(bits))) or 'no number of'} bits; "
            "we read pack-quantized of 4 or 8 bits"
        )
    if "weight_g_idx" in parts.names:
        raise ConfigError(f"{parts.where}: by its weight_g_idx columns are reordered, which is read of GPTQ files only")
    (width,) = bits
    rows, words = parts.shape("weight_packed", _WORDS, 2)
    num_rows, num_groups = parts.shape("weight_scale", _FLOATS, 2)
    parts.agree(num_rows == rows and parts.shape("weight_shape", _NUMBERS, 1) == (2,))
    if not symmetric.pop():
        zeros = parts.shape("weight_zero_point", _WORDS, 2)
        parts.agree(zeros == (-(-rows * width // 32), num_groups))
    return Packed("packed", (rows, words * 32 // width), parts.dtype("weight_scale"), parts.names, width)


def _describe_words(parts: _Parts, settings: _Settings) -> Packed:
    """GPTQ and AWQ name their tensors alike."""
    bits = settings.bits or settings.w_bit or 4
    words, width = parts.shape("qweight", _WORDS, 2)
    groups, num_scales = parts.shape("scales", _FLOATS, 2)
    zeros, dtype = parts.shape("qzeros", _WORDS, 2), parts.dtype("scales")
    if settings.quant_method == "awq" and bits == 4 and (settings.version or "gemm").lower() == "gemm":
        parts.agree(num_scales == width * 8 and zeros == (groups, width))
        return Packed("awq", (width * 8, words), dtype, parts.names)
    if settings.quant_method != "gptq" or bits not in (2, 3, 4, 8):
        method = settings.quant_method or "not given"
        version = f", version {settings.version}" if settings.version else ""
        raise ConfigError(
            f"{parts.where}: config.json says that its qweight is of quant_method {method} with {bits} bits{version}; "
            "we read gptq of 2, 3, 4 and 8 bits and awq of 4 bits, version gemm"
        )
    columns = words * 32 // bits
    parts.agree(num_scales == width and words * 32 % bits == 0 and zeros == (groups, width * bits // 32))
    if "g_idx" in parts.names:
        parts.agree(parts.shape("g_idx", _NUMBERS, 1) == (columns,))
    is_v1 = settings.checkpoint_format != "gptq_v2"
    return Packed("gptq", (width, columns), dtype, parts.names, bits, is_v1)


_DESCRIBE: Mapping[str, Callable[[_Parts, _Settings], Packed]] = {
    "blocks": _describe_mxfp4,
    "weight": _describe_fp8,
    "weight_packed": _describe_compressed,
    "qweight": _describe_words,
}
"""By the part that holds the values."""


# -- values ------------------------------------------------------------------------------------------------------------


def _mxfp4(packed: Packed, part: Callable[[str], NDArray[Any]]) -> NDArray[np.float32]:
    blocks, scales = part("blocks"), part("scales")
    values: NDArray[np.float32] = _fp4_pairs()[blocks].reshape(*blocks.shape[:-1], 2 * blocks.shape[-1])
    values *= np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None]
    return values.reshape(*blocks.shape[:-2], -1)


def _fp8(packed: Packed, part: Callable[[str], NDArray[Any]]) -> NDArray[np.float32]:
    weight, scale = _fp8_values()[part("weight")], np.atleast_2d(_float(part("scale")))
    (rows, columns), (num_rows, num_columns) = packed.block, weight.shape
    values: NDArray[np.float32] = weight * np.repeat(np.repeat(scale, rows, 0)[:num_rows], columns, 1)[:, :num_columns]
    return values


def _packed(packed: Packed, part: Callable[[str], NDArray[Any]]) -> NDArray[np.float32]:
    codes = _unpack(part("weight_packed"), packed.bits).astype(np.float32)
    rows, columns = codes.shape
    if part("weight_shape").tolist() != [rows, columns]:
        raise ReplicaError(
            f"{packed.parts['weight_shape']} is {part('weight_shape').tolist()} and weight_packed holds "
            f"{[rows, columns]}: the checkpoint is damaged"
        )
    scale = _float(part("weight_scale"))
    group = -(-columns // scale.shape[1])
    if "weight_zero_point" in packed.parts:
        zeros = _unpack(part("weight_zero_point").T, packed.bits).T[:rows].astype(np.float32)
    else:
        zeros = np.full(scale.shape, 1 << (packed.bits - 1), np.float32)
    spread: NDArray[np.float32] = np.repeat(scale, group, 1)[:, :columns]
    return (codes - np.repeat(zeros, group, 1)[:, :columns]) * spread


def _gptq(packed: Packed, part: Callable[[str], NDArray[Any]]) -> NDArray[np.float32]:
    codes = _unpack(part("qweight").T, packed.bits).astype(np.float32)  # [N, C]
    scale = _float(part("scales"))  # [G, N]
    zeros = _unpack(part("qzeros"), packed.bits).astype(np.float32) + np.float32(packed.zero_is_less_one)
    if "g_idx" in packed.parts:
        group_of = part("g_idx").astype(np.int64)
        if group_of.min() < 0 or group_of.max() >= len(scale):
            raise ReplicaError(f"{packed.parts['g_idx']} names groups that have no scales: the checkpoint is damaged")
    else:
        group_of = np.arange(codes.shape[1]) // -(-codes.shape[1] // len(scale))
    return (codes - zeros[group_of].T) * scale[group_of].T


def _awq(packed: Packed, part: Callable[[str], NDArray[Any]]) -> NDArray[np.float32]:
    def in_order(words: NDArray[Any]) -> NDArray[np.float32]:  # [C, N / 8] -> [C, N]
        nibbles = _unpack(words, 4).reshape(len(words), -1, 8)
        return nibbles[:, :, list(_AWQ_ORDER)].reshape(len(words), -1).astype(np.float32)

    codes, zeros, scale = in_order(part("qweight")), in_order(part("qzeros")), _float(part("scales"))
    group = -(-len(codes) // len(scale))
    dequantized = (codes - np.repeat(zeros, group, 0)[: len(codes)]) * np.repeat(scale, group, 0)[: len(codes)]
    return np.ascontiguousarray(dequantized.T)


_DEQUANTIZE = {"mxfp4": _mxfp4, "fp8": _fp8, "packed": _packed, "gptq": _gptq, "awq": _awq}


def _unpack(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """int32 [N, words] -> codes [N, words * 32 / bits]: a stream of bits, the lowest first."""
    stored = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return stored
    if bits == 4:
        return np.stack([stored & 15, stored >> 4], axis=-1).reshape(len(stored), -1)
    stream = np.unpackbits(stored, axis=1, bitorder="little").reshape(len(stored), -1, bits)
    codes: NDArray[np.uint8] = (stream << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
    return codes


def _one_of(values: NDArray[Any], index: int | None) -> NDArray[Any]:
    return values if index is None else values[index]


def _float(values: NDArray[Any]) -> NDArray[np.float32]:
    """Scales as float32; 16-bit unsigned integers are bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _as_stored(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Rounded to nearest even, as torch does."""
    if dtype != "BF16":
        return values.astype(_DTYPES[dtype])
    bits = values.view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


@cache
def _fp4_pairs() -> NDArray[np.float32]:
    """Byte -> its two values, the low nibble first."""
    both = np.arange(256)
    return np.stack([_FP4[both & 15], _FP4[both >> 4]], axis=1)


@cache
def _fp8_values() -> NDArray[np.float32]:
    """Byte -> E4M3 without infinities: 4 bits of exponent, 3 of mantissa, NaN only at 0x7f."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    size = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    size[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte & 0x80, -size, size).astype(np.float32)
