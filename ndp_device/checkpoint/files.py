"""The files of a checkpoint directory: config.json, headers of tensors, and the digest that names the weights.

Knows files. Does not know which tensor is what (names.py), torch, replicas or timing.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from ndp_device import strict_json
from ndp_device.checkpoint.gguf_files import MAGIC, MAX_HEADER_BYTES, gguf_header
from ndp_device.errors import ConfigError, ReplicaError
from ndp_device.strict_files import Refused, open_plain

_MAX_HEADER_BYTES = 32 << 20  # one file of a large model's 100 000 tensors takes 12 MiB
_MAX_HEADER_VALUES = 2 << 20
_MAX_NAME = 512
_MAX_SIZE = 1 << 62
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096
_METADATA = "__metadata__"
SUFFIXES = (".safetensors", ".gguf")
"""Suffixes of files with weights. If a directory has both kinds, the checkpoint is the first kind."""


def read_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        config = strict_json.read(path, constants=True)
    except FileNotFoundError:
        raise ConfigError(f"no config.json in {model_dir}: give the directory of a Hugging Face checkpoint") from None
    except (OSError, Refused) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def has_weights(model_dir: Path) -> bool:
    return any(any(model_dir.glob(f"*{suffix}")) for suffix in SUFFIXES)


def checkpoint_files(model_dir: Path) -> list[Path]:
    """The files that hold tensors, sorted by name. Raises ReplicaError when there is none."""
    for suffix in SUFFIXES:
        if files := sorted(model_dir.glob(f"*{suffix}")):
            return files
    raise ReplicaError(f"no file in {model_dir} is one of {' or '.join(SUFFIXES)}: the device reads no other weights")


def tensor_header(path: Path) -> tuple[dict[str, Any], int]:
    """Entries of a file's tensors by name, and the offset of its first tensor byte. By the file's first bytes."""
    with _open(path) as file:
        if file.read(len(MAGIC)) == MAGIC:
            file.seek(0)
            return gguf_header(file.read(MAX_HEADER_BYTES), path.name)
    return safetensors_header(path)


class _Tensor(msgspec.Struct):
    """The entry of one tensor in a header."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, le=_MAX_SIZE)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0, le=_MAX_SIZE)], Annotated[int, msgspec.Meta(le=_MAX_SIZE)]]


def safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and the offset of its first tensor byte.

    Every entry but `__metadata__` has a dtype, a shape and two data_offsets, each of its right type. The reader of a
    tensor (replicas/mapped.py) checks that they agree with each other and with the file.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ReplicaError(f"{path.name} is too short to be a safetensors file ({size} bytes)")
        (length,) = struct.unpack("<Q", prefix)
        if length > size - 8:
            raise ReplicaError(f"{path.name}: its header claims {length} bytes but the file has {size}")
        if length > _MAX_HEADER_BYTES:
            raise ReplicaError(f"{path.name}: its header has {length} bytes, and at most {_MAX_HEADER_BYTES} are read")
        text = file.read(length)
    try:
        header: dict[str, Any] = strict_json.decode(text, max_values=_MAX_HEADER_VALUES)
        if not isinstance(header, dict):
            raise Refused("it must be a JSON object")
        if too_long := next((name for name in header if len(name) > _MAX_NAME), None):
            raise Refused(f"a name of {len(too_long)} characters is none of a tensor")
        msgspec.convert({name: entry for name, entry in header.items() if name != _METADATA}, dict[str, _Tensor])
        msgspec.convert(header.get(_METADATA, {}), dict[str, str])
    except (Refused, msgspec.ValidationError) as error:
        raise ReplicaError(f"{path.name}: its header cannot be read as one of tensors: {error}") from None
    return header, 8 + length


def _open(path: Path) -> BinaryIO:
    try:
        return open_plain(path)
    except (OSError, Refused) as error:
        raise ReplicaError(f"{path} cannot be read: {error}") from None


def read_tensor(path: Path, first: int, last: int) -> bytes:
    """A small tensor's bytes, of which the headers say where they lie. Raises ReplicaError where they are not there."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if not 0 <= first <= last <= size:
            raise ReplicaError(f"{path.name} is damaged or truncated: a tensor lies at {first}..{last} of {size} bytes")
        file.seek(first)
        return file.read(last - first)


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
    for path in checkpoint_files(model_dir):
        header, start = tensor_header(path)
        size = path.stat().st_size
        digest.update(f"{size} {json.dumps(header, sort_keys=True)}".encode())
        span = max(size - start - _SAMPLE_BYTES, 0)
        with _open(path) as file:
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(start + span * sample // max(_SAMPLES_PER_FILE - 1, 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
