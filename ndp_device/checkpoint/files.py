"""Files of a checkpoint as they lie: config.json, and the digest that names a model. Reads no weight but samples."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ndp_device.checkpoint.headers import MAX_LISTING_BYTES, weight_files
from ndp_device.checkpoint.tensor_files import open_file, tensor_header
from ndp_device.common.errors import ConfigError
from ndp_device.common.strict_files import Refused, decode_json, read_bytes

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


def read_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    if not path.exists():
        raise ConfigError(f"no config.json in {model_dir}: give the directory of a Hugging Face checkpoint")
    config = read_json(path)
    compressed = config.get("compression_config")
    transforms = compressed.get("transform_config") if isinstance(compressed, dict) else None
    if config.get("approximate_experts") or (isinstance(transforms, dict) and transforms.get("expert_substitution")):
        raise ConfigError(
            f"{path} says that constants stand for some experts (MoNE), which have no weights here: give the "
            "checkpoint it was made from"
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file such as config.json."""
    try:
        config = decode_json(read_bytes(path, MAX_LISTING_BYTES), constants=True)
    except (OSError, Refused) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def model_digest(model_dir: Path) -> str:
    """32 hex digits that change when the architecture or the weights do.

    BLAKE2b over the sizes in config.json and, per file of weights, its size, its header and 64 samples of 4 KiB spread
    evenly. That takes a few milliseconds for 90 GB, but misses an edit between the samples.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = read_config(model_dir)
    relevant = {key: config[key] for key in sorted(config) if isinstance(config[key], int | float | str | bool)}
    for volatile in ("transformers_version", "_name_or_path", "torch_dtype", "dtype"):
        relevant.pop(volatile, None)
    digest.update(json.dumps(relevant, sort_keys=True).encode())
    for path in weight_files(model_dir):
        header, start = tensor_header(path)
        size = path.stat().st_size
        digest.update(f"{size} {json.dumps(header, sort_keys=True)}".encode())
        span = max(size - start - _SAMPLE_BYTES, 0)
        with open_file(path) as file:
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(start + span * sample // max(_SAMPLES_PER_FILE - 1, 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
