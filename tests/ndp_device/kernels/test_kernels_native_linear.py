"""Linear layers by the native kernel, against fp64 and by themselves."""

from __future__ import annotations

import numpy as np
import pytest
from drawn_experts import LIMIT, random_matrix

from ndp_device.kernels import _native
from ndp_device.kernels.native import NativeKernel
from ndp_device.kernels.reference import ReferenceKernel, dequantize

ISAS = _native.supported_isas()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("rows", "cols", "group"), [(256, 128, 128), (40, 24, 32), (33, 136, 64), (320, 384, 1024)])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_linear_layer_is_within_fp64_and_a_row_does_not_depend_on_the_others(
    isa: str, rows: int, cols: int, group: int, bits: int
) -> None:
    rng = np.random.default_rng(rows)
    matrix = random_matrix(rng, rows, cols, bits, group)
    kernel = NativeKernel(isa=isa, threads=2)
    prepared = kernel.prepare_matrix(matrix)
    x = rng.standard_normal((19, cols)).astype(np.float32)
    wanted = x.astype(np.float64) @ dequantize(matrix).astype(np.float64).T
    y = kernel.multiply(x, prepared)
    assert np.linalg.norm(y - wanted) <= LIMIT[1] * np.linalg.norm(wanted)
    alone = [kernel.multiply(x[row : row + 1], prepared)[0] for row in range(len(x))]
    np.testing.assert_array_equal(y, alone)
    reference = ReferenceKernel()
    by_reference = reference.multiply(x, reference.prepare_matrix(matrix))
    assert np.linalg.norm(by_reference - wanted) <= 1e-5 * np.linalg.norm(wanted)


def test_a_linear_layer_refuses_rows_that_do_not_fit() -> None:
    kernel = NativeKernel(threads=1)
    prepared = kernel.prepare_matrix(random_matrix(np.random.default_rng(0), 32, 64, 4, 32))
    with pytest.raises(ValueError, match="the columns of the matrix"):
        kernel.multiply(np.ones((1, 96), np.float32), prepared)
