"""Kernels: one signature (kernel.py), several implementations. load_kernel names them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Literal, get_args

from ndp_device.errors import ConfigError
from ndp_device.kernels.kernel import Kernel
from ndp_device.kernels.reference import ReferenceKernel

KernelName = Literal["auto", "reference", "native"]


def load_kernel(name: str = "auto") -> Kernel:
    """The named kernel; "auto" is the native one where it is installed, else the reference."""
    if name not in get_args(KernelName):
        raise ConfigError(f"kernel must be one of {', '.join(get_args(KernelName))}, got {name!r}")
    has_native = importlib.util.find_spec("ndp_device.kernels._native") is not None
    if name == "native" and not has_native:
        raise ConfigError("the native kernel is not part of this installation: choose kernel 'reference'")
    if name == "reference" or not has_native:
        return ReferenceKernel()
    kernel: Kernel = importlib.import_module("ndp_device.kernels.native").NativeKernel()
    return kernel
