"""A Mixtral checkpoint of a few kilobytes for tests: config.json and one safetensors file, written byte by byte."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 3, 16, 24
_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def write_small_checkpoint(
    directory: Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    **config: Any,
) -> Path:
    """Random experts and norms; `config` replaces entries of config.json."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["MixtralForCausalLM"],
                "num_hidden_layers": LAYERS,
                "num_local_experts": EXPERTS,
                "num_experts_per_tok": 2,
                "hidden_size": hidden,
                "intermediate_size": intermediate,
                "dtype": dtype,
            }
            | config
        )
    )
    rng = np.random.default_rng(seed)
    tensors: dict[str, NDArray[Any]] = {}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.post_attention_layernorm.weight"] = rng.uniform(0.5, 1.5, hidden)
        for expert in range(EXPERTS):
            for name, shape in (
                ("w1", (intermediate, hidden)),
                ("w3", (intermediate, hidden)),
                ("w2", (hidden, intermediate)),
            ):
                tensors[f"{prefix}.block_sparse_moe.experts.{expert}.{name}.weight"] = rng.normal(size=shape)
    write_safetensors(directory / "model.safetensors", tensors, dtype)
    return directory


def write_safetensors(path: Path, tensors: dict[str, NDArray[Any]], dtype: str, **others: str) -> None:
    """others: dtypes of the tensors that have this word in their name."""
    header: dict[str, Any] = {}
    body = b""
    for name, values in tensors.items():
        own = next((other for word, other in others.items() if word in name.split(".")), dtype)
        data = as_stored(values, own).tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": _SAFETENSORS[own], "shape": values.shape, "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def as_stored(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values in a checkpoint's dtype; bfloat16 by cutting float32 in half, as uint16."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)
