"""Kernels: one signature (kernel.py), several implementations. load_kernel names them."""

from __future__ import annotations

import importlib

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
    kernel: Kernel = importlib.import_module("ndp_device.kernels.native").NativeKernel()
    return kernel
