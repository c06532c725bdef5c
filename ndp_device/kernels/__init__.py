"""Kernels: one signature (kernel.py), several implementations. load_kernel names them."""

from __future__ import annotations

import importlib
import importlib.util

from ndp_device.common.errors import ConfigError
from ndp_device.kernels.kernel import Kernel
from ndp_device.kernels.reference import ReferenceKernel

KERNELS = ("auto", "reference", "native")


def load_kernel(name: str = "auto") -> Kernel:
    """The named kernel; "auto" is the native one. Raises ConfigError where there is none of that name."""
    if name not in KERNELS:
        raise ConfigError(f"kernel must be one of {', '.join(KERNELS)}, got {name!r}")
    if name == "reference":
        return ReferenceKernel()
    if importlib.util.find_spec("ndp_device.kernels._native") is None:
        raise ConfigError(
            f"kernel {name!r} needs the native kernel, which is not part of this installation: install again with a "
            "C++17 compiler, or ask for 'reference', a slow check in numpy"
        )
    kernel: Kernel = importlib.import_module("ndp_device.kernels.native").NativeKernel()
    return kernel
