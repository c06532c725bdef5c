"""Writes gpt-oss-20b's layers at full width with random weights, in the official names and MXFP4, tensor by tensor.

python tests/checkpoints/make_gptoss.py DIRECTORY [LAYERS] [VOCABULARY]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

WIDTH, EXPERTS, TOP_K, HEADS, KV_HEADS, HEAD = 2880, 32, 4, 64, 8, 64
PART = 1 << 24
"""Values that are drawn at once."""


def config(layers: int, vocabulary: int) -> dict[str, object]:
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    scaling = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "attention_bias": True,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "experts_per_token": TOP_K,
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)],
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling": scaling | {"original_max_position_embeddings": 4096},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        "pad_token_id": 1,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": plain},
    }


def tensors(layers: int, vocabulary: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape)."""
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", "BF16", (vocabulary, WIDTH)
    yield "model.norm.weight", "BF16", (WIDTH,)
    outputs = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD, "o": WIDTH}
    for layer in range(layers):
        of = f"model.layers.{layer}."
        yield of + "input_layernorm.weight", "BF16", (WIDTH,)
        yield of + "post_attention_layernorm.weight", "BF16", (WIDTH,)
        yield of + "self_attn.sinks", "BF16", (HEADS,)
        for name, rows in outputs.items():
            yield of + f"self_attn.{name}_proj.weight", "BF16", (rows, HEADS * HEAD if name == "o" else WIDTH)
            yield of + f"self_attn.{name}_proj.bias", "BF16", (rows,)
        yield of + "mlp.router.weight", "BF16", (EXPERTS, WIDTH)
        yield of + "mlp.router.bias", "BF16", (EXPERTS,)
        for name, rows in {"gate_up_proj": 2 * WIDTH, "down_proj": WIDTH}.items():
            yield of + f"mlp.experts.{name}_bias", "BF16", (EXPERTS, rows)
            yield of + f"mlp.experts.{name}_blocks", "U8", (EXPERTS, rows, WIDTH // 32, 16)
            yield of + f"mlp.experts.{name}_scales", "U8", (EXPERTS, rows, WIDTH // 32)


def write(directory: Path, layers: int = 24, vocabulary: int = 201_088) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(layers, vocabulary)))
    header, end = {}, 0
    for name, dtype, shape in tensors(layers, vocabulary):
        begin, end = end, end + prod(shape) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    listing = json.dumps(header).encode()
    listing += b" " * (-len(listing) % 8)
    rng = np.random.default_rng(0)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(listing).to_bytes(8, "little") + listing)
        for name, _, shape in tensors(layers, vocabulary):
            _write_values(file, name, prod(shape), rng)


def _write_values(file: IO[bytes], name: str, count: int, rng: np.random.Generator) -> None:
    for begin in range(0, count, PART):
        size = min(PART, count - begin)
        if name.endswith("_blocks"):
            file.write(rng.bytes(size))
        elif name.endswith("_scales"):  # powers of two around 2^-8
            file.write(rng.integers(117, 122, size, np.uint8).tobytes())
        else:
            values = np.ones(size, np.float32) if "norm" in name else 0.02 * rng.standard_normal(size, np.float32)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())


if __name__ == "__main__":
    write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
