"""The kernel that ours are held to: numpy, slow and obviously right.

Experts are dequantized to float32 when prepared. Every (row, expert) pair is computed alone, with three matrix-vector
products in float32. So the result of a row does not depend on the other rows of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.activation import SILU, Activation
from ndp_device.common.widths import FP4
from ndp_device.experts.expert import (
    Biases,
    ByteExpert,
    ByteMatrix,
    Expert,
    Fp4Matrix,
    FullExpert,
    QuantizedMatrix,
    StoredExpert,
    to_float32,
)

Float32 = NDArray[np.float32]


def unpack(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Planes [bits, N, C // 8] -> codes [N, C]."""
    codes = np.zeros((planes.shape[1], planes.shape[2] * 8), dtype=np.uint8)
    for plane in planes:
        codes = (codes << 1) | np.unpackbits(plane, axis=-1, bitorder="little")
    return codes


@dataclass(frozen=True)
class ReferenceExpert:
    """A SwiGLU expert as float32: w13 [2I, H] (gate rows first, then up), w2 [H, I]."""

    w13: Float32
    w2: Float32
    biases: Biases | None = None
    activation: Activation = SILU

    def __call__(self, x: Float32) -> Float32:
        """W2 act(W1 x, W3 x) for one row x [H], with the expert's own activation and biases."""
        gate, up = np.split(self.w13 @ x, 2)
        if self.biases is None:
            return self.w2 @ activated(gate, up, self.activation)
        return self.w2 @ activated(gate + self.biases.gate, up + self.biases.up, self.activation) + self.biases.down


class ReferenceKernel:
    """As NativeKernel."""

    name = "reference"

    def prepare(self, expert: Expert | StoredExpert) -> ReferenceExpert:
        if isinstance(expert, ByteExpert):
            w1, w3, w2 = map(weights_of, expert.matrices)
            return ReferenceExpert(np.concatenate([w1, w3]), w2, expert.biases, expert.activation)
        if isinstance(expert, FullExpert):
            w13 = to_float32(np.concatenate([expert.w1, expert.w3]), expert.dtype)
            return ReferenceExpert(w13, to_float32(expert.w2, expert.dtype), expert.biases, expert.activation)
        return ReferenceExpert(weights_of(expert.w13), weights_of(expert.w2), expert.biases, expert.activation)

    def masked(self, narrow: ReferenceExpert, wide: ReferenceExpert) -> None:
        return None

    def parts(self, prepared: ReferenceExpert) -> tuple[()]:
        return ()

    def prepare_matrix(self, matrix: QuantizedMatrix | Fp4Matrix | ByteMatrix) -> Float32:
        return weights_of(matrix)

    def multiply(self, x: Float32, prepared: Float32) -> Float32:
        return np.stack([prepared @ row for row in x]) if len(x) else np.empty((0, len(prepared)), np.float32)

    def execute(
        self,
        x: Float32,
        prepared: Sequence[ReferenceExpert],
        pair_rows: NDArray[np.int32],
        pair_experts: NDArray[np.int32],
        gates: Float32,
    ) -> Float32:
        y = np.zeros_like(x, dtype=np.float32)
        for row, expert, gate in zip(pair_rows, pair_experts, gates, strict=True):
            y[row] += gate * prepared[expert](x[row])
        return y


REFERENCE: Any = ReferenceKernel()
"""In place of the native one."""


def weights_of(matrix: QuantizedMatrix | Fp4Matrix | ByteMatrix) -> Float32:
    """The matrix as float32 [N, C]."""
    if isinstance(matrix, ByteMatrix):
        return from_bytes(matrix)
    return from_fp4(matrix) if isinstance(matrix, Fp4Matrix) else dequantize(matrix)


def dequantize(matrix: QuantizedMatrix) -> Float32:
    """The matrix as float32 [N, C], its columns back in the order of the input they multiply."""
    groups = np.arange(matrix.shape[1]) // matrix.group_size
    scale, offset = matrix.scale.astype(np.float32)[:, groups], matrix.offset.astype(np.float32)[:, groups]
    weights: Float32 = scale * unpack(matrix.planes) + offset
    if matrix.perm is None:
        return weights
    in_order = np.empty_like(weights)
    in_order[:, matrix.perm] = weights
    return in_order


def from_fp4(matrix: Fp4Matrix) -> Float32:
    """The matrix as float32 [N, C]."""
    codes = np.stack([matrix.codes & 15, matrix.codes >> 4], axis=-1).reshape(matrix.shape)
    if matrix.of_rows is None:
        scale = np.ldexp(np.float32(1), matrix.scales.astype(np.int32) - 127)
    else:
        scale = _e4m3(matrix.scales) * matrix.of_rows[:, None]
    weights: Float32 = np.array(FP4, np.float32)[codes] * np.repeat(scale, matrix.group, axis=1)
    return weights


def _e4m3(bits: NDArray[np.uint8]) -> Float32:
    exponent, mantissa = (bits >> 3 & 15).astype(np.int32), (bits & 7).astype(np.float32)
    sizes = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    numbers: Float32 = np.where(bits & 128, -sizes, sizes).astype(np.float32)
    return numbers


def from_bytes(matrix: ByteMatrix) -> Float32:
    """The matrix as float32 [N, C]."""
    codes, (rows, columns) = matrix.codes, matrix.shape
    numbers = codes.view(np.int8).astype(np.float32) if matrix.numbers == "int8" else _e4m3(codes)
    scale = matrix.scale[np.arange(rows) // matrix.block[0]][:, np.arange(columns) // matrix.block[1]]
    weights: Float32 = numbers * scale
    return weights


def activated(gate: Float32, up: Float32, activation: Activation) -> Float32:
    """The formula of ndp_device/common/activation.py, in the arrays' dtype."""
    limit = activation.largest
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):  # exp(-x) = inf gives x / inf = -0, the right limit
        square = np.minimum(gate * gate, np.float32(1e30))  # 0 times infinity would be a NaN
        argument = gate * (activation.linear + activation.cubic * square)
        y: Float32 = gate / (1 + np.exp(-argument)) * (up + activation.up_bias)
        return y
