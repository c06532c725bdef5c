"""How much each replica loses: mean squared error of the expert's output against full precision. numpy only.

The error is that of the expert's output, because the output enters the residual stream. Errors per matrix would not
help: those of gate, up and down do not add.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.widths import loss_columns
from ndp_device.experts.expert import Expert, FullExpert, QuantizedExpert
from ndp_device.kernels.reference import Float32, ReferenceExpert, ReferenceKernel

_REFERENCE = ReferenceKernel()
ROWS_BYTES = 64 << 20
"""Products of gate and up that are held at once."""


def expert_losses(
    inputs: Float32,
    full: FullExpert,
    replicas: dict[int, QuantizedExpert],
    prepare: Callable[[Expert], ReferenceExpert] = _REFERENCE.prepare,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Inputs [T, H] -> (mean squared output error, the same over the mean squared output), each [columns]: one
    for each of widths.loss_columns, NaN if absent."""
    wanted = _outputs(prepare(full), inputs)
    energy = float(np.mean(wanted.astype(np.float64) ** 2))
    columns = loss_columns(replicas)
    loss = np.full(len(columns), np.nan)
    for bits, replica in replicas.items():
        error = _outputs(prepare(replica), inputs).astype(np.float64) - wanted
        loss[columns.index(bits)] = np.mean(error**2)
    return loss, loss / max(energy, np.finfo(np.float64).tiny)


def _outputs(expert: ReferenceExpert, inputs: Float32) -> Float32:
    """Outputs [T, H] of rows [T, H], some at a time: gate and up of 8192 rows of Mixtral would take 0.9 GB."""
    rows_at_once = max(1, ROWS_BYTES // expert.w13[:, 0].nbytes)
    return np.concatenate(
        [expert.rows(inputs[first : first + rows_at_once]) for first in range(0, len(inputs), rows_at_once)]
    )
