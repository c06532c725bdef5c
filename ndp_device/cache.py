"""Where what was computed once is kept on this machine. Knows the environment's say in it and no file content."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir(model_digest: str) -> Path:
    """A model's place in the cache: under $NDP_CACHE_DIR, $XDG_CACHE_HOME/vllm-ndp or ~/.cache/vllm-ndp."""
    chosen = os.environ.get("NDP_CACHE_DIR")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-ndp"
    return base / "replicas" / model_digest
