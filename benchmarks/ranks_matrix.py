"""Does the plugin give stock vLLM's tokens when several ranks run the model? One engine per case, fp32, greedy.

    python benchmarks/ranks_matrix.py                     every case, as the table of docs/distributed.md
    python benchmarks/ranks_matrix.py TP2 "TP2 compiled"  some of them
    python benchmarks/ranks_matrix.py TP1 TP2 --wall 3    how long stock and the plugin take, in turns, instead

Identity cases compute every expert in full precision and are compared with stock vLLM in one process (and with stock at
the same parallelism where its CPU build runs); quantized ones with the plugin in one process at the same settings,
where the last bits of a router weight may place one expert elsewhere. Two passes: chunked prefill, then prefix cache.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL, REPLICAS = ROOT / "models" / "tiny-mixtral", ROOT / "models" / "tiny-mixtral-replicas"
IDENTITY = {"cold_precision": "full", "hot_experts": 3}
QUANTIZED = {"hot_experts": 4, "avg_bits": 2.0, "replicas": str(REPLICAS)}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
COMPILED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}

MODES: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2": {"tensor_parallel_size": 2},
    "EP2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "TP2 on Ray": {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
    "PP2": {"pipeline_parallel_size": 2},
    "TP2 x PP2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "ngram": {"speculative_config": NGRAM},
    "ngram TP2": {"speculative_config": NGRAM, "tensor_parallel_size": 2},
}
PROMPTS = (
    "def parse(line):\n    parts = line.split(',')\n    for part in parts:\n        if not part:\n",
    "static void free_list(struct node *head)\n{\n    while (head) {\n        struct node *next = head->next;\n",
    "She had always wished to see the sea, and now that the carriage stood at the door she could hardly",
    "CREATE TABLE orders (id integer PRIMARY KEY, total numeric); The table is created in the current schema",
)
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "disable_log_stats": True,
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def run_engine(
    options: dict[str, Any], settings: dict[str, Any] | None, tokens: int, *, fork: bool, num_passes: int = 2
) -> dict[str, Any]:
    """Tokens of the passes, how long each took, and what each rank counted."""
    from vllm import LLM, SamplingParams

    if fork:  # workers inherit what this process has imported: for trying things out
        import vllm.v1.executor.multiproc_executor as executor

        executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    plugin: dict[str, Any] = {}
    if settings is not None:
        ndp = {"deadline_ms": 20_000.0} | settings
        plugin = {"quantization": "ndp", "additional_config": {"ndp": ndp}}
    if options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1) > 1:
        options = {"distributed_executor_backend": "mp"} | options
    llm = LLM(str(MODEL), **(ENGINE | plugin | options))
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [prompt * 4 for prompt in PROMPTS]
    passes, reports, seconds = [], [], []
    for _ in range(num_passes):
        begun = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
        passes.append([list(output.outputs[0].token_ids) for output in outputs])
        reports += [output.kv_transfer_params for output in outputs]
    totals = llm.collective_rpc("ndp_totals") if settings is not None else []
    llm.llm_engine.engine_core.shutdown()
    return {"passes": passes, "totals": totals, "reports": reports, "seconds": seconds}


def case(
    name: str, options: dict[str, Any], settings: dict[str, Any] | None, tokens: int, fork: bool, num_passes: int = 2
) -> dict[str, Any]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        asked = json.dumps(
            {"options": options, "settings": settings, "tokens": tokens, "fork": fork, "num_passes": num_passes}
            | {"out": str(out)}
        )
        done = subprocess.run(
            [sys.executable, __file__, "--one", asked], env=os.environ | ENVIRONMENT, capture_output=True, text=True
        )
        if not out.exists():
            return {"name": name, "failed": (done.stderr.strip().splitlines() or ["no output"])[-1], "log": done.stderr}
        return {"name": name} | json.loads(out.read_text())


def identical(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[int, int]:
    pairs = [
        (a, b)
        for my_pass, their_pass in zip(mine["passes"], theirs["passes"], strict=True)
        for my_tokens, their_tokens in zip(my_pass, their_pass, strict=True)
        for a, b in zip(my_tokens, their_tokens, strict=True)
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def wall(modes: list[str], rounds: int, tokens: int, fork: bool) -> list[dict[str, Any]]:
    """Seconds of a pass from the prefix cache, the least of all: stock, plugin with all experts hot, and as it is used;
    engine after engine, in turns."""
    sides = {"stock": None, "all hot": {"cold_precision": "full", "hot_experts": 8}, "half hot": QUANTIZED}
    least: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for mode in modes:
            for side, settings in sides.items():
                result = case(mode, MODES[mode], settings, tokens, fork, num_passes=6)
                if "failed" in result:
                    print(f"{mode} {side} failed: {result['failed']}")
                    continue
                took = min(result["seconds"][1:])
                least[mode, side] = min(took, least.get((mode, side), took))
    rows = []
    for mode in modes:
        seconds = {side: round(least[mode, side], 4) for side in sides if (mode, side) in least}
        ratios = {side: round(took / seconds["stock"], 3) for side, took in seconds.items() if "stock" in seconds}
        print(f"{mode:12} " + ", ".join(f"{side} {took} s ({ratios.get(side)})" for side, took in seconds.items()))
        rows.append({"mode": mode, "seconds": seconds, "of_stock": ratios})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", help=f"of {', '.join(MODES)}, each perhaps with ' compiled'; all if none")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--precision", choices=("identity", "quantized"), help="only one of the two")
    parser.add_argument("--fork", action="store_true", help="fork workers instead of spawning them: faster")
    parser.add_argument("--verbose", action="store_true", help="print the log of a case that failed")
    parser.add_argument("--wall", type=int, metavar="ROUNDS", help="time stock and the plugin in turns instead")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        asked = json.loads(arguments.one)
        out = Path(asked.pop("out"))
        out.write_text(json.dumps(run_engine(**asked)))
        return
    wanted = arguments.modes or [*MODES, *(f"{mode} compiled" for mode in MODES)]
    tokens, fork = arguments.tokens, arguments.fork
    if arguments.wall:
        print(json.dumps(wall(arguments.modes or ["TP1", "TP2"], arguments.wall, tokens, fork)))
        return
    stock = case("stock", {}, None, tokens, fork)
    quantized = case("quantized TP1", {}, QUANTIZED, tokens, fork) if arguments.precision != "identity" else stock
    print(f"{'mode':24} {'precision':10} {'identical':>12}  fallback pairs, row checks (mismatches) by rank")
    rows = []
    for mode in wanted:
        options = MODES[mode.removesuffix(" compiled")] | (COMPILED if mode.endswith(" compiled") else {})
        for precision, settings, against in (("identity", IDENTITY, stock), ("quantized", QUANTIZED, quantized)):
            if arguments.precision not in (None, precision):
                continue
            result = case(mode, options, settings, tokens, fork)
            if "failed" in result:
                print(f"{mode:24} {precision:10} {'failed':>12}  {result['failed']}", flush=True)
                if arguments.verbose:
                    print(result["log"])
                continue
            same, total = identical(result, against)
            totals = result["totals"]
            counts = ", ".join(f"{t['fallback_pairs']}, {t['row_checks']} ({t['sidecar_mismatches']})" for t in totals)
            print(f"{mode:24} {precision:10} {f'{same}/{total}':>12}  {counts}", flush=True)
            rows.append({"mode": mode, "precision": precision, "identical": same, "total": total, "totals": totals})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
