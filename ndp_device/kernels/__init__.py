"""Kernels: one signature (kernel.py), several implementations. load_kernel names them.

Another package adds a kernel by an entry point, and `--kernel` takes the entry point's name; docs/extend.md shows one:

    [project.entry-points."ndp_device.kernels"]
    chip = "my_package:Chip"       # called without arguments, gives a Kernel
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import entry_points

from ndp_device.errors import ConfigError
from ndp_device.kernels.kernel import Kernel
from ndp_device.kernels.reference import ReferenceKernel

GROUP = "ndp_device.kernels"
KERNELS = ("auto", "reference", "native")


def load_kernel(name: str = "auto") -> Kernel:
    """The named kernel; "auto" is the native one. Raises ConfigError where there is none of that name."""
    if name not in KERNELS:
        return _foreign(name)
    if name == "reference":
        return ReferenceKernel()
    if importlib.util.find_spec("ndp_device.kernels._native") is None:
        raise ConfigError(
            f"kernel {name!r} needs the native kernel, which is not part of this installation: install again with a "
            "C++17 compiler, or ask for 'reference', a slow check in numpy"
        )
    kernel: Kernel = importlib.import_module("ndp_device.kernels.native").NativeKernel()
    return kernel


def _foreign(name: str) -> Kernel:
    """Kernel of another installed package."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise ConfigError(f"kernel must be one of {', '.join((*KERNELS, *sorted(found)))}, got {name!r}")
    kernel: Kernel = found[name].load()()
    return kernel
