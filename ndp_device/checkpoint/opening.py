"""A checkpoint directory -> its experts' layout and sizes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.checkpoint import spellings, values
from ndp_device.checkpoint.files import TensorInfo, has_weights, open_file, read_config, read_headers, read_json
from ndp_device.checkpoint.formats import PARTS, Parts, describe
from ndp_device.checkpoint.gguf_files import QUANTIZED, logical_shape
from ndp_device.checkpoint.names import ExpertLayout, resolve
from ndp_device.checkpoint.spellings import keys_about_experts, text_config
from ndp_device.checkpoint.stated import Settings
from ndp_device.checkpoint.values import Packed, StoredForm
from ndp_device.common.errors import ConfigError, ReplicaError
from ndp_device.common.model_shape import ModelShape


class Checkpoint(NamedTuple):
    """Facts about a checkpoint, known before a weight is read."""

    shape: ModelShape
    layout: ExpertLayout
    tensors: Mapping[str, TensorInfo]
    """Tensors by name; quantized experts have the shapes of their values."""
    packed: Mapping[str, Packed]
    """How each of these is read."""


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Find the experts. Raises ConfigError or ReplicaError in one sentence where they do not add up."""
    config, name = read_config(model_dir), model_dir.resolve().name
    if not keys_about_experts(text_config(config)) and not has_weights(model_dir):
        raise ConfigError(
            f"{name} is a dense model (no experts in its config.json); vllm-ndp serves Mixture-of-Experts models only"
        )
    tensors, packed = unpacked(read_headers(model_dir), _with_settings(model_dir, config), name=name)
    layout = resolve(tensors, config, name=name)
    if any(info.file.suffix == ".gguf" for info in tensors.values()):
        layout = replace(layout, norm_offset=0.0)  # llama.cpp's converter has added it
    shape = ModelShape(
        name=name,
        num_layers=len(layout.layers),
        num_experts=layout.num_experts,
        top_k=layout.top_k,
        hidden_size=layout.hidden_size,
        intermediate_size=layout.intermediate_size,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
    )
    return Checkpoint(shape, layout, tensors, packed)


SETTINGS_BESIDE = "hf_quant_config.json"
"""modelopt's older place of what is stated; vLLM reads it where config.json states nothing."""


def _with_settings(model_dir: Path | None, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Multimodal models say how they are quantized beside their language model's part, or in it; modelopt in a file."""
    for part in (config, text_config(config)):
        for key in ("quantization_config", "compression_config"):  # the second of older compressed-tensors
            if (given := part.get(key)) is not None:
                return {"quantization_config": given}
    path = None if model_dir is None else model_dir / SETTINGS_BESIDE
    return {"quantization_config": read_json(path)} if path is not None and path.is_file() else {}


_MAX_SMALL = 4096
_PARTS = "|".join(re.escape(part) for part in sorted(PARTS, key=len, reverse=True))
_OF_EXPERTS = re.compile(
    r"(?P<prefix>.*\bexperts\b.*?(?:_(?=(?:blocks|scales)$)|\.))"
    rf"(?P<part>(?<=_)(?:blocks|scales)|(?<=\.)(?:{_PARTS}))"
)
_OF_OTHERS = re.compile(rf"(?P<prefix>(?!.*\bexperts\b).*?\.)(?P<part>{_PARTS})")
_PLAIN = ("F64", "F32", "F16", "BF16")


def read_small(info: TensorInfo) -> NDArray[Any]:
    """A tensor of at most 4 KiB, from its file. Raises ReplicaError where its bytes are not there."""
    dtype = np.dtype({"U8": "u1", "I32": "<i4", "I64": "<i8"}[info.dtype])
    with open_file(info.file) as file:
        file.seek(info.first)
        stored = file.read(min(max(info.last - info.first, 0), _MAX_SMALL))
    if len(stored) != dtype.itemsize * math.prod(info.shape):
        raise ReplicaError(
            f"{info.file.name} is damaged: {len(stored)} bytes are read of a tensor {info.dtype} {list(info.shape)}"
        )
    return np.frombuffer(stored, dtype)


def unpacked(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    *,
    name: str,
    small: Callable[[TensorInfo], NDArray[Any]] = read_small,
) -> tuple[dict[str, TensorInfo], dict[str, Packed]]:
    """All tensors, those of quantized experts replaced by what they stand for; and how each of these is read."""
    groups = _groups(tensors, _OF_EXPERTS) | {
        prefix: parts
        for prefix, parts in _groups(tensors, _OF_OTHERS).items()
        if prefix.split(".")[-2] in spellings.ROLES
        and any(
            len(tensors[name].shape) == 3 and not tensors[name].dtype.startswith(QUANTIZED) for name in parts.values()
        )
    }  # Granite's tensors of all experts do not say that they are of experts; `_of_gguf` reads those of GGUF files
    hidden = {tensor for parts in groups.values() for tensor in parts.values()}
    shown = {tensor: info for tensor, info in tensors.items() if tensor not in hidden}
    packed = _of_gguf(tensors, name)
    settings = _settings(config.get("quantization_config"), name) if groups else Settings()
    for prefix, parts in groups.items():
        shown_name = prefix[:-1] if prefix.endswith("_") else f"{prefix}weight"
        if shown_name in shown:
            raise ReplicaError(
                f"{name}: {shown_name} is there as {shown[shown_name].dtype} and beside it in a quantized form "
                f"({min(parts.values())}): keep the tensors of one checkpoint only"
            )
        packed[shown_name] = describe(Parts(prefix, parts, tensors, name, small), settings)
    for shown_name, one in packed.items():
        shown[shown_name] = TensorInfo(one.dtype, one.shape, tensors[one.parts["codes"]].file)
    return shown, packed


class PackedLinears:
    """How quantized layers beside the experts are read, by their modules' names."""

    def __init__(self, model_dir: Path) -> None:
        config, self._name = read_config(model_dir), model_dir.resolve().name
        self._tensors = read_headers(model_dir)
        groups = _groups(self._tensors, _OF_OTHERS)
        self._groups = {prefix.rstrip("."): parts for prefix, parts in groups.items()}
        stated = _with_settings(model_dir, config).get("quantization_config") if groups else None
        self._settings = _settings(stated, self._name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __getitem__(self, module: str) -> Packed:
        """Raises ConfigError for one that is not read."""
        parts = Parts(f"{module}.", self._groups[module], self._tensors, self._name, read_small)
        return describe(parts, self._settings)

    @property
    def weights_by_form(self) -> Counter[StoredForm | None]:
        """How many weights of matrices are stored in which form; None: one that no kernel takes."""
        weights = Counter[StoredForm | None]()
        for module in self:
            with suppress(ConfigError, ReplicaError):
                one = self[module]
                if len(one.shape) == 2:  # Granite's experts have names of others
                    weights[one.stored_form] += math.prod(one.shape)
        return weights


def _groups(tensors: Mapping[str, TensorInfo], part_of: re.Pattern[str]) -> dict[str, dict[str, str]]:
    """Prefix of a quantized tensor -> its parts -> their names."""
    groups: dict[str, dict[str, str]] = {}
    for tensor, info in tensors.items():
        match = part_of.fullmatch(tensor)
        if match is not None and not (match["part"] == "weight" and info.dtype in _PLAIN):
            groups.setdefault(match["prefix"], {})[match["part"]] = tensor
    return groups


def _of_gguf(tensors: Mapping[str, TensorInfo], name: str) -> dict[str, Packed]:
    """The quantized tensors of all experts of a GGUF file: one each, whose values `gguf` makes."""
    packed = {}
    for tensor, info in tensors.items():
        if tensor.endswith("_exps.scale"):
            raise ConfigError(
                f"{name}: experts have a scale of their own ({tensor}), which the package gguf leaves out: give the "
                "model in another of llama.cpp's types"
            )
        if not info.dtype.startswith(QUANTIZED) or len(info.shape) != 3:
            continue
        shape = logical_shape(info.dtype, info.shape)
        packed[tensor] = Packed(values.ggml, shape, "F32", {"codes": tensor}, info.dtype.removeprefix(QUANTIZED))
    return packed


def stated_form(model_dir: Path | None, config: Mapping[str, Any], *columns: int) -> StoredForm | None:
    """How config.json, without a tensor, says that all experts are stored, where a kernel takes them so. model_dir:
    where it lies; columns: of the experts' matrices."""
    given = _with_settings(model_dir, config).get("quantization_config")
    inner = text_config(config)
    v4 = "fp4" if str(inner.get("model_type")).startswith("deepseek_v4") else None  # the rest of it is of FP8
    if isinstance(given, Mapping) and inner.get("expert_dtype", given.get("expert_dtype", v4)) == "fp4":
        return values.MXFP4
    try:
        return None if given is None else _settings(given, "config.json").form_of_experts(*columns)
    except ConfigError:  # said where it is served
        return None


def stated_method(model_dir: Path, config: Mapping[str, Any]) -> str:
    """quant_method of config.json, or of what lies beside it, spelled as vLLM spells it; empty where none is stated."""
    given = _with_settings(model_dir, config).get("quantization_config")
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    return method.lower().replace("compressed_tensors", "compressed-tensors") if isinstance(method, str) else ""


def _settings(given: object, name: str) -> Settings:
    if isinstance(given, Mapping) and isinstance(inner := given.get("quantization"), Mapping):
        given = {"quant_method": "modelopt"} | dict(inner)  # modelopt's own form
    try:
        return msgspec.convert({} if given is None else given, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: config.json's quantization_config cannot be read: {error}") from None
