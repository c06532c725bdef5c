"""Kernels: one signature, pairs of one layer in and their gate-weighted partial sum out, and load_kernel.

reference.py is the obviously right one, native.py the fast one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import Expert, QuantizedMatrix, StoredExpert
from ndp_device.kernels.reference import ReferenceKernel

KERNELS = ("auto", "reference", "native")


class Kernel(Protocol):
    """T rows, P (row, expert) pairs, N distinct experts of one layer, H hidden size."""

    name: str

    def prepare(self, expert: Expert | StoredExpert) -> Any:
        """Convert an expert once, at load, into whatever this kernel streams."""
        ...

    def masked(self, narrow: Any, wide: Any) -> Any | None:
        """`narrow`, prepared, with nothing of its own where `wide`, the same expert at more bits, holds it as well.

        It is slower, and every result is the same to the bit. None where `wide` does not hold it.
        """
        ...

    def parts(self, prepared: Any) -> Iterable[tuple[int, int]]:
        """(identity, bytes) of what it keeps in memory; an identity that several experts name is there once.

        Nothing for an expert that is not held to the size of the packed replicas.
        """
        ...

    def execute(
        self,
        x: NDArray[np.float32],  # [T, H]
        prepared: Sequence[Any],  # [N], from prepare()
        pair_rows: NDArray[np.int32],  # [P], row of x
        pair_experts: NDArray[np.int32],  # [P], index into prepared
        gates: NDArray[np.float32],  # [P], router weight
    ) -> NDArray[np.float32]:  # [T, H]
        """sum over pairs p of row t: gates[p] * W2 (silu(W1 x) * (W3 x)); rows without a pair are exactly 0."""
        ...

    def prepare_matrix(self, matrix: QuantizedMatrix) -> Any:
        """The layer's weights [N, C]; the result has `nbytes`."""
        ...

    def multiply(self, x: NDArray[np.float32], prepared: Any) -> NDArray[np.float32]:
        """x [T, C] -> [T, N], perhaps with activations of 8 bits; a row's result does not depend on the other rows."""
        ...


def load_kernel(name: str = "auto") -> Kernel:
    """The named kernel; "auto" is the native one. Raises ConfigError where there is none of that name."""
    if name not in KERNELS:
        raise ConfigError(f"kernel must be one of {', '.join(KERNELS)}, got {name!r}")
    if name == "reference":
        return ReferenceKernel()
    kernel: Kernel = importlib.import_module("ndp_device.kernels.native").NativeKernel()
    return kernel
