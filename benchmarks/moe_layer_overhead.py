"""How much wall time does the plugin add to one MoE layer of a decode step, and how much of it is the device?

Times `MoERunner.forward` (router, experts, everything vLLM does for a MoE layer) with module hooks in a real engine,
decode steps only, stock and plugin alternating in processes of their own. Limit: with every expert hot the work is
vLLM's own fused call, so stock is the floor; with cold experts the floor is stock plus one round trip to the device.

    python benchmarks/moe_layer_overhead.py --model models/tiny-mixtral --batch 1 --rounds 3
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
ARMS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "all-hot": {"cold_precision": "full", "hot_experts": -1},
    "half-hot-3-bit": {"hot_experts": -2, "avg_bits": 3.0},
    "all-cold-3-bit": {"hot_experts": 0, "avg_bits": 3.0},
}


def run_arm(arguments: argparse.Namespace) -> dict[str, float]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    settings = ARMS[arguments.arm]
    plugin: dict[str, Any] = {}
    if settings is not None:
        experts = json.loads((Path(arguments.model) / "config.json").read_text())["num_local_experts"]
        hot = {-1: experts, -2: experts // 2}.get(settings["hot_experts"], settings["hot_experts"])
        plugin = {"quantization": "ndp", "additional_config": {"ndp": {**settings, "hot_experts": hot}}}
    llm = LLM(
        arguments.model,
        dtype=arguments.dtype,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=arguments.batch,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
        enable_prefix_caching=False,
        **plugin,
    )
    times: list[float] = []
    started = [0.0]
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    for module in model.modules():
        if type(module).__name__ == "MoERunner":
            module.register_forward_pre_hook(lambda *_: started.__setitem__(0, time.perf_counter()))
            module.register_forward_hook(lambda *_: times.append(time.perf_counter() - started[0]))
    prompts = [{"prompt_token_ids": [5 + i, 90 + i, 700 + i, 33]} for i in range(arguments.batch)]
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    times.clear()
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    decode = sorted(times[len(times) // 8 :])  # the first steps are prefill
    return {
        "measured_p10_us": decode[len(decode) // 10] * 1e6,
        "measured_p50_us": decode[len(decode) // 2] * 1e6,
        "measured_min_us": decode[0] * 1e6,
        "measured_tokens_per_s": arguments.batch * arguments.tokens / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "tiny-mixtral"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--arm", choices=tuple(ARMS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(run_arm(arguments)))
        return
    arms = arguments.arms.split(",")
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for _ in range(arguments.rounds):
        for arm in arms:
            command = [sys.executable, __file__, "--arm", arm]
            for name in ("model", "batch", "tokens", "dtype"):
                command += [f"--{name}", str(getattr(arguments, name))]
            environment = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            results[arm].append(json.loads(done.stdout.strip().splitlines()[-1]))
    table = Table(title=f"measured us per MoE layer, decode, batch {arguments.batch}, load {os.getloadavg()[0]:.1f}")
    for name in ("arm", "min", "p10", "p50", "tokens/s"):
        table.add_column(name)
    summary: dict[str, dict[str, float]] = {}
    for arm, runs in results.items():
        summary[arm] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        table.add_row(
            arm, *(f"{summary[arm][f'measured_{key}']:.1f}" for key in ("min_us", "p10_us", "p50_us", "tokens_per_s"))
        )
    Console().print(table)
    print(json.dumps({"batch": arguments.batch, "load": os.getloadavg()[0], "arms": summary}))


if __name__ == "__main__":
    main()
