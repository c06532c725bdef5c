"""A Mixtral checkpoint as GGUF files for llama.cpp, quantized by llama.cpp itself. Needs `gguf` and `llama-cpp-python`.

    python benchmarks/gguf_mixtral.py MODEL OUT [--types q4_0,q4_k]

Writes OUT/bf16.gguf once and from it OUT/TYPE.gguf for each type; what is there is kept. A file gets its name when it
is whole. No vocabulary is written: the benchmark speaks in token ids. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

FILE_TYPES = {"q4_0": 2, "q4_k": 14}
"""llama_ftype (llama.h); K types in their small mixes, which stay closest to the width of their name."""
DEFAULT_TYPES = ("q4_0", "q4_k")

Values = NDArray[np.uint16]  # bfloat16, which numpy lacks


def write_gguf(model: Path, out: Path) -> None:
    """The checkpoint's weights, unchanged, under llama.cpp's names."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(_head_size(config))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    tensors = list(_tensors(model, config))
    for name, shape, _ in tensors:
        num_bytes = int(np.prod(shape)) * (4 if len(shape) == 1 else 2)
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.BF16
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, shape, read in tensors:
        values = read()
        writer.write_tensor_data(_as_float32(values) if len(shape) == 1 else values.view(np.uint8))
    writer.close()


def _tensors(model: Path, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Values]]]:
    """(GGUF name, shape, reader); what is not a matrix is stored as float32."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    queries = config["num_attention_heads"] * _head_size(config)
    keys = config["num_key_value_heads"] * _head_size(config)

    def plain(name: str) -> Callable[[], Values]:
        return lambda: _read(model, name)

    def rotated(name: str, heads: int) -> Callable[[], Values]:
        """llama.cpp turns neighbouring elements, the checkpoint's layout turns halves."""
        return lambda: _neighbours(_read(model, name), heads)

    def stacked(prefix: str, weight: str) -> Callable[[], Values]:
        return lambda: np.stack([_read(model, f"{prefix}.experts.{e}.{weight}.weight") for e in range(experts)])

    yield "token_embd.weight", (config["vocab_size"], hidden), plain("model.embed_tokens.weight")
    yield "output_norm.weight", (hidden,), plain("model.norm.weight")
    if not config["tie_word_embeddings"]:
        yield "output.weight", (config["vocab_size"], hidden), plain("lm_head.weight")
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"blk.{layer}", f"model.layers.{layer}"
        attention, moe = f"{ours}.self_attn", f"{ours}.block_sparse_moe"
        yield f"{theirs}.attn_norm.weight", (hidden,), plain(f"{ours}.input_layernorm.weight")
        yield f"{theirs}.ffn_norm.weight", (hidden,), plain(f"{ours}.post_attention_layernorm.weight")
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        yield f"{theirs}.attn_q.weight", (queries, hidden), rotated(f"{attention}.q_proj.weight", heads)
        yield f"{theirs}.attn_k.weight", (keys, hidden), rotated(f"{attention}.k_proj.weight", kv_heads)
        yield f"{theirs}.attn_v.weight", (keys, hidden), plain(f"{attention}.v_proj.weight")
        yield f"{theirs}.attn_output.weight", (hidden, queries), plain(f"{attention}.o_proj.weight")
        yield f"{theirs}.ffn_gate_inp.weight", (experts, hidden), plain(f"{moe}.gate.weight")
        yield f"{theirs}.ffn_gate_exps.weight", (experts, inner, hidden), stacked(moe, "w1")
        yield f"{theirs}.ffn_up_exps.weight", (experts, inner, hidden), stacked(moe, "w3")
        yield f"{theirs}.ffn_down_exps.weight", (experts, hidden, inner), stacked(moe, "w2")


def _head_size(config: dict[str, Any]) -> int:
    size: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return size


def _neighbours(weight: Values, heads: int) -> Values:
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def _read(model: Path, name: str) -> Values:
    import torch

    index = model / "model.safetensors.index.json"
    file = json.loads(index.read_text())["weight_map"][name] if index.exists() else "model.safetensors"
    with safe_open(model / file, framework="pt") as tensors:
        values: Values = tensors.get_tensor(name).view(torch.uint16).numpy()
    return values


def _as_float32(values: Values) -> NDArray[np.float32]:
    return (values.astype(np.uint32) << 16).view(np.float32)


def quantize(source: Path, out: Path, kind: str) -> None:
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[kind]
    parameters.nthread = len(os.sched_getaffinity(0))
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), parameters):
        raise SystemExit(f"llama.cpp could not quantize {source} to {kind}")


def prepare(model: Path, out: Path, kinds: tuple[str, ...]) -> dict[str, Path]:
    """{"bf16": …, kind: …}, written where missing."""
    out.mkdir(parents=True, exist_ok=True)
    files = {kind: out / f"{kind}.gguf" for kind in ("bf16", *kinds)}
    for kind, path in files.items():
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            if kind == "bf16":
                write_gguf(model, unfinished)
            else:
                quantize(files["bf16"], unfinished, kind)
            unfinished.replace(path)
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--types", default=",".join(DEFAULT_TYPES), help=f"among {', '.join(FILE_TYPES)}")
    arguments = parser.parse_args()
    kinds = tuple(arguments.types.split(","))
    if unknown := [kind for kind in kinds if kind not in FILE_TYPES]:
        parser.error(f"--types must be among {', '.join(FILE_TYPES)}, got {unknown[0]!r}")
    files = prepare(arguments.model, arguments.out, kinds)
    print(json.dumps({kind: {"file": str(path), "bytes": path.stat().st_size} for kind, path in files.items()}))


if __name__ == "__main__":
    main()
