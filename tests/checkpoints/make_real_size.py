"""Writes a model of today's size with random weights, in the names and the format of its official checkpoint.

    python tests/checkpoints/make_real_size.py MODEL DIRECTORY [LAYERS] [VOCABULARY]

MODEL: gpt-oss-20b (MXFP4), qwen3-30b-a3b (GPTQ-Int4), its -fp8 (blocks of 128 x 128), -awq and -nvfp4
(compressed-tensors), or mixtral-8x7b (GPTQ of 4 bits, one scale a row).
Tensor by tensor, so the writer needs the memory of some million values.
"""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.timing.public_models import PUBLIC_MODELS

PART = 1 << 24
"""Values that are drawn at once."""
ITEM_BYTES = {"BF16": 2, "F8_E4M3": 1, "F16": 2, "F32": 4, "I32": 4, "U8": 1}

FILE_BYTES = 5_000_000_000
"""Of one file at most, as hubs have them: who maps a file larger than the memory is refused by the kernel."""

EMBEDDING = 4.0
"""Standard deviation of embeddings. With that of the other matrices all tokens come to be alike within two layers, and
choose the same experts, which no trained router does: a prompt and a batch would be far too fast."""
E4M3_DEVIATION = 150.0
"""Of codes: three deviations are the largest value of the type."""
E2M1_GLOBAL_SCALE = 38000.0
"""Divides the scales of NVFP4: values of about 0.02."""
CODES_AROUND_8 = np.array([(byte & 15 or 8) | (byte >> 4 or 8) << 4 for byte in range(256)], np.uint8)
"""Bytes of two codes from 1 to 15, whose mean is their zero. With another mean all tokens come to be alike, too."""

Tensors = Iterator[tuple[str, str, tuple[int, ...]]]
"""(name, dtype, shape)."""


COMMON = {"hidden_act": "silu", "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
OWN: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "experts_per_token": 4,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        | {"original_max_position_embeddings": 4096},
        "rms_norm_eps": 1e-5,
        "pad_token_id": 1,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [f"model.layers.*.{part}" for part in ("self_attn", "mlp.router")]
            + ["model.embed_tokens", "lm_head"],
        },
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "bos_token_id": 1,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "quantization_config": {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "desc_act": False,
            "true_sequential": True,
            "lm_head": False,
            "damp_percent": 0.01,
        },
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "bos_token_id": 1,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": -1,
            "sym": True,
            "desc_act": True,
            "true_sequential": True,
            "damp_percent": 0.1,
            "modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"]]
            + [["self_attn.o_proj"]]
            + [[f"block_sparse_moe.experts.{expert}.{name}" for expert in range(8)] for name in ("w1", "w3", "w2")],
        },
    },
}
"""What config.json says beside the sizes."""
OWN["qwen3-30b-a3b-fp8"] = OWN["qwen3-30b-a3b"] | {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"] + [f"model.layers.{layer}.mlp.gate" for layer in range(48)],
    },
}
OWN["qwen3-30b-a3b-awq"] = OWN["qwen3-30b-a3b"] | {
    "quantization_config": {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "modules_to_not_convert": ["mlp.gate"],
    },
}
OWN["qwen3-30b-a3b-nvfp4"] = OWN["qwen3-30b-a3b"] | {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
                | {"symmetric": True, "dynamic": False, "actorder": None, "observer": "minmax"},
                "input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
                | {"symmetric": True, "dynamic": "local", "actorder": None, "observer": "minmax"},
                "output_activations": None,
            }
        },
        "ignore": [f"model.layers.{layer}.mlp.gate" for layer in range(48)] + ["lm_head"],
    },
}


def _config(model: str, layers: int | None, vocabulary: int | None) -> dict[str, Any]:
    config = PUBLIC_MODELS[re.sub("-(fp8|awq|nvfp4)$", "", model)].config | COMMON | OWN[model]
    if layers:
        config |= {"num_hidden_layers": layers}
        config |= {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
    return config | ({"vocab_size": vocabulary} if vocabulary else {})


def _gptoss_tensors(config: dict[str, Any]) -> Tensors:
    width, experts, heads = config["hidden_size"], config["num_local_experts"], config["num_attention_heads"]
    outputs = _attention(config)
    yield from _ends(config)
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}."
        yield of + "self_attn.sinks", "BF16", (heads,)
        for name, shape in outputs.items():
            yield of + f"self_attn.{name}_proj.weight", "BF16", shape
            yield of + f"self_attn.{name}_proj.bias", "BF16", shape[:1]
        yield of + "mlp.router.weight", "BF16", (experts, width)
        yield of + "mlp.router.bias", "BF16", (experts,)
        for name, rows in {"gate_up_proj": 2 * width, "down_proj": width}.items():
            yield of + f"mlp.experts.{name}_bias", "BF16", (experts, rows)
            yield of + f"mlp.experts.{name}_blocks", "U8", (experts, rows, width // 32, 16)
            yield of + f"mlp.experts.{name}_scales", "U8", (experts, rows, width // 32)


def _ends(config: dict[str, Any]) -> Tensors:
    """What lies around the layers, and their norms."""
    width = config["hidden_size"]
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", "BF16", (config["vocab_size"], width)
    yield "model.norm.weight", "BF16", (width,)
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{norm}.weight", "BF16", (width,)


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Rows and columns of the four projections."""
    width = config["hidden_size"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}


def _qwen3_tensors(config: dict[str, Any]) -> Tensors:
    width, inner, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    yield from _ends(config)
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}."
        for norm in ("q_norm", "k_norm"):
            yield of + f"self_attn.{norm}.weight", "BF16", (head,)
        for name, shape in _attention(config).items():
            yield from _matrix(config, of + f"self_attn.{name}_proj", *shape)
        yield of + "mlp.gate.weight", "BF16", (config["num_experts"], width)
        for expert in range(config["num_experts"]):
            for name, shape in {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}.items():
                yield from _matrix(config, of + f"mlp.experts.{expert}.{name}_proj", *shape)


def _mixtral_tensors(config: dict[str, Any]) -> Tensors:
    width, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield from _ends(config)
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}."
        for name, shape in _attention(config).items():
            yield from _matrix(config, of + f"self_attn.{name}_proj", *shape)
        yield of + "block_sparse_moe.gate.weight", "BF16", (experts, width)
        for expert in range(experts):
            for name, shape in {"w1": (inner, width), "w3": (inner, width), "w2": (width, inner)}.items():
                yield from _matrix(config, of + f"block_sparse_moe.experts.{expert}.{name}", *shape)


def _matrix(config: dict[str, Any], name: str, rows: int, columns: int) -> Tensors:
    stored = config["quantization_config"]
    if stored["quant_method"] == "fp8":
        yield f"{name}.weight", "F8_E4M3", (rows, columns)
        yield f"{name}.weight_scale_inv", "BF16", (rows // 128, columns // 128)
        return
    if stored["quant_method"] == "compressed-tensors":
        yield f"{name}.weight_packed", "U8", (rows, columns // 2)
        yield f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16)
        yield f"{name}.weight_global_scale", "F32", (1,)
        yield f"{name}.input_global_scale", "F32", (1,)
        return
    if stored["quant_method"] == "awq":
        yield f"{name}.qweight", "I32", (columns, rows // 8)
        yield f"{name}.qzeros", "I32", (columns // 128, rows // 8)
        yield f"{name}.scales", "F16", (columns // 128, rows)
        return
    groups = 1 if stored["group_size"] == -1 else columns // stored["group_size"]
    yield f"{name}.qweight", "I32", (columns // 8, rows)
    yield f"{name}.qzeros", "I32", (groups, rows // 8)
    yield f"{name}.scales", "F16", (groups, rows)
    yield f"{name}.g_idx", "I32", (columns,)


TENSORS = {"gpt_oss": _gptoss_tensors, "mixtral": _mixtral_tensors, "qwen3_moe": _qwen3_tensors}


def write(model: str, directory: Path, layers: int | None = None, vocabulary: int | None = None) -> None:
    """layers, vocabulary: the official ones if not given. Raises KeyError for a model that is not known."""
    config = _config(model, layers, vocabulary)
    tensors = TENSORS[config["model_type"]]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    files: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    held = 0
    for tensor in tensors(config):
        _, dtype, shape = tensor
        if held + (num_bytes := prod(shape) * ITEM_BYTES[dtype]) > FILE_BYTES:
            files.append([])
            held = 0
        files[-1].append(tensor)
        held += num_bytes
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    of_tensor = {tensor[0]: name for name, listed in zip(names, files, strict=True) for tensor in listed}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of_tensor}))
    rng = np.random.default_rng(0)
    for name, listed in zip(names, files, strict=True):
        _write_file(directory / name, listed, rng, config["quantization_config"])


def _write_file(
    path: Path, tensors: list[tuple[str, str, tuple[int, ...]]], rng: np.random.Generator, stored: dict[str, Any]
) -> None:
    header, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    listing = json.dumps(header).encode()
    listing += b" " * (-len(listing) % 8)
    with path.open("wb") as file:
        file.write(len(listing).to_bytes(8, "little") + listing)
        for name, dtype, shape in tensors:
            if name.endswith("g_idx") and stored["group_size"] == -1:
                file.write(bytes(prod(shape) * ITEM_BYTES[dtype]))
            elif name.endswith("qzeros"):  # 8; of GPTQ one less
                zero = b"\x88" if stored["quant_method"] == "awq" else b"\x77"
                file.write(zero * (prod(shape) * ITEM_BYTES[dtype]))
            else:
                for begin in range(0, prod(shape), PART):
                    file.write(_values(name, dtype, min(PART, prod(shape) - begin), rng))


def _values(name: str, dtype: str, count: int, rng: np.random.Generator) -> bytes:
    if name.endswith(("_blocks", "weight_packed")):
        return rng.bytes(count * ITEM_BYTES[dtype])
    if name.endswith("qweight"):
        return CODES_AROUND_8[np.frombuffer(rng.bytes(count * ITEM_BYTES[dtype]), np.uint8)].tobytes()
    if name.endswith("global_scale"):
        return np.full(count, E2M1_GLOBAL_SCALE, np.float32).tobytes()
    if name.endswith("weight_scale"):  # of NVFP4: 240, 256 or 288
        return rng.integers(0x77, 0x7A, count, np.uint8).tobytes()
    if dtype == "F8_E4M3":
        return _e4m3_of_normal()[np.frombuffer(rng.bytes(count), np.uint8)].tobytes()
    if name.endswith("_scales"):  # of MXFP4: powers of two around 2^-8, as near each other as those of normal weights
        return rng.integers(118, 121, count, np.uint8).tobytes()
    if name.endswith("g_idx"):
        return (np.arange(count, dtype=np.int32) // 128).tobytes()
    if name.endswith("scales"):  # of 4 bits: values of about 0.02
        return (0.004 + 0.001 * rng.random(count)).astype(np.float16).tobytes()
    if name.endswith("scale_inv"):
        return _bfloat16(np.float32(0.02 / E4M3_DEVIATION) * (0.8 + 0.4 * rng.random(count, np.float32)))
    deviation = EMBEDDING if name.endswith("embed_tokens.weight") else 0.02
    return _bfloat16(
        np.ones(count, np.float32) if "norm" in name else deviation * rng.standard_normal(count, np.float32)
    )


@cache
def _e4m3_of_normal() -> NDArray[np.uint8]:
    """Codes of 256 values that are normal together."""
    import torch

    values = [E4M3_DEVIATION * NormalDist().inv_cdf((one + 0.5) / 256) for one in range(256)]
    codes: NDArray[np.uint8] = torch.tensor(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return codes


def _bfloat16(values: NDArray[np.float32]) -> bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
