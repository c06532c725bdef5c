"""Contents of a checkpoint directory, from the headers of its files: names, dtypes, shapes, the file of each tensor.

Knows files and the index that lists them. Does not know what a tensor means (names.py), and reads no weight.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ndp_device import strict_json
from ndp_device.checkpoint.files import checkpoint_files, tensor_header
from ndp_device.errors import ReplicaError

INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 32 << 20  # 9 MiB for the 91 000 tensors of DeepSeek-V3
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")


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


def weight_files(model_dir: Path) -> list[Path]:
    """The files that make the checkpoint: those its index names, or all of their kind where there is no index."""
    index = model_dir / INDEX
    if os.path.lexists(index):  # whatever it is: one that cannot be read is refused
        named = sorted(set(_weight_map(index).values()))
        if missing := [name for name in named if not (model_dir / name).is_file()]:
            raise ReplicaError(
                f"{model_dir.name} lacks {len(missing)} of the {len(named)} files that {INDEX} names, {missing[0]} "
                "first: download the checkpoint again"
            )
        return [model_dir / name for name in named]
    files = checkpoint_files(model_dir)
    _refuse_gaps(model_dir, files)
    return files


def _refuse_gaps(model_dir: Path, files: list[Path]) -> None:
    """Shards say how many they are, so a missing one is known without an index."""
    present = {path.name for path in files}
    for path in files:
        if shard := _SHARD.fullmatch(path.name):
            stem, _, count, suffix = shard.groups()
            for number in range(1, int(count) + 1):
                if (wanted := f"{stem}-{number:05d}-of-{count}{suffix}") not in present:
                    raise ReplicaError(f"{model_dir.name} lacks {wanted}: download the checkpoint again")


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map = strict_json.read(index, _Index, at_most=_MAX_INDEX_BYTES).weight_map
        if outside := [
            name for name in weight_map.values() if Path(name).name != name or "\0" in name or len(name) > 255
        ]:
            raise strict_json.Refused(f"{outside[0]!r} is not a file of this directory")
    except (OSError, strict_json.Refused) as error:
        raise ReplicaError(f"{index} cannot be read as an index of safetensors files: {error}") from None
    return weight_map
