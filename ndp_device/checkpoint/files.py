"""The files of a checkpoint directory: config.json, safetensors headers, and the digest that names the weights.

Knows files. Does not know which tensor is what (names.py), torch, replicas or timing.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from ndp_device.errors import ConfigError, ReplicaError

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


def read_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"no config.json in {model_dir}: give the directory of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def checkpoint_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sorted by name. Raises ReplicaError when there is none."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ReplicaError(f"no .safetensors file in {model_dir}: the device reads safetensors checkpoints only")
    return files


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and the offset of its first tensor byte."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ReplicaError(f"{path.name} is too short to be a safetensors file ({size} bytes)")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, 100 << 20):
            raise ReplicaError(f"{path.name}: its header claims {length} bytes but the file has {size}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ReplicaError(f"{path.name}: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ReplicaError(f"{path.name}: its header must be a JSON object")
    return header, 8 + length


def model_digest(model_dir: Path) -> str:
    """32 hex digits that change when the architecture or the weights do.

    BLAKE2b over the sizes in config.json and, per safetensors file, its size, its header and 64 samples of 4 KiB
    spread evenly: a few milliseconds for 90 GB, at the price of missing an edit between the samples.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = read_config(model_dir)
    relevant = {key: config[key] for key in sorted(config) if isinstance(config[key], int | float | str | bool)}
    for volatile in ("transformers_version", "_name_or_path", "torch_dtype", "dtype"):
        relevant.pop(volatile, None)
    digest.update(json.dumps(relevant, sort_keys=True).encode())
    for path in checkpoint_files(model_dir):
        header, start = safetensors_header(path)
        size = path.stat().st_size
        digest.update(f"{size} {json.dumps(header, sort_keys=True)}".encode())
        span = max(size - start - _SAMPLE_BYTES, 0)
        with path.open("rb") as file:
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(start + span * sample // max(_SAMPLES_PER_FILE - 1, 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
