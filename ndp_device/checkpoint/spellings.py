"""How families spell what we look for: keys of config.json, words of tensor names, activations.

One table. A family with odd names adds words to it. The first key that is present counts. In what order gate and up lie
in tensors says nothing of the activation (names.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ndp_device.common.activation import GPT_OSS, Activation, activation_named
from ndp_device.common.errors import ConfigError

# -- keys of config.json -----------------------------------------------------------------------------------------------

NESTED = ("thinker_config", "text_config", "llm_config", "language_config")  # Qwen-Omni, most, InternVL, DeepSeek-VL
"""Objects that hold the language model's part, within each other too."""
NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "experts_per_token"),
    "top_k_experts",  # Gemma-4
)
"""Experts per token."""
OTHER_TOP_K = ("top_k",)
"""Further words for it that also have another meaning; read if no word of TOP_K is there."""
ACTIVATION = ("hidden_act", "hidden_activation", "mlp_hidden_act")
ACTIVATION_LIMIT = ("swiglu_limit", "swiglu_limits", "expert_swiglu_limit_list")  # most, EXAONE, Bailing v3
"""Limit of gate and up: one number, or a list by decoder layer; 0 or null: no limit."""
ACTIVATION_LINEAR = ("swiglu_alpha",)
"""Factor of the gate inside the sigmoid."""
ACTIVATION_UP_BIAS = ("swiglu_beta",)
"""Number that is added to up."""
SHARED_EXPERTS = ("n_shared_experts", "num_shared_expert", "moe_num_shared_experts", "num_shared_experts")
"""How many shared experts a layer has, each as wide as the others."""
SHARED_WIDTH = ("shared_intermediate_size", "share_expert_dim")  # Granite, Step-3.5
"""How wide a layer's shared expert is."""

# -- words of tensor names ---------------------------------------------------------------------------------------------

LAYERS = ("layers", "blocks", "h", "blk")  # llama.cpp says blk
"""The word before a layer's number."""
EXPERTS = ("experts",)
"""The word before an expert's number, or before the role in a tensor of all experts."""
_ROLES = {
    "gate": ("gate_proj", "w1", "fc_gate", "ffn_gate_exps"),
    "up": ("up_proj", "w3", "fc_up", "ffn_up_exps"),
    "down": ("down_proj", "w2", "fc_down", "output_linear", "ffn_down_exps", "fc2"),
    "gate_up": ("gate_up_proj", "input_linear", "ffn_gate_up_exps", "fc1"),  # both in one tensor; Aria says fc1
}
ROLES = {word: role for role, words in _ROLES.items() for word in words}
ROUTER = ("gate", "router", "gate.wg", "router.layer", "ffn_gate_inp")
NORMS = (
    "pre_feedforward_layernorm_2",  # Gemma-4, whose dense layer beside the experts reads the one without a number
    *("pre_feedforward_layernorm", "pre_ff_layernorm", "pre_mlp_layernorm", "ffn_norm"),
    *("post_attention_layernorm", "norm"),
    "input_layernorm",  # Cohere-2, whose attention and experts read the same
)
"""The norm whose output the experts read; the first that a layer has."""
BESIDE = (
    *("mtp", "nextn", "visual", "vision_model", "vision_tower", "audio_tower"),
    *("talker", "code2wav"),  # Qwen-Omni's voice
)
"""Words that mark tensors beside the language model: extra prediction layers and other modalities."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of config.json: multimodal models wrap it."""
    for key in NESTED:
        if isinstance(inner := config.get(key), Mapping):
            return text_config(inner)
    return config


def first_of(config: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """The value of the first of these keys that is there and not null."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def keys_about(config: Mapping[str, Any], *words: str) -> str:
    """The keys that have one of these words in them, for messages: what a config.json has instead."""
    found = [key for key, value in config.items() if value is not None and any(word in key.lower() for word in words)]
    return f"it has {', '.join(found[:8])}" if found else "it has no key like that"


def keys_about_experts(config: Mapping[str, Any]) -> list[str]:
    """The keys that speak of experts, in whatever words, and say that there are some."""
    return [key for key, value in config.items() if value and re.search(r"expert|moe", key, re.IGNORECASE)]


_GPT_OSS = {"gpt_oss"}
"""Model types that say silu and compute gpt-oss's form: neither vLLM nor transformers reads their limit."""
_CLAMPED_AFTER = {"step3p5", "step3p7"}
"""Model types whose limit clamps what SiLU gives instead of what it takes."""


def activation_of(config: Mapping[str, Any], decoder_layer: int, name: str) -> Activation:
    """config: the language model's part. name: the checkpoint's, for messages."""
    if config.get("model_type") in _GPT_OSS:
        return GPT_OSS  # neither vLLM nor transformers reads its numbers
    value = first_of(config, ACTIVATION) or "silu"
    limit = _of_layer(config, ACTIVATION_LIMIT, decoder_layer, name) or 0.0
    if limit > 0 and config.get("model_type") in _CLAMPED_AFTER:
        value = "swiglustep"
    linear = _of_layer(config, ACTIVATION_LINEAR, decoder_layer, name)
    up_bias = _of_layer(config, ACTIVATION_UP_BIAS, decoder_layer, name)
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
