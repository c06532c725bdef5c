"""The vLLM of a command: in its own process, without lines of libraries; what vLLM does not serve is one sentence.

Runs no code that comes with a model. Knows how vLLM speaks and refuses. Does not know what the command asks the engine.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from pathlib import Path
from typing import Any

from ndp_device.common.errors import ConfigError, NdpError

_MOST_CHARACTERS = 400
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def import_vllm() -> None:
    """Import vLLM without its words; it runs in this process, since another would import all again.

    Variables that the user set stay.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, level in _QUIET.items():
        os.environ.setdefault(name, level)
    if os.environ["VLLM_LOGGING_LEVEL"] == "ERROR":  # Triton is spoken of before vLLM sets that level
        for name in ("vllm.triton_utils.importing", "torch._library.triton"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.|torch\.")
    _ = importlib.import_module("vllm").LLM  # vLLM imports it when it is asked for


def quiet_llm(model: Path, **options: Any) -> Any:
    """vLLM's `LLM`, after `import_vllm`. Raises ConfigError with vLLM's reason where it does not serve this model."""
    from vllm import LLM

    try:
        return LLM(str(model), use_tqdm_on_load=False, disable_log_stats=True, **options)
    except NdpError:
        raise
    except Exception as error:  # vLLM and transformers raise whatever their parts raise
        raise ConfigError(f"vLLM cannot serve {model}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """What vLLM said, and what to change. A failed check of pydantic is told without pydantic's words around it."""
    failed = getattr(error, "errors", None)
    said = str(failed()[0]["msg"]).removeprefix("Value error, ") if callable(failed) else str(error)
    if "trust_remote_code" in said or "trust-remote-code" in said:
        return (
            "vLLM knows its model type only with code that comes with the model, and this command runs none: use vllm "
            "serve --trust-remote-code, or give another model"
        )
    return f"{' '.join(said.split())[:_MOST_CHARACTERS]} ({type(error).__name__})"
