"""Write a tiny checkpoint with random weights for every family of Mixture-of-Experts models that transformers builds.

    python benchmarks/make_family_models.py OUT                  # all of them, 2 to 4 M parameters each
    python benchmarks/make_family_models.py OUT qwen3_moe gpt_oss

They show that a family is read, routed and computed right, never how good its text is: the tests run each one on stock
vLLM and on the plugin, and compare tokens. The same seed gives the same bytes. Nothing is downloaded: the tokenizer is
the bundled model's (4096 words). Prints one JSON object: family -> directory.

Weights are drawn anew after transformers has built the model, wide enough that the logits of two words rarely tie; with
the draws of the classes themselves nearly all of them do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "models" / "tiny-mixtral"
MORE = Path(__file__).with_name("families.toml")

COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 4096,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
)

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_QWEN = {"head_dim": 32, "intermediate_size": 192, "moe_intermediate_size": 64, "num_experts": 16}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # vLLM's CPU kernel for latent attention is compiled for 512 + 64 only
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 64,
    "moe_intermediate_size": 64,
    "intermediate_size": 192,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
_GRANITE = {"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 4}


@dataclass(frozen=True)
class Family:
    """How one family's tiny model is built: transformers' configuration class and what differs from COMMON."""

    config_class: str
    sizes: Mapping[str, Any]
    added: Mapping[str, Any] = field(default_factory=dict)
    """Keys of published config.json files that transformers' class drops and vLLM reads."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of a multimodal model's vision tower; `sizes` are its language model's."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """A multimodal model's tokens that stand for images and videos."""
    norm_mean: float = 1.0
    """What a norm's weight is drawn around: 0 where the model adds the 1 itself."""
    ones: Sequence[str] = ()
    """Norms of published checkpoints that transformers' class leaves out and vLLM reads: [H], all 1."""
    dtype: str = "float32"
    on_cpu: bool = True
    """Whether stock vLLM runs this checkpoint on a CPU: others are compared with transformers only."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: Family(**fields) for name, fields in tomllib.loads(MORE.read_text()).items()}
    | {
        "mixtral": Family("MixtralConfig", {"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2}),
        "qwen2_moe": Family(
            "Qwen2MoeConfig",
            _QWEN | {"num_experts_per_tok": 4, "shared_expert_intermediate_size": 96, "norm_topk_prob": False},
        ),
        "qwen3_moe": Family(
            "Qwen3MoeConfig", _QWEN | {"num_experts_per_tok": 4, "norm_topk_prob": True, "mlp_only_layers": [1]}
        ),
        "qwen3_moe_top22": Family(
            "Qwen3MoeConfig", _QWEN | {"num_experts": 64, "num_experts_per_tok": 22, "norm_topk_prob": True}
        ),
        "qwen3_moe_512": Family(
            "Qwen3MoeConfig",
            _QWEN
            | {"num_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 32, "num_hidden_layers": 2},
        ),
        "qwen3_next": Family("Qwen3NextConfig", _LINEAR, norm_mean=0.0, dtype="bfloat16"),
        "qwen3_5_moe": Family("Qwen3_5MoeTextConfig", _LINEAR, norm_mean=0.0, dtype="bfloat16"),
        "olmoe": Family("OlmoeConfig", {"intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4}),
        "flex_olmo": Family("FlexOlmoConfig", {"intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}),
        "deepseek_v2": Family(
            "DeepseekV2Config",
            _MLA
            | {
                "q_lora_rank": None,
                "n_shared_experts": 2,
                "n_group": 1,
                "topk_group": 1,
                "routed_scaling_factor": 1.0,
                "rope_parameters": _YARN,
            },
            {"topk_method": "greedy", "scoring_func": "softmax", "moe_layer_freq": 1, "norm_topk_prob": False},
        ),
        "deepseek_v3": Family(
            "DeepseekV3Config",
            _MLA
            | {
                "q_lora_rank": 64,
                "n_shared_experts": 1,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
                "norm_topk_prob": True,
                "rope_parameters": _YARN,
            },
            {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
        ),
        "glm4_moe": Family(
            "Glm4MoeConfig",
            {
                "head_dim": 32,
                "intermediate_size": 192,
                "moe_intermediate_size": 64,
                "n_routed_experts": 16,
                "num_experts_per_tok": 4,
                "n_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 2.5,
                "norm_topk_prob": True,
                "use_qk_norm": True,
                "partial_rotary_factor": 0.5,
            },
        ),
        "dots1": Family(
            "Dots1Config",
            {
                "head_dim": 32,
                "intermediate_size": 192,
                "moe_intermediate_size": 64,
                "n_routed_experts": 16,
                "num_experts_per_tok": 4,
                "n_shared_experts": 2,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 2.5,
                "norm_topk_prob": True,
            },
        ),
        "hunyuan_moe": Family(
            "HunYuanMoEV1Config", {"head_dim": 32, "intermediate_size": 64, "num_experts": 8, "moe_topk": 2}
        ),
        "granite_moe": Family("GraniteMoeConfig", _GRANITE),
        "granite_moe_shared": Family("GraniteMoeSharedConfig", _GRANITE | {"shared_intermediate_size": 96}),
        "granite_moe_hybrid": Family(
            "GraniteMoeHybridConfig",
            _GRANITE
            | {
                "shared_intermediate_size": 96,
                "layer_types": ["mamba", "mamba", "attention", "mamba"],
                "mamba_n_heads": 8,
                "mamba_d_head": 32,
                "mamba_d_state": 32,
                "mamba_expand": 2,
            },
        ),
        "gpt_oss": Family(
            "GptOssConfig",
            {
                "head_dim": 32,
                "intermediate_size": 96,
                "num_local_experts": 8,
                "num_experts_per_tok": 4,
                "sliding_window": 128,
            },
        ),
        "gemma4": Family(
            "Gemma4TextConfig",
            {
                "head_dim": 32,
                "global_head_dim": 64,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "intermediate_size": 192,
                "enable_moe_block": True,
                "moe_intermediate_size": 64,
                "num_experts": 16,
                "top_k_experts": 4,
                "hidden_size_per_layer_input": 0,
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
        "exaone_moe": Family(
            "ExaoneMoeConfig",
            {
                "head_dim": 32,
                "intermediate_size": 192,
                "moe_intermediate_size": 64,
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "num_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 2.5,
                "norm_topk_prob": True,
                "sliding_window": 128,
                "sliding_window_pattern": 2,
            },
            {"swiglu_limits": [0.0, 7.0, 0.0, 10.0]},
        ),
        "minimax_m3": Family(
            "MiniMaxM3VLTextConfig",
            {
                "head_dim": 32,
                "intermediate_size": 64,
                "dense_intermediate_size": 192,
                "shared_intermediate_size": 64,
                "num_local_experts": 16,
                "num_experts_per_tok": 4,
                "rotary_dim": 16,
                "index_n_heads": 2,
                "index_head_dim": 32,
                "index_block_size": 16,
            },
        ),
        "deepseek_v4": Family(
            "DeepseekV4Config",
            {
                "num_key_value_heads": 1,
                "head_dim": 64,
                "partial_rotary_factor": 0.5,
                "q_lora_rank": 64,
                "moe_intermediate_size": 64,
                "n_routed_experts": 16,
                "num_experts_per_tok": 4,
                "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
                "o_groups": 2,
                "o_lora_rank": 32,
                "index_n_heads": 2,
                "index_head_dim": 32,
                "swiglu_limit": 0.5,  # published 10.0, which these weights never reach
            },
            on_cpu=False,
        ),
        "hy_v4": Family(
            "HYV4Config",
            {
                "num_key_value_heads": 4,
                "head_dim": 32,
                "kv_lora_rank": 64,
                "q_lora_rank": 64,
                "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 32,
                "v_head_dim": 32,
                "intermediate_size": 192,
                "moe_intermediate_size": 64,
                "n_routed_experts": 16,
                "num_experts_per_tok": 4,
                "index_n_heads": 2,
                "index_head_dim": 64,
                "swiglu_limit": 0.5,
            },
            on_cpu=False,
        ),
        "llama4": Family(
            "Llama4TextConfig",
            {
                "head_dim": 32,
                "intermediate_size": 96,
                "intermediate_size_mlp": 192,
                "num_local_experts": 8,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 512,
            },
        ),
        "phimoe": Family(
            "PhimoeConfig",
            {
                "intermediate_size": 96,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "attention_bias": True,
                "lm_head_bias": True,
            },
            {"architectures": ["PhiMoEForCausalLM"]},
        ),
        "ernie4_5_moe": Family(
            "Ernie4_5_MoeConfig",
            {
                "intermediate_size": 192,
                "moe_intermediate_size": 64,
                "moe_num_experts": 16,
                "moe_k": 4,
                "moe_num_shared_experts": 2,
                "moe_layer_start_index": 1,
            },
        ),
        "minimax_m2": Family(
            "MiniMaxM2Config",
            {"head_dim": 32, "intermediate_size": 64, "num_local_experts": 16, "num_experts_per_tok": 4},
            {
                "scoring_func": "sigmoid",
                "use_routing_bias": True,
                "rotary_dim": 32,
                "use_qk_norm": True,
                "qk_norm_type": "per_layer",
                "attn_type_list": [1, 1, 1, 1],
                "num_mtp_modules": 0,
            },
        ),
        "glm4_moe_lite": Family(
            "Glm4MoeLiteConfig",
            _MLA
            | {
                "q_lora_rank": 64,
                "n_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
                "routed_scaling_factor": 1.8,
                "norm_topk_prob": True,
            },
            {"first_k_dense_replace": 1},
        ),
        "jamba": Family(
            "JambaConfig",
            {
                "intermediate_size": 96,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "attn_layer_period": 4,
                "attn_layer_offset": 1,
                "expert_layer_period": 2,
                "expert_layer_offset": 1,
                "mamba_d_state": 16,
                "use_mamba_kernels": False,
            },
        ),
        "nemotron_h": Family(
            "NemotronHConfig",
            {
                "layers_block_type": ["mamba", "moe", "attention", "moe"],
                "head_dim": 32,
                "intermediate_size": 192,
                "moe_intermediate_size": 64,
                "moe_shared_expert_intermediate_size": 64,
                "n_routed_experts": 16,
                "n_shared_experts": 1,
                "num_experts_per_tok": 4,
                "n_group": 1,
                "topk_group": 1,
                "mamba_num_heads": 8,
                "mamba_head_dim": 32,
                "ssm_state_size": 32,
                "n_groups": 1,
            },
        ),
    }
)

_LEFT_ALONE = ("inv_freq", "A_log", "dt_bias")


def make(name: str, out: Path, *, seed: int = 0) -> Path:
    """Write the family's model to out/name, or leave it where a whole one is; returns the directory."""
    import torch
    import transformers

    directory = out / name
    if (directory / "tokenizer_config.json").is_file():
        return directory
    transformers.utils.logging.disable_progress_bar()
    family = FAMILIES[name]
    sizes: dict[str, Any] = {**COMMON, **family.sizes}
    if family.vision:
        sizes = {"text_config": sizes, "vision_config": dict(family.vision), "tie_word_embeddings": False}
    config = getattr(transformers, family.config_class)(**sizes, **family.tokens)
    auto = transformers.AutoModelForImageTextToText if family.vision else transformers.AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32).eval()
        _redraw(model, family, torch.Generator().manual_seed(seed))
    model.to(getattr(torch, family.dtype)).save_pretrained(directory)
    _add_keys(directory / "config.json", family.added)
    _add_ones(directory / "model.safetensors", family.ones, COMMON["hidden_size"])
    for file in ("tokenizer.json", "tokenizer_config.json"):  # last: what says that the directory is whole
        shutil.copyfile(TOKENIZER / file, directory / file)
    return directory


def _redraw(model: Any, family: Family, generator: Any) -> None:
    import torch

    def normal(values: Any, scale: float, mean: float = 0.0) -> None:
        values.copy_(mean + scale * torch.randn(values.shape, generator=generator))

    values = [*model.named_parameters(), *(item for item in model.named_buffers() if "correction_bias" in item[0])]
    with torch.no_grad():
        for name, value in values:
            last = name.rsplit(".", 1)[-1]
            if last in _LEFT_ALONE or last == "D":
                continue
            if "correction_bias" in name:
                normal(value, 0.04)
            elif "norm" in name and value.ndim == 1 and last == "weight":
                is_plain = "linear_attn.norm" in name  # the gated norm multiplies by its weight in every family
                normal(value, 0.01, 1.0 if is_plain else family.norm_mean)
            elif last.endswith("scale"):
                normal(value, 0.05, 1.0)
            elif "embed_tokens" in name:
                normal(value, 0.25)
            elif value.ndim < 2 or last.endswith("bias"):
                normal(value, 0.01)
            else:
                normal(value, value.shape[-1 if value.ndim == 2 else -2] ** -0.5)


def _add_keys(path: Path, added: Mapping[str, Any]) -> None:
    config = json.loads(path.read_text())
    config.get("text_config", config).update(added)
    path.write_text(json.dumps(config, indent=1) + "\n")


def _add_ones(path: Path, names: Sequence[str], size: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    if names:
        save_file(load_file(path) | {name: torch.ones(size) for name in names}, path, metadata={"format": "pt"})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    made = {name: str(make(name, options.out, seed=options.seed)) for name in options.families or FAMILIES}
    print(json.dumps(made))


if __name__ == "__main__":
    main()
