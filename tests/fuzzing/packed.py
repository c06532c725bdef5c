"""Checkpoints whose experts are stored quantized, for the fuzzer: one format per layer, and one GGUF file.

Written by hand, byte by byte: the formats' packages are not needed to damage their files.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

EXPERTS, SIZE = 2, 64
"""Hidden and intermediate size alike."""
Stored = Mapping[str, tuple[str, tuple[int, ...]]]

_STATE = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [SIZE, SIZE]}).encode()
LAYERS: tuple[Stored, ...] = (
    {
        "weight_packed": ("U8", (SIZE, SIZE // 2)),
        "weight_scale": ("F8_E4M3", (SIZE, SIZE // 16)),
        "weight_global_scale": ("F32", (1,)),
    },
    {"weight": ("F8_E4M3", (SIZE, SIZE)), "weight_scale": ("U8", (SIZE, SIZE // 32))},
    {"weight": ("I8", (SIZE, SIZE // 2)), "scale": ("F8_E8M0", (SIZE, SIZE // 32))},
    {
        "weight_packed": ("I32", (SIZE, SIZE // 8)),
        "weight_scale": ("BF16", (SIZE, 2)),
        "weight_shape": ("I64", (2,)),
        "weight_zero_point": ("I32", (SIZE // 8, 2)),
        "weight_g_idx": ("I32", (SIZE,)),
    },
    {"weight": ("I8", (SIZE, SIZE)), "weight_scale": ("BF16", (SIZE, 1)), "weight_zero_point": ("I8", (SIZE, 1))},
    {
        "weight": ("U8", (SIZE * SIZE // 2, 1)),
        "weight.absmax": ("F32", (SIZE,)),
        "weight.quant_map": ("F32", (16,)),
        "weight.quant_state.bitsandbytes__nf4": ("U8", (len(_STATE),)),
    },
    {
        "qweight": ("I32", (SIZE // 8, SIZE)),
        "qzeros": ("I32", (2, SIZE // 8)),
        "scales": ("BF16", (2, SIZE)),
        "g_idx": ("I32", (SIZE,)),
    },
)
_BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}
_WRITTEN = {
    "weight_global_scale": np.ones(1, np.float32).tobytes(),
    "weight.absmax": np.ones(SIZE, np.float32).tobytes(),
    "weight_shape": np.array([SIZE, SIZE], np.int64).tobytes(),
    "weight.quant_state.bitsandbytes__nf4": _STATE,
    "weight_g_idx": np.repeat(np.arange(2, dtype=np.int32), SIZE // 2).tobytes(),
    "g_idx": np.repeat(np.arange(2, dtype=np.int32), SIZE // 2).tobytes(),
}
_SETTINGS = {
    "quant_method": "gptq",
    "checkpoint_format": "gptq",
    "bits": 4,
    "group_size": 32,
    "config_groups": {
        str(layer): {"targets": [f"re:.*layers[.]{layer}[.]"], "weights": weights}
        for layer, weights in enumerate(
            (
                {"num_bits": 4, "type": "float", "group_size": 16},
                {"num_bits": 8, "type": "float", "group_size": 32},
                {"num_bits": 4, "type": "float", "group_size": 32},
                {"num_bits": 4, "symmetric": False, "group_size": 32, "actorder": "group"},
                {"num_bits": 8, "symmetric": False, "strategy": "channel"},
                {"symmetric": False},
                {"num_bits": 4, "symmetric": False, "group_size": 32},
            )
        )
    }
    | {"no weights": {}},
    "dynamic": {"+:.*layers[.]6[.].*": {"bits": 4, "group_size": 32}, "-:.*lm_head": {}},
    "extra_config": {"lm_head": {"bits": 16}, ".*layers[.]6[.].*": {"bits": 4}},
}


def make_packed(path: Path, config: Mapping[str, Any]) -> None:
    """Each layer in another format: names, dtypes and shapes are real, most values are drawn."""
    generator, tensors = np.random.default_rng(0), {}
    for layer, stored in enumerate(LAYERS):
        prefix = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{prefix}.gate.weight"] = ("F32", (EXPERTS, SIZE), np.ones((EXPERTS, SIZE), np.float32).tobytes())
        for expert in range(EXPERTS):
            for word in ("w1", "w2", "w3"):
                for part, (dtype, shape) in stored.items():
                    count = int(np.prod(shape)) * _BYTES[dtype]
                    values = _WRITTEN.get(part) or generator.integers(0, 100, count, np.uint8).tobytes()
                    tensors[f"{prefix}.experts.{expert}.{word}.{part}"] = (dtype, shape, values)
    path.mkdir()
    _write_safetensors(path / "model.safetensors", tensors)
    sizes = {"hidden_size": SIZE, "intermediate_size": SIZE, "num_local_experts": EXPERTS, "num_experts_per_tok": 1}
    settings = {"num_hidden_layers": len(LAYERS), "quantization_config": _SETTINGS}
    (path / "config.json").write_text(json.dumps(dict(config) | sizes | settings))


def _write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header, first = {}, 0
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [first, first + len(values)]}
        first += len(values)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(values for *_, values in tensors.values()))


def make_gguf(path: Path, config: Mapping[str, Any]) -> None:
    """Experts of one layer as float32 in a GGUF file of version 3, with metadata of each kind before them."""
    shapes = {f"blk.0.ffn_{role}_exps.weight": (EXPERTS, SIZE, SIZE) for role in ("gate", "up", "down")}
    shapes |= {"blk.0.ffn_gate_inp.weight": (EXPERTS, SIZE), "blk.0.ffn_norm.weight": (SIZE,)}
    text = _string(b"general.architecture") + struct.pack("<I", 8) + _string(b"llama")
    number = _string(b"general.alignment") + struct.pack("<II", 4, 64)
    words = _string(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + _string(b"a") + _string(b"b")
    header = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), 3) + text + number + words
    first, values = 0, b""
    for name, shape in shapes.items():
        header += _string(name.encode()) + struct.pack("<I", len(shape))
        header += b"".join(struct.pack("<Q", size) for size in reversed(shape)) + struct.pack("<IQ", 0, first)
        raw = np.ones(shape, np.float32).tobytes()
        values, first = values + raw, first + len(raw)
    path.mkdir()
    (path / "model.gguf").write_bytes(header + b"\0" * (-len(header) % 64) + values)
    sizes = {"hidden_size": SIZE, "intermediate_size": SIZE, "num_local_experts": EXPERTS, "num_experts_per_tok": 1}
    (path / "config.json").write_text(json.dumps(dict(config) | sizes | {"num_hidden_layers": 1}))


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text
