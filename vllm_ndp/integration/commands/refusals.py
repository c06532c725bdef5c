"""The vLLM of a command: a model that vLLM does not serve is refused in one sentence, with vLLM's reason.

Runs no code that comes with a model. Knows how vLLM refuses. Does not know what the command asks the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ndp_device.common.errors import ConfigError, NdpError

_MOST_CHARACTERS = 400


@contextmanager
def refusals_of_vllm(model: Path) -> Iterator[None]:
    """Raise ConfigError where vLLM's `LLM`, made within, does not serve this model."""
    try:
        yield
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
