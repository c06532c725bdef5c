"""Published Mixture-of-Experts models by name (public_models.py has their sizes), and the bytes of one expert."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ndp_device.common.errors import ConfigError
from ndp_device.common.model_shape import ModelShape, WholeModel
from ndp_device.common.widths import FULL_PRECISION_BITS, PLAN_BITS
from ndp_device.model_config import public_model
from ndp_device.timing.public_models import PUBLIC_MODELS
from ndp_device.timing.units import ceil_div
from ndp_device.timing.work import ExpertWork, Work

SHAPES: Mapping[str, WholeModel] = {name: public_model(name, model.config) for name, model in PUBLIC_MODELS.items()}


def public_shape(name: str) -> WholeModel:
    if name not in SHAPES:
        nearest = difflib.get_close_matches(name, SHAPES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown model {name!r}: did you mean {nearest!r}? Known: {', '.join(SHAPES)}")
    return SHAPES[name]


def expert_bytes(hidden: int, intermediate: int, bits: int, group_size: int, *, scales: bool = True) -> int:
    """Bytes of one replica: bit planes, and a float16 scale and offset per group of inputs unless scales is False."""
    if bits not in PLAN_BITS:
        raise ConfigError(f"bits must be one of {sorted(PLAN_BITS)}, got {bits}")
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
