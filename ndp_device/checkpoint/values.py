"""Stored codes and scales as the numbers that they stand for: one decoder per kind of format, in numpy; FP4 in C++ too.

A decoder takes how one matrix is stored (`Packed`) and a reader of its parts, and returns what gives some of its rows,
float32 [n, C]. The order of its operations is that of the format's own library, so each value is the same to the last
bit. Rows are decoded some at a time, as many as a core's cache holds: MXFP4 6 times as fast as all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.checkpoint import _values
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.widths import BYTE_BITS, FP4, FP4_GROUP, NVFP4_GROUP
from ndp_device.experts.expert import ByteMatrix, Fp4Matrix, QuantizedMatrix

Floats = NDArray[np.float32]
Rows = Callable[[int, int], NDArray[Any]]
"""The values of rows first .. last - 1: float32, or bfloat16 as uint16."""
Read = Callable[[str], NDArray[Any]]
"""Name of a stored tensor -> its values; bfloat16 as uint16, FP8 and E8M0 as their bytes."""

_FP4, _INTEGERS = np.array(FP4, np.float32), np.arange(16, dtype=np.float32)
_ONE_127TH = np.float32(7.874015718698502e-3)
"""As bitsandbytes writes it."""
_AT_ONCE = 1 << 18
"""Values decoded at once: 1 MB in float32."""
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


_NO_NUMBER, _NAN_OF_E4M3 = 0xFF, 0x7F
"""Of E8M0; of E4M3."""

CODE_BITS = 4
"""Width of the codes that replicas may hold as they are stored."""


class StoredForm(NamedTuple):
    """How codes are stored: as integers (int4, int8), E2M1 numbers (fp4) or E4M3 ones (float8), so many columns under
    one scale; 0: 8 bits in rows, or in blocks of 128 columns and more."""

    numbers: str
    group: int

    @property
    def bits(self) -> int:
        return BYTE_BITS if self.numbers in _BYTES.values() else CODE_BITS

    @property
    def unit(self) -> int:
        """Intermediate units that stay together where an expert is cut into parts; 1: as its blocks allow."""
        return FP4_GROUP if self.numbers == "fp4" else self.group or 1


MXFP4, NVFP4 = StoredForm("fp4", FP4_GROUP), StoredForm("fp4", NVFP4_GROUP)

_BYTES = {"e4m3": "float8", "int8": "int8"}
"""Elements -> what experts/expert.py calls them."""

StoredMatrix = QuantizedMatrix | Fp4Matrix | ByteMatrix
"""A matrix as a checkpoint stores it. Of integers the offset is minus zero point times scale, rounded to float16; the
columns lie in the order of their groups (`perm`)."""


@dataclass(frozen=True)
class Packed:
    """One tensor in the shape that its values have, and the stored tensors that hold them."""

    decode: Callable[[Packed, Read], Rows | Whole]
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it
    parts: Mapping[str, str]
    """Purpose (codes, scale, zero, ...) -> name of the stored tensor."""
    elements: str = ""
    """Type of a code: fp4, e4m3, int8, or ggml's name of a type."""
    scale_dtype: str = "F32"
    bits: int = 4
    block: tuple[int, int] = (1, 1)
    """Rows and columns under one scale."""
    zero_is_less_one: bool = False
    zeros_borrow: bool = False
    """One was subtracted from all zero points of a word at once, as gptqmodel does: a zero point of 0 borrows."""
    is_symmetric: bool = False
    """config.json states that every zero point is the middle code."""
    is_in_order: bool = False
    """config.json states that the columns lie in the order of their groups."""
    is_dense: bool = True
    """Codes lie across words."""

    def values(self, read: Read, index: int | None) -> NDArray[Any]:
        """Dequantized, in `dtype` (bfloat16 as uint16); of a tensor of all experts only number `index`."""
        one, part = self._one(read, index)
        with np.errstate(
            over="ignore", invalid="ignore", divide="ignore"
        ):  # who takes an expert refuses infinities and NaN
            return one._decoded(part)

    @property
    def stored_form(self) -> StoredForm | None:
        """What a kernel may compute from as it is stored, integers and FP4 in whole groups of a row; else None."""
        columns, group = self.shape[-1], max(self.block)
        if self.decode is scaled and self.elements in _BYTES and self.parts.keys() == {"codes", "scale"}:
            return StoredForm(_BYTES[self.elements], self.block[1] if self.block[1] < min(columns, 128) else 0)
        if columns % group:
            return None
        if self.decode in _OF_INTEGERS and self.bits == CODE_BITS and group % 8 == 0:
            return StoredForm("int4", group)
        if self.decode is not scaled or self.elements != "fp4" or self.block[0] != 1 or columns % FP4_GROUP:
            return None
        has_powers = self.scale_dtype in ("U8", "F8_E8M0") and self.parts.keys() == {"codes", "scale"}
        if has_powers and group == FP4_GROUP:
            return MXFP4
        return NVFP4 if self.scale_dtype == "F8_E4M3" and group == NVFP4_GROUP else None

    def codes(self, read: Read, index: int | None) -> StoredMatrix | None:
        """The same as it is stored; None where a kernel cannot take it so. Raises ReplicaError for a byte or a scale
        that is no number."""
        one, part = self._one(read, index)
        if one.stored_form is None:
            return None
        if one.stored_form.bits == BYTE_BITS:
            return one._byte_codes(part, one.stored_form.numbers)
        if one.stored_form.numbers == "fp4":
            return one._fp4_codes(part, one.stored_form)
        whole = self.decode(one, part)
        assert isinstance(whole, Whole)
        scale, zero, words = whole.scale, whole.zero, whole.words[:, : one.shape[1] // 8]
        perm = None
        if whole.group_of is not None:
            if scale.shape[1] * max(one.block) != one.shape[1]:  # groups of several sizes
                return None
            perm = np.argsort(whole.group_of, kind="stable").astype(np.int32)
            nibbles = _unpack_stream(words, CODE_BITS)[:, perm]
            words = np.ascontiguousarray(nibbles[:, ::2] | nibbles[:, 1::2] << 4).view("<i4")
        with np.errstate(over="ignore"):
            halves, offset = scale.astype(np.float16), (-zero * scale).astype(np.float16)
        if not (np.array_equal(halves, scale) and np.isfinite(offset).all()):
            return None
        planes = np.empty((CODE_BITS, *words.shape), np.uint8)
        _values.planes_of_nibbles(words.view(np.uint32), planes)
        return QuantizedMatrix(CODE_BITS, planes, halves, offset, max(one.block), perm)

    def _fp4_codes(self, part: Read, form: StoredForm) -> Fp4Matrix | None:
        codes, scales = (part(role).view(np.uint8).reshape(self.shape[0], -1) for role in ("codes", "scale"))
        if form == MXFP4:
            return None if (scales == _NO_NUMBER).any() else Fp4Matrix(codes, scales)
        of_all = np.float32(1)
        with np.errstate(divide="ignore"):
            if "divisor" in self.parts:
                of_all /= _one_number(part("divisor"))
            if "factor" in self.parts:
                of_all *= _one_number(part("factor"))
        if not np.isfinite(of_all) or (scales >= _NAN_OF_E4M3).any():  # negative ones, too
            return None
        return Fp4Matrix(codes, scales, np.full(self.shape[0], of_all, np.float32))

    def _byte_codes(self, part: Read, numbers: str) -> ByteMatrix:
        (rows, columns), (of_rows, of_columns) = self.shape, self.block
        codes = part("codes").view(np.uint8).reshape(rows, columns)
        scale = _numbers(part("scale"), self.scale_dtype).reshape(-(-rows // of_rows), -(-columns // of_columns))
        if not np.isfinite(scale).all() or (numbers == "float8" and _values.holds_nan_of_e4m3(codes)):
            raise ReplicaError(
                f"{self.parts['codes']} holds NaN or infinity: the checkpoint is damaged, give it another"
            )
        return ByteMatrix(numbers, codes, np.ascontiguousarray(scale, np.float32), self.block)

    def _one(self, read: Read, index: int | None) -> tuple[Packed, Read]:
        def part(role: str) -> NDArray[Any]:
            values = read(self.parts[role])
            is_of_each = index is not None and role not in _OF_ALL and values.shape[:1] == self.shape[:1]
            return values[index] if is_of_each else values

        return (self if index is None else replace(self, shape=self.shape[1:])), part

    def _decoded(self, part: Read) -> NDArray[Any]:
        found, (num_rows, columns) = self.decode(self, part), self.shape
        rows = found.rows_of(self) if isinstance(found, Whole) else found
        at_once = max(_AT_ONCE // columns, 1)
        out = np.empty(self.shape, "uint16" if self.dtype == "BF16" else _DTYPES[self.dtype])
        for first in range(0, num_rows, at_once):
            last = min(first + at_once, num_rows)
            out[first:last] = _as_stored(rows(first, last), self.dtype)
        return out


_OF_ALL = ("shape", "group_of")
"""Parts that a tensor of all experts has once, whatever their length."""


# -- decoders ----------------------------------------------------------------------------------------------------------


def scaled(packed: Packed, part: Read) -> Rows:
    """(code - zero) * scale of its block. NVFP4 has a second scale, of the whole tensor, in the first one's unit."""
    (num_rows, columns), block = packed.shape, packed.block
    codes, values_of = part("codes").reshape(num_rows, -1), _ELEMENTS[packed.elements]
    scale = _numbers(part("scale"), packed.scale_dtype)
    if "divisor" in packed.parts:
        scale = scale / _one_number(part("divisor"))
    if "factor" in packed.parts:
        scale = scale * _one_number(part("factor"))
    zero = None
    if "zero" in packed.parts:
        zero = part("zero").view(np.int8).astype(np.float32)
        _refuse_zeros_of_symmetric(packed, zero, 0)

    def rows(first: int, last: int) -> Floats:
        values = values_of(codes[first:last]).reshape(last - first, columns)
        if zero is not None:
            _by_block(np.subtract, values, zero, block, first)
        _by_block(np.multiply, values, scale, block, first)
        if packed.elements == "int8 of 127":
            values *= _ONE_127TH
        return values

    if packed.elements == "fp4" and zero is None and block[0] == 1 and block[1] % 8 == columns % block[1] == 0:
        words = np.ascontiguousarray(codes).view(np.uint8).view(np.uint32)
        return _of_nibbles(packed, words, _FP4, scale, np.zeros_like(scale)) or rows
    return rows


def _of_nibbles(packed: Packed, words: NDArray[np.uint32], levels: Floats, scale: Floats, zero: Floats) -> Rows | None:
    """words [N, C / 8], scale and zero [N, groups]; None where values are not of 16 bits, or a group of whole words."""
    columns, group = packed.shape[1], max(packed.block)
    scale, zero = (np.ascontiguousarray(of_groups).reshape(packed.shape[0], -1) for of_groups in (scale, zero))
    if packed.dtype not in ("BF16", "F16") or group % 8 or scale.shape[1] * group != columns:
        return None

    def rows(first: int, last: int) -> NDArray[Any]:
        is_bfloat16, of_rows = packed.dtype == "BF16", slice(first, last)
        values = np.empty((last - first, columns), np.uint16)
        _values.values_of_nibbles(words[of_rows], levels, scale[of_rows], zero[of_rows], values, is_bfloat16)
        return values if is_bfloat16 else values.view(np.float16)

    return rows


class Whole(NamedTuple):
    """A matrix [N, C] of integer codes, (code - zero) * scale of its group of columns."""

    words: NDArray[Any]
    """int32 [N, words]: codes, the lowest bits first."""
    scale: Floats
    """[N, groups], zero likewise."""
    zero: Floats
    group_of: NDArray[np.int64] | None
    """Group of each column [C]; None: by its place."""

    def rows_of(self, packed: Packed) -> Rows:
        """What gives the values of some rows."""
        block = (1, max(packed.block))

        def rows(first: int, last: int) -> Floats:
            values = _unpacked(packed, self.words[first:last])[:, : packed.shape[1]].astype(np.float32)
            if self.group_of is not None:
                values -= self.zero[first:last, self.group_of]
                values *= self.scale[first:last, self.group_of]
            else:
                _by_block(np.subtract, values, self.zero, block, first)
                _by_block(np.multiply, values, self.scale, block, first)
            return values

        if packed.bits == CODE_BITS and self.group_of is None:
            codes = self.words[:, : packed.shape[1] // 8].view(np.uint32)
            return _of_nibbles(packed, codes, _INTEGERS, self.scale, self.zero) or rows
        return rows


def words(packed: Packed, part: Read) -> Whole:
    """compressed-tensors, pack-quantized."""
    (num_rows, columns), bits = packed.shape, packed.bits
    if (stored := part("shape").tolist())[-2:] != [num_rows, columns]:
        raise ReplicaError(
            f"{packed.parts['shape']} is {stored} and its codes are {[num_rows, columns]}: the checkpoint is damaged"
        )
    scale = _float(part("scale"))
    zero = np.full(scale.shape, 1 << (bits - 1), np.float32)
    if "zero" in packed.parts:
        zero = _unpacked(packed, part("zero").T).T[:num_rows].astype(np.float32)
        _refuse_zeros_of_symmetric(packed, zero, 1 << (bits - 1))
    return Whole(part("codes"), scale, zero, _group_of_columns(packed, part, scale.shape[1]))


def gptq(packed: Packed, part: Read) -> Whole:
    """Codes [C, N] in a stream of bits down the columns; groups in any order."""
    scale, zero = _float(part("scale")), _gptq_zeros(packed, part("zero"))  # [G, N]
    return Whole(part("codes").T, scale.T, zero.T, _group_of_columns(packed, part, len(scale)))


def _gptq_zeros(packed: Packed, stored: NDArray[Any]) -> Floats:
    """Zero points [G, N]. Those of symmetric codes are known, and stored as they are or less one, whatever the label
    says. Those of others are stored as the label says. Less one, a zero point of 0 takes from those behind it."""
    bits = packed.bits
    fields, middle, top = _unpack_stream(stored, bits), 1 << (bits - 1), (1 << bits) - 1
    if packed.is_symmetric:
        first = int(fields.flat[0])
        _refuse_zeros_of_symmetric(packed, fields, first if first in (middle, middle - 1) else middle)
        return np.full(fields.shape, middle, np.float32)
    if not packed.zero_is_less_one:
        return fields.astype(np.float32)
    is_zero = fields == top
    whole = 32 % bits == 0
    if whole:  # behind the last of a word lies none
        is_zero = is_zero.reshape(*stored.shape, -1)[..., :-1]
    if not is_zero.any():
        return ((fields + np.uint8(1)) & np.uint8(top)).astype(np.float32)
    if not (whole and packed.zeros_borrow):
        raise ReplicaError(
            f"{packed.parts['zero']} holds zero points of 0 stored less one, which may have changed those behind them, "
            "and config.json has no checkpoint_format that says how: store them as gptq_v2"
        )
    ones = np.uint32(sum(1 << first for first in range(0, 32, bits)))
    words = np.ascontiguousarray(stored).view(np.uint32) + ones
    return _unpack_stream(words.view(np.int32), bits).astype(np.float32)


def awq(packed: Packed, part: Read) -> Whole:
    """Words [C, N / 8], eight neighbours of a row in AWQ's order; zero points alike."""
    stored = part("zero")
    zero = _unpack_stream(_awq_words(stored), 4)[:, : len(stored)].astype(np.float32)
    _refuse_zeros_of_symmetric(packed, zero, 8)
    return Whole(_awq_words(part("codes")), _float(part("scale")).T, zero, None)


def _awq_words(stored: NDArray[Any]) -> NDArray[np.int32]:
    """Words [C, N / 8] -> words [N, C / 8] of eight columns, the first in the lowest bits; behind C are zeros."""
    words = np.empty((stored.shape[1] * 8, -(-len(stored) // 8)), np.uint32)
    _values.words_of_awq(stored.view(np.uint32), words)
    return words.view("<i4")


_OF_INTEGERS = (words, gptq, awq)


def _refuse_zeros_of_symmetric(packed: Packed, zero: NDArray[Any], middle: int) -> None:
    if packed.is_symmetric and (odd := zero != middle).any():
        raise ReplicaError(
            f"config.json states symmetric codes, and {packed.parts['zero']} holds other zero points than {middle}, "
            f"such as {zero[odd].flat[0]:g}: take both from one checkpoint"
        )


def _group_of_columns(packed: Packed, part: Read, count: int) -> NDArray[np.int64] | None:
    """Group of each column where it is stored and not that of the column's place; else None."""
    if "group_of" not in packed.parts:
        return None
    group_of, name = part("group_of").astype(np.int64), packed.parts["group_of"]
    if packed.decode is words and group_of.min() < 0:  # -1: not in use
        return None
    if group_of.min() < 0 or group_of.max() >= count:
        raise ReplicaError(f"{name} names groups that have no scales: the checkpoint is damaged")
    size = packed.block[1]
    if (most := int(np.bincount(group_of).max())) > size:
        raise ReplicaError(
            f"{name} puts {most} columns under one scale, and config.json states {size}: take both from one checkpoint"
        )
    if count == -(-len(group_of) // size) and np.array_equal(group_of, np.arange(len(group_of)) // size):
        return None
    if packed.is_in_order:
        raise ReplicaError(
            f"{name} puts columns into another order, and config.json states that there is none (desc_act or "
            "actorder): take both from one checkpoint"
        )
    return group_of


class FourBitState(msgspec.Struct):
    """The state that bitsandbytes writes beside a matrix of 4-bit codes."""

    shape: tuple[int, int]
    dtype: str
    blocksize: int
    nested_blocksize: int | None = None
    nested_offset: float = 0.0


def four_bit_state(stored: NDArray[np.uint8], name: str) -> FourBitState:
    try:
        state = msgspec.json.decode(stored.tobytes(), type=FourBitState)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ReplicaError(f"{name} cannot be read as bitsandbytes' state: {error}") from None
    if state.blocksize < 1 or min(state.shape) < 1 or (state.nested_blocksize or 1) < 1:
        raise ReplicaError(f"{name} gives sizes below 1: the checkpoint is damaged")
    return state


def four_bit(packed: Packed, part: Read) -> Rows:
    """bitsandbytes nf4 and fp4: the high nibble first, a table of 16 values; scales may be quantized themselves."""
    state = four_bit_state(part("state"), packed.parts["state"])
    codes, table, scale = part("codes").reshape(-1), part("table"), part("scale").reshape(-1)
    if "nested_scale" in packed.parts:
        nested = part("nested_scale").astype(np.float32)
        scale = part("nested_table")[scale]
        scale = scale * np.repeat(nested, state.nested_blocksize or 256)[: len(scale)]
        scale = scale + np.float32(state.nested_offset)
    pairs = np.stack([table[np.arange(256) >> 4], table[np.arange(256) & 15]], axis=1).astype(np.float32)
    values: Floats = pairs[codes].reshape(-1)
    _by_block(np.multiply, values.reshape(1, -1), scale.astype(np.float32), (1, state.blocksize))
    whole = values.reshape(packed.shape)
    return lambda first, last: whole[first:last]


def ggml(packed: Packed, part: Read) -> Rows:
    """The types of llama.cpp, by its own package."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ConfigError(
            f"{packed.parts['codes']} is of llama.cpp's type {packed.elements}, which its package gguf reads: "
            "pip install gguf"
        ) from None
    try:
        whole = np.asarray(dequantize(part("codes"), GGMLQuantizationType[packed.elements]), np.float32)
    except (KeyError, NotImplementedError):
        raise ConfigError(
            f"{packed.parts['codes']} is of llama.cpp's type {packed.elements}, which the installed package gguf does "
            "not dequantize: give the model in another type, or install a newer gguf"
        ) from None
    return lambda first, last: whole[first:last]


# -- codes and scales --------------------------------------------------------------------------------------------------


def _by_block(operate: np.ufunc, values: Floats, by: NDArray[Any], block: tuple[int, int], first: int = 0) -> None:
    """Combine values [n, C] with the number of their block, in place; they are rows `first` .. of a matrix, of all of
    whose blocks `by` has the numbers in their order."""
    (rows, columns), (of_rows, of_columns) = values.shape, block
    grid = by.reshape(-1, -(-columns // of_columns))
    if len(grid) > 1:
        grid = grid[np.arange(first, first + rows) // of_rows]
    if columns % of_columns == 0:
        blocks = values.reshape(rows, -1, of_columns)
        operate(blocks, grid[:, :, None], out=blocks)
    else:
        operate(values, np.repeat(grid, of_columns, 1)[:, :columns], out=values)


def _unpacked(packed: Packed, stored: NDArray[Any]) -> NDArray[np.uint8]:
    """int32 [N, words] -> codes [N, words * (32 // bits)] where no code crosses a word; else as a stream."""
    bits = packed.bits
    if packed.is_dense or 32 % bits == 0:
        return _unpack_stream(stored, bits)
    each = np.ascontiguousarray(stored).view(np.uint32)[..., None] >> (np.arange(32 // bits, dtype=np.uint32) * bits)
    codes: NDArray[np.uint8] = (each & ((1 << bits) - 1)).astype(np.uint8).reshape(len(stored), -1)
    return codes


def _unpack_stream(stored: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """int32 [N, words] -> codes [N, words * 32 // bits]: a stream of bits, the lowest first."""
    octets = np.ascontiguousarray(stored).view(np.uint8)
    if bits == 8:
        return octets
    if bits == 4:
        return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), -1)
    stream = np.unpackbits(octets, axis=1, bitorder="little")
    stream = stream[:, : stream.shape[1] // bits * bits].reshape(len(octets), -1, bits)
    codes: NDArray[np.uint8] = (stream << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
    return codes


def _numbers(stored: NDArray[Any], dtype: str) -> Floats:
    """Scales in any of their dtypes, as safetensors spells these; bytes in U8 are exponents too."""
    if dtype in ("U8", "F8_E8M0"):
        return np.asarray(_e8m0()[stored])
    values: Floats = _e4m3()[stored] if dtype == "F8_E4M3" else _float(stored)
    return values


def _one_number(stored: NDArray[Any]) -> np.float32:
    return np.float32(_float(stored).reshape(-1)[0])


def _float(values: NDArray[Any]) -> Floats:
    """As float32; 16-bit unsigned integers are bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _as_stored(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Rounded to nearest even, as torch does."""
    if values.dtype == np.uint16:
        return values
    if dtype != "BF16":
        return values.astype(_DTYPES[dtype], copy=False)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


@cache
def _fp4_pairs() -> NDArray[np.uint64]:
    """Byte -> its two values in float32, the low nibble first, as one number: taken as such, twice as fast."""
    both = np.arange(256)
    return np.stack([_FP4[both & 15], _FP4[both >> 4]], axis=1).view(np.uint64)[:, 0].copy()


@cache
def _e4m3() -> Floats:
    """Byte -> E4M3 without infinities: 4 bits of exponent, 3 of mantissa, NaN only at 0x7f."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    size = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    size[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte & 0x80, -size, size).astype(np.float32)


@cache
def _e8m0() -> Floats:
    """Byte -> a power of two; NaN at 0xff (OCP Microscaling Formats 1.0, 5.4.1)."""
    powers: NDArray[np.float64] = np.ldexp(1.0, np.arange(256) - 127)
    powers[255] = np.nan
    return powers.astype(np.float32)


_ELEMENTS: Mapping[str, Callable[[NDArray[Any]], Floats]] = {
    "fp4": lambda stored: _fp4_pairs().take(stored.view(np.uint8)).view(np.float32),
    "e4m3": lambda stored: np.asarray(_e4m3().take(stored)),
    "int8": lambda stored: stored.view(np.int8).astype(np.float32),
    "int8 of 127": lambda stored: stored.view(np.int8).astype(np.float32),
}
