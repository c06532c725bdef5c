"""How much each replica loses: mean squared error of the expert's output against full precision. numpy only.

Measured at the expert's output and not per matrix, because that is what enters the residual stream and because errors
of gate, up and down do not add.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ndp_device.kernels.reference import Float32, ReferenceKernel
from ndp_device.replicas.format import ReplicaFiles
from ndp_device.replicas.replica import REPLICA_BITS, FullExpert, QuantizedExpert


def expert_losses(
    inputs: Float32, full: FullExpert, replicas: dict[int, QuantizedExpert]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Inputs [T, H] -> (mean squared output error, the same over the mean squared output), each [4], NaN if absent."""
    kernel = ReferenceKernel()
    wanted = kernel.prepare(full).rows(inputs)
    energy = float(np.mean(wanted.astype(np.float64) ** 2))
    loss = np.full(len(REPLICA_BITS), np.nan)
    for bits, replica in replicas.items():
        error = kernel.prepare(replica).rows(inputs).astype(np.float64) - wanted
        loss[REPLICA_BITS.index(bits)] = np.mean(error**2)
    return loss, loss / max(energy, np.finfo(np.float64).tiny)


def load_loss_table(replicas_dir: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(loss, relative loss) of a replica directory, each [L, E, 4], column b - 1 for b bits, NaN for an absent width.

    Never rising with bits: where few held-out tokens made a wider replica look worse, it counts as its narrower one.
    """
    files = ReplicaFiles(replicas_dir, check_contents=False)
    losses = [files.layer_losses(layer) for layer in range(files.manifest.model.num_layers)]
    loss, relative = (np.stack(tables) for tables in zip(*losses, strict=True))
    absent = np.isnan(loss)
    for table in (loss, relative):
        table[:] = np.fmin.accumulate(table, axis=-1)
        table[absent] = np.nan
    return loss, relative
