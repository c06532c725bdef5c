"""How much each replica loses: mean squared error of the expert's output against full precision. numpy only.

Measured at the expert's output and not per matrix, because that is what enters the residual stream and because errors
of gate, up and down do not add.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ndp_device.kernels.reference import Float32, ReferenceKernel
from ndp_device.replicas.replica import FullExpert, QuantizedExpert
from ndp_device.widths import WIDTHS


def expert_losses(
    inputs: Float32, full: FullExpert, replicas: dict[int, QuantizedExpert]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Inputs [T, H] -> (mean squared output error, the same over the mean squared output), each [4], NaN if absent."""
    kernel = ReferenceKernel()
    wanted = kernel.prepare(full).rows(inputs)
    energy = float(np.mean(wanted.astype(np.float64) ** 2))
    loss = np.full(len(WIDTHS), np.nan)
    for bits, replica in replicas.items():
        error = kernel.prepare(replica).rows(inputs).astype(np.float64) - wanted
        loss[WIDTHS.index(bits)] = np.mean(error**2)
    return loss, loss / max(energy, np.finfo(np.float64).tiny)
