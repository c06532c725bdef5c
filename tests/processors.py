"""Environments under which a process sees another processor than this machine's: numpy, BLAS, libm and our kernels."""


def features() -> list[str]:
    """What numpy may choose by processor and finds on this one."""
    from numpy._core import _multiarray_umath as numpy_core

    return [name for name in numpy_core.__cpu_dispatch__ if numpy_core.__cpu_features__.get(name)]


def settings() -> dict[str, dict[str, str]]:
    wide = [name for name in features() if name.startswith("AVX512")]
    return {
        "as it is": {},
        "no AVX-512": {"NPY_DISABLE_CPU_FEATURES": " ".join(wide), "OPENBLAS_CORETYPE": "Haswell", "NDP_ISA": "avx2"},
        "nothing but the least": {
            "NPY_DISABLE_CPU_FEATURES": " ".join(features()),
            "OPENBLAS_CORETYPE": "Prescott",
            "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
            "NDP_ISA": "portable",
        },
    }
