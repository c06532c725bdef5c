"""The device's kernel in the engine's process, on all of the engine's cores. Knows kernels, threads and cores."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np

from ndp_device.experts.expert import FullExpert
from ndp_device.kernels import load_kernel
from ndp_device.kernels.kernel import EngineKernel

_SIDE = 512
"""Size from which on the native kernel divides an expert among its threads, even for one row."""


def load_engine_kernel(name: str, cores: Collection[int]) -> EngineKernel:
    """name: the setting `kernel`. Its threads are started here, in a thread that may run on all these cores.

    A worker's own thread is bound to one core where vLLM binds OpenMP, and threads that it starts would share that one.
    """
    with ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, frozenset(cores))) as thread:
        return thread.submit(_load, name).result()


def _load(name: str) -> EngineKernel:
    kernel = cast(EngineKernel, load_kernel(name))  # the setting names only ours
    weights, one, weight = np.zeros((_SIDE, _SIDE), np.float32), np.zeros(1, np.int32), np.ones(1, np.float32)
    expert = kernel.prepare(FullExpert("float32", weights, weights, weights))
    kernel.execute(weights[:1], [expert], one, one, weight)
    return kernel
