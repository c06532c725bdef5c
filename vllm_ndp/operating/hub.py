"""Checkpoints on a hub of models, fetched by id: of a repository the checkpoint alone, without second copies.

Speaks to the hub through huggingface_hub, which has the cache, the keys and the address (HF_HOME, HF_TOKEN,
HF_ENDPOINT).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ndp_device.checkpoint.headers import INDEX, WHOLE, has_weights, indexed_files
from ndp_device.common.errors import ConfigError

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_BESIDE_WEIGHTS = [
    *("config.json", "generation_config.json", "quant*_config.json", "hf_quant_config.json", "params.json", INDEX),
    *("tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "tekken.json"),
    *("*.model", "*.jinja", "chat_template*", "*processor_config.json"),
]
_CHECKPOINT_FILES = [*_BESIDE_WEIGHTS, WHOLE, "model-*-of-*.safetensors"]
"""Files that a checkpoint without an index is loaded from. Weights in other formats are not fetched."""
_FOLDERS = ["*/*"]
"""No part of a checkpoint lies in a folder: there are second copies (original/, checkpoint-500/, onnx/)."""


def is_repo(name: str) -> bool:
    """Whether this can be an id, and is no directory here."""
    return _REPO.fullmatch(name) is not None and not Path(name).exists()


def checkpoint_dir(name: str) -> Path:
    """A directory as it is; a model's id as its place in the hub's cache, fetched first where it is not there."""
    if not is_repo(name):
        return Path(name)
    with asked_of_hub(f"the checkpoint {name}") as hub:

        def fetch(files: list[str], revision: str | None) -> Path:
            wanted = {"allow_patterns": files, "ignore_patterns": _FOLDERS}
            return Path(hub.snapshot_download(name, revision=revision, **wanted))

        directory = fetch(_BESIDE_WEIGHTS, None)
        commit = directory.name  # whatever is pushed meanwhile
        fetch(indexed_files(directory) or _CHECKPOINT_FILES, commit)
        if not has_weights(directory):  # under other names
            fetch(["*.safetensors"], commit)
        return directory


@contextmanager
def asked_of_hub(what: str) -> Iterator[Any]:
    """huggingface_hub, whose errors leave as one sentence about `what`."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ModuleNotFoundError:
        raise ConfigError(f"{what} needs the package huggingface_hub: pip install huggingface_hub") from None
    try:
        yield huggingface_hub
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
        advice = "unset HF_HUB_OFFLINE, or give a directory" if offline else "check its name, HF_TOKEN and HF_ENDPOINT"
        raise ConfigError(f"{what} cannot be had from the hub ({_first_line(error)}): {advice}") from None


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text.rstrip(".:")
