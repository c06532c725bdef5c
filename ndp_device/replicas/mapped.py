"""One file of tensors as a read-only memory map. Knows the format of files, not what the tensors mean. No torch.

A mapped file that is cut short or rewritten does not end the process (csrc/mapping.cpp). Nor does the change go
unnoticed: a reader of its values calls `check` before it uses its results.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.checkpoint.gguf_files import QUANTIZED, TYPES
from ndp_device.checkpoint.tensor_files import tensor_header
from ndp_device.common.errors import ReplicaError
from ndp_device.replicas import _mapping

# safetensors dtype -> (our name, numpy dtype that holds its bytes); numpy has no bfloat16
_DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "F64": ("float64", np.dtype("<f8")),
    "F32": ("float32", np.dtype("<f4")),
    "F16": ("float16", np.dtype("<f2")),
    "BF16": ("bfloat16", np.dtype("<u2")),
    "I64": ("int64", np.dtype("<i8")),
    "I32": ("int32", np.dtype("<i4")),
    "I8": ("int8", np.dtype("i1")),
    "U8": ("uint8", np.dtype("u1")),
    "F8_E4M3": ("float8_e4m3fn", np.dtype("u1")),
    "F8_E8M0": ("float8_e8m0fnu", np.dtype("u1")),
    **{QUANTIZED + name: (name, np.dtype("u1")) for name, _, _ in TYPES.values()},
}
_WITHOUT_NAME = 0
"""Replaced or removed: nobody can open it to write any more."""


class MappedBytes:
    """A plain file's bytes, uint8 [N]; nothing is read before its values are used. remedy: what restores the file."""

    def __init__(self, path: Path, remedy: str = "restore it") -> None:
        if path.is_symlink() or not path.is_file():
            raise ReplicaError(f"{path} must be a plain file, not missing, a directory or a symbolic link")
        self.path, self._remedy = path, remedy
        try:
            self._file = _mapping.File(str(path))
        except OSError as error:
            raise ReplicaError(f"{path} cannot be mapped: {error.strerror}") from None
        self._stamp, self.bytes = self._file.stamp(), self._file.bytes()
        if self._stamp[0] != self.bytes.size:
            raise ReplicaError(f"{path} changes its size while it is opened")

    def release(self) -> None:
        """Give back the pages read so far: they stay in the page cache, and a later read maps them again."""
        self._file.release()

    def check(self) -> None:
        """Raise ReplicaError when the file is no longer what was opened: values read since then may be wrong."""
        *written, changed = self._file.stamp()
        has_changed = written != [*self._stamp[:2]] or changed not in (self._stamp[2], _WITHOUT_NAME)
        if self._file.faults or has_changed:
            raise ReplicaError(
                f"{self.path} was cut short or rewritten while it was in use, or got another owner, mode or name: "
                f"{self._remedy}, and start again what uses it"
            )


class MappedFile(MappedBytes):
    """`tensor(name)` is a view of the mapped bytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._header, self._start = tensor_header(path)
        self.metadata: dict[str, str] = self._header.pop("__metadata__", {})
        for name, entry in self._header.items():
            self._refuse_disagreement(name, entry["shape"], *entry["data_offsets"])

    @property
    def names(self) -> list[str]:
        return list(self._header)

    def __contains__(self, name: str) -> bool:
        return name in self._header

    def dtype(self, name: str) -> str:
        """float64 | float32 | float16 | bfloat16 | int64 | int32 | uint8"""
        return self._entry(name)[0]

    def tensor(self, name: str) -> NDArray[Any]:
        """The tensor's values; bfloat16 as uint16. Raises ReplicaError naming the file when its bytes are not there."""
        _, storage, shape, first, last = self._entry(name)
        return self.bytes[first:last].view(storage).reshape(shape)

    def _entry(self, name: str) -> tuple[str, np.dtype[Any], tuple[int, ...], int, int]:
        entry = self._header.get(name)
        if entry is None:
            raise ReplicaError(f"{self.path.name} holds no tensor {name}: it is incomplete or of another model")
        if entry["dtype"] not in _DTYPES:
            raise ReplicaError(f"{self.path.name}: {name} is {entry['dtype']}, which is not read")
        dtype, storage = _DTYPES[entry["dtype"]]
        first, last = entry["data_offsets"]
        if last - first != storage.itemsize * math.prod(entry["shape"]):
            raise self._damaged(name, entry["shape"], first, last)
        return dtype, storage, tuple(entry["shape"]), self._start + first, self._start + last

    def _refuse_disagreement(self, name: str, shape: list[int], first: int, last: int) -> None:
        """Refuse a tensor that does not lie inside the file, whatever its dtype: most tensors are never read."""
        if last < first or self._start + last > self.bytes.size:
            raise self._damaged(name, shape, first, last)

    def _damaged(self, name: str, shape: list[int], first: int, last: int) -> ReplicaError:
        return ReplicaError(
            f"{self.path.name} is damaged or truncated: {name} {shape} lies at {self._start + first}.."
            f"{self._start + last}, the file has {self.bytes.size} bytes"
        )
