"""Published Mixture-of-Experts models: the sizes in their config.json files, by our name for them.

`source` is the repository on the Hugging Face hub whose config.json has these keys. `published` holds its parameters in
billions by its model card or paper, total and active. A test compares the sizes with them. Data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ndp_device.common.errors import ConfigError, nearest
from ndp_device.common.model_shape import WholeModel
from ndp_device.model_config import public_model


@dataclass(frozen=True)
class PublicModel:
    source: str
    published: tuple[float, float]  # billions: in all, active for one token
    config: Mapping[str, Any]


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Keys that every config.json has."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **more,
    }


def _mla(query_rank: int | None) -> dict[str, Any]:
    """Multi-head latent attention: one size fits every published model but for the queries."""
    return {
        "q_lora_rank": query_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }


def _experts(count: int, top_k: int, inner: int, dense: int, first_dense: int, shared: int) -> dict[str, Any]:
    """As the DeepSeek family spells its experts."""
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": inner,
        "intermediate_size": dense,
        "first_k_dense_replace": first_dense,
        "n_shared_experts": shared,
    }


def _few_experts(count: int, top_k: int, inner: int) -> dict[str, Any]:
    """As Mixtral spells its experts."""
    return {"num_local_experts": count, "num_experts_per_tok": top_k, "intermediate_size": inner}


def _qwen(count: int, top_k: int, inner: int, shared: int = 0) -> dict[str, Any]:
    sizes = {"num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": inner}
    return sizes | ({"shared_expert_intermediate_size": shared} if shared else {})


def _delta(value_heads: int) -> dict[str, Any]:
    """Three of four layers of Qwen3-Next and Qwen3.5."""
    return {
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }


def _mamba2(heads: int, shared: int) -> dict[str, Any]:
    """Granite 4.0: attention in layers 5, 15, 25 and 35, Mamba-2 in the others."""
    return {
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        "mamba_n_heads": heads,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "shared_intermediate_size": shared,
        "tie_word_embeddings": True,
    }


def _alternating(layers: int) -> dict[str, Any]:
    """gpt-oss: every other layer looks back 128 tokens."""
    kinds = ["sliding_attention", "full_attention"]
    return {"head_dim": 64, "sliding_window": 128, "layer_types": [kinds[layer % 2] for layer in range(layers)]}


def _llama4(experts: int, interleave: int) -> dict[str, Any]:
    return {
        "model_type": "llama4_text",
        "head_dim": 128,
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": interleave,
        "attention_chunk_size": 8192,
    }


PUBLIC_MODELS: Mapping[str, PublicModel] = {
    "mixtral-8x7b": PublicModel(
        "mistralai/Mixtral-8x7B-v0.1", (46.7, 12.9), _sizes(32, 4096, 32, 8, 32000, **_few_experts(8, 2, 14336))
    ),
    "mixtral-8x22b": PublicModel(
        "mistralai/Mixtral-8x22B-v0.1", (141, 39), _sizes(56, 6144, 48, 8, 32768, **_few_experts(8, 2, 16384))
    ),
    "qwen1.5-moe-a2.7b": PublicModel(
        "Qwen/Qwen1.5-MoE-A2.7B", (14.3, 2.7), _sizes(24, 2048, 16, 16, 151936, **_qwen(60, 4, 1408, 5632))
    ),
    "qwen2-57b-a14b": PublicModel(
        "Qwen/Qwen2-57B-A14B", (57, 14), _sizes(28, 3584, 28, 4, 151936, **_qwen(64, 8, 2560, 20480))
    ),
    "qwen3-30b-a3b": PublicModel(
        "Qwen/Qwen3-30B-A3B", (30.5, 3.3), _sizes(48, 2048, 32, 4, 151936, head_dim=128, **_qwen(128, 8, 768))
    ),
    "qwen3-235b-a22b": PublicModel(
        "Qwen/Qwen3-235B-A22B", (235, 22), _sizes(94, 4096, 64, 4, 151936, head_dim=128, **_qwen(128, 8, 1536))
    ),
    "qwen3-next": PublicModel(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        (80, 3),
        _sizes(48, 2048, 16, 2, 151936, **_delta(32), **_qwen(512, 10, 512, 512)),
    ),
    "qwen3.5-35b-a3b": PublicModel(
        "Qwen/Qwen3.5-35B-A3B", (35, 3), _sizes(40, 2048, 16, 2, 248320, **_delta(32), **_qwen(256, 8, 512, 512))
    ),
    "olmoe": PublicModel(
        "allenai/OLMoE-1B-7B-0924",
        (6.9, 1.3),
        _sizes(16, 2048, 16, 16, 50304, num_experts=64, num_experts_per_tok=8, intermediate_size=1024),
    ),
    "deepseek-v2-lite": PublicModel(
        "deepseek-ai/DeepSeek-V2-Lite",
        (15.7, 2.4),
        _sizes(27, 2048, 16, 16, 102400, **_mla(None), **_experts(64, 6, 1408, 10944, 1, 2)),
    ),
    "deepseek-v2": PublicModel(
        "deepseek-ai/DeepSeek-V2",
        (236, 21),
        _sizes(60, 5120, 128, 128, 102400, **_mla(1536), **_experts(160, 6, 1536, 12288, 1, 2)),
    ),
    "deepseek-v3": PublicModel(
        "deepseek-ai/DeepSeek-V3",
        (671, 37),
        _sizes(61, 7168, 128, 128, 129280, **_mla(1536), **_experts(256, 8, 2048, 18432, 3, 1)),
    ),
    "deepseek-r1": PublicModel(
        "deepseek-ai/DeepSeek-R1",
        (671, 37),
        _sizes(61, 7168, 128, 128, 129280, **_mla(1536), **_experts(256, 8, 2048, 18432, 3, 1)),
    ),
    "kimi-k2": PublicModel(
        "moonshotai/Kimi-K2-Instruct",
        (1040, 32.6),
        _sizes(61, 7168, 64, 64, 163840, **_mla(1536), **_experts(384, 8, 2048, 18432, 1, 1)),
    ),
    "glm-4.5": PublicModel(
        "zai-org/GLM-4.5",
        (355, 32),
        _sizes(92, 5120, 96, 8, 151552, head_dim=128, **_experts(160, 8, 1536, 12288, 3, 1)),
    ),
    "glm-4.5-air": PublicModel(
        "zai-org/GLM-4.5-Air",
        (106, 12),
        _sizes(46, 4096, 96, 8, 151552, head_dim=128, **_experts(128, 8, 1408, 10944, 1, 1)),
    ),
    "dots.llm1": PublicModel(
        "rednote-hilab/dots.llm1.inst",
        (142, 14),
        _sizes(62, 4096, 32, 32, 152064, **_experts(128, 6, 1408, 10944, 1, 2)),
    ),
    "hunyuan-a13b": PublicModel(
        "tencent/Hunyuan-A13B-Instruct",
        (80, 13),
        _sizes(
            32,
            4096,
            32,
            8,
            128167,
            head_dim=128,
            num_experts=64,
            moe_topk=8,
            moe_intermediate_size=3072,
            num_shared_expert=1,
            tie_word_embeddings=True,
        ),
    ),
    "granite-3.1-1b-a400m": PublicModel(
        "ibm-granite/granite-3.1-1b-a400m-instruct",
        (1.3, 0.4),
        _sizes(24, 1024, 16, 8, 49155, tie_word_embeddings=True, **_few_experts(32, 8, 512)),
    ),
    "granite-3.1-3b-a800m": PublicModel(
        "ibm-granite/granite-3.1-3b-a800m-instruct",
        (3.3, 0.8),
        _sizes(32, 1536, 24, 8, 49155, tie_word_embeddings=True, **_few_experts(40, 8, 512)),
    ),
    "granite-4.0-h-tiny": PublicModel(
        "ibm-granite/granite-4.0-h-tiny",
        (7, 1),
        _sizes(40, 1536, 12, 4, 100352, **_mamba2(48, 1024), **_few_experts(64, 6, 512)),
    ),
    "granite-4.0-h-small": PublicModel(
        "ibm-granite/granite-4.0-h-small",
        (32, 9),
        _sizes(40, 4096, 32, 8, 100352, **_mamba2(128, 1536), **_few_experts(72, 10, 768)),
    ),
    "gpt-oss-20b": PublicModel(
        "openai/gpt-oss-20b",
        (20.9, 3.6),
        _sizes(24, 2880, 64, 8, 201088, **_alternating(24), **_few_experts(32, 4, 2880)),
    ),
    "gpt-oss-120b": PublicModel(
        "openai/gpt-oss-120b",
        (116.8, 5.1),
        _sizes(36, 2880, 64, 8, 201088, **_alternating(36), **_few_experts(128, 4, 2880)),
    ),
    "llama-4-scout": PublicModel(
        "meta-llama/Llama-4-Scout-17B-16E", (109, 17), _sizes(48, 5120, 40, 8, 202048, **_llama4(16, 1))
    ),
    "llama-4-maverick": PublicModel(
        "meta-llama/Llama-4-Maverick-17B-128E", (400, 17), _sizes(48, 5120, 40, 8, 202048, **_llama4(128, 2))
    ),
    "phi-3.5-moe": PublicModel(
        "microsoft/Phi-3.5-MoE-instruct", (41.9, 6.6), _sizes(32, 4096, 32, 8, 32064, **_few_experts(16, 2, 6400))
    ),
}

SHAPES: Mapping[str, WholeModel] = {name: public_model(name, model.config) for name, model in PUBLIC_MODELS.items()}


def public_shape(name: str) -> WholeModel:
    if name not in SHAPES:
        raise ConfigError(
            "a model is a checkpoint's directory, a config.json, an id of the hub such as ORG/NAME, or one of "
            f"{', '.join(SHAPES)}, got {name!r}{nearest(name.lower(), SHAPES)}"
        )
    return SHAPES[name]
