"""Sizes of public Mixture-of-Experts models, as their config.json files give them, and the bytes of one expert."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from ndp_device.errors import ConfigError
from ndp_device.timing.units import ceil_div
from ndp_device.timing.work import ExpertWork, Work
from ndp_device.widths import FULL_PRECISION_BITS, TIMED_BITS


@dataclass(frozen=True)
class PublicShape:
    """L MoE layers of E routed experts, top_k chosen; H x I per projection; 16-bit weights."""

    name: str
    num_layers: int  # MoE layers only
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    source: str

    @property
    def weights_per_expert(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size


_SHAPES = (
    PublicShape("mixtral-8x7b", 32, 8, 2, 4096, 14336, 32, 8, 128, 32000, "mistralai/Mixtral-8x7B-v0.1"),
    PublicShape("mixtral-8x22b", 56, 8, 2, 6144, 16384, 48, 8, 128, 32768, "mistralai/Mixtral-8x22B-v0.1"),
    PublicShape("qwen3-30b-a3b", 48, 128, 8, 2048, 768, 32, 4, 128, 151936, "Qwen/Qwen3-30B-A3B"),
    PublicShape("olmoe", 16, 64, 8, 2048, 1024, 16, 16, 128, 50304, "allenai/OLMoE-1B-7B-0924"),
    # Multi-head latent attention keeps 512 + 64 values per token and layer: as one shared head of 288 x (key, value).
    PublicShape("deepseek-v3", 58, 256, 8, 7168, 2048, 128, 1, 288, 129280, "deepseek-ai/DeepSeek-V3"),
    PublicShape("qwen3-next", 48, 512, 10, 2048, 512, 16, 2, 256, 151936, "Qwen/Qwen3-Next-80B-A3B-Instruct"),
)
SHAPES: Mapping[str, PublicShape] = {shape.name: shape for shape in _SHAPES}


def public_shape(name: str) -> PublicShape:
    if name not in SHAPES:
        nearest = difflib.get_close_matches(name, SHAPES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown model {name!r}: did you mean {nearest!r}? Known: {', '.join(SHAPES)}")
    return SHAPES[name]


def expert_bytes(hidden: int, intermediate: int, bits: int, group_size: int, *, scales: bool = True) -> int:
    """Bytes of one replica: bit planes, and a float16 scale and offset per group of inputs unless scales is False."""
    if bits not in TIMED_BITS:
        raise ConfigError(f"bits must be one of {list(TIMED_BITS)}, got {bits}")
    if group_size < 1:
        raise ConfigError(f"group size must be at least 1, got {group_size}")
    codes = ceil_div(3 * hidden * intermediate * bits, 8)
    if bits == FULL_PRECISION_BITS or not scales:
        return codes
    groups = 2 * intermediate * ceil_div(hidden, group_size) + hidden * ceil_div(intermediate, group_size)
    return codes + 4 * groups


def single_expert_work(shape: PublicShape, bits: int, tokens: int, group_size: int, *, scales: bool = True) -> Work:
    """One expert serving `tokens` rows; 16-bit activations in, float32 partial sums out."""
    num_bytes = expert_bytes(shape.hidden_size, shape.intermediate_size, bits, group_size, scales=scales)
    return Work(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        group_size=group_size,
        tokens=tokens,
        bytes_in=2 * shape.hidden_size * tokens,
        bytes_out=4 * shape.hidden_size * tokens,
        experts=(ExpertWork(layer=0, expert=0, bits=bits, tokens=tokens, dram_bytes=num_bytes),),
    )
