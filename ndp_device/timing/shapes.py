"""Sizes of public Mixture-of-Experts models, as their config.json files give them, and the bytes of one expert."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ndp_device.errors import ConfigError
from ndp_device.model_shape import ModelShape, WholeModel
from ndp_device.timing.units import ceil_div
from ndp_device.timing.work import ExpertWork, Work
from ndp_device.widths import FULL_PRECISION_BITS, TIMED_BITS

_SHAPES = (
    # name, L, E, k, H, I; source: config.json of the repository above each
    # mistralai/Mixtral-8x7B-v0.1
    WholeModel("mixtral-8x7b", 32, 8, 2, 4096, 14336, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=32000),
    # mistralai/Mixtral-8x22B-v0.1
    WholeModel("mixtral-8x22b", 56, 8, 2, 6144, 16384, num_heads=48, num_kv_heads=8, head_dim=128, vocab_size=32768),
    # Qwen/Qwen3-30B-A3B
    WholeModel("qwen3-30b-a3b", 48, 128, 8, 2048, 768, num_heads=32, num_kv_heads=4, head_dim=128, vocab_size=151936),
    # allenai/OLMoE-1B-7B-0924
    WholeModel("olmoe", 16, 64, 8, 2048, 1024, num_heads=16, num_kv_heads=16, head_dim=128, vocab_size=50304),
    # deepseek-ai/DeepSeek-V3: L counts its MoE layers. Multi-head latent attention keeps 512 + 64 values per
    # token and layer: as one shared head of 288 x (key, value).
    WholeModel("deepseek-v3", 58, 256, 8, 7168, 2048, num_heads=128, num_kv_heads=1, head_dim=288, vocab_size=129280),
    # Qwen/Qwen3-Next-80B-A3B-Instruct
    WholeModel("qwen3-next", 48, 512, 10, 2048, 512, num_heads=16, num_kv_heads=2, head_dim=256, vocab_size=151936),
)
SHAPES: Mapping[str, WholeModel] = {shape.name: shape for shape in _SHAPES}


def public_shape(name: str) -> WholeModel:
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


def single_expert_work(shape: ModelShape, bits: int, tokens: int, group_size: int, *, scales: bool = True) -> Work:
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
