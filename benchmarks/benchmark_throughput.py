"""How many tokens per second does stock vLLM make, and how many with the plugin, on the same prompts?

Prints both clocks side by side: measured tokens/s of this machine for both arms, and the simulated time per token of
the preset for the plugin's arm. The arms alternate, each in a process of its own, so that drift of the machine hits
both. Limit: with every expert hot the plugin can at best equal stock; with cold experts the device process shares the
same cores.

    python benchmarks/benchmark_throughput.py --model models/tiny-mixtral --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent


def run_arm(arguments: argparse.Namespace) -> dict[str, Any]:
    """One engine, one timed pass; runs in the child process."""
    import numpy as np
    from vllm import LLM, SamplingParams

    settings = json.loads(arguments.settings)
    plugin = {"quantization": "ndp", "additional_config": {"ndp": settings}} if arguments.arm == "ndp" else {}
    llm = LLM(
        arguments.model,
        max_model_len=arguments.input_len + arguments.output_len + 32,
        max_num_seqs=arguments.batch,
        kv_cache_memory_bytes=512 << 20,
        enforce_eager=True,
        dtype=arguments.dtype,
        disable_log_stats=True,
        enable_prefix_caching=False,
        **plugin,
    )
    random = np.random.default_rng(arguments.seed)
    vocab = llm.get_tokenizer().vocab_size
    prompts = [
        {"prompt_token_ids": random.integers(3, vocab, arguments.input_len).tolist()} for _ in range(arguments.prompts)
    ]
    llm.generate(prompts[:1], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    params = SamplingParams(temperature=0.0, max_tokens=arguments.output_len, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    result: dict[str, Any] = {"measured_seconds": seconds, "measured_tokens_per_s": tokens / seconds}
    if arguments.arm == "ndp":
        reports = [output.kv_transfer_params["ndp"] for output in outputs]
        result["simulated_tpot_us"] = statistics.fmean(report["simulated_tpot_us"] for report in reports)
        result["simulated_ttft_us"] = statistics.fmean(report["simulated_ttft_us"] for report in reports)
        result["measured_tpot_ms"] = statistics.fmean(report["measured_tpot_ms"] for report in reports)
        for kind in ("hot", "cold", "prefill", "fallback"):
            result[f"{kind}_pairs"] = sum(report[f"{kind}_pairs"] for report in reports)
    return result


def run_child(arguments: argparse.Namespace, arm: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--arm", arm]
    for name in ("model", "prompts", "batch", "input_len", "output_len", "settings", "seed", "dtype"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "tiny-mixtral"))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8, help="sequences running at once")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--settings", default="{}", help="JSON of ndp settings for the plugin's arm")
    parser.add_argument("--arm", choices=("stock", "ndp"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(run_arm(arguments)))
        return
    runs: dict[str, list[dict[str, Any]]] = {"stock": [], "ndp": []}
    for _ in range(arguments.rounds):
        for arm, results in runs.items():
            results.append(run_child(arguments, arm))
    speed = {arm: [run["measured_tokens_per_s"] for run in results] for arm, results in runs.items()}
    ratios = [ndp / stock for stock, ndp in zip(speed["stock"], speed["ndp"], strict=True)]
    last = runs["ndp"][-1]
    table = Table(title=f"{arguments.prompts} prompts of {arguments.input_len} + {arguments.output_len} tokens")
    for name in ("arm", "measured tokens/s (median, min..max)", "simulated TPOT us", "pairs hot / cold / fallback"):
        table.add_column(name)
    for arm, values in speed.items():
        spread = f"{statistics.median(values):.1f} ({min(values):.1f}..{max(values):.1f})"
        pairs = f"{last['hot_pairs']} / {last['cold_pairs']} / {last['fallback_pairs']}" if arm == "ndp" else "-"
        table.add_row(arm, spread, f"{last['simulated_tpot_us']:.1f}" if arm == "ndp" else "-", pairs)
    Console().print(table)
    print(
        json.dumps(
            {
                "model": Path(arguments.model).name,
                "batch": arguments.batch,
                "rounds": arguments.rounds,
                "load": os.getloadavg()[0],
                "measured_stock_tokens_per_s": statistics.median(speed["stock"]),
                "measured_ndp_tokens_per_s": statistics.median(speed["ndp"]),
                "measured_ratio": statistics.median(ratios),
                "simulated_tpot_us": last["simulated_tpot_us"],
                "simulated_ttft_us": last["simulated_ttft_us"],
                "settings": json.loads(arguments.settings),
            }
        )
    )


if __name__ == "__main__":
    main()
