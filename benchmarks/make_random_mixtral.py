"""Write a Mixtral of any size with random weights: for memory and speed measurements, where its text does not matter.

    python benchmarks/make_random_mixtral.py OUT --hidden 4096 --intermediate 14336 --layers 2 --experts 8
    python benchmarks/make_random_mixtral.py OUT --shape qwen3-30b-a3b --layers 2      # the experts of that model

The weights are bfloat16 draws of N(0, 0.02) cut from one table of 16 M values, each matrix from a place of its own, so
that writing is as fast as the disk; two experts are never equal, but the values repeat. One file is written in pieces
of 32 MiB, so the writer needs 100 MB however large the model. The tokenizer is the bundled model's (4096 words).
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.timing.public_models import SHAPES

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "models" / "tiny-mixtral"
VOCABULARY = 4096
HEAD_SIZE = 64
TABLE_VALUES = 1 << 24  # 32 MiB of bfloat16
SCALE = 0.02  # initializer_range of Mixtral's own configuration
BF16_ONE = 0x3F80

Tensors = dict[str, tuple[int, ...]]


def config_of(hidden: int, intermediate: int, layers: int, experts: int, top_k: int) -> dict[str, Any]:
    heads = max(hidden // HEAD_SIZE, 1)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 4, 1),
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def tensors_of(config: dict[str, Any]) -> Tensors:
    """Name -> shape, in the order in which the file holds them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts = config["num_local_experts"]
    queries = config["num_attention_heads"] * HEAD_SIZE
    keys = config["num_key_value_heads"] * HEAD_SIZE
    tensors: Tensors = {"model.embed_tokens.weight": (VOCABULARY, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = (hidden,)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, shape in (
            ("q", (queries, hidden)),
            ("k", (keys, hidden)),
            ("v", (keys, hidden)),
            ("o", (hidden, queries)),
        ):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = shape
        tensors[f"{prefix}.block_sparse_moe.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            for name, shape in (("w1", (inner, hidden)), ("w3", (inner, hidden)), ("w2", (hidden, inner))):
                tensors[f"{prefix}.block_sparse_moe.experts.{expert}.{name}.weight"] = shape
    return tensors


def write(out: Path, config: dict[str, Any], seed: int) -> int:
    """The checkpoint's bytes. A file is complete or not there: it gets its name last."""
    tensors = tensors_of(config)
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in tensors.items():
        num_bytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    rng = np.random.default_rng(seed)
    table = (rng.standard_normal(TABLE_VALUES, dtype=np.float32) * np.float32(SCALE)).view(np.uint32) >> 16
    table = table.astype(np.uint16)
    out.mkdir(parents=True, exist_ok=True)
    unfinished = out / ".model.safetensors.unfinished"
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors.items():
            is_norm = name.endswith("norm.weight")
            for piece in _pieces(table, int(np.prod(shape)), int(rng.integers(TABLE_VALUES))):
                file.write(np.full_like(piece, BF16_ONE) if is_norm else piece)
    unfinished.replace(out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, out / name)
    return offset


def _pieces(table: NDArray[np.uint16], count: int, start: int) -> Iterator[NDArray[np.uint16]]:
    """`count` values of the table, from `start` on and round its end."""
    while count:
        piece = table[start : start + count]
        yield piece
        count -= len(piece)
        start = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--intermediate", type=int, default=1792)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", choices=SHAPES, metavar="NAME", help="experts as in this published model")
    arguments = parser.parse_args()
    if arguments.shape:
        shape = SHAPES[arguments.shape]
        arguments.hidden, arguments.intermediate = shape.hidden_size, shape.intermediate_size
        arguments.experts, arguments.top_k = shape.num_experts, shape.top_k
    if arguments.hidden % HEAD_SIZE or min(arguments.intermediate, arguments.layers, arguments.experts) < 1:
        print(f"--hidden must be a multiple of {HEAD_SIZE} and the other sizes at least 1", file=sys.stderr)
        sys.exit(2)
    config = config_of(arguments.hidden, arguments.intermediate, arguments.layers, arguments.experts, arguments.top_k)
    num_bytes = write(arguments.out, config, arguments.seed)
    print(json.dumps({"model": str(arguments.out), "bytes": num_bytes, "experts": arguments.experts}))


if __name__ == "__main__":
    main()
