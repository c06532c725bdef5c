"""The activation of a layer's experts, from config.json. Knows its keys and which model types mean more by them.

Does not know tensors: in what order gate and up lie in them says nothing of the activation (names.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ndp_device.checkpoint.spellings import SPELLINGS, first_of
from ndp_device.common.activation import GPT_OSS, Activation, activation_named
from ndp_device.common.errors import ConfigError

_GPT_OSS = {"gpt_oss"}
"""Model types that say silu and compute gpt-oss's form: neither vLLM nor transformers reads their limit."""
_CLAMPED_AFTER = {"step3p5", "step3p7"}
"""Model types whose limit clamps what SiLU gives instead of what it takes."""


def activation_of(config: Mapping[str, Any], decoder_layer: int, name: str) -> Activation:
    """config: the language model's part. name: the checkpoint's, for messages."""
    known = SPELLINGS
    if config.get("model_type") in _GPT_OSS:
        return GPT_OSS  # neither vLLM nor transformers reads its numbers
    value = first_of(config, known.activation) or "silu"
    limit = _of_layer(config, known.activation_limit, decoder_layer, name) or 0.0
    if limit > 0 and config.get("model_type") in _CLAMPED_AFTER:
        value = "swiglustep"
    linear = _of_layer(config, known.activation_linear, decoder_layer, name)
    up_bias = _of_layer(config, known.activation_up_bias, decoder_layer, name)
    try:
        return activation_named(value, limit=limit if limit > 0 else None, linear=linear, up_bias=up_bias)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _of_layer(config: Mapping[str, Any], keys: Sequence[str], decoder_layer: int, name: str) -> float | None:
    """A number for all layers, or a list by decoder layer, which may end early."""
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        return None
    value = config[key]
    if isinstance(value, list):
        value = value[decoder_layer] if decoder_layer < len(value) else None
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        raise ConfigError(f"{name}: config.json must give {key} as a number, or one per decoder layer, got {value!r}")
    return None if value is None else float(value)
