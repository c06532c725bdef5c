"""Short digests of a sweep's inputs, so that rows of two sweeps or two programs never meet in one table."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

import ndp_device
import vllm_ndp
from vllm_ndp.traces.trace import Trace


def array_digest(*arrays: NDArray[Any]) -> str:
    """Digest of the arrays' values, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for values in arrays:
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def trace_digest(trace: Trace) -> str:
    """Digest of the arrays that replay reads: the routing, and the request of each row."""
    return array_digest(trace.request, trace.position, trace.ids, trace.weights, trace.prompt_len)


def program_digest() -> str:
    """Digest of this program's sources: rows of two versions do not belong in one table."""
    digest = hashlib.blake2b(digest_size=16)
    for package in (ndp_device, vllm_ndp):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def plain(value: Any) -> Any:
    """A settings dataclass as JSON gives it back, so that it can be compared with what was read."""
    return msgspec.json.decode(msgspec.json.encode(dataclasses.asdict(value)))
