"""A checkpoint as it lies: which files make it, of each tensor name, dtype, shape and place, config.json, the digest.

`weight_names` alone says which files are the checkpoint: to its reader, to its digest, and to who fetches it. What a
file of tensors is, safetensors or GGUF, its first bytes say. Does not know what a tensor means (names.py), and reads no
weight but samples.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from ndp_device.checkpoint.gguf_files import MAGIC, MAX_HEADER_BYTES, gguf_header
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.model_shape import MAX_EXPERTS_IN_ALL
from ndp_device.common.strict_files import MAX_VALUES, Refused, decode_json, open_plain, read_bytes

INDEX = "model.safetensors.index.json"
SUFFIXES = (".safetensors", ".gguf")
"""Suffixes of files with weights. If a directory has both kinds, the checkpoint is the first kind."""
WHOLE = "model.safetensors"
MAX_LISTING_BYTES = 3 * MAX_EXPERTS_IN_ALL * 128
"""Most bytes of a file that names every matrix of every expert, in lines of 128 bytes: an index, a config.json."""
_SHARD = re.compile(r"(.*)-(\d{1,6})-of-(\d{1,6})(\.\w+)")
_BESIDE = re.compile(r"(\.|adapter_|consolidated|optimizer).*|(.*[-_.])?(mmproj|imatrix)[-_.].*")
"""Beside a checkpoint: hidden files, adapters, a second copy in another layout, states of training, other parts."""
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit: the safetensors library neither writes nor reads a longer header."""
_BYTES_PER_VALUE = 6
"""A tensor's entry holds 8 values, and takes 50 bytes at least."""
_MAX_NAME = 512
_MAX_SIZE = 1 << 62
_METADATA = "__metadata__"
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: dtype as safetensors spells it (F32, BF16, F8_E4M3, ...), shape and where it lies."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    first: int = 0
    last: int = 0


def read_headers(model_dir: Path) -> dict[str, TensorInfo]:
    """Every tensor by name. Raises ReplicaError when a shard is missing or two files hold the same tensor."""
    tensors: dict[str, TensorInfo] = {}
    for path in weight_files(model_dir):
        header, start = tensor_header(path)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if name in tensors:
                raise ReplicaError(
                    f"{model_dir.name}: {name} is in {tensors[name].file.name} and in {path.name}: delete the one "
                    "that does not belong to this checkpoint"
                )
            first, last = entry["data_offsets"]
            tensors[name] = TensorInfo(entry["dtype"], tuple(entry["shape"]), path, start + first, start + last)
    return tensors


def has_weights(model_dir: Path) -> bool:
    return any(any(model_dir.glob(f"*{suffix}")) for suffix in SUFFIXES)


def weight_files(model_dir: Path) -> list[Path]:
    """The files that make the checkpoint, sorted by name. Raises ReplicaError where there is none, or not all."""
    index = model_dir / INDEX
    if os.path.lexists(index):  # whatever it is: one that cannot be read is refused
        if not (named := indexed_files(model_dir)):
            raise ReplicaError(f"{index} names no tensor: download the checkpoint again")
        if missing := [name for name in named if not (model_dir / name).is_file()]:
            raise ReplicaError(
                f"{model_dir.name} lacks {len(missing)} of the {len(named)} files that {INDEX} names, {missing[0]} "
                "first: download the checkpoint again"
            )
        return [model_dir / name for name in named]
    for suffix in SUFFIXES:
        if names := weight_names([path.name for path in model_dir.glob(f"*{suffix}")]):
            _refuse_gaps(model_dir, names)
            return [model_dir / name for name in names]
    raise ReplicaError(f"no file in {model_dir} is one of {' or '.join(SUFFIXES)}: the device reads no other weights")


def indexed_files(model_dir: Path) -> list[str]:
    """The files that the directory's index names, sorted; none where there is no index."""
    index = model_dir / INDEX
    return sorted(set(_weight_map(index).values())) if os.path.lexists(index) else []


def weight_names(names: Collection[str]) -> list[str]:
    """Which of a directory's files of one kind are the checkpoint where no index names them, sorted.

    As transformers chooses: model.safetensors alone, or its shards. Otherwise all but those that by their names are
    something else, and these where there are no others.
    """
    if WHOLE in names:
        return [WHOLE]
    shards = [name for name in names if (found := _SHARD.fullmatch(name)) and found[1] == "model"]
    return sorted(shards or [name for name in names if not _BESIDE.fullmatch(name)] or names)


def _refuse_gaps(model_dir: Path, names: Collection[str]) -> None:
    """Shards say how many they are, so a missing one is known without an index. gpt-oss counts from 0."""
    for name in names:
        if shard := _SHARD.fullmatch(name):
            stem, digits, count, suffix = shard.groups()
            first = 0 if f"{stem}-{0:0{len(digits)}d}-of-{count}{suffix}" in names else 1
            for number in range(first, first + int(count)):
                if (wanted := f"{stem}-{number:0{len(digits)}d}-of-{count}{suffix}") not in names:
                    raise ReplicaError(f"{model_dir.name} lacks {wanted}: download the checkpoint again")


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map = decode_json(read_bytes(index, MAX_LISTING_BYTES), _Index).weight_map
        if outside := [
            name for name in weight_map.values() if Path(name).name != name or "\0" in name or len(name) > 255
        ]:
            raise Refused(f"{outside[0]!r} is not a file of this directory")
    except (OSError, Refused) as error:
        raise ReplicaError(f"{index} cannot be read as an index of safetensors files: {error}") from None
    return weight_map


# -- one file of tensors -----------------------------------------------------------------------------------------------


def tensor_header(path: Path) -> tuple[dict[str, Any], int]:
    """Entries of a file's tensors by name, and the offset of its first tensor byte. By the file's first bytes."""
    with open_file(path) as file:
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
    with open_file(path) as file:
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
        header: dict[str, Any] = decode_json(text, max_values=max(MAX_VALUES, length // _BYTES_PER_VALUE))
        if not isinstance(header, dict):
            raise Refused("it must be a JSON object")
        if too_long := next((name for name in header if len(name) > _MAX_NAME), None):
            raise Refused(f"a name of {len(too_long)} characters is none of a tensor")
        msgspec.convert({name: entry for name, entry in header.items() if name != _METADATA}, dict[str, _Tensor])
        msgspec.convert(header.get(_METADATA, {}), dict[str, str])
    except (Refused, msgspec.ValidationError) as error:
        raise ReplicaError(f"{path.name}: its header cannot be read as one of tensors: {error}") from None
    return header, 8 + length


def open_file(path: Path) -> BinaryIO:
    """Raises ReplicaError where there is no such plain file."""
    try:
        return open_plain(path)
    except (OSError, Refused) as error:
        raise ReplicaError(f"{path} cannot be read: {error}") from None


# -- config.json, and the digest that names a model --------------------------------------------------------------------


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
