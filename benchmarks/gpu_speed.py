"""Pieces of gpu_check.py that take times: how fast it is beside what, what waits, and what lies beside what.

Speed is measured on random weights at the width of Mixtral-8x7B, which `wide` makes; in a dry run on the bundled model.
"""

from __future__ import annotations

import cProfile
import fcntl
import gzip
import io
import json
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_engines as engines
import gpu_timeline
from gpu_engines import HALF, MODEL, PATIENT_MS, PROMPTS, REPLICAS
from measured import ROOT
from pieces import LeftOutError, Row, Run

WIDE = Path(tempfile.gettempdir()) / "ndp-wide"
WIDE_REPLICAS = Path(tempfile.gettempdir()) / "ndp-wide-replicas"
PROBE_S = 45
"""Limit of a part of the probe."""
WIDE_LAYERS = 4
"""Random weights at the width of Mixtral-8x7B: 2.8 GB a layer."""
QUANTIZE = (sys.executable, "-c", "import sys; from vllm_ndp.app import main; sys.exit(main())", "quantize")

WAITS: dict[str, dict[str, Any] | None] = {
    "as it serves": HALF, "all hot": {"hot_experts": 8, "deadline_ms": PATIENT_MS}, "stock": None,
    "plain": {**HALF, "debug": {"gpu": "plain"}},
}  # fmt: skip


def waits(run: Run, way: str) -> list[Row]:
    """Host waits, copies and launches per layer and decode step, from the profiler; and the lines that wait."""
    if not engines.on_gpu():
        raise LeftOutError("what waits for a GPU is counted by the profiler of one; without: test_cuda_layer.py")
    import torch
    from torch.profiler import ProfilerActivity, profile

    llm = engines.engine(WAITS[way])
    engines.greedy(llm, PROMPTS[:1], 8)
    counts: dict[str, int] = {}
    for sign, tokens in ((-1, 2), (1, 34)):  # the difference is 32 decode steps, without prompt, start and end
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            engines.greedy(llm, PROMPTS[:1], tokens)
        kinds = ("cudaStreamSync", "cudaEventSync", "cudaDeviceSync", "cudaMemcpy", "cudaLaunch", "cuLaunch")
        for event in profiled.key_averages():
            if event.key.startswith(kinds):
                counts[event.key] = counts.get(event.key, 0) + sign * event.count
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        engines.greedy(llm, PROMPTS[:1], 2)
    torch.cuda.set_sync_debug_mode("default")
    (run.folder / f"gpu_waits_{way.replace(' ', '_')}.txt").write_text(where_time_goes(llm))
    engines.end(llm)
    per_layer = {key: round(count / 32 / 4, 2) for key, count in sorted(counts.items())}  # steps, layers
    return [{**per_layer, "waiting lines of a prompt and a step": waiting_lines(warned)}]


def where_time_goes(llm: Any, tokens: int = 64) -> str:
    """Functions of Python by their own time and with what they call, and operators by host and GPU time, of decode
    steps. Profilers add to what they count."""
    from torch.profiler import ProfilerActivity, profile

    timed, said = cProfile.Profile(), io.StringIO()
    start = time.perf_counter()
    engines.greedy(llm, PROMPTS[:1], tokens)
    said.write(f"{tokens} tokens in {time.perf_counter() - start:.4f} s without a profiler\n")
    timed.runcall(engines.greedy, llm, PROMPTS[:1], tokens)
    stats = pstats.Stats(timed, stream=said)
    stats.sort_stats("tottime").print_stats(45)
    stats.sort_stats("cumulative").print_stats(70)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        engines.greedy(llm, PROMPTS[:1], tokens)
    for by in ("self_cpu_time_total", "self_cuda_time_total"):
        said.write(profiled.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=60))
    return said.getvalue()


def waiting_lines(warned: list[warnings.WarningMessage]) -> dict[str, int]:
    """How often each line made the host wait, as torch warns of it, the most often first."""
    waits = [one for one in warned if "synchronizing CUDA operation" in str(one.message)]
    return dict(Counter(f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}" for one in waits).most_common())


def timeline(run: Run) -> dict[str, Any]:
    """How much of the packet's and the sums' copies, and of the device's time, lies beside the hot experts."""
    if not engines.on_gpu():
        raise LeftOutError("a timeline of copies beside kernels needs a GPU that runs both")
    from torch.profiler import ProfilerActivity, profile

    llm = engines.engine(HALF)
    engines.greedy(llm, PROMPTS, 8)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        engines.greedy(llm, PROMPTS, 9)
    engines.end(llm)
    path = run.folder / "gpu_timeline.trace.json.gz"  # ui.perfetto.dev opens it
    profiled.export_chrome_trace(str(path))
    with gzip.open(path, "rt") as file:
        return {"perfetto": path.name, **gpu_timeline.beside(json.load(file)["traceEvents"])}


SLOW = {"deadline_ms": PATIENT_MS, "execution": "paper"}
IN_PIECES = engines.IN_PIECES
WAYS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "4 of 8 hot in one graph": ({"hot_experts": 4, **SLOW}, engines.IN_ONE),
    "8 of 8 hot in one graph": ({"hot_experts": 8, **SLOW}, engines.IN_ONE),
    "stock with graphs": (None, {"enforce_eager": False}),
    "stock, half the experts offloaded": (None, {"cpu_offload_gb": WIDE_LAYERS * 4 * 0.33}),
    "4 of 8 hot": ({"hot_experts": 4, **SLOW}, {}),
    "stock": (None, {}),
    "8 of 8 hot": ({"hot_experts": 8, **SLOW}, {}),
    "4 of 8 hot in pieces": ({"hot_experts": 4, **SLOW}, IN_PIECES),
    "8 of 8 hot in pieces": ({"hot_experts": 8, **SLOW}, IN_PIECES),
    "stock in pieces": (None, IN_PIECES),
    "8 of 8 hot at 4 bits": ({"hot_experts": 8, "slot_bits": 4, **SLOW}, {}),
    "4 of 8 hot, plain": ({"hot_experts": 4, "debug": {"gpu": "plain"}, **SLOW}, {}),
    "8 of 8 hot at 8 bits": ({"hot_experts": 8, "slot_bits": 8, **SLOW}, {}),
    "6 of 8 hot": ({"hot_experts": 6, **SLOW}, {}),
    "2 of 8 hot": ({"hot_experts": 2, **SLOW}, {}),
}
"""What is timed: settings of the plugin, None = stock; options of the engine."""
FIRST = 7
"""So many of them in the first half hour."""
BATCHES = (1, 8, 32)


def wide(run: Run) -> dict[str, Any]:
    """The model that speed is measured on, and its replicas."""
    if run.dry:
        raise LeftOutError(f"{WIDE_LAYERS} layers at full width, 12 GB, are written where a GPU serves them")
    if not (took := make_wide()):
        raise LeftOutError("they are there already")
    return took


def make_wide() -> dict[str, Any]:
    """Once per machine: who comes while another process makes them waits for it. Empty where they were there."""
    with WIDE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if WIDE_REPLICAS.exists():
            return {}
        for folder in (WIDE, WIDE_REPLICAS):
            shutil.rmtree(folder, ignore_errors=True)
        start, aside = time.perf_counter(), WIDE_REPLICAS.with_suffix(".part")
        sizes = ["--hidden", "4096", "--intermediate", "14336", "--layers", str(WIDE_LAYERS), "--experts", "8"]
        subprocess.run([sys.executable, str(ROOT / "benchmarks/make_random_mixtral.py"), str(WIDE), *sizes], check=True)
        written = time.perf_counter()
        shutil.rmtree(aside, ignore_errors=True)
        subprocess.run([*QUANTIZE, str(WIDE), "--out", str(aside)], check=True)
        aside.rename(WIDE_REPLICAS)
    return {"write_s": round(written - start, 1), "quantize_s": round(time.perf_counter() - written, 1)}


def way_at_width(run: Run, way: str, **options: Any) -> Any:
    """An engine of the model for speed; in a dry run of the small one."""
    settings, of_way = WAYS[way]
    if settings is not None:
        settings = {**settings, "replicas": str(REPLICAS if run.dry else WIDE_REPLICAS)}
    if run.dry:
        return engines.engine(settings)
    make_wide()
    room = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 2 << 30}  # beside engines before it in this process
    return engines.engine(settings, WIDE, max_num_seqs=32, **room, **of_way, **options)


def speed(run: Run, way: str) -> list[Row]:
    """Tokens per second at real width: decode and prefill, by how many of the 8 experts are hot, beside stock."""
    llm, rows = way_at_width(run, way), list[Row]()
    for batch in BATCHES[: 1 if run.dry else None]:
        with round_trips() as taken:
            rows.append({"batch": batch, **tokens_per_second(llm, batch, run.dry)})
        if taken:
            rows[-1]["round_trip_us"] = round(statistics.median(taken) * 1e6, 1)
    engines.end(llm)
    return rows


@contextmanager
def round_trips() -> Iterator[list[float]]:
    """Of the device's messages, in seconds: sent, computed and in hand."""
    from vllm_ndp.integration.device_link import DeviceLink

    taken, take = list[float](), DeviceLink.take_round_trips

    def keep(link: DeviceLink) -> list[float]:
        found = take(link)
        taken.extend(found)
        return found

    DeviceLink.take_round_trips = keep  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        DeviceLink.take_round_trips = take  # type: ignore[method-assign]


def tokens_per_second(llm: Any, batch: int, dry: bool) -> dict[str, float | None]:
    """The better of two runs each; None where noise is larger than what decoding takes."""
    few, many = (2, 6) if dry else (8, 136)
    prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 4000 + 10 for j in range(32)]} for i in range(batch)]
    engines.greedy(llm, prompts, few)
    took = {}
    for tokens in (1, few, many):
        times = []
        for _ in range(2):
            start = time.perf_counter()
            engines.greedy(llm, prompts, tokens)
            times.append(time.perf_counter() - start)
        took[tokens] = min(times)
    decoding = took[many] - took[few]
    return {
        "decode": round(batch * (many - few) / decoding, 1) if decoding > 0 else None,
        "prefill": round(batch * 32 / took[1], 1),
    }


PROMPT_LENGTHS = (64, 512, 1536)
PREFILLED = ("stock", "4 of 8 hot", "stock, half the experts offloaded")


def prefill(run: Run, way: str) -> list[Row]:
    """First token of one prompt at real width, by its length; where experts are cold they stream to the GPU.

    What streams is counted from the plugin's sizes: every cold expert of every layer, once per prompt.
    """
    llm = way_at_width(run, way, max_model_len=2048, max_num_batched_tokens=2048)
    rows = []
    for length in PROMPT_LENGTHS[:1] if run.dry else PROMPT_LENGTHS:
        took = []
        for number in range(2 if run.dry else 5):
            prompt = {"prompt_token_ids": [(7 * i + 31 * number) % 4000 + 10 for i in range(length)]}
            start = time.perf_counter()
            engines.greedy(llm, [prompt], 1)
            took.append(time.perf_counter() - start)
        rows.append({"tokens": length, "first_token_ms": round(1000 * min(took[1:]), 1)})
    engines.end(llm)
    return rows


def quantizing(run: Run) -> dict[str, Any]:
    """`quantize` with text, on the GPU and on the host: how long, and whether both lose the same."""
    rows = []
    for device in ("cpu", "cuda") if engines.on_gpu() else ("cpu",):
        with tempfile.TemporaryDirectory() as folder:
            options = [
                "--calibration",
                str(MODEL / "calibration.txt"),
                "--device",
                device,
                "--samples",
                "8" if run.dry else "64",
            ]
            command = [*QUANTIZE, str(MODEL), "--out", f"{folder}/replicas", *options]
            if run.dry:
                command += ["--bits", "2"]
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)  # its words go to the log
        if done.returncode:
            raise RuntimeError(f"quantize ended with {done.returncode}: the lines before this one say why")
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append({"device": device, **{name: found[name] for name in ("experts", "seconds", "relative_loss")}})
    return {"results": rows}


PROBED = (
    "bandwidths,latencies,host rates,quantizing",
    "whole graph",
    "stream words",
    "host function",
    "registering",
)
"""Parts of the kit's probe: those that may hang or leave an error behind are processes of their own, and come last."""


def link(run: Run, way: str) -> list[Row]:
    """Rates and latencies of link, GPU memory and host, which become a preset beside the simulated ones."""
    if not engines.on_gpu():
        raise LeftOutError("the link that is measured is the one to a GPU")
    kit = ROOT / "benchmarks/gpu_kit/probe_gpu.py"
    words = [sys.executable, str(kit), "--part", way]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_S, check=False)
    print(done.stdout, done.stderr, sep="")  # to the log
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return [{"probed": json.loads(done.stdout.splitlines()[-1])}]
