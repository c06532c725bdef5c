"""A checkpoint directory -> its experts' layout and sizes. Knows config.json and headers; reads no weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ndp_device.checkpoint.files import read_config
from ndp_device.checkpoint.headers import TensorInfo, has_weights, read_headers
from ndp_device.checkpoint.names import ExpertLayout, resolve
from ndp_device.checkpoint.quantized import unpacked
from ndp_device.checkpoint.spellings import keys_about_experts, text_config
from ndp_device.checkpoint.values import Packed
from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import ModelShape


@dataclass(frozen=True)
class Checkpoint:
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
    tensors, packed = unpacked(read_headers(model_dir), _with_outer_settings(config), name=name)
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


def _with_outer_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Multimodal models say how they are quantized beside their language model's part, or in it."""
    inner = text_config(config)
    return config if "quantization_config" in config else inner
