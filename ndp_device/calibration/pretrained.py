"""What transformers reads of a checkpoint: its configuration and its tokenizer, without running the checkpoint's code.

transformers would ask on the terminal whether to run it. Here the answer is no, and what transformers cannot read alone
is refused in one sentence. Knows transformers. Does not know experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ndp_device.common.errors import ConfigError


def load_tokenizer(model_dir: str | Path) -> Any:
    """Raises ConfigError where there is none that transformers reads."""
    from transformers import AutoTokenizer

    return _read(AutoTokenizer.from_pretrained, model_dir, "tokenizer", "put its tokenizer.json beside the weights")


def load_config(model_dir: str | Path) -> Any:
    """Raises ConfigError where transformers does not know the model's type."""
    from transformers import AutoConfig

    remedy = "quantize from the weights alone (no --calibration), or take a transformers that knows the model"
    return _read(AutoConfig.from_pretrained, model_dir, "configuration", remedy)


def _read(load: Callable[..., Any], model_dir: str | Path, what: str, remedy: str) -> Any:
    import transformers

    try:
        return load(model_dir, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its parts raise
        reason = " ".join(str(error).split())[:300].rstrip(".")
        code = " and does not run the code that comes with it" if _brings_code(model_dir) else ""
        raise ConfigError(
            f"transformers {transformers.__version__} cannot read the {what} of {model_dir}{code} "
            f"({type(error).__name__}: {reason}): {remedy}"
        ) from None


def _brings_code(model_dir: str | Path) -> bool:
    for name in ("config.json", "tokenizer_config.json"):
        with suppress(OSError, ValueError, TypeError, RecursionError):
            if "auto_map" in json.loads((Path(model_dir) / name).read_text()):
                return True
    return False
