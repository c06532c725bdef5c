"""Contents of a checkpoint directory: which files make it, and of each tensor in them name, dtype, shape and place.

`weight_names` alone says which files are the checkpoint: to its reader, to its digest, and to who fetches it.
Does not know what a tensor means (names.py), and reads no weight.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ndp_device.checkpoint.tensor_files import tensor_header
from ndp_device.common.errors import ReplicaError
from ndp_device.common.model_shape import MAX_EXPERTS_IN_ALL
from ndp_device.common.strict_files import Refused, decode_json, read_bytes

INDEX = "model.safetensors.index.json"
SUFFIXES = (".safetensors", ".gguf")
"""Suffixes of files with weights. If a directory has both kinds, the checkpoint is the first kind."""
WHOLE = "model.safetensors"
MAX_LISTING_BYTES = 3 * MAX_EXPERTS_IN_ALL * 128
"""Most bytes of a file that names every matrix of every expert, in lines of 128 bytes: an index, a config.json."""
_SHARD = re.compile(r"(.*)-(\d{1,6})-of-(\d{1,6})(\.\w+)")
_BESIDE = re.compile(r"(adapter_|consolidated|optimizer|mmproj|imatrix).*")
"""Files that stand beside a checkpoint: adapters, a second copy in another layout, states of training, other parts."""


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
        named = indexed_files(model_dir)
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
