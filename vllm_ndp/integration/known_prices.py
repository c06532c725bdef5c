"""Measured prices that this machine keeps: one file in the cache for each processor, shape of experts and version.

A machine measures once; every later start decides by the same prices, and so alike. After a change of the machine,
delete the file. Knows files and what prices depend on. Does not measure.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ndp_device.common import kept
from ndp_device.common.errors import ConfigError
from ndp_device.common.kept import prices_file
from ndp_device.common.strict_files import Refused, decode_json, read_bytes
from ndp_device.kernels import _native
from vllm_ndp.integration.compat import say

P = TypeVar("P")

_BUSY = 0.1
"""Share of the time that a thread waits for a core beside other programs, above which nothing is kept: a guess."""
_ISA_VARIABLES = ("NDP_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS", "NDP_THREADS")
"""Variables that can make kernels slower than the processor allows."""


def find_or_measure(kind: type[P], facts: Mapping[str, Any], measure: Callable[[], P]) -> tuple[P, str]:
    """Prices as a dataclass of this kind, and in words where they come from.

    facts: all that they depend on beside the processor.
    """
    path = prices_file(_digest({**facts, "processor": processor()}))
    if (known := _read(path, kind)) is not None:
        return known, f"measured at an earlier start and kept in {path}"
    began, waited = time.monotonic_ns(), _waited_ns()
    prices = measure()
    if _waited_ns() - waited > _BUSY * (time.monotonic_ns() - began):
        return prices, "measured now, and again at the next start, because other programs took cores meanwhile"
    _write(path, prices)
    return prices, f"measured now and kept in {path}"


def _waited_ns() -> int:
    """How long this thread has been ready to run and was not let; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def processor() -> dict[str, str]:
    """Processor of this machine, and what keeps kernels from using all of it."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    limits = {name: os.environ[name] for name in _ISA_VARIABLES if name in os.environ}
    paths = ",".join(_native.supported_isas())  # a version that brings a faster one measures again
    return {"name": fields.get("model name", ""), "flags": fields.get("flags", ""), "kernels": paths} | limits


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _read(path: Path, kind: type[P]) -> P | None:
    """Read kept prices; None where there are none, or none that can be read: they are measured again then."""
    if not path.exists():
        return None
    try:
        return decode_json(read_bytes(path), kind)
    except (OSError, Refused, ConfigError) as error:
        say(f"the prices kept in {path} are measured again: {error}")
        return None


def _write(path: Path, prices: object) -> None:
    """Whole or not at all. A cache that cannot be written costs the next start a second."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with kept.written(path, aside=path.with_suffix(f".{os.getpid()}")) as file:
            file.write(msgspec.json.encode(prices))
    except OSError as error:
        say(f"prices cannot be kept ({error}): every start measures them; set NDP_CACHE_DIR elsewhere")
