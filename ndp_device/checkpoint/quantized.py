"""Experts that are stored quantized, as the full-precision tensors they stand for: which tensors, and how to read them.

    X_blocks, X_scales                               MXFP4 of gpt-oss: 32 values of 4 bits under one power of two
    X.weight (F8_E4M3), X.weight_scale_inv           FP8 in blocks (DeepSeek); X.weight_scale: for a row or for all
    X.weight_packed, X.weight_scale, X.weight_shape  compressed-tensors, pack-quantized
    X.qweight, X.scales, X.qzeros, X.g_idx           GPTQ as auto-gptq writes it; AWQ: same names, another order

`unpacked` shows each such group as one tensor X (or X.weight) with the shape and dtype it has when dequantized, so that
names.py finds experts in it as in any other checkpoint. Values come out as the formats' own libraries dequantize them:
in bfloat16 for MXFP4, where that is exact, and FP8, in the dtype of the scales for the others. A format that is not
read is refused by its name. numpy only; knows nothing of experts but how their tensors are named, and opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

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
    settings = config.get("quantization_config")
    groups: dict[str, dict[str, str]] = {}
    for tensor, info in tensors.items():
        match = _PART.fullmatch(tensor)
        if match is None or (match[3] == "weight" and not info.dtype.startswith("F8")):
            continue
        separator = "_" if match[2] else "."
        groups.setdefault(match[1] + separator, {})[match[2] or match[3]] = tensor
    if not groups:
        return dict(tensors), {}
    settings = settings if isinstance(settings, Mapping) else {}
    hidden = {tensor for parts in groups.values() for tensor in parts.values()}
    shown = {tensor: info for tensor, info in tensors.items() if tensor not in hidden}
    packed: dict[str, Packed] = {}
    for prefix, parts in groups.items():
        one = _describe(prefix, parts, tensors, settings, name)
        shown_name = prefix[:-1] if prefix.endswith("_") else f"{prefix}weight"
        packed[shown_name] = one
        shown[shown_name] = TensorInfo(one.dtype, one.shape, tensors[next(iter(parts.values()))].file)
    return shown, packed


def _describe(
    prefix: str, parts: dict[str, str], tensors: Mapping[str, TensorInfo], settings: Mapping[str, Any], name: str
) -> Packed:
    method = str(settings.get("quant_method", "none"))
    where = f"{name}: {prefix}"

    def shape(part: str) -> tuple[int, ...]:
        return tensors[parts[part]].shape

    def need(*wanted: str) -> None:
        if missing := [part for part in wanted if part not in parts]:
            raise ReplicaError(f"{where}{missing[0]} is missing beside {' and '.join(sorted(parts))}: it is incomplete")

    if {"blocks"} <= parts.keys():
        need("blocks", "scales")
        *outer, groups, half = shape("blocks")
        _agree(half == 16 and shape("scales") == (*outer, groups), where, parts, tensors)
        return Packed("mxfp4", (*outer, groups * 2 * half), "BF16", parts)
    if "weight" in parts:
        scale = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        need(scale)
        block = _fp8_block(shape("weight"), shape(scale), settings, where)
        parts = {"weight": parts["weight"], "scale": parts[scale]}
        return Packed("fp8", shape("weight"), "BF16", parts, 8, block=block)
    if "weight_packed" in parts:
        need("weight_scale", "weight_shape")
        bits, symmetric = _compressed_tensors(settings, where)
        if "weight_g_idx" in parts:
            raise ConfigError(f"{where}weight_g_idx: its columns are reordered, which is read of GPTQ files only")
        if not symmetric:
            need("weight_zero_point")
        rows, words = shape("weight_packed")
        _agree(shape("weight_scale")[0] == rows, where, parts, tensors)
        dtype = tensors[parts["weight_scale"]].dtype
        return Packed("packed", (rows, words * 32 // bits), dtype, parts, bits)
    if "qweight" in parts:
        need("scales", "qzeros")
        bits = settings.get("bits", settings.get("w_bit", 4))
        dtype = tensors[parts["scales"]].dtype
        if method == "awq":
            _agree(bits == 4 and settings.get("version", "gemm") == "gemm", where, parts, tensors)
            columns, words = shape("qweight")
            _agree(shape("scales")[1] == words * 8, where, parts, tensors)
            return Packed("awq", (words * 8, columns), dtype, parts)
        if method != "gptq" or bits not in (2, 3, 4, 8):
            raise ConfigError(f"{where}qweight is of quant_method {method} with {bits} bits; we read gptq and awq")
        words, rows = shape("qweight")
        _agree(shape("scales")[1] == rows and words * 32 % bits == 0, where, parts, tensors)
        is_v1 = settings.get("checkpoint_format", "gptq") != "gptq_v2"
        return Packed("gptq", (rows, words * 32 // bits), dtype, parts, bits, is_v1)
    raise ConfigError(
        f"{name}: its experts are stored in a quantized format ({min(parts.values())}, quant_method {method}), which "
        "is not read: give the checkpoint in bfloat16, or in MXFP4, FP8, GPTQ, AWQ or pack-quantized"
    )


def _agree(shapes: bool, where: str, parts: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    if not shapes:
        found = ", ".join(f"{part} {list(tensors[tensor].shape)}" for part, tensor in sorted(parts.items()))
        raise ReplicaError(
            f"{where}: its tensors do not belong together ({found}): it is damaged or of another version"
        )


def _compressed_tensors(settings: Mapping[str, Any], where: str) -> tuple[int, bool]:
    groups = settings.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values() if isinstance(group, Mapping)]
    bits = {entry.get("num_bits") for entry in weights}
    symmetric = {bool(entry.get("symmetric", True)) for entry in weights}
    if settings.get("format") != "pack-quantized" or len(bits) != 1 or len(symmetric) != 1 or not bits <= {4, 8}:
        raise ConfigError(
            f"{where}weight_packed is of compressed-tensors' format {settings.get('format')} with "
            f"{' and '.join(sorted(map(str, bits)))} bits; we read pack-quantized of 4 or 8 bits"
        )
    return int(bits.pop()), symmetric.pop()  # type: ignore[arg-type]


def _fp8_block(
    shape: tuple[int, ...], scale: tuple[int, ...], settings: Mapping[str, Any], where: str
) -> tuple[int, int]:
    """Rows and columns under one scale: in blocks as config.json says, a row each, or all of them."""
    if not scale or scale == (1,):
        return shape[-2], shape[-1]
    rows, columns = settings.get("weight_block_size") or (1, shape[-1])
    if (-(-shape[-2] // rows), -(-shape[-1] // columns)) != scale[-2:]:
        raise ReplicaError(
            f"{where}weight {list(shape)} and its scales {list(scale)} do not belong together in blocks of "
            f"{[rows, columns]}: config.json's weight_block_size is of another model"
        )
    return rows, columns


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
    rows, columns = (int(size) for size in part("weight_shape"))
    codes, scale = codes[:rows, :columns], _float(part("weight_scale"))
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
