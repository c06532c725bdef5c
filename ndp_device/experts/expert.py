"""One expert in memory: quantized at one bit width, or the checkpoint's own weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, lcm
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.activation import SILU, Activation
from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import BYTE_BITS, FP4_BITS, FP4_GROUP, FULL_PRECISION_BITS, NVFP4_GROUP, REPLICA_WIDTHS

MAX_BITS = 8
"""A code is one byte; replicas use 1 to 4 bits of it, or all."""
_UNITS_PER_BYTE = 8  # of a bit plane
_WITHIN_A_BLOCK = "an expert with scales of blocks cannot be cut into parts within a block: use whole experts"


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes [N, C] below 2**bits -> planes [bits, N, C // 8].

    A plane holds one bit of every code of a matrix: plane 0 the most significant. Within a plane, column c of a row is
    bit c % 8 of byte c // 8. The first k planes are therefore the code shifted down to k bits, and one sequential read.
    """
    if codes.ndim != 2 or codes.dtype != np.uint8 or codes.shape[1] % 8:
        raise ValueError(f"codes must be uint8 [N, C] with C a multiple of 8, got {codes.dtype}{list(codes.shape)}")
    if not 1 <= bits <= MAX_BITS or (codes.size and int(codes.max()) >> bits):
        raise ValueError(f"codes up to {codes.max(initial=0)} do not fit in {bits} bits")
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint8)
    return np.packbits((codes >> shifts[:, None, None]) & 1, axis=-1, bitorder="little")


@dataclass(frozen=True)
class Biases:
    """Biases that an expert adds to its three products, float32: gate and up [I], down [H]. Never quantized."""

    gate: NDArray[np.float32]
    up: NDArray[np.float32]
    down: NDArray[np.float32]

    def __post_init__(self) -> None:
        if any(v.ndim != 1 or v.dtype != np.float32 for v in self) or self.gate.shape != self.up.shape:
            raise ValueError(f"biases must be float32 [I], [I], [H], got {[(v.dtype, v.shape) for v in self]}")

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return iter((self.gate, self.up, self.down))

    def reordered(self, units: NDArray[Any]) -> Biases:
        """Reorder to these intermediate units, which may be a part of all."""
        return Biases(self.gate[units], self.up[units], self.down)


@dataclass(frozen=True)
class QuantizedMatrix:
    """W[n, c] ~ scale[n, c // g] * code[n, c] + offset[n, c // g]; the code's bits lie in planes, the top bit first.

    - planes: uint8 [bits, N, C // 8]; plane 0 holds the most significant bit; column c is bit c % 8 of byte c // 8
    - scale, offset: float16 [N, ceil(C / g)]
    - perm: int32 [C] or None: column c of the matrix multiplies input element perm[c] (None = identity)
    """

    bits: int
    planes: NDArray[np.uint8]
    scale: NDArray[np.float16]
    offset: NDArray[np.float16]
    group_size: int
    perm: NDArray[np.int32] | None = None
    nested: NestedMatrix | None = field(default=None, init=False, compare=False, repr=False)
    """Nested matrix of which this is a view; None if it has planes of its own. A changed copy (`replace`) is no
    view."""
    token: object = field(default_factory=object, init=False, compare=False, repr=False)
    """Stands for this matrix where its arrays need not live."""

    def __post_init__(self) -> None:
        are_planes = self.planes.dtype == np.uint8 and self.planes.ndim == 3 and len(self.planes) == self.bits
        if self.bits not in REPLICA_WIDTHS or not are_planes or self.group_size < 1:
            raise ValueError(
                f"{self.bits}-bit planes must be uint8 [{self.bits}, N, C // 8] in groups of 1 or more, "
                f"got {self.planes.dtype}{list(self.planes.shape)}"
            )
        rows, columns = self.shape
        groups = (rows, -(-columns // self.group_size))
        for name, values in (("scale", self.scale), ("offset", self.offset)):
            if values.dtype != np.float16 or values.shape != groups:
                raise ValueError(f"{name} must be float16 {list(groups)}, got {values.dtype}{list(values.shape)}")
        if self.perm is not None and (
            self.perm.dtype != np.int32 or not np.array_equal(np.sort(self.perm), np.arange(columns))
        ):
            raise ValueError(f"perm must be int32 and hold each of 0..{columns - 1} once")

    @property
    def shape(self) -> tuple[int, int]:
        return self.planes.shape[1], self.planes.shape[2] * 8

    @property
    def nbytes(self) -> int:
        """Bytes that a read of this matrix moves: its planes, scales and offsets.

        The permutation is not streamed with the weights: it reorders a row's activations, once per row.
        """
        return self.planes.nbytes + self.scale.nbytes + self.offset.nbytes

    def at_rows(self, rows: slice | NDArray[Any]) -> QuantizedMatrix:
        """Some of its rows, in this order."""
        return replace(self, planes=self.planes[:, rows], scale=self.scale[rows], offset=self.offset[rows])

    def in_groups_of(self, columns: int) -> QuantizedMatrix:
        """The same values; columns: what divides the size of its groups."""
        if columns == self.group_size:
            return self
        scale, offset = (np.repeat(values, self.group_size // columns, 1) for values in (self.scale, self.offset))
        return replace(self, scale=scale, offset=offset, group_size=columns)

    def at_columns(self, first: int, last: int) -> QuantizedMatrix:
        """Columns between borders of groups. Raises ConfigError for columns in another order than that of the rows
        before them: no replica has any."""
        if self.perm is not None:
            raise ConfigError("an expert whose w2 has an order of columns of its own cannot be cut: use whole experts")
        groups = slice(first // self.group_size, last // self.group_size)
        planes = self.planes[:, :, first // _UNITS_PER_BYTE : last // _UNITS_PER_BYTE]
        return replace(self, planes=planes, scale=self.scale[:, groups], offset=self.offset[:, groups])

    def above(self, other: QuantizedMatrix) -> QuantizedMatrix | None:
        """Both as one matrix; None where they differ in groups or in the order of their columns."""
        same_order = self.perm is other.perm or np.array_equal(self.perm, other.perm)  # type: ignore[arg-type]
        if not same_order or (self.bits, self.group_size) != (other.bits, other.group_size):
            return None
        planes = np.concatenate([self.planes, other.planes], axis=1)
        scale, offset = (np.concatenate(pair) for pair in ((self.scale, other.scale), (self.offset, other.offset)))
        return replace(self, planes=planes, scale=scale, offset=offset)


@dataclass(frozen=True, eq=False)
class NestedMatrix:
    """One matrix at several widths: its first b planes are the b-bit matrix, and each width has scales of its own.

    - bits: the widths, rising
    - planes: uint8 [bits[-1], N, C // 8]
    - scale, offset: float16 [len(bits), N, ceil(C / g)]
    - perm: int32 [C] or None, of all widths
    """

    bits: tuple[int, ...]
    planes: NDArray[np.uint8]
    scale: NDArray[np.float16]
    offset: NDArray[np.float16]
    group_size: int
    perm: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        widths = (self.scale.shape[:1], self.offset.shape[:1])
        if widths != ((len(self.bits),), (len(self.bits),)):
            raise ValueError(
                f"scale and offset must be of the {len(self.bits)} widths {list(self.bits)}, got "
                f"{list(self.scale.shape)} and {list(self.offset.shape)}"
            )

    @classmethod
    def of(cls, matrices: Sequence[QuantizedMatrix]) -> NestedMatrix:
        """The matrix that these widths, rising, are views of; refuses matrices with planes of their own that do not
        nest."""
        widest, bits = matrices[-1], tuple(matrix.bits for matrix in matrices)
        nested = widest.nested
        if nested is not None and nested.bits == bits and all(matrix.nested is nested for matrix in matrices):
            return nested
        for matrix in matrices:
            same_perm = matrix.perm is widest.perm or np.array_equal(matrix.perm, widest.perm)  # type: ignore[arg-type]
            if not same_perm or not np.array_equal(matrix.planes, widest.planes[: matrix.bits]):
                raise ValueError(f"{matrix.bits} bits are not a prefix of {widest.bits}; they cannot be nested")
            if matrix.group_size != widest.group_size:
                raise ValueError(
                    f"{matrix.bits} bits are in groups of {matrix.group_size} columns, {widest.bits} bits in groups of "
                    f"{widest.group_size}; they cannot be nested"
                )
        scale, offset = (np.stack([getattr(one, name) for one in matrices]) for name in ("scale", "offset"))
        return cls(bits, widest.planes, scale, offset, widest.group_size, widest.perm)

    def at(self, bits: int) -> QuantizedMatrix:
        """The matrix at one width: a view."""
        track = self.bits.index(bits)
        scale, offset = self.scale[track], self.offset[track]
        matrix = QuantizedMatrix(bits, self.planes[:bits], scale, offset, self.group_size, self.perm)
        object.__setattr__(matrix, "nested", self)
        return matrix

    def by_width(self) -> dict[int, QuantizedMatrix]:
        return {bits: self.at(bits) for bits in self.bits}


class _Expert:
    """What all forms of one SwiGLU expert share. The biases lie in the order of the rows."""

    names: ClassVar[tuple[str, ...]] = ("w1", "w3", "w2")
    """Of its matrices: gate and up [I, H] each, or w13 [2I, H], gate rows first; then down [H, I]."""
    biases: Biases | None

    def __post_init__(self) -> None:
        shapes = [matrix.shape for matrix in self.matrices]
        hidden, intermediate = shapes[-1]
        wanted = [(2 * intermediate, hidden)] if len(shapes) == 2 else [(intermediate, hidden)] * 2
        if shapes[:-1] != wanted:
            got = " and ".join(f"{name} {list(shape)}" for name, shape in zip(self.names, shapes, strict=True))
            raise ValueError(f"{got} must be {'[2I, H]' if len(shapes) == 2 else '[I, H] and [I, H]'} and [H, I]")
        if self.biases is not None and (self.biases.gate.shape, self.biases.down.shape) != ((intermediate,), (hidden,)):
            raise ValueError(
                f"biases must be [{intermediate}] and [{hidden}] long, got {self.biases.gate.shape}, "
                f"{self.biases.down.shape}"
            )

    @property
    def matrices(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.names)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.matrices, *(self.biases or ())))


@dataclass(frozen=True)
class QuantizedExpert(_Expert):
    """One SwiGLU expert at `bits` bits: w13 [2I, H] (gate rows first, then up), w2 [H, I].

    w2's act-order permutation is folded into the row order of w13, so w2.perm is None in files we write.
    """

    names = ("w13", "w2")
    bits: int
    w13: QuantizedMatrix
    w2: QuantizedMatrix
    biases: Biases | None = None
    activation: Activation = SILU

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.w13.bits, self.w2.bits) != (self.bits, self.bits):
            raise ValueError(f"w13 and w2 must both have {self.bits} bits, got {self.w13.bits} and {self.w2.bits}")


@dataclass(frozen=True)
class Fp4Matrix:
    """E2M1 numbers as stored: MXFP4 (OCP Microscaling 1.0), W[n, c] = FP4[code[n, c]] * E8M0(scales[n, c // 32]);
    or NVFP4, W[n, c] = FP4[code[n, c]] * E4M3(scales[n, c // 16]) * of_rows[n].

    - codes: uint8 [N, C // 2], the first of two columns in the low bits; C is a multiple of 32
    - scales: uint8, bits of E8M0, of which those below 2 count as zero, or of E4M3, neither negative nor NaN
    - of_rows: None (MXFP4), or float32 [N]
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    of_rows: NDArray[np.float32] | None = None

    @property
    def group(self) -> int:
        """Columns under one scale."""
        return FP4_GROUP if self.of_rows is None else NVFP4_GROUP

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.of_rows is None else self.of_rows.nbytes)

    def at_rows(self, rows: slice | NDArray[Any]) -> Fp4Matrix:
        """Some of its rows, in this order."""
        return Fp4Matrix(self.codes[rows], self.scales[rows], None if self.of_rows is None else self.of_rows[rows])

    def at_columns(self, first: int, last: int) -> Fp4Matrix:
        """Columns between borders of groups."""
        groups = slice(first // self.group, last // self.group)
        return replace(self, codes=self.codes[:, first // 2 : last // 2], scales=self.scales[:, groups])

    def above(self, other: Fp4Matrix) -> Fp4Matrix | None:
        """Both as one matrix; None where they have scales of two kinds."""
        if self.group != other.group:
            return None
        codes, scales = np.concatenate([self.codes, other.codes]), np.concatenate([self.scales, other.scales])
        if self.of_rows is None or other.of_rows is None:
            return Fp4Matrix(codes, scales)
        return Fp4Matrix(codes, scales, np.concatenate([self.of_rows, other.of_rows]))


@dataclass(frozen=True)
class Fp4Expert(_Expert):
    """One SwiGLU expert in MXFP4 or NVFP4: w13 [2I, H] (gate rows first, then up), w2 [H, I]."""

    names = ("w13", "w2")
    w13: Fp4Matrix
    w2: Fp4Matrix
    biases: Biases | None = None
    activation: Activation = SILU
    bits: int = FP4_BITS


@dataclass(frozen=True)
class ByteMatrix:
    """W[n, c] = number(codes[n, c]) * scale[n // block[0], c // block[1]]: 8 bits as a checkpoint stores them.

    - numbers: "float8" (E4M3 without infinities, none of them NaN) or "int8"
    - codes: uint8 [N, C]
    - scale: float32, one for each block of rows and columns
    """

    numbers: str
    codes: NDArray[np.uint8]
    scale: NDArray[np.float32]
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def at_rows(self, rows: slice) -> ByteMatrix | None:
        """Some of its rows, in this order; None where they end within a block."""
        some = range(*rows.indices(len(self.codes)))
        if len(self.scale) == 1:
            return replace(self, codes=self.codes[rows], block=(len(some), self.block[1]))
        if self.block[0] != 1 and (some.start % self.block[0] or some.step != 1):
            return None
        places = slice(some.start // self.block[0], -(-some.stop // self.block[0]), some.step)
        return replace(self, codes=self.codes[rows], scale=self.scale[places])

    def at_columns(self, first: int, last: int) -> ByteMatrix:
        """Columns between borders of blocks. Raises ConfigError for others."""
        codes, wide = self.codes[:, first:last], self.block[1]
        if self.scale.shape[1] == 1:
            return replace(self, codes=codes, block=(self.block[0], last - first))
        if first % wide or last % wide:
            raise ConfigError(_WITHIN_A_BLOCK)
        return replace(self, codes=codes, scale=self.scale[:, first // wide : last // wide])

    def above(self, other: ByteMatrix) -> ByteMatrix | None:
        """Both as one matrix; None where they are of two kinds or differ in columns under one scale."""
        if (self.numbers, self.block[1]) != (other.numbers, other.block[1]):
            return None
        rows = gcd(len(self.codes), min(self.block[0], len(self.codes)), min(other.block[0], len(other.codes)))
        scale = [one.scale[np.arange(0, len(one.codes), rows) // one.block[0]] for one in (self, other)]
        codes = np.concatenate([self.codes, other.codes])
        return ByteMatrix(self.numbers, codes, np.concatenate(scale), (rows, self.block[1]))


@dataclass(frozen=True)
class ByteExpert(_Expert):
    """One SwiGLU expert in 8 bits as stored: w1 (gate) and w3 (up) [I, H], w2 (down) [H, I]."""

    w1: ByteMatrix
    w3: ByteMatrix
    w2: ByteMatrix
    biases: Biases | None = None
    activation: Activation = SILU
    bits: int = BYTE_BITS


StoredExpert = Fp4Expert | ByteExpert
"""What only a checkpoint holds: no replica."""


@dataclass(frozen=True)
class FullExpert(_Expert):
    """One SwiGLU expert as the checkpoint holds it: w1 (gate) and w3 (up) [I, H], w2 (down) [H, I].

    dtype is "float32", "float16" or "bfloat16"; bfloat16 arrays are uint16 views of the file's bytes.
    """

    dtype: str
    w1: NDArray[Any]
    w3: NDArray[Any]
    w2: NDArray[Any]
    bits: int = FULL_PRECISION_BITS
    biases: Biases | None = None
    activation: Activation = SILU


Expert = QuantizedExpert | StoredExpert | FullExpert


# -- one of several equal parts of every expert ------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One of `count` equal runs of an expert's intermediate units, in the order in which this form of it has them.

        y = sum over units of w2[:, unit] * act(w1[unit] @ x, w3[unit] @ x)

    so the parts of one expert add up to it, in any order of its units. Parts of two forms of it need not: replicas have
    their units in the order that their calibration found, not in the checkpoint's.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(f"a part of an expert must be [i, n] with 0 <= i < n, got [{self.index}, {self.count}]")

    def __str__(self) -> str:
        return "whole experts" if self.count == 1 else f"part {self.index + 1} of {self.count} of every expert"

    def check(self, intermediate_size: int, group_size: int) -> None:
        """Raise ConfigError where a border would lie within a group of weights that share a scale."""
        if self.count > 1 and intermediate_size % (self.count * lcm(group_size, _UNITS_PER_BYTE)):
            raise ConfigError(
                f"experts of {intermediate_size} units with {group_size} to a scale cannot be cut into {self.count} "
                "equal parts at borders of scales: use another number of devices, or whole experts"
            )

    def of(self, expert: Expert) -> Expert:
        """Cut this part out of an expert that `check` found divisible. The bias of the expert's output goes to the
        first part."""
        if self.count == 1:
            return expert
        intermediate = expert.w2.shape[1]
        length = intermediate // self.count
        first, last = self.index * length, (self.index + 1) * length
        biases = expert.biases and expert.biases.reordered(np.arange(first, last))
        if biases is not None and self.index:
            biases = replace(biases, down=np.zeros_like(biases.down))
        if isinstance(expert, FullExpert):
            w1, w3, w2 = expert.w1[first:last], expert.w3[first:last], expert.w2[:, first:last]
            return replace(expert, w1=w1, w3=w3, w2=w2, biases=biases)
        if isinstance(expert, ByteExpert):
            gate, up = (one.at_rows(slice(first, last)) for one in (expert.w1, expert.w3))
            if gate is None or up is None:
                raise ConfigError(_WITHIN_A_BLOCK)
            return replace(expert, w1=gate, w3=up, w2=expert.w2.at_columns(first, last), biases=biases)
        rows, down = np.r_[first:last, intermediate + first : intermediate + last], expert.w2.at_columns(first, last)
        return replace(expert, w13=expert.w13.at_rows(rows), w2=down, biases=biases)  # type: ignore[arg-type]


WHOLE = Part()


# ----------------------------------------------------------------------------------------------------------------------


def to_float32(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Checkpoint values as float32: exact for float32, float16 and bfloat16 (which numpy holds as uint16)."""
    if dtype == "bfloat16":
        bits = values.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return np.ascontiguousarray(values, dtype=np.float32)
