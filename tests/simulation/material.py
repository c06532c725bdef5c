"""What the hosts of a history ask a device, and what it must answer to the bit.

Made once for all histories: a checkpoint, calls with the answers of the kernel itself. Knows no time.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from small_checkpoint import EXPERTS, HIDDEN, LAYERS, write_small_checkpoint

from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.kernels import load_kernel
from ndp_device.replicas.store import ExpertStore

ADDRESS = "simulated"
_folders: list[tempfile.TemporaryDirectory[str]] = []


@dataclass(frozen=True)
class Call:
    layer: int
    x: NDArray[np.float32]
    rows: NDArray[np.int32]
    experts: NDArray[np.int32]
    gates: NDArray[np.float32]
    y: NDArray[np.float32]  # what a device must answer, to the bit


@cache
def store(seed: int) -> ExpertStore:
    folder = tempfile.TemporaryDirectory(prefix="ndp-simulation-")
    _folders.append(folder)
    return ExpertStore(write_small_checkpoint(Path(folder.name) / "model", seed=seed), None, kernel=load_kernel("auto"))


@cache
def calls() -> list[Call]:
    """Random rows on random experts; the answers come from the kernel, called directly."""
    rng, kernel, experts_of = np.random.default_rng(5), load_kernel("auto"), store(0)
    calls = []
    for number in range(24):
        layer, count = number % LAYERS, int(rng.integers(1, 5))
        x = rng.standard_normal((int(rng.integers(1, 4)), HIDDEN), np.float32)
        rows = rng.integers(0, len(x), count).astype(np.int32)
        experts = rng.integers(0, EXPERTS, count).astype(np.int32)
        gates = rng.uniform(0, 1, count).astype(np.float32)
        distinct = list(dict.fromkeys(experts.tolist()))
        places = np.array([distinct.index(expert) for expert in experts], np.int32)
        prepared = [experts_of.get(layer, expert, FULL_PRECISION_BITS) for expert in distinct]
        y = kernel.execute(x, prepared, rows, places, gates)
        calls.append(Call(layer, x, rows, experts, gates, y))
    return calls
