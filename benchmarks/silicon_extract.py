"""Times of vLLM's GPU kernels that NVIDIA measured, as the small extract that the package ships.

    python benchmarks/silicon_extract.py FOLDER > vllm_ndp/cost_model/silicon.csv

FOLDER: `aiconfigurator_core/systems/data` of the wheel aiconfigurator-core 0.12.0 (Apache-2.0, vLLM 0.24.0), unpacked.
A line is a card, a kernel, its shape, and nanoseconds along its axis; `-` where a row is missing. Nothing is left out
for its time here: vllm_ndp/cost_model/silicon.py says which rows it does not believe.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

CARDS = {"h100": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s", "rtxpro6000": "rtx_pro_6000_server"}
EXPERTS = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "int4_wo": "int4", "w4a16_mxfp4": "mxfp4"}
"""Where a card has both kernels of fp8, the one with a scale for each block: the other is untuned on Hopper, three
times as slow as bf16, and takes longer for 16 rows than for 4096."""
TOKENS = [1 << n for n in range(15)]
ROWS = [1, 4, 16, 64, 256, 1024, 4096, 16384]
CACHED = [15, 63, 255, 1023, 4095, 16383]
PROMPT = [16, 64, 256, 1024, 4096, 16384]
MATRICES = (1024, 2048, 4096, 6144, 8192, 12288, 16384, 51200)
HEADS = (8, 16, 32, 64)
REQUESTS = (1, 4, 16, 64, 256)
REDUCED = [128 << 2 * n for n in range(11)]
NARROWEST = 128
"""Columns of an expert's shard; fewer are no shard that an engine makes of one model on one machine."""
SPREAD = {"fp8_block": ("fp8", (7168, 2048, 8, 256), 1.01), "w4a16_mxfp4": ("mxfp4", (2880, 2880, 4, 128), 1.2)}
"""Layers of DeepSeek-R1 and gpt-oss-120b, and how skewed their routing is in NVIDIA's own estimates."""
TWO_MATRICES = (22, 6)
"""Experts a token of the models without gate in the data; their rows would count a matrix too much."""

HEADER = """\
# vLLM 0.24.0 kernels timed by NVIDIA: aiconfigurator-core 0.12.0, Copyright NVIDIA CORPORATION & AFFILIATES, Apache-2.0
# made by benchmarks/silicon_extract.py; times in ns. Axis and shape of each kernel:
# bf16, fp8, int4, mxfp4: a MoE layer, balanced routing, by tokens 2^0..2^14; hidden, intermediate, chosen, experts
# gemm: bf16, by rows 4^0..4^7; columns, hidden
# decode, prefill: attention, bf16, by cached or prompt tokens 16 x 4^0..4^5; requests, heads, kv heads, head size
# decode-sglang: gpt-oss' attention by SGLang 0.5.14 on a card where its kernel is Triton's, to 16 x 4^6 cached tokens
# latent: a layer's attention of DeepSeek-V3 with its products, bf16, the faster of vLLM's and TensorRT-LLM's 1.3.0rc20,
# by cached tokens 16 x 4^0..4^5; requests, heads
# mxfp4-spread, fp8-spread: a MoE layer of TensorRT-LLM 1.3.0rc20, each expert whole on one GPU, routing by a power law
# of 1.2 and 1.01, by tokens as above; hidden, intermediate, chosen, experts, GPUs
# allreduce: in a CUDA graph, by bytes 128 x 4^0..4^10; GPUs. L40S: vLLM 0.14.0
card,kernel,shape,ns
"""

Line = tuple[str, tuple[int, ...], str]


def read(path: Path, **only: object) -> list[dict[str, int | float | str]]:
    table = pq.read_table(path)
    for name, value in only.items():
        table = table.filter(pc.equal(table[name], value))
    rows: list[dict[str, int | float | str]] = table.to_pylist()
    return rows


def series(rows: list[tuple[str, tuple[int, ...], int, float]], axis: list[int]) -> Iterator[Line]:
    """rows: kernel, shape, place on the axis, ms."""
    known = {(kernel, shape, at): f"{ms * 1e6:.0f}" for kernel, shape, at, ms in rows}
    for kernel, shape in sorted({row[:2] for row in rows}):
        yield kernel, shape, " ".join(known.get((kernel, shape, at), "-") for at in axis)


def spread(folder: Path) -> Iterator[tuple[str, tuple[int, ...], int, float]]:
    for dtype, (name, shape, alpha) in SPREAD.items():
        only = {"moe_tp_size": 1, "moe_dtype": dtype, "distribution": f"power_law_{alpha}", "inter_size": shape[1]}
        for r in read(folder / "moe/trtllm/1.3.0rc20/moe_perf.parquet", **only):
            if (r["hidden_size"], r["topk"], r["num_experts"]) == (shape[0], *shape[2:]) and r["moe_ep_size"] <= 8:
                yield f"{name}-spread", (*shape, r["moe_ep_size"]), r["num_tokens"], r["latency"]


def lines_of(folder: Path) -> Iterator[Line]:
    layers = read(folder / "moe/vllm/0.24.0/moe_perf.parquet", moe_ep_size=1, distribution="balanced")
    left_out = "fp8" if any(r["moe_dtype"] == "fp8_block" for r in layers) else ""
    experts = [
        (EXPERTS[r["moe_dtype"]], (r["hidden_size"], wide, r["topk"], r["num_experts"]), r["num_tokens"], r["latency"])
        for r in layers
        if r["moe_dtype"] in EXPERTS.keys() - {left_out}
        and (wide := r["inter_size"] // r["moe_tp_size"]) >= NARROWEST
        and r["topk"] not in TWO_MATRICES
    ]
    yield from series(experts, TOKENS)
    if folder.name == "h200_sxm":
        yield from series(list(spread(folder)), TOKENS)
    gemms = [
        ("gemm", (r["n"], r["k"]), r["m"], r["latency"])
        for r in read(folder / "gemm/vllm/0.24.0/gemm_perf.parquet", gemm_dtype="bfloat16")
        if r["n"] in MATRICES and r["k"] in MATRICES[:-1]
    ]
    yield from series(gemms, ROWS)
    for kernel, name, at, axis in (
        ("decode", "generation", "step", CACHED),
        ("prefill", "context", "isl", PROMPT),
    ):
        path = folder / f"attention/vllm/0.24.0/{name}_attention_perf.parquet"
        found = [
            (kernel, (r["batch_size"], r["num_heads"], r["num_key_value_heads"], r["head_dim"]), r[at], r["latency"])
            for r in read(path, kv_cache_dtype="bfloat16", window_size=0)
            if r["batch_size"] in REQUESTS
            and r["num_heads"] in HEADS
            and r["num_key_value_heads"] < r["num_heads"]
            and r["head_dim"] in (64, 128)
        ]
        yield from series(found, axis)
    if folder.name == "rtx_pro_6000_server":
        path = folder / "attention/sglang/0.5.14/generation_attention_perf.parquet"
        of = {"batch_size": 1, "num_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
        found = read(path, kv_cache_dtype="bfloat16", window_size=0, **of)
        own = [("decode-sglang", tuple(of.values()), r["step"], r["latency"]) for r in found]
        yield from series(own, [*CACHED, 65535])
    layers_of: dict[tuple[int, ...], float] = {}
    for path in sorted(folder.glob("mla/*/*/mla_generation_module_perf.parquet")):
        for r in read(path, gemm_type="bfloat16", kv_cache_dtype="bfloat16"):
            key = r["batch_size"], r["num_heads"], r["step"]
            layers_of[key] = min(r["latency"], layers_of.get(key, r["latency"]))
    latent = [("latent", key[:2], key[2], ms) for key, ms in layers_of.items() if key[0] in REQUESTS]
    yield from series(latent, PROMPT)
    [path] = sorted(folder.glob("comm/vllm/0.2[24].0/custom_allreduce_perf.parquet"))
    reduced = [
        ("allreduce", (r["num_gpus"],), r["message_size"], r["latency"]) for r in read(path, backend="vllm_graph")
    ]
    yield from series(reduced, REDUCED)


def main() -> None:
    sys.stdout.write(HEADER)
    for card, system in CARDS.items():
        for kernel, shape, times in lines_of(Path(sys.argv[1]) / system):
            print(f"{card},{kernel},{'x'.join(map(str, shape))},{times}")


if __name__ == "__main__":
    main()
