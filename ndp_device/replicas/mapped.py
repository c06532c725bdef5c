"""One file of tensors as a read-only memory map. No torch.

A mapped file that is cut short or rewritten does not end the process (csrc/mapping.cpp). Nor does the change go
unnoticed: a reader of its values calls `check` before it uses its results.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.checkpoint.files import tensor_header
from ndp_device.checkpoint.gguf_files import MAGIC, QUANTIZED, TYPES
from ndp_device.common.errors import ReplicaError
from ndp_device.replicas import _mapping

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # numpy has no bfloat16
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    **dict.fromkeys(("U8", "F8_E4M3", "F8_E8M0", *(QUANTIZED + name for name, _, _ in TYPES.values())), np.dtype("u1")),
}
"""Safetensors dtype -> the numpy dtype that holds its bytes."""
_WITHOUT_NAME = 0
"""Replaced or removed: nobody can open it to write any more."""


class MappedFile:
    """A plain file of tensors: `tensor(name)` is a view of its mapped bytes, read when its values are used."""

    def __init__(self, path: Path) -> None:
        if path.is_symlink() or not path.is_file():
            raise ReplicaError(f"{path} must be a plain file, not missing, a directory or a symbolic link")
        self.path = path
        try:
            self._file = _mapping.File(str(path))
        except OSError as error:
            raise ReplicaError(f"{path} cannot be mapped: {error.strerror}") from None
        self._stamp, self.bytes = self._file.stamp(), self._file.bytes()
        if self._stamp[0] != self.bytes.size:
            raise ReplicaError(f"{path} changes its size while it is opened")
        self._header, self._start = tensor_header(path)
        self._header.pop("__metadata__", None)
        self._refuse_other_places(has_gaps=bytes(self.bytes[: len(MAGIC)]) == MAGIC)

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
                "restore it, and start again what uses it"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._header

    def tensor(self, name: str) -> NDArray[Any]:
        """The tensor's values; bfloat16 as uint16. Raises ReplicaError naming the file when its bytes are not there."""
        entry = self._header.get(name)
        if entry is None:
            raise ReplicaError(f"{self.path.name} holds no tensor {name}: it is incomplete or of another model")
        dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in _DTYPES:
            raise ReplicaError(f"{self.path.name}: {name} is {dtype}, which is not read")
        if last - first != _DTYPES[dtype].itemsize * math.prod(shape):
            raise self._damaged(name, shape, first, last, first)
        return self.bytes[self._start + first : self._start + last].view(_DTYPES[dtype]).reshape(shape)

    def _refuse_other_places(self, *, has_gaps: bool) -> None:
        """Refuse a tensor that does not lie inside the file, whatever its dtype: most tensors are never read. And one
        that does not begin where another ends, as the safetensors library does: a name that stands twice is one."""
        end = 0
        for name, entry in sorted(self._header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            if last < first or self._start + last > self.bytes.size or first < end or (first > end and not has_gaps):
                raise self._damaged(name, entry["shape"], first, last, end)
            end = last

    def _damaged(self, name: str, shape: list[int], first: int, last: int, end: int) -> ReplicaError:
        before = f", the one before it ends at {self._start + end}" if first != end else ""
        return ReplicaError(
            f"{self.path.name} is damaged or truncated: {name} {shape} lies at {self._start + first}.."
            f"{self._start + last}{before}, the file has {self.bytes.size} bytes"
        )
