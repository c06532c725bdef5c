"""How much wall time does the plugin add to a MoE layer and to a decode step, and how much of it is the device?

Times `MoERunner.forward` (router, experts, everything vLLM does for a MoE layer) and `LLMEngine.step` in a real engine,
decode steps only, stock and plugin in processes of their own that take turns every few steps, so that all meet the same
moods of the machine; differences are taken turn by turn. Limits: with every expert hot the work is
vLLM's own fused call, so stock is the floor; a layer with a call to the device has stock plus one round trip, measured
in the same process by sending the run's last message again, as seldom as the run did and back to back. A step outside
its layers is the step less the sum of its MoE layers: vLLM's attention, sampling and scheduling, and what the plugin
adds to them.

The floor of a layer with a call is what it reads over this machine's bandwidth, the host's share and the device's at
the same time on a core each, plus a message without experts there and back, measured in the same rounds.

    python benchmarks/moe_layer_overhead.py --model models/tiny-mixtral --batch 1 --rounds 20 --json out.json
    python benchmarks/moe_layer_overhead.py --shape qwen3-30b-a3b --layers 2      # random weights, written aside
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from arm import Arm, answer
from make_random_mixtral import config_of, write
from measured import Measurement, add_json_option
from rich.console import Console
from rich.table import Table

from ndp_device.kernels.native import NativeKernel
from ndp_device.timing.public_models import SHAPES

ROOT = Path(__file__).resolve().parent.parent
ARMS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "all-hot": {"cold_precision": "full", "hot_experts": -1},
    "half-hot-3-bit": {"hot_experts": -2, "avg_bits": 3.0},
    "all-cold-3-bit": {"hot_experts": 0, "avg_bits": 3.0},
}
STREAM_BYTES = 1 << 28
ROUND_TRIPS = 50
"""Per round."""
TARGETS = {  # us over stock, of the median
    "every expert hot, a layer": 10.0,
    "half hot, a layer with a call, beside the round trip": 60.0,
    "every expert hot, a step outside its layers": 300.0,
    "half hot, a step outside its layers": 300.0,
}


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Of decode only: the first eighth of the samples, which holds prefill and first plans, is left out."""
    values = sorted(seconds[len(seconds) // 8 :])
    if not values:
        return {}
    shares = {"min": 0, "p10": len(values) // 10, "p50": len(values) // 2}
    return {f"measured_{name}_{share}_us": values[at] * 1e6 for share, at in shares.items()}


class Stopwatch:
    """Wall seconds of every MoE layer and every step; `calls` says how many messages have gone to the device."""

    def __init__(self, llm: Any, calls: Any) -> None:
        self.layers: list[float] = []
        self.layers_with_call: list[float] = []
        self.steps: list[float] = []
        self.outside: list[float] = []
        self._calls, self._calls_before, self._start, self._in_layers = calls, 0, 0.0, 0.0
        for module in llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.modules():
            if type(module).__name__ == "MoERunner":
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)
        self._step, llm.llm_engine.step = llm.llm_engine.step, self._timed_step

    def _enter(self, *_: Any) -> None:
        self._calls_before = self._calls()
        self._start = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        seconds = time.perf_counter() - self._start
        self._in_layers += seconds
        self.layers.append(seconds)
        if self._calls() > self._calls_before:
            self.layers_with_call.append(seconds)

    def _timed_step(self) -> Any:
        self._in_layers, start = 0.0, time.perf_counter()
        outputs = self._step()
        seconds = time.perf_counter() - start
        self.steps.append(seconds)
        self.outside.append(seconds - self._in_layers)
        return outputs

    def clear(self) -> None:
        for times in (self.layers, self.layers_with_call, self.steps, self.outside):
            times.clear()


def round_trips(client: Any, message: tuple[Any, ...], pause_s: float) -> list[float]:
    """The same Execute again and again, nothing computed beside it; this core stays busy in the pauses."""
    seconds = []
    for _ in range(ROUND_TRIPS):
        until = time.perf_counter() + pause_s
        while time.perf_counter() < until:
            pass
        start = time.perf_counter()
        client.finish_execute(client.begin_execute(*message))
        seconds.append(time.perf_counter() - start)
    return seconds


class Floor:
    """Bytes that each layer with a call reads, on either side, from its messages; and what limits reading them."""

    def __init__(self, controller: Any, batch: int) -> None:
        self._replica_bytes = controller.device.setup.expert_bytes
        self._shape = controller.worker.facts.shape
        self._pairs = batch * self._shape.top_k
        self._stream = NativeKernel(threads=1)
        self._data = np.ones(STREAM_BYTES, np.uint8)
        self.seconds_per_byte = float("inf")
        self.device_bytes: list[int] = []
        self.host_bytes: list[int] = []

    def note(self, experts: Any, bits: Any) -> None:
        read = set(zip(experts.tolist(), bits.tolist(), strict=True))
        self.device_bytes.append(sum(self._replica_bytes[width] for _, width in read))
        hot = self._pairs - len(experts)  # at batch 1 each is an expert of its own
        router = self._shape.router_weights * self._shape.dtype_bytes
        self.host_bytes.append(router + hot * self._shape.expert_bytes)

    def measure_bandwidth(self) -> None:
        for streams, prefetch in ((1, 2048), (2, 1024), (4, 512), (4, 1024)):
            start = time.thread_time()
            self._stream.read_stream(self._data, streams=streams, prefetch_bytes=prefetch)
            self.seconds_per_byte = min(self.seconds_per_byte, (time.thread_time() - start) / STREAM_BYTES)

    def us(self, bare_us: float) -> float:
        """Mean over the layers with a call since the last clear."""
        slower = [max(pair) for pair in zip(self.device_bytes, self.host_bytes, strict=True)]
        return 1e6 * statistics.mean(slower) * self.seconds_per_byte + bare_us

    def clear(self) -> None:
        self.device_bytes.clear()
        self.host_bytes.clear()


def without_experts(message: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same rows there and back, nothing computed."""
    return (*message[:4], *(part[:0] for part in message[4:]))


def run_arm(arguments: argparse.Namespace) -> None:
    """Measure once for each line that comes in."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # stock dies without it: patches/PROPOSALS.md, 11
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
    worker = llm.llm_engine.model_executor.driver_worker.worker
    client = worker.ndp.device.link.client if settings is not None else None
    floor = None if client is None or arguments.batch != 1 else Floor(worker.ndp, arguments.batch)
    last: list[tuple[Any, ...]] = []
    calls: list[float] = []  # when they were made
    if client is not None:
        begin = client.begin_execute

        def begin_and_note(*message: Any, **options: Any) -> Any:
            calls.append(time.perf_counter())
            if floor is not None:
                floor.note(message[5], message[6])
            last[:] = [tuple(part.copy() if hasattr(part, "copy") else part for part in message)]
            return begin(*message, **options)

        client.begin_execute = begin_and_note
    watch = Stopwatch(llm, lambda: len(calls))
    prompts = [{"prompt_token_ids": [5 + i, 90 + i, 700 + i, 33]} for i in range(arguments.batch)]
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)

    def measure(_: object) -> dict[str, float]:
        watch.clear()
        calls.clear()
        if floor is not None:
            floor.clear()
            floor.measure_bandwidth()
        if client is not None:
            client.begin_execute = begin_and_note
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        found = percentiles("layer", watch.layers) | percentiles("called_layer", watch.layers_with_call)
        found |= percentiles("step", watch.steps) | percentiles("outside", watch.outside)
        if client is not None and len(calls) > 1:
            client.begin_execute = begin
            pause_s = statistics.median(b - a for a, b in itertools.pairwise(calls))
            found |= percentiles("round_trip", round_trips(client, last[0], pause_s))
            found |= percentiles("back_to_back", round_trips(client, last[0], 0.0))
            found |= percentiles("bare", round_trips(client, without_experts(last[0]), pause_s))
            if floor is not None:
                for share in ("min", "p50"):
                    floor_us = floor.us(found["measured_bare_min_us"])
                    found[f"measured_over_floor_{share}"] = found[f"measured_called_layer_{share}_us"] / floor_us
                found["measured_floor_us"] = floor_us
        found["measured_tokens_per_s"] = arguments.batch * arguments.tokens / seconds
        return found

    answer(measure)


def start_arm(name: str, arguments: argparse.Namespace) -> Arm:
    """A process with its engine; it measures when it is asked."""
    command = [sys.executable, __file__, "--arm", name]
    for option in ("model", "batch", "tokens", "dtype"):
        command += [f"--{option}", str(getattr(arguments, option))]
    return Arm(command, OMP_NUM_THREADS="1")


def verdicts(arms: dict[str, dict[str, float]], share: str) -> dict[str, float]:
    """Over stock, in us, by the names of TARGETS; what was not run is left out."""
    stock, hot, half = (arms.get(name, {}) for name in ("stock", "all-hot", "half-hot-3-bit"))

    def difference(arm: dict[str, float], name: str) -> float:
        return arm.get(f"measured_{name}_{share}_us", float("nan")) - stock.get(
            f"measured_{name.removeprefix('called_')}_{share}_us", float("nan")
        )

    over = (
        difference(hot, "layer"),
        difference(half, "called_layer") - half.get(f"measured_round_trip_{share}_us", float("nan")),
        difference(hot, "outside"),
        difference(half, "outside"),
    )
    return {name: value for name, value in zip(TARGETS, over, strict=True) if value == value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "models" / "tiny-mixtral"))
    parser.add_argument("--shape", choices=SHAPES, metavar="NAME", help="instead: random experts of a published model")
    parser.add_argument("--layers", type=int, default=2, help="of --shape")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--arms", default=",".join(ARMS))
    add_json_option(parser)
    parser.add_argument("--arm", choices=tuple(ARMS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        run_arm(arguments)
        return
    measurement = Measurement(__doc__ or "")
    if arguments.shape:
        aside = tempfile.TemporaryDirectory(prefix=f"{arguments.shape}-")
        arguments.model = aside.name
        shape = SHAPES[arguments.shape]
        sizes = shape.hidden_size, shape.intermediate_size, arguments.layers, shape.num_experts, shape.top_k
        write(Path(aside.name), config_of(*sizes), 0)
    arms = arguments.arms.split(",")
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    loads = []
    processes = {name: start_arm(name, arguments) for name in arms}
    for _ in range(arguments.rounds):
        for name, process in processes.items():
            results[name].append(process.ask())
            loads.append(os.getloadavg()[0])
    for process in processes.values():
        process.close()
    load = statistics.median(loads)
    summary = {
        arm: {key: statistics.median(run[key] for run in runs if key in run) for key in sorted(set().union(*runs))}
        for arm, runs in results.items()
    }
    console = Console()
    table = Table(title=f"measured us, decode, batch {arguments.batch}, load {load:.1f}, min / p10 / p50")
    columns = ("layer", "called_layer", "round_trip", "step", "outside")
    for name in ("arm", *columns, "tokens/s"):
        table.add_column(name.replace("_", " "))
    for arm, found in summary.items():
        cells = [[found.get(f"measured_{name}_{share}_us") for share in ("min", "p10", "p50")] for name in columns]
        table.add_row(
            arm,
            *(
                "-" if None in cell else " / ".join(f"{value:.0f}" for value in cell if value is not None)
                for cell in cells
            ),
            f"{found['measured_tokens_per_s']:.0f}",
        )
    console.print(table)
    over = {}
    for share in ("min", "p10", "p50"):
        rounds = [verdicts({arm: runs[i] for arm, runs in results.items()}, share) for i in range(arguments.rounds)]
        over[share] = {
            name: round(statistics.median(found), 1)
            for name in TARGETS
            if (found := [values[name] for values in rounds if name in values])
        }
    table = Table(title="measured us over stock")
    for name in ("what", "min", "p10", "p50", "at most"):
        table.add_column(name)
    for name in over["p50"]:
        table.add_row(name, *(f"{over[share][name]:.0f}" for share in over), f"{TARGETS[name]:.0f}")
    console.print(table)
    for arm, found in summary.items():
        if "measured_floor_us" in found:
            console.print(
                f"{arm}: a layer with a call takes {found['measured_over_floor_min']:.2f} times (fastest) and "
                f"{found['measured_over_floor_p50']:.2f} times (median) its floor, {found['measured_floor_us']:.0f} us"
            )
    figures = {
        "batch": arguments.batch,
        "shape": arguments.shape,
        "rounds": arguments.rounds,
        "arms": summary,
        "measured_over_stock_us": over,
    }
    measurement.end(figures, arguments.json)


if __name__ == "__main__":
    main()
