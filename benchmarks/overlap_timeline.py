"""Do the two halves of a layer run at the same time? Measured spans of the engine and of the device, on one time axis.

    python benchmarks/overlap_timeline.py [--model DIR] [--hot-experts K] [--batch 1] [--out FILE] [--json FILE]

The engine's spans are taken around sending, the hot experts and collecting, the device's around each request it
serves; both processes read CLOCK_MONOTONIC. `--out` writes them for ui.perfetto.dev. `--json` keeps the figures and
the spans of one decode step, which docs/decode-step.svg shows: of the steps that ask the device most often the
shortest. `hidden` is the part of the device's time that passed while the engine did something else than wait. Where
the device is the slower half, `wait` is what remains of the device's time after the hot experts. Layers without a
cold pair are not counted. Everything here is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measured import Measurement, add_json_option
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
ENGINE, DEVICE = 1, 2
NAMES = {ENGINE: "engine: one MoE layer after the other", DEVICE: "device process"}

Spans = list[tuple[str, int, int]]  # name, start and end in ns of CLOCK_MONOTONIC


def timed(spans: Spans, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.monotonic_ns()
        try:
            return function(*args, **kwargs)
        finally:
            spans.append((name, start, time.monotonic_ns()))

    return call


def serve(arguments: argparse.Namespace) -> None:
    """The device process: ndp_device as it is, with a stopwatch around each request."""
    from ndp_device.config import DeviceConfig
    from ndp_device.handler import Handler
    from ndp_device.server import Server
    from ndp_device.transport import listen

    spans: Spans = []
    config = DeviceConfig(address=arguments.serve, model_dir=arguments.model, replicas_dir=arguments.replicas)
    transport = listen(config.address)
    handler = Handler.from_config(config)
    handler.reply = timed(spans, "cold experts", handler.reply)  # type: ignore[method-assign]
    print("ready", flush=True)
    Server(transport, handler).run()
    transport.close()
    print(json.dumps(spans), flush=True)


def run_engine(arguments: argparse.Namespace, address: str) -> Spans:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    from vllm_ndp.integration.device_link import DeviceCall, DeviceLink
    from vllm_ndp.integration.hot_slots import CpuSlotKernel
    from vllm_ndp.integration.moe_layer import MoELayer
    from vllm_ndp.integration.worker import NdpWorker

    settings: dict[str, Any] = {"device": address, "hot_experts": arguments.hot_experts, "avg_bits": arguments.avg_bits}
    settings |= {"execution": "paper"} | ({"replicas": str(arguments.replicas)} if arguments.replicas else {})
    llm = LLM(
        str(arguments.model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=arguments.batch,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
        enable_prefix_caching=False,
        quantization="ndp",
        additional_config={"ndp": settings},
    )
    prompts = [{"prompt_token_ids": [5 + i, 90 + i, 700 + i, 33]} for i in range(arguments.batch)]
    spans: Spans = []
    for owner, method, name in (
        (NdpWorker, "execute_model", "step"),
        (MoELayer, "forward", "layer"),
        (DeviceLink, "start", "send"),
        (CpuSlotKernel, "fused", "hot experts"),
        (DeviceCall, "result", "wait"),
    ):
        setattr(owner, method, timed(spans, name, getattr(owner, method)))
    params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return spans


def layers_of(engine: Spans, device: Spans) -> list[dict[str, float]]:
    """Per layer with a message: us of each part, of the device, and of the device while the engine did not wait."""
    out = []
    served = sorted((start, end) for _, start, end in device)
    layer = [(start, end) for name, start, end in engine if name == "layer"]
    parts = sorted((start, end, name) for name, start, end in engine if name not in ("layer", "step"))
    at = 0
    for start, end in layer:
        row = dict.fromkeys(("send", "hot experts", "wait"), 0.0)
        waited = None
        while at < len(parts) and parts[at][1] <= end:
            part_start, part_end, name = parts[at]
            row[name] += (part_end - part_start) / 1e3
            waited = part_start if name == "wait" else waited
            at += 1
        inside = [span for span in served if start <= span[0] and span[1] <= end]
        if waited is None or not inside:
            continue
        busy = sum(b - a for a, b in inside)
        hidden = sum(max(min(b, waited) - a, 0) for a, b in inside)
        out.append(row | {"layer": (end - start) / 1e3, "device": busy / 1e3, "hidden": hidden / busy})
    return out


def shortest_step(engine: Spans, device: Spans) -> dict[str, Any]:
    """Spans of the shortest step among those that ask the device most often, in us from the step's start."""
    steps = [(start, end) for name, start, end in engine if name == "step"]
    messages = [(start, end) for name, start, end in engine if name == "send"]

    def rank(step: tuple[int, int]) -> tuple[int, int]:
        asked = sum(step[0] <= start and end <= step[1] for start, end in messages)
        return -asked, step[1] - step[0]

    begin, end = min(steps[1:], key=rank)  # the first is the prompts'

    def inside(spans: Spans) -> list[tuple[str, float, float]]:
        found = sorted((start, -stop, name) for name, start, stop in spans if begin <= start and stop <= end)
        return [(name, round((start - begin) / 1e3, 1), round((-stop - begin) / 1e3, 1)) for start, stop, name in found]

    return {"engine": inside(engine), "device": inside(device)}


def chrome_trace(engine: Spans, device: Spans) -> dict[str, Any]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
        for track, name in NAMES.items()
    ]
    events.append({"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "measured"}})
    for track, spans in ((ENGINE, engine), (DEVICE, device)):
        events += [
            {"ph": "X", "pid": 1, "tid": track, "name": name, "ts": start / 1e3, "dur": (end - start) / 1e3}
            for name, start, end in spans
        ]
    return {"traceEvents": events}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny-mixtral")
    parser.add_argument("--replicas", type=Path)
    parser.add_argument("--hot-experts", type=int, default=4)
    parser.add_argument("--avg-bits", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    add_json_option(parser)
    arguments = parser.parse_args()
    if arguments.replicas is None and (beside := Path(f"{arguments.model}-replicas")).is_dir():
        arguments.replicas = beside
    if arguments.serve:
        serve(arguments)
        return
    measurement = Measurement(__doc__)
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="ndp-") as directory:
        address = f"ipc://{directory}/device"
        command = [sys.executable, __file__, "--serve", address, "--model", str(arguments.model)]
        command += ["--replicas", str(arguments.replicas)] if arguments.replicas else []
        if len(cores) > 1:
            command = ["taskset", "-c", str(cores[-1]), *command]
            os.sched_setaffinity(0, cores[:-1])
        os.environ["OMP_NUM_THREADS"] = str(max(len(cores) - 1, 1))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        try:
            engine = run_engine(arguments, address)
        finally:
            process.send_signal(signal.SIGTERM)
        device: Spans = [tuple(span) for span in json.loads(process.stdout.readlines()[-1])]
        process.wait()
    os.sched_setaffinity(0, cores)
    rows = layers_of(engine, device)
    rows = rows[len(rows) // 8 :]  # the first calls warm up
    if not rows:
        raise SystemExit("no layer had a cold pair in decode: lower --hot-experts")
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    table = Table(title=f"measured us per layer with a message, median of {len(rows)}, load {os.getloadavg()[0]:.1f}")
    for name in median:
        table.add_column(name, justify="right")
    table.add_row(*(f"{value:.2f}" if name == "hidden" else f"{value:.0f}" for name, value in median.items()))
    Console().print(table)
    if arguments.out:
        arguments.out.write_text(json.dumps(chrome_trace(engine, device)))
    summary = {f"measured_{name.replace(' ', '_')}_us": round(value, 1) for name, value in median.items()}
    summary["hidden"] = round(median["hidden"], 3)
    summary.pop("measured_hidden_us")
    figures = {"layers": len(rows), "batch": arguments.batch, **summary, "step": shortest_step(engine, device)}
    measurement.end(figures, arguments.json)


if __name__ == "__main__":
    main()
