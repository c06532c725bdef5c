"""The loss tables that a replica directory carries, as one table. Knows files, not how losses are measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.replicas.format import ReplicaFiles, read_manifest


def load_layer_weights(replicas_dir: Path) -> tuple[NDArray[np.float64] | None, float | None]:
    """Effect of the same relative loss in each layer on the answer [L], mean 1, and the nats a token that 1 stands for.

    None where it was not measured.
    """
    manifest = read_manifest(replicas_dir)
    weights, nats = manifest.layer_weights, manifest.nats_per_loss
    return (
        None if isinstance(weights, msgspec.UnsetType) else np.array(weights),
        None if isinstance(nats, msgspec.UnsetType) else nats,
    )


def load_losses(replicas_dir: Path, kind: str) -> tuple[NDArray[np.float64], NDArray[np.float64] | None, float | None]:
    """(losses [L, E, columns], weights of layers [L], nats of a weight of 1) of one kind, relative or absolute.

    Weights are measured over relative losses: absolute ones have none.
    """
    absolute, relative = load_loss_table(replicas_dir)
    return (relative, *load_layer_weights(replicas_dir)) if kind == "relative" else (absolute, None, None)


def load_loss_table(replicas_dir: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(loss, relative loss) of a replica directory, each [L, E, columns], one for each of widths.loss_columns, NaN for
    an absent width.

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
