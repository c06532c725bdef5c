"""Published models: their sizes against the parameter counts of their cards.

test_checkpoint_families.py holds the same reading of config.json against tensors that transformers wrote.
"""

from __future__ import annotations

import math

import pytest

from ndp_device.timing.public_models import PUBLIC_MODELS, SHAPES

BILLION = 1e9


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_a_public_shape_has_the_parameters_that_its_card_says(name: str) -> None:
    """In all within 1.5 % or its last digit: norms, biases, vision towers and extra prediction layers are left out.

    Active ones as a card rounds them, or cuts them off; some cards count the embedding table, some not even the output
    projection.
    """
    model, (total, active) = SHAPES[name], PUBLIC_MODELS[name].published
    assert model.num_parameters / BILLION == pytest.approx(total, rel=0.015, abs=0.05)
    digit = 1.0 if active == math.floor(active) else 0.1
    own = model.num_active_parameters / BILLION
    least, most = own - model.head_weights / BILLION, own + model.head_weights / BILLION
    assert least - digit <= active <= most + digit / 2


def test_every_family_that_the_plugin_serves_has_a_public_shape() -> None:
    named = {
        "mixtral-8x7b", "mixtral-8x22b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-next",
        "qwen3.5-35b-a3b", "olmoe", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-r1", "kimi-k2",
        "glm-4.5", "glm-4.5-air", "dots.llm1", "hunyuan-a13b", "granite-3.1-3b-a800m", "granite-4.0-h-small",
        "gpt-oss-20b", "gpt-oss-120b", "llama-4-scout", "llama-4-maverick", "phi-3.5-moe",
    }  # fmt: skip
    assert named <= set(SHAPES)
    assert all("/" in model.source for model in PUBLIC_MODELS.values())


def test_what_is_cached_of_a_token_is_what_the_families_are_known_for() -> None:
    """bf16. V3: 61 layers x (512 + 64) x 2 B. Qwen3-Next: 12 of 48 layers x 2 x 2 x 256 x 2 B, and a state beside."""
    assert SHAPES["deepseek-v3"].kv_bytes == 61 * 576 * 2
    assert SHAPES["qwen3-next"].kv_bytes == 12 * 1024 * 2
    state = 32 * 128 * 128 + (2 * 16 * 128 + 32 * 128) * 3
    assert SHAPES["qwen3-next"].state_bytes == 36 * state * 2
    assert SHAPES["mixtral-8x7b"].kv_bytes == 32 * 2 * 8 * 128 * 2
    assert SHAPES["mixtral-8x7b"].state_bytes == 0
    assert SHAPES["gpt-oss-120b"].windows == {(128, False)}
    assert SHAPES["llama-4-scout"].windows == {(8192, True)}


def test_dense_layers_and_shared_experts_lie_where_the_families_have_them() -> None:
    v3, maverick, next_ = SHAPES["deepseek-v3"], SHAPES["llama-4-maverick"], SHAPES["qwen3-next"]
    assert [layer.has_experts for layer in v3.decoder] == [False] * 3 + [True] * 58
    assert v3.decoder[0].dense_weights == 3 * 7168 * 18432
    assert v3.shared_weights == 3 * 7168 * 2048
    assert [layer.has_experts for layer in maverick.decoder] == [False, True] * 24
    assert next_.shared_weights == 3 * 2048 * 512 + 2048
    assert SHAPES["mixtral-8x7b"].shared_weights == SHAPES["gpt-oss-20b"].shared_weights == 0
