"""What one expert looks like to a kernel: quantized at one bit width, or the checkpoint's own weights.

Knows shapes and dtypes. Does not know files (format.py, checkpoint.py) or arithmetic (kernels/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.model_shape import FULL_PRECISION_BITS


@dataclass(frozen=True)
class QuantizedMatrix:
    """W[n, c] ~ scale[n, c // g] * code[n, c] + offset[n, c // g]; the code's bits lie in planes, the top bit first.

    planes  uint8 [bits, N, C // 8]; plane 0 holds the most significant bit; column c is bit c % 8 of byte c // 8
    scale, offset  float16 [N, ceil(C / g)]
    perm    int32 [C] or None: column c of the matrix multiplies input element perm[c] (None = identity)
    """

    bits: int
    planes: NDArray[np.uint8]
    scale: NDArray[np.float16]
    offset: NDArray[np.float16]
    group_size: int
    perm: NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.planes.shape[1], self.planes.shape[2] * 8


@dataclass(frozen=True)
class QuantizedExpert:
    """One SwiGLU expert at `bits` bits: w13 [2I, H] (gate rows first, then up), w2 [H, I].

    w2's act-order permutation is folded into the row order of w13, so w2.perm is None in files we write.
    """

    bits: int
    w13: QuantizedMatrix
    w2: QuantizedMatrix


@dataclass(frozen=True)
class FullExpert:
    """One SwiGLU expert as the checkpoint holds it: w1 (gate) and w3 (up) [I, H], w2 (down) [H, I].

    dtype is "float32", "float16" or "bfloat16"; bfloat16 arrays are uint16 views of the file's bytes.
    """

    dtype: str
    w1: NDArray[Any]
    w3: NDArray[Any]
    w2: NDArray[Any]
    bits: int = FULL_PRECISION_BITS


Expert = QuantizedExpert | FullExpert
