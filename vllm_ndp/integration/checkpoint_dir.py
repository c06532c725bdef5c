"""Where the checkpoint lies: the directory that was named, or what vLLM's own loader fetches for an id of the hub.

Fetched while the engine is configured, because the plugin reads sizes before vLLM loads a weight; vLLM then finds the
same files in its cache. Knows vLLM's loader and the hub's cache. Does not know what a checkpoint holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ndp_device.common.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def model_dir(vllm_config: VllmConfig) -> Path:
    """Raises ConfigError in one sentence where there is no such directory, and no such id within reach."""
    model, load = vllm_config.model_config, vllm_config.load_config
    name = model.model
    if Path(name).is_dir():
        return Path(name).resolve()
    from huggingface_hub import hf_hub_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf

    try:
        directory = download_weights_from_hf(
            name, load.download_dir, ["*.safetensors"], model.revision, ignore_patterns=load.ignore_patterns
        )
        # beside the weights: with --download-dir vLLM has put it elsewhere
        hf_hub_download(name, "config.json", cache_dir=load.download_dir, revision=model.revision)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        advice = "unset HF_HUB_OFFLINE, or fetch it first" if HF_HUB_OFFLINE else "check its name, HF_TOKEN and network"
        raise ConfigError(
            f"there is no directory {name}, and the model cannot be had from the hub ({why.rstrip('.:')}): {advice}"
        ) from None
    return Path(directory)
