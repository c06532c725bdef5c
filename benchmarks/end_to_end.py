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
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arm import Arm
from end_to_end_named import SYSTEMS, Unavailable, config_of, environment_of, job_of
from end_to_end_rows import resident_over_served, summarise, table_of
from end_to_end_systems import ISAS, Job, Order, serve
from measured import Measurement, add_json_option
from rich.console import Console

SETTLE_S = 1.2  # before each pass: the workers of stock vLLM poll for a second after theirs
STREAM_BYTES = 512 << 20  # read by each core, far more than any cache
STREAM_WAYS = ((1, 2048), (2, 1024), (2, 2048), (4, 1024))  # streams, bytes of prefetch


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
    Console(width=200).print(table_of(entries, arguments, title))
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
