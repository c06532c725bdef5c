"""Experts that are stored quantized, as the full-precision tensors they stand for: which tensors belong together.

`unpacked` shows each group of tensors that stores one (formats.py) as one tensor X or X.weight. It has the shape and
dtype of the dequantized values. So has each quantized tensor of a GGUF file. Then names.py finds experts as in any
other checkpoint. The dtype is bfloat16 for FP4 and FP8, that of the scales for whole numbers as codes, and float32 for
llama.cpp's types. Knows nothing of experts but the names of their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from numpy.typing import NDArray

from ndp_device.checkpoint import values
from ndp_device.checkpoint.formats import PARTS, Parts, describe, small_values
from ndp_device.checkpoint.gguf_files import QUANTIZED, logical_shape
from ndp_device.checkpoint.headers import TensorInfo
from ndp_device.checkpoint.stated import Settings
from ndp_device.checkpoint.tensor_files import read_tensor
from ndp_device.checkpoint.values import Packed
from ndp_device.common.errors import ConfigError

_MAX_SMALL = 4096
_PART = re.compile(
    r"(.*\bexperts\b.*?)(?:_(blocks|scales)|\.("
    + "|".join(re.escape(part) for part in sorted(PARTS, key=len, reverse=True))
    + "))"
)
_PLAIN = ("F64", "F32", "F16", "BF16")


def read_small(info: TensorInfo) -> NDArray[Any]:
    """A tensor of at most 4 KiB, from its file; of a larger one the first bytes, which its reader refuses."""
    return small_values(read_tensor(info.file, info.first, min(info.last, info.first + _MAX_SMALL)), info)


def unpacked(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    *,
    name: str,
    small: Callable[[TensorInfo], NDArray[Any]] = read_small,
) -> tuple[dict[str, TensorInfo], dict[str, Packed]]:
    """All tensors, those of quantized experts replaced by what they stand for; and how each of these is read."""
    groups: dict[str, dict[str, str]] = {}
    for tensor, info in tensors.items():
        match = _PART.fullmatch(tensor)
        if match is None or (match[3] == "weight" and info.dtype in _PLAIN):
            continue
        separator = "_" if match[2] else "."
        groups.setdefault(match[1] + separator, {})[match[2] or match[3]] = tensor
    hidden = {tensor for parts in groups.values() for tensor in parts.values()}
    shown = {tensor: info for tensor, info in tensors.items() if tensor not in hidden}
    packed = _of_gguf(tensors, name)
    settings = _settings(config.get("quantization_config"), name) if groups else Settings()
    for prefix, parts in groups.items():
        shown_name = prefix[:-1] if prefix.endswith("_") else f"{prefix}weight"
        packed[shown_name] = describe(Parts(prefix, parts, tensors, name, small), settings)
    for shown_name, one in packed.items():
        shown[shown_name] = TensorInfo(one.dtype, one.shape, tensors[one.parts["codes"]].file)
    return shown, packed


def _of_gguf(tensors: Mapping[str, TensorInfo], name: str) -> dict[str, Packed]:
    """The quantized tensors of all experts of a GGUF file: one each, whose values `gguf` makes."""
    packed = {}
    for tensor, info in tensors.items():
        if not info.dtype.startswith(QUANTIZED) or len(info.shape) != 3:
            continue
        if (scale := f"{tensor.removesuffix('.weight')}.scale") in tensors:
            raise ConfigError(
                f"{name}: {tensor} has a scale of its own ({scale}), which the package gguf leaves out: give the model "
                "in another of llama.cpp's types"
            )
        shape = logical_shape(info.dtype, info.shape)
        packed[tensor] = Packed(values.ggml, shape, "F32", {"codes": tensor}, info.dtype.removeprefix(QUANTIZED))
    return packed


def _settings(given: object, name: str) -> Settings:
    try:
        return msgspec.convert({} if given is None else given, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: config.json's quantization_config cannot be read: {error}") from None
