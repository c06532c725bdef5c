"""What does a whole model gain: tokens per second of stock vLLM, the plugin, vLLM int4 and llama.cpp, side by side.

A Mixtral-shaped model with random weights, real width, few layers; same weights, same prompts, same number of cores
for everyone (for the plugin: engine and device together). Systems of a group are loaded at once, each in processes of
its own, and take turns pass by pass, because the machine's memory bandwidth changes within minutes. A group must fit
the memory together with the checkpoint's page cache; groups run one after the other. Wall clock only, prefill and
decode apart; beside it the memory of engine and device, and the processor time of each of their threads.

    python benchmarks/make_random_mixtral.py MODEL --hidden 4096 --intermediate 14336 --layers 2 --experts 8
    vllm-ndp quantize MODEL --out REPLICAS
    python benchmarks/gguf_mixtral.py MODEL GGUF                    # for llama.cpp only
    python benchmarks/end_to_end.py --model MODEL --replicas REPLICAS [--gguf GGUF] [--cores 2] [--rounds 3]

Many small experts: `make_random_mixtral.py MODEL --shape qwen3-30b-a3b --layers 2`, and the rest likewise. With --isa
no system uses more of the processor: vLLM, torch and oneDNN are told that it has no more, and llama.cpp is another
build (--llama). Systems named 3db895e... run the code of that commit in a checkout of its own (--before).
Random weights route almost evenly, so half of the decode pairs of "4 of 8 hot" are cold; a trained model's prompts
choose better. A round's figure is the mean of the steps beside which other programs used at most a tenth of a core, or
of all steps, marked ~, where there are too few such ones. A system's figure is the median of its rounds; a ratio is the
median of the rounds' ratios. Prints a table, then one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arm import Arm
from end_to_end_systems import ISAS, KV_BYTES, Job, Order, serve
from end_to_end_threads import table_of_threads
from measured import Measurement, add_json_option
from rich.console import Console
from rich.table import Table

MAX_FOREIGN_CORES = 0.1
MIN_QUIET_STEPS = 5
SETTLE_S = 1.2  # before each pass: the workers of stock vLLM poll for a second after theirs
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
    executor: str = ""  # vLLM's name; the plugin chooses where it is empty
    environment: Mapping[str, str] = field(default_factory=dict)
    before: bool = False  # runs the code of --before


def _plugin(hot: float, bits: float, **settings: Any) -> System:
    return System("vllm", bits, hot, {"hot_experts": hot, "avg_bits": bits, "execution": "paper", **settings})


_FOUR = {"debug": {"linear_bits": 4}}
_ASKED = {"debug": {"linear_bits": 4, "prepare": "asked"}}  # else the device holds replicas for what may be offloaded
_BFLOAT16 = {"debug": {"linear_bits": None}}
_SPINNING = {"GOMP_SPINCOUNT": "300000"}  # libgomp's own default; a user who sets it keeps it
SYSTEMS: dict[str, System] = {
    "stock-bf16": System("vllm", 16),
    "3db895e-cold4": replace(_plugin(0, 4), before=True),
    "worker-spinning": System("vllm", 4, 0, _BFLOAT16, executor="mp", environment=_SPINNING),
    "spinning": System("vllm", 4, 0, _BFLOAT16, environment=_SPINNING),
    "defaults-linear16": System("vllm", 4, 0, _BFLOAT16),
    "defaults": System("vllm", 4, 0, linear_bits=8),
    "defaults-linear4": System("vllm", 4, 0, _FOUR, linear_bits=4),
    "slots4-linear4": System("vllm", 4, 1, {"hot_experts": 1, "slot_bits": 4, **_ASKED}, linear_bits=4),
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
}
"""By name, in the order of the table; hot4-cold3: half of the experts hot in bf16, the others at 3 bits on average.
defaults: what a server chooses that is told nothing; defaults-linear4: with linear layers at 4 bits instead of 8.
slots4-linear4: the engine's process holds every expert at 4 bits and computes prompts from those, too.
Each step of the waterfall beside the one before: 3db895e-cold4, the code of this turn's start with no expert hot;
worker-spinning, today's kernels and device; the engine polls a process of its worker's own and OpenMP's threads spin;
spinning, in one process; defaults-linear16, nobody spins; defaults, linear layers at 8 bits."""


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
        if arguments.isa and arguments.llama is None:
            raise Unavailable("--llama was not given")
        model = str(path)
    elif system.hot is not None:
        settings = {"deadline_ms": LONG_DEADLINE_MS, **system.settings}
        if "hot_experts" in settings:  # the defaults keep the checkpoint alone in the page cache
            settings["pool"] = "packed"
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
    environment = dict(system.environment)
    if system.hot is None and system.kind == "vllm":
        # vLLM would leave one core to its scheduler, which sleeps meanwhile; the plugin sees to this itself
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, arguments.cores))
    if arguments.isa and system.kind == "vllm":
        environment |= ISAS[arguments.isa]
    elif arguments.isa:
        libraries = str(arguments.llama / "llama_cpp/lib")
        environment |= {"LLAMA_CPP_LIB_PATH": libraries, "LD_LIBRARY_PATH": libraries}
    return environment


def why_no_int4() -> str:
    """vLLM's int4 experts on CPU are CPUExpertsInt4 (and AMD's ZenTorch); the class itself knows where it runs."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsInt4

    if CPUExpertsInt4._supports_current_device():
        return "this benchmark has no int4 checkpoint for vLLM"
    return "vLLM's int4 experts on x86 need AMX, which this processor lacks"


def start(name: str, arguments: argparse.Namespace) -> Arm:
    """Loaded and warm. Raises Unavailable with the last words of one that is not."""
    job = job_of(name, arguments)
    settings = [f"{name}={value}" for name, value in environment_of(name, arguments).items()]
    python = arguments.before / ".venv/bin/python" if SYSTEMS[name].before else Path(sys.executable)
    cores = ",".join(map(str, arguments.cores))
    try:
        return Arm(["taskset", "-c", cores, "env", *settings, str(python), __file__, "--child", job.to_json()])
    except SystemExit as ended:
        raise Unavailable(str(ended).strip().splitlines()[-1][:300]) from ended


def measure_group(group: Sequence[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The JSON entries of systems that take turns."""
    arms: dict[str, Arm] = {}
    reasons: dict[str, str] = {}
    for name in group:
        try:
            arms[name] = start(name, arguments)
        except Unavailable as reason:
            reasons[name] = str(reason)
        print(f"{name}: {reasons.get(name, 'ready')}", file=sys.stderr, flush=True)
    rounds = take_turns(arms, arguments)
    last = {name: arm.ask() for name, arm in arms.items()}
    for arm in arms.values():
        arm.close()
    return [
        summarise(name, rounds[name], last[name], arguments)
        if name in arms
        else {"system": name, "unavailable": reasons[name]}
        for name in group
    ]


def take_turns(arms: Mapping[str, Arm], arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Rounds of each system, {"passes": {batch: pass}, "long_prompt_s": seconds}; every second round goes backwards."""
    shapes = [(str(batch), batch, arguments.prompt_tokens, arguments.tokens) for batch in arguments.batches]
    shapes += [("long", 1, arguments.long_prompt, 1)] * (arguments.long_prompt > 0)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for number in range(arguments.rounds):
        order = list(arms) if number % 2 == 0 else list(arms)[::-1]
        done: dict[str, dict[str, Any]] = {name: {} for name in arms}
        for shape, batch, prompt_tokens, tokens in shapes:
            for name in order:
                time.sleep(SETTLE_S)
                done[name][shape] = arms[name].ask(asdict(Order(batch, prompt_tokens, tokens, seed=number + 1)))
        for name, passes in done.items():
            long_s = passes.pop("long")["prefill_s"] if arguments.long_prompt else 0.0
            rounds[name].append({"passes": passes, "long_prompt_s": long_s})
        print(f"round {number + 1} of {arguments.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return rounds


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


def step_ms(one: Mapping[str, Any]) -> tuple[float, int]:
    """Mean decode step over the quiet steps of a pass, and how many those are (0: all steps were taken).

    The mean, because steps differ: how many of a token's experts are hot is a matter of luck.

    The first step of a pass is left out: with the plugin it holds the migration, which `first_step_ms` shows.
    """
    steps = list(zip(one["steps_s"], one["foreign"][1:], strict=True))[1:]
    quiet = [seconds for seconds, foreign in steps if foreign <= MAX_FOREIGN_CORES]
    enough = len(quiet) >= MIN_QUIET_STEPS
    return 1e3 * statistics.fmean(quiet if enough else [seconds for seconds, _ in steps]), len(quiet) * enough


def figures_of(passes: Sequence[Mapping[str, Any]], batch: int, prompt_tokens: int) -> dict[str, Any]:
    """One system, one batch, a pass a round: medians, and under "rounds" each round's, for ratios within a round."""
    steps = [step_ms(one) for one in passes]
    rounds = {
        "decode_tokens_per_s": [1e3 * batch / step for step, _ in steps],
        "prefill_tokens_per_s": [batch * prompt_tokens / one["prefill_s"] for one in passes],
    }
    return {
        "decode_step_ms": statistics.median(step for step, _ in steps),
        **{name: statistics.median(values) for name, values in rounds.items()},
        "first_step_ms": 1e3 * statistics.median(one["steps_s"][0] for one in passes),
        "quiet_steps": sum(quiet for _, quiet in steps),
        "foreign_cores": statistics.fmean(value for one in passes for value in one["foreign"]),
        "rounds": {name: [round(value, 2) for value in values] for name, values in rounds.items()},
    }


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
    name: str,
    rounds: Sequence[Mapping[str, Any]],
    last: Mapping[str, Any],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """The JSON entry of one system. last: what it said after its rounds: memory, and of the plugin pairs and status."""
    system = SYSTEMS[name]
    batches = {
        str(batch): figures_of([one["passes"][str(batch)] for one in rounds], batch, arguments.prompt_tokens)
        for batch in arguments.batches
    }
    pairs = last.get("pairs", {})
    decode_pairs = sum(count for kind, count in pairs.items() if not kind.startswith("prefill"))
    hot_share = pairs.get("hot_pairs", 0) / decode_pairs if decode_pairs else 1.0
    entry: dict[str, Any] = {"system": name, "batches": batches, "memory": last["memory"]}
    entry |= {key: last[key] for key in ("status", "llama_cpp_python", "file_bytes") if key in last}
    if arguments.long_prompt:
        speeds = [arguments.long_prompt / one["long_prompt_s"] for one in rounds]
        entry["long_prompt"] = {
            "tokens": arguments.long_prompt,
            "prefill_tokens_per_s": statistics.median(speeds),
            "rounds": {"prefill_tokens_per_s": [round(speed, 2) for speed in speeds]},
        }
    entry["threads"] = rounds[-1]["passes"][str(arguments.batches[0])].get("threads", [])
    if decode_pairs:
        entry |= {"hot_share": round(hot_share, 3), "pairs": pairs}
    if "1" in batches:
        num_bytes = floor_bytes(system, config_of(arguments), hot_share, entry.get("file_bytes", 0))
        entry["bytes_per_token"] = round(num_bytes)
    return entry


def resident_over_served(entry: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Anonymous memory of engine and device over the bytes that they serve from: weights at their widths, KV cache.

    Files that are mapped are not in it: the system takes their pages back when it needs them.
    """
    system, memory = SYSTEMS[entry["system"]], entry["memory"]
    held = sum(value for name, value in memory.items() if name.endswith("_anonymous_bytes"))
    embedding = 2 * config["vocab_size"] * config["hidden_size"]
    experts = config["num_hidden_layers"] * config["num_local_experts"]
    kept = entry.get("file_bytes", 0)
    if system.kind != "llama":
        cold = entry.get("status", {}).get("device_bytes", 0) if system.hot != 1 else 0
        hot = entry["status"]["hot_bytes"] if "status" in entry else experts * expert_bytes(config, 16)
        kept = cold + hot + other_bytes(config, system.linear_bits) + embedding
    return float(held / (kept + KV_BYTES))


def in_turns(mine: Mapping[str, Any], other: Mapping[str, Any], what: str) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(mine["rounds"][what], other["rounds"][what], strict=True))


def table_of(entries: Sequence[Mapping[str, Any]], arguments: argparse.Namespace, title: str) -> Table:
    table = Table(title=title)
    columns = ["system"]
    columns += [f"decode tok/s, batch {batch} (x the first)" for batch in arguments.batches]
    columns += [f"prefill tok/s, batch {batch}" for batch in arguments.batches]
    columns += [f"one prompt of {arguments.long_prompt}"] * (arguments.long_prompt > 0)
    columns += ["of limit, batch 1", "hot share", "held / served", "engine GiB", "device GiB"]
    for name in columns:
        table.add_column(name, justify="left" if name == "system" else "right")
    for entry in entries:
        if "unavailable" in entry:
            table.add_row(entry["system"], f"not available: {entry['unavailable']}")
            continue
        row = [entry["system"]]
        others = (one for one in entries if one["group"] == entry["group"] and "batches" in one)
        first = next(others)["batches"]
        for batch in map(str, arguments.batches):
            figures = entry["batches"][batch]
            speed, noisy = figures["decode_tokens_per_s"], "" if figures["quiet_steps"] else "~"
            row.append(f"{noisy}{speed:.1f} ({in_turns(figures, first[batch], 'decode_tokens_per_s'):.2f})")
        row += [f"{entry['batches'][str(batch)]['prefill_tokens_per_s']:.0f}" for batch in arguments.batches]
        if arguments.long_prompt:
            row.append(f"{entry['long_prompt']['prefill_tokens_per_s']:.0f}" if "long_prompt" in entry else "")
        row.append(f"{entry['fraction_of_limit']:.0%}" if "fraction_of_limit" in entry else "")
        row.append(f"{entry['hot_share']:.0%}" if "hot_share" in entry else "")
        row.append(f"{entry['resident_over_served']:.2f}")
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
    parser.add_argument(
        "--systems",
        nargs="+",
        default=["stock-bf16,defaults"],
        metavar="GROUP",
        help=f"each A,B,… of {', '.join(SYSTEMS)}",
    )
    parser.add_argument("--batches", default="1,8,32", help="sequences at once")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16, help="decode steps of a pass")
    parser.add_argument("--long-prompt", type=int, default=512, help="tokens of one more prompt alone; 0: none")
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="checkout of 3db895e with its .venv, for 3db895e-..."
    )
    parser.add_argument("--isa", choices=ISAS, help="no system uses more of the processor")
    parser.add_argument("--llama", type=Path, metavar="DIR", help="llama-cpp-python built for that")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, help="how many cores each system gets; default: all")
    add_json_option(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        return arguments
    if arguments.model is None or not (arguments.model / "config.json").exists():
        parser.error("--model must be a checkpoint directory: benchmarks/make_random_mixtral.py writes one")
    arguments.systems = [group.split(",") for group in arguments.systems]
    named = [name for group in arguments.systems for name in group]
    if unknown := [name for name in named if name not in SYSTEMS]:
        parser.error(f"--systems must be among {', '.join(SYSTEMS)}, got {unknown[0]!r}")
    try:
        arguments.batches = [int(text) for text in arguments.batches.split(",")]
    except ValueError:
        parser.error(f"--batches must be whole numbers with commas between them, got {arguments.batches!r}")
    if arguments.before is None and any(SYSTEMS[name].before for name in named):
        parser.error("--before must be a checkout of 3db895e with its .venv for the systems named 3db895e-...")
    numbers = [*arguments.batches, arguments.prompt_tokens, arguments.rounds]
    if min(numbers) < 1 or arguments.tokens < 2 or arguments.long_prompt < 0:
        parser.error("--batches, --prompt-tokens and --rounds must be at least 1 and --tokens at least 2")
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
        serve(Job.parse(arguments.child))
        return
    measurement = Measurement(__doc__)
    limit = measure_limit(arguments.cores)
    loads = [os.getloadavg()[0]]
    entries: list[dict[str, Any]] = []
    for number, group in enumerate(arguments.systems):
        entries += [{"group": number, **entry} for entry in measure_group(group, arguments)]
        loads.append(os.getloadavg()[0])
    limit = max(limit, measure_limit(arguments.cores))
    config = config_of(arguments)
    for entry in entries:
        if "batches" in entry:
            entry["resident_over_served"] = round(resident_over_served(entry, config), 3)
        if "bytes_per_token" in entry:
            took_ms = entry["batches"]["1"]["decode_step_ms"]
            entry["fraction_of_limit"] = round(1e3 * entry["bytes_per_token"] / limit / took_ms, 3)
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
        "rounds": arguments.rounds,
        "isa": arguments.isa,
        "results": entries,
    }
    measurement.end(figures, arguments.json)


if __name__ == "__main__":
    main()
