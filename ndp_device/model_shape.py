"""What the device must know about a Mixture-of-Experts model, and the digest that names its weights.

Knows checkpoint directories (config.json and safetensors headers). Does not know torch, replicas or timing.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndp_device.errors import ConfigError, ReplicaError

_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one Mixture-of-Experts model: L layers, E experts, top_k of them per token, H x I weights."""

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_experts", "top_k", "hidden_size", "intermediate_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"model {self.name!r}: {field} must be at least 1, got {getattr(self, field)}")
        if self.top_k > self.num_experts:
            raise ConfigError(f"model {self.name!r}: top_k {self.top_k} must not exceed num_experts {self.num_experts}")

    @property
    def weights_per_expert(self) -> int:
        """Gate, up and down projections together."""
        return 3 * self.hidden_size * self.intermediate_size

    @classmethod
    def from_checkpoint(cls, model_dir: Path) -> ModelShape:
        """The sizes of the experts that the checkpoint holds. Raises where it cannot be served."""
        from ndp_device.checkpoint.opening import open_checkpoint

        return open_checkpoint(model_dir).shape


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
