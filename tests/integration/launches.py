"""Triton launches by cuda_stubs/launches.c: a CUDA driver without a GPU, which computes our two kernels itself."""

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path


def launch_without_gpu() -> ctypes.CDLL:
    """From now on, in this process. Needs a C compiler that is called cc."""
    folder = Path(tempfile.mkdtemp())
    path, source = folder / "libcuda.so.1", Path(__file__).parent / "cuda_stubs" / "launches.c"
    words = ["cc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", path, source]
    subprocess.run(words, check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    driver = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)

    import triton
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    class Driver(CudaDriver):
        """Triton's, on a build of torch that knows no CUDA."""

        def __init__(self) -> None:
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device: 0
            self.get_device_capability = lambda device: (9, 0)

    triton.runtime.driver.set_active(Driver())
    return driver
