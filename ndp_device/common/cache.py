"""Where what was computed or fetched once is kept on this machine. Knows what the environment says, no file content."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ndp_device.common.errors import ConfigError


def default_cache_dir(model_digest: str) -> Path:
    """A model's place in the cache: under $NDP_CACHE_DIR, $XDG_CACHE_HOME/vllm-ndp or ~/.cache/vllm-ndp."""
    return _base() / "replicas" / model_digest


def prices_file(key: str) -> Path:
    """Where measured prices of one machine, shape and version are kept."""
    return _base() / "prices" / f"{key}.json"


def checked_file(directory: Path) -> Path:
    """Where this machine notes which files of a directory it has found whole."""
    key = hashlib.blake2b(os.fsencode(directory.resolve()), digest_size=16).hexdigest()
    return _base() / "checked" / f"{key}.json"


def _base() -> Path:
    if chosen := os.environ.get("NDP_CACHE_DIR"):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-ndp"
    except RuntimeError:
        raise ConfigError(
            f"user {os.getuid()} has no home directory on this system: set NDP_CACHE_DIR to a directory of yours"
        ) from None
