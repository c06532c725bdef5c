"""What the hosts of a history ask a device, and what it must answer to the bit.

Made once for all histories: a checkpoint, calls with the answers of the kernel itself. Knows no time.
"""

import tempfile
from functools import cache
from pathlib import Path

from caller import Call, random_calls
from small_checkpoint import write_small_checkpoint

from ndp_device.kernels.native import NativeKernel
from ndp_device.replicas.store import ExpertStore

ADDRESS = "simulated"
_folders: list[tempfile.TemporaryDirectory[str]] = []


@cache
def store(seed: int) -> ExpertStore:
    folder = tempfile.TemporaryDirectory(prefix="ndp-simulation-")
    _folders.append(folder)
    return ExpertStore(write_small_checkpoint(Path(folder.name) / "model", seed=seed), None, kernel=NativeKernel())


@cache
def calls() -> list[Call]:
    return random_calls(store(0), NativeKernel(), count=24, seed=5)
