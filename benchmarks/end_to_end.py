"""What does a whole model gain: tokens per second of stock vLLM, the plugin, vLLM int4 and llama.cpp, side by side.

A Mixtral-shaped model with random weights, real width, few layers; same weights, same prompts, same number of cores
for everyone (for the plugin: engine and device together). Each system runs in a process of its own, one at a time, in
rounds. Wall clock only, prefill and decode apart; beside it the memory of engine and device, and the processor time of
each of their threads.

    python benchmarks/make_random_mixtral.py MODEL --hidden 4096 --intermediate 14336 --layers 2 --experts 8
    vllm-ndp quantize MODEL --out REPLICAS
    python benchmarks/gguf_mixtral.py MODEL GGUF                    # for llama.cpp only
    python benchmarks/end_to_end.py --model MODEL --replicas REPLICAS [--gguf GGUF] [--cores 2] [--rounds 2]

Many small experts: `make_random_mixtral.py MODEL --shape qwen3-30b-a3b --layers 2`, and the rest likewise. Systems
named ...-avx2 use no wider vectors in our kernels or, with --llama-avx2, another build of llama.cpp.
Random weights route almost evenly, so half of the decode pairs of "4 of 8 hot" are cold; a trained model's prompts
choose better. A system's figure is its fastest round; of a round, the mean of the steps beside which other programs
used at most a tenth of a core, or of all steps, marked ~, where there are too few such ones. Prints a table, then one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from end_to_end_systems import Job, run
from end_to_end_threads import table_of_threads
from measured import Measurement, add_json_option
from rich.console import Console
from rich.table import Table

MAX_FOREIGN_CORES = 0.1
MIN_QUIET_STEPS = 5
CHILD_TIMEOUT_S = 900
LONG_DEADLINE_MS = 20_000.0  # the batch of 32 at full width is slower than any deadline meant for real hardware
STREAM_BYTES = 512 << 20  # read by each core, far more than any cache
STREAM_WAYS = ((1, 2048), (2, 1024), (2, 2048), (4, 1024))  # streams, bytes of prefetch
GROUP = 128


@dataclass(frozen=True)
class System:
    """One row of the table. `hot` and `bits` describe what its experts cost; hot None = no plugin."""

    kind: str  # vllm | int4 | llama
    bits: float  # of the experts that are not hot
    hot: float | None = None  # share of the experts
    settings: Mapping[str, Any] = field(default_factory=dict)  # `hot_experts` as a share
    file: str = ""
    linear_bits: float = 16
    avx2: bool = False
    executor: str = ""  # vLLM's name; the plugin chooses where it is empty
    environment: Mapping[str, str] = field(default_factory=dict)


def _plugin(hot: float, bits: float, **settings: Any) -> System:
    return System("vllm", bits, hot, {"hot_experts": hot, "avg_bits": bits, "execution": "paper", **settings})


_SIMULATED = {"hardware": "h100-ndp512"}
_SPINNING = {"GOMP_SPINCOUNT": "300000"}  # libgomp's own default; a user who sets it keeps it
SYSTEMS: dict[str, System] = {
    "stock-bf16": System("vllm", 16),
    "defaults": System("vllm", 4, 0, {}),
    "defaults-linear8": System("vllm", 4, 0, {"debug": {"linear_bits": 8}}, linear_bits=8),
    "defaults-linear4": System("vllm", 4, 0, {"debug": {"linear_bits": 4}}, linear_bits=4),
    "defaults-avx2": System("vllm", 4, 0, {}, avx2=True),
    "defaults-linear4-avx2": System("vllm", 4, 0, {"debug": {"linear_bits": 4}}, linear_bits=4, avx2=True),
    "before-spinning-worker": System("vllm", 3, 1 / 2, _SIMULATED, executor="mp", environment=_SPINNING),
    "before-spinning": System("vllm", 3, 1 / 2, _SIMULATED, environment=_SPINNING),
    "defaults-before": System("vllm", 3, 1 / 2, _SIMULATED),
    "all-hot": System("vllm", 16, 1, {"hot_experts": 1, "cold_precision": "full"}),
    "hot4-cold3": _plugin(1 / 2, 3),
    "hot4-cold3-balanced": _plugin(1 / 2, 3, execution="balanced"),
    "hot4-cold2": _plugin(1 / 2, 2),
    "hot4-cold4": _plugin(1 / 2, 4),
    "hot2-cold3": _plugin(1 / 4, 3),
    "hot0-cold4": _plugin(0, 4),
    "hot0-cold3": _plugin(0, 3),
    "hot0-cold2": _plugin(0, 2),
    "vllm-int4": System("int4", 4),
    "llama-q4_0": System("llama", 4, file="q4_0"),
    "llama-q4_k": System("llama", 4, file="q4_k"),
    "llama-q3_k": System("llama", 3, file="q3_k"),
    "llama-q2_k": System("llama", 2, file="q2_k"),
    "llama-q4_0-avx2": System("llama", 4, file="q4_0", avx2=True),
}
"""By name, in the order of the table; hot4-cold3: half of the experts hot in bf16, the others at 3 bits on average.
defaults: what a server chooses that is told nothing; defaults-linear8: with linear layers at 8 bits;
defaults-before: by simulated prices, half of the experts hot; before-spinning: and OpenMP's threads spin;
before-spinning-worker: and the engine polls a process of its worker's own. The waterfall: before-spinning-worker,
before-spinning, defaults-before, defaults, defaults-linear8."""


class Unavailable(Exception):
    """Why a system cannot be measured here, in one sentence."""


# -- running ---------------------------------------------------------------------------------------------------------


def job_of(name: str, arguments: argparse.Namespace) -> Job:
    """Raises Unavailable."""
    system = SYSTEMS[name]
    model, engine = str(arguments.model), {}
    if system.kind == "int4":
        raise Unavailable(why_no_int4())
    if system.kind == "llama":
        if arguments.gguf is None:
            raise Unavailable("--gguf was not given")
        path = arguments.gguf / f"{system.file}.gguf"
        if not path.exists():
            raise Unavailable(f"{path.name} is missing: run benchmarks/gguf_mixtral.py")
        if system.avx2 and arguments.llama_avx2 is None:
            raise Unavailable("--llama-avx2 was not given")
        model = str(path)
    elif system.hot is not None:
        settings = {"pool": "packed", "deadline_ms": LONG_DEADLINE_MS, **system.settings}
        if settings.get("cold_precision") != "full":
            if arguments.replicas is None:
                raise Unavailable("--replicas was not given")
            settings["replicas"] = str(arguments.replicas)
        if "hot_experts" in settings:
            settings["hot_experts"] = round(settings["hot_experts"] * config_of(arguments)["num_local_experts"])
        engine = {"quantization": "ndp", "additional_config": {"ndp": settings}}
        if system.executor:
            engine["distributed_executor_backend"] = system.executor
    return Job(
        name,
        "llama" if system.kind == "llama" else "vllm",
        model,
        tuple(arguments.batches),
        tuple(arguments.passes if batch == 1 else 1 for batch in arguments.batches),
        arguments.prompt_tokens,
        arguments.tokens,
        engine,
        arguments.long_prompt,
    )


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((arguments.model / "config.json").read_text())
    return config


def environment_of(name: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Of the system's process."""
    system = SYSTEMS[name]
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"} | os.environ
    environment |= system.environment
    if system.hot is None and system.kind == "vllm":
        # vLLM would leave one core to its scheduler, which sleeps meanwhile; the plugin sees to this itself
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, arguments.cores))
    if system.avx2 and system.kind == "vllm":
        environment["NDP_ISA"] = "avx2"
    elif system.avx2:
        environment |= {"LLAMA_CPP_LIB_PATH": str(arguments.llama_avx2), "LD_LIBRARY_PATH": str(arguments.llama_avx2)}
    return environment


def why_no_int4() -> str:
    """vLLM's int4 experts on CPU are CPUExpertsInt4 (and AMD's ZenTorch); the class itself knows where it runs."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt4

    if CPUExpertsInt4._supports_current_device():
        return "this benchmark has no int4 checkpoint for vLLM"
    return "vLLM's int4 experts on x86 need AMX, which this processor lacks"


def run_child(job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    """Raises Unavailable with the child's last words."""
    command = [sys.executable, __file__, "--child", job.to_json()]
    process = subprocess.Popen(
        command,
        env=environment_of(job.name, arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: os.sched_setaffinity(0, arguments.cores),
    )
    try:
        output, errors = process.communicate(timeout=CHILD_TIMEOUT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()]
        raise Unavailable(lines[-1][:300] if lines else f"it ended with {process.returncode}")
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result | {"load": os.getloadavg()[0]}


def measure_limit(cores: Sequence[int]) -> float:
    """Bytes per second that these cores read together, the way the kernels read, with nothing computed."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", "limit"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    return float(done.stdout)


def read_limit() -> float:
    """In the child: every core reads memory of its own."""
    from ndp_device.kernels.native import NativeKernel

    readers = [NativeKernel(threads=1) for _ in os.sched_getaffinity(0)]
    data = [np.ones(STREAM_BYTES, np.uint8) for _ in readers]
    best = 0.0

    def read(core: int, streams: int, ahead: int) -> None:
        readers[core].read_stream(data[core], streams=streams, prefetch_bytes=ahead)

    with ThreadPoolExecutor(len(readers)) as threads:
        for streams, ahead in STREAM_WAYS * 3:
            start = time.perf_counter()
            for reader in [threads.submit(read, core, streams, ahead) for core in range(len(readers))]:
                reader.result()
            best = max(best, len(data) * STREAM_BYTES / (time.perf_counter() - start))
    return best


# -- figures ---------------------------------------------------------------------------------------------------------


def step_ms(passes: Sequence[Mapping[str, Any]]) -> tuple[float, int]:
    """Mean decode step over the quiet steps of all passes, and how many those are (0: all steps were taken).

    The mean, because steps differ: how many of a token's experts are hot is a matter of luck.

    The first step of a pass is left out: with the plugin it holds the migration, which `first_step_ms` shows.
    """
    steps = [
        (seconds, foreign)
        for one in passes
        for seconds, foreign in list(zip(one["steps_s"], one["foreign"][1:], strict=True))[1:]
    ]
    quiet = [seconds for seconds, foreign in steps if foreign <= MAX_FOREIGN_CORES]
    enough = len(quiet) >= MIN_QUIET_STEPS
    return 1e3 * statistics.fmean(quiet if enough else [seconds for seconds, _ in steps]), len(quiet) * enough


def figures_of(passes: Sequence[Mapping[str, Any]], batch: int, prompt_tokens: int) -> dict[str, float]:
    """One system, one batch, one round."""
    step, quiet = step_ms(passes)
    prefill = min(passes, key=lambda one: (one["foreign"][0] > MAX_FOREIGN_CORES, one["prefill_s"]))
    return {
        "decode_step_ms": step,
        "decode_tokens_per_s": 1e3 * batch / step,
        "prefill_tokens_per_s": batch * prompt_tokens / prefill["prefill_s"],
        "first_step_ms": 1e3 * statistics.median(one["steps_s"][0] for one in passes),
        "quiet_steps": quiet,
        "foreign_cores": statistics.fmean(value for one in passes for value in one["foreign"]),
    }


def best_round(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Decode and prefill each from the round in which they were fastest; quiet steps beat all others."""
    decode = min(rounds, key=lambda one: (one["quiet_steps"] == 0, one["decode_step_ms"]))
    prefill = max(one["prefill_tokens_per_s"] for one in rounds)
    return {**decode, "prefill_tokens_per_s": prefill}


def expert_bytes(config: Mapping[str, Any], bits: float) -> float:
    """One read of an expert: weights, and below 16 bits an fp16 scale and offset per group."""
    weights = 3 * config["hidden_size"] * config["intermediate_size"]
    return weights * (bits / 8 + (4 / GROUP if bits < 16 else 0))


def other_bytes(config: Mapping[str, Any], bits: float = 16) -> float:
    """What a token reads beside experts: attention, the output matrix and, always in bf16, the router."""
    hidden, head = config["hidden_size"], config["head_dim"]
    attention = 2 * hidden * head * (config["num_attention_heads"] + config["num_key_value_heads"])
    router, layers = config["num_local_experts"] * hidden, config["num_hidden_layers"]
    group_bytes = 4 / GROUP * bits / 4 if bits < 16 else 0  # a scale and an offset for each 4 bits
    return 2.0 * layers * router + (bits / 8 + group_bytes) * (layers * attention + config["vocab_size"] * hidden)


def floor_bytes(system: System, config: Mapping[str, Any], hot_share: float, file_bytes: int) -> float:
    """Weights that one token of batch 1 must read."""
    experts, top_k, layers = (config[f"num_{name}"] for name in ("local_experts", "experts_per_tok", "hidden_layers"))
    if system.kind == "llama":  # everything is quantized; its own file knows best
        outside = other_bytes(config) / (other_bytes(config) + layers * experts * expert_bytes(config, 16))
        return file_bytes * (outside + (1 - outside) * top_k / experts)
    cold = expert_bytes(config, system.bits)
    pair = hot_share * expert_bytes(config, 16) + (1 - hot_share) * cold
    return other_bytes(config, system.linear_bits) + layers * top_k * pair


def summarise(
    name: str, rounds: Sequence[Mapping[str, Any]], arguments: argparse.Namespace, limit: float
) -> dict[str, Any]:
    """The JSON entry of one system."""
    system = SYSTEMS[name]
    batches = {}
    for batch in arguments.batches:
        batches[str(batch)] = best_round(
            [figures_of(one["passes"][str(batch)], batch, arguments.prompt_tokens) for one in rounds]
        )
    pairs: dict[str, int] = {}
    for one in rounds:
        for kind, count in one.get("pairs", {}).items():
            pairs[kind] = pairs.get(kind, 0) + count
    decode_pairs = sum(count for kind, count in pairs.items() if not kind.startswith("prefill"))
    hot_share = pairs.get("hot_pairs", 0) / decode_pairs if decode_pairs else 1.0
    entry: dict[str, Any] = {"system": name, "batches": batches, "memory": rounds[-1]["memory"], "rounds": len(rounds)}
    entry |= {key: rounds[-1][key] for key in ("status", "llama_cpp_python", "file_bytes") if key in rounds[-1]}
    if long := [seconds for one in rounds for seconds in one.get("long_prompt_s", [])]:
        entry["long_prompt"] = {
            "tokens": arguments.long_prompt,
            "prefill_tokens_per_s": arguments.long_prompt / min(long),
        }
    entry["threads"] = rounds[-1]["passes"][str(arguments.batches[0])][-1].get("threads", [])
    if decode_pairs:
        entry |= {"hot_share": round(hot_share, 3), "pairs": pairs}
    if "1" in batches:
        num_bytes = floor_bytes(system, config_of(arguments), hot_share, entry.get("file_bytes", 0))
        entry["bytes_per_token"] = round(num_bytes)
        entry["fraction_of_limit"] = round(1e3 * num_bytes / limit / batches["1"]["decode_step_ms"], 3)
    return entry


def memory_targets(entries: Mapping[str, Mapping[str, Any]], config: Mapping[str, Any]) -> dict[str, float]:
    """How many times the device holds its packed replicas, and the engine what stock holds beside its experts."""
    found: dict[str, float] = {}
    plugin = entries.get("hot4-cold3")
    if plugin is None:
        return found
    memory, status = plugin["memory"], plugin["status"]
    found["device_resident_over_packed"] = memory["device_rss_bytes"] / status["device_bytes"]
    if stock := entries.get("stock-bf16"):
        experts = config["num_hidden_layers"] * config["num_local_experts"] * expert_bytes(config, 16)
        rest = stock["memory"]["engine_anonymous_bytes"] - experts
        ours = memory["engine_anonymous_bytes"] - status["hot_bytes"] - status["staging_bytes"]
        found["engine_beside_slots_over_stock"] = ours / rest
    return {name: round(value, 3) for name, value in found.items()}


def table_of(entries: Sequence[Mapping[str, Any]], arguments: argparse.Namespace, title: str) -> Table:
    table = Table(title=title)
    columns = ["system"]
    columns += [f"decode tok/s, batch {batch} (x stock)" for batch in arguments.batches]
    columns += [f"prefill tok/s, batch {batch}" for batch in arguments.batches]
    columns += [f"one prompt of {arguments.long_prompt}"] * (arguments.long_prompt > 0)
    columns += ["of limit, batch 1", "hot share", "engine GiB", "device GiB"]
    for name in columns:
        table.add_column(name, justify="left" if name == "system" else "right")
    stock = next((entry["batches"] for entry in entries if entry["system"] == "stock-bf16" and "batches" in entry), {})
    for entry in entries:
        if "unavailable" in entry:
            table.add_row(entry["system"], f"not available: {entry['unavailable']}")
            continue
        row = [entry["system"]]
        for batch in map(str, arguments.batches):
            figures = entry["batches"][batch]
            speed, noisy = figures["decode_tokens_per_s"], "" if figures["quiet_steps"] else "~"
            beside = f" ({speed / stock[batch]['decode_tokens_per_s']:.2f})" if stock else ""
            row.append(f"{noisy}{speed:.1f}{beside}")
        row += [f"{entry['batches'][str(batch)]['prefill_tokens_per_s']:.0f}" for batch in arguments.batches]
        if arguments.long_prompt:
            row.append(f"{entry['long_prompt']['prefill_tokens_per_s']:.0f}" if "long_prompt" in entry else "")
        row.append(f"{entry['fraction_of_limit']:.0%}" if "fraction_of_limit" in entry else "")
        row.append(f"{entry['hot_share']:.0%}" if "hot_share" in entry else "")
        memory = entry["memory"]
        row.append(f"{memory['engine_anonymous_bytes'] / 2**30:.2f}")
        row.append(f"{memory['device_rss_bytes'] / 2**30:.2f}" if "device_rss_bytes" in memory else "")
        table.add_row(*row)
    return table


# -- the program -----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint of a Mixtral")
    parser.add_argument("--replicas", type=Path, help="its replicas; needed by systems with cold experts")
    parser.add_argument("--gguf", type=Path, help="directory with its GGUF files; needed by llama-*")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="names with commas between them")
    parser.add_argument("--batches", default="1,8,32", help="sequences at once")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="decode steps of a pass")
    parser.add_argument("--long-prompt", type=int, default=512, help="tokens of one more prompt alone; 0: none")
    parser.add_argument("--llama-avx2", type=Path, metavar="DIR", help="libraries of llama.cpp built without AVX-512")
    parser.add_argument("--passes", type=int, default=3, help="measured passes at batch 1")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cores", type=int, help="how many cores each system gets; default: all")
    add_json_option(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        return arguments
    if arguments.model is None or not (arguments.model / "config.json").exists():
        parser.error("--model must be a checkpoint directory: benchmarks/make_random_mixtral.py writes one")
    arguments.systems = [name for name in arguments.systems.split(",") if name]
    if unknown := [name for name in arguments.systems if name not in SYSTEMS]:
        parser.error(f"--systems must be among {', '.join(SYSTEMS)}, got {unknown[0]!r}")
    try:
        arguments.batches = [int(text) for text in arguments.batches.split(",")]
    except ValueError:
        parser.error(f"--batches must be whole numbers with commas between them, got {arguments.batches!r}")
    numbers = [*arguments.batches, arguments.prompt_tokens, arguments.passes, arguments.rounds]
    if min(numbers) < 1 or arguments.tokens < 2 or arguments.long_prompt < 0:
        parser.error("--batches, --prompt-tokens, --passes and --rounds must be at least 1 and --tokens at least 2")
    usable = sorted(os.sched_getaffinity(0))
    wanted = arguments.cores or len(usable)
    if not 1 <= wanted <= len(usable):
        parser.error(f"--cores must lie in 1..{len(usable)}, got {wanted}")
    arguments.cores = usable[:wanted]
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.child == "limit":
        print(read_limit())
        return
    if arguments.child:
        print(json.dumps(run(Job.parse(arguments.child))))
        return
    measurement = Measurement(__doc__)
    limit = measure_limit(arguments.cores)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.systems}
    reasons: dict[str, str] = {}
    loads = [os.getloadavg()[0]]
    for number in range(arguments.rounds):
        for name in arguments.systems:
            if name in reasons:
                continue
            try:
                rounds[name].append(run_child(job_of(name, arguments), arguments))
                loads.append(rounds[name][-1]["load"])
                print(f"round {number + 1}: {name} done, load {loads[-1]:.1f}", file=sys.stderr, flush=True)
            except (Unavailable, subprocess.TimeoutExpired) as error:
                reasons[name] = str(error)
                print(f"round {number + 1}: {name} not available: {error}", file=sys.stderr, flush=True)
        limit = max(limit, measure_limit(arguments.cores))
    entries = [
        summarise(name, rounds[name], arguments, limit)
        if rounds[name]
        else {"system": name, "unavailable": reasons[name]}
        for name in arguments.systems
    ]
    config = config_of(arguments)
    measured = {entry["system"]: entry for entry in entries if "batches" in entry}
    title = (
        f"{config['hidden_size']} x {config['intermediate_size']}, {config['num_hidden_layers']} layers, "
        f"{len(arguments.cores)} cores, {limit / 1e9:.1f} GB/s, load {min(loads):.1f} to {max(loads):.1f}; "
        f"{arguments.prompt_tokens} + {arguments.tokens} tokens; random weights, so routing is almost even"
    )
    console = Console(width=200)
    console.print(table_of(entries, arguments, title))
    console.print(table_of_threads(entries, arguments.batches[0]))
    figures = {
        "cores": len(arguments.cores),
        "limit_gb_per_s": round(limit / 1e9, 2),
        "prompt_tokens": arguments.prompt_tokens,
        "tokens": arguments.tokens,
        "targets": memory_targets(measured, config),
        "results": entries,
    }
    measurement.end(figures, arguments.json)


if __name__ == "__main__":
    main()
