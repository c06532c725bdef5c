"""What each family's config.json says of its experts' activation, per layer, as the families publish it."""

from __future__ import annotations

from typing import Any

import pytest

from ndp_device.checkpoint.spellings import activation_of
from ndp_device.common.activation import GELU_TANH, GPT_OSS, SILU, Activation
from ndp_device.common.errors import ConfigError

AT_10, AT_7 = Activation(limit=10.0), Activation(limit=7.0)

FAMILIES: dict[str, tuple[dict[str, Any], tuple[Activation, Activation]]] = {
    "mixtral": ({"hidden_act": "silu"}, (SILU, SILU)),
    "nothing said": ({}, (SILU, SILU)),
    "gpt-oss": ({"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0}, (GPT_OSS, GPT_OSS)),
    "deepseek_v4": ({"hidden_act": "silu", "swiglu_limit": 10.0}, (AT_10, AT_10)),
    "glm5_next": ({"hidden_act": "silu", "swiglu_limit": 10}, (AT_10, AT_10)),
    "hy_v4 without a clamp": ({"hidden_act": "silu", "swiglu_limit": -1.0}, (SILU, SILU)),
    "gemma4": ({"hidden_activation": "gelu_pytorch_tanh"}, (GELU_TANH, GELU_TANH)),
    "minimax_m3": ({"hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}, (GPT_OSS, GPT_OSS)),
    "minimax_m3, transformers": ({"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}, (GPT_OSS,) * 2),
    "minimax_m3, other numbers": (
        {"hidden_act": "swigluoai", "swiglu_alpha": 1.5, "swiglu_beta": 0.5, "swiglu_limit": 9.0},
        (Activation(linear=1.5, up_bias=0.5, limit=9.0),) * 2,
    ),
    "exaone_moe": ({"hidden_act": "silu", "swiglu_limits": [0, 7.0]}, (SILU, AT_7)),
    "bailing v3": ({"hidden_act": "silu", "expert_swiglu_limit_list": [10.0]}, (AT_10, SILU)),
    "step3p5 without limits": ({"model_type": "step3p5", "swiglu_limits": [0.0, None]}, (SILU, SILU)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_of_every_layer_come_from_config_json(family: str) -> None:
    config, wanted = FAMILIES[family]
    assert tuple(activation_of(config, layer, "m") for layer in range(2)) == wanted


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"hidden_act": "situ"}, "m: its experts compute situ, whose gate goes through a tanh"),
        ({"hidden_act": "relu2"}, "which has no gate"),
        ({"hidden_act": "gelu"}, "error function"),
        ({"model_type": "step3p5", "swiglu_limits": [0.0, 7.0]}, "swiglustep, which clamps after its SiLU"),
        ({"swiglu_limit": "10"}, "swiglu_limit as a number, or one per decoder layer, got '10'"),
        ({"swiglu_limits": [0.0, True]}, "swiglu_limits as a number, or one per decoder layer, got True"),
        ({"swiglu_alpha": float("nan")}, "swiglu_alpha as a number"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        activation_of(config, 1, "m")
