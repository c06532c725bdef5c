"""What does the host pay for an asynchronous decode layer with a cold pair, part by part, where no GPU computes?

    python benchmarks/asynchronous_layer.py                the host sends; the hot experts release the GIL for 150 us
    python benchmarks/asynchronous_layer.py --thread       the thread of C++ sends
    python benchmarks/asynchronous_layer.py --holds-gil    they hold it for 150 us, as launches from Python do
    python benchmarks/asynchronous_layer.py --turns 3      all four, in turns

Real are engine, layer, messenger, link, device process, shared memory, and the launches of our Triton kernels; batch 1,
half of the bundled model's experts hot. In place of the hot experts the host sleeps. In place of the GPU a driver
computes the two kernels (launches.c), so that the real driver's part of a launch is missing. `fixed` is the layer
less the hot experts. The bundled experts are so small that their message passes beside the hot ones.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from measured import ROOT, Measurement, add_json_option

MODEL, REPLICAS = ROOT / "models/tiny-mixtral", ROOT / "models/tiny-mixtral-replicas"
LIBRARY = ROOT / "build/figures/launches"
_BEGIN: dict[str, tuple[str, str]] = {"sidecar": ("begin", "noted")}
_END = {"sums": ("answered", "brought"), "add": ("brought", "added"), "account": ("added", "end")}
PARTS = {
    "host": {
        **_BEGIN,
        "split": ("noted", "split"),  # one launch
        "packet, send": ("split", "asked"),
        "hot experts": ("asked", "hot end"),
        "device": ("hot end", "answered"),  # what is left of its handling, and of both ways
        **_END,
    },
    "thread": {
        **_BEGIN,
        "order": ("noted", "ordered"),  # to the thread that sends
        "split": ("ordered", "split"),
        "hot experts": ("split", "hot end"),  # beside them the thread splits for the message, sends, takes the answer
        "crossed": ("hot end", "crossed"),  # what the thread has done
        "device": ("crossed", "answered"),
        **_END,
    },
}
"""Who sends -> name -> the stamps that it lies between."""
GPU = {"host": "asynchronous", "thread": "thread"}
"""Who sends -> the setting."""
_TIMER_SLACK = 29  # of prctl: sleeps end within a microsecond


class Stamps:
    """Times in ns of the layer that runs, by name; those of layers with an answer are kept."""

    def __init__(self) -> None:
        self.layers: list[dict[str, int]] = []
        self._now: dict[str, int] = {}

    def on(self, owner: Any, name: str, *, before: str = "", after: str = "") -> None:
        inner = getattr(owner, name)
        setattr(owner, name, self.stamped(inner, before, after))

    def stamped(self, inner: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if before:
                self._note(before)
            done = inner(*args, **kwargs)
            if after:
                self._note(after)
            return done

        return call

    def _note(self, name: str) -> None:
        if name == "begin":
            self._now = {}
        self._now[name] = time.perf_counter_ns()
        if name == "end" and "answered" in self._now and "added" in self._now:
            self.layers.append(self._now)


def watch(stamps: Stamps, driver: ctypes.CDLL) -> None:
    """Before the engine starts, whose layers bind these functions."""
    from vllm_ndp.integration import assembly, moe_layer, step
    from vllm_ndp.integration.cuda import kernels, layer, messenger, routing
    from vllm_ndp.integration.device_link import DeviceCall

    stamps.on(moe_layer.MoELayer, "_run_rows", before="begin", after="end")
    stamps.on(step.Step, "note_of", after="noted")
    known: list[bool] = []

    def launch(expert_map: Any, topk_ids: Any, topk_weights: Any, x: Any, *into: Any) -> None:
        if not known:
            driver.launches_set(topk_ids.shape[1], topk_ids.element_size(), x.element_size())
            known.append(True)
        kernels.split(expert_map, topk_ids, topk_weights, x, *into)

    split = stamps.stamped(launch, "", "split")
    add_rows = stamps.stamped(kernels.add_rows, "", "added")
    assembly.routing_by = lambda *, kernels: routing.Routing(split, add_rows, routing.take_answer)
    stamps.on(layer.AsideLayer, "_send_ahead", after="ordered")
    stamps.on(layer.AsideLayer, "_sent_ahead", after="crossed")
    stamps.on(layer.AsideLayer, "_ask", after="asked")
    stamps.on(messenger.Messenger, "bring", after="brought")
    stamps.on(layer.AsideLayer, "_run_hot", after="hot end")
    stamps.on(DeviceCall, "result", after="answered")


def launch_without_gpu() -> ctypes.CDLL:
    """Triton launches by launches.c from now on."""
    LIBRARY.mkdir(parents=True, exist_ok=True)
    path = LIBRARY / "libcuda.so.1"
    words = ["cc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", path, ROOT / "benchmarks/launches.c"]
    subprocess.run(words, check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(LIBRARY)
    driver = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)

    import triton
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    class Driver(CudaDriver):
        """Triton's, on a build of torch that knows no CUDA."""

        def __init__(self) -> None:
            self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device: 0
            self.get_device_capability = lambda device: (9, 0)

    triton.runtime.driver.set_active(Driver())
    return driver


def stand_in(microseconds: float, *, holds_gil: bool) -> None:
    """For the hot experts: takes so long, and gives zeros."""
    import torch

    from vllm_ndp.integration.hot_slots import CpuSlotKernel

    def run(self: object, x: torch.Tensor, *of_pairs: Any) -> torch.Tensor:
        if not holds_gil:
            time.sleep(microseconds / 1e6)
            return torch.zeros_like(x)
        until = time.perf_counter_ns() + int(microseconds * 1e3)
        while time.perf_counter_ns() < until:
            pass
        return torch.zeros_like(x)

    ctypes.CDLL(None).prctl(_TIMER_SLACK, 1000, 0, 0, 0)
    CpuSlotKernel.run = run  # type: ignore[method-assign]


def parts_of(layer: dict[str, int], parts: dict[str, tuple[str, str]]) -> dict[str, float]:
    """Microseconds of each part; of the whole layer; of all of it but the hot experts."""
    found = {name: (layer[end] - layer[start]) / 1e3 for name, (start, end) in parts.items()}
    whole = (layer["end"] - layer["begin"]) / 1e3
    return {**found, "fixed": whole - found["hot experts"], "layer": whole}


def run(stamps: Stamps, who: str, num_tokens: int, num_rounds: int) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    settings = {"hot_experts": 4, "debug": {"gpu": GPU[who]}, "execution": "paper", "replicas": str(REPLICAS)}
    llm = LLM(
        str(MODEL), quantization="ndp", additional_config={"ndp": settings | {"deadline_ms": 20_000.0}},
        enforce_eager=True, max_model_len=512, max_num_seqs=1, kv_cache_memory_bytes=64 << 20, dtype="bfloat16",
        disable_log_stats=True, enable_prefix_caching=False,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    generate = partial(llm.generate, [{"prompt_token_ids": [5, 90, 700, 33]}], params, use_tqdm=False)
    generate()
    stamps.layers.clear()
    rounds = []
    for _ in range(num_rounds):
        generate()
        rounds.append([parts_of(layer, PARTS[who]) for layer in stamps.layers])
        stamps.layers.clear()
    llm.llm_engine.engine_core.shutdown()
    return [_row(part, rounds) for part in (*PARTS[who], "fixed", "layer")]


def _row(part: str, rounds: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Of a round the median and the least tenth; of these the median round."""
    values = [sorted(layer[part] for layer in layers) for layers in rounds]
    middle = statistics.median(statistics.median(each) for each in values)
    least = statistics.median(each[len(each) // 10] for each in values)
    return {"part": part, "median_us": round(middle, 1), "tenth_us": round(least, 1)}


def in_turns(turns: int, options: list[str]) -> list[dict[str, Any]]:
    """Rows of both who send. Of the turns the one whose fixed part is the middle one: its parts belong together."""
    found = []
    for holds in ([], ["--holds-gil"]):
        runs: dict[str, list[dict[str, Any]]] = {"host": [], "thread": []}
        for _ in range(turns):
            for who, asked in (("host", []), ("thread", ["--thread"])):
                words = [sys.executable, __file__, *asked, *holds, *options]
                said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
                runs[who].append(json.loads(said.splitlines()[-1]))
        for who, of_turns in runs.items():
            by_fixed = sorted(of_turns, key=lambda run: _median_of(run, "fixed"))
            middle, fixed = by_fixed[turns // 2], [_median_of(run, "fixed") for run in by_fixed]
            parts = {row["part"]: row["median_us"] for row in middle["figures"]["results"]}
            row = {"sends": who, "holds_gil": bool(holds), "fixed_us_of_turns": fixed}
            found.append(row | {"us": parts})
    return found


def _median_of(run: dict[str, Any], part: str) -> float:
    return float(next(row["median_us"] for row in run["figures"]["results"] if row["part"] == part))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hot-us", type=float, default=150.0, help="time of the hot experts' stand-in")
    parser.add_argument("--holds-gil", action="store_true", help="while it runs, as a program that launches does")
    parser.add_argument("--thread", action="store_true", help="the thread sends, however few cores there are")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, metavar="N", help="both who send, lock released and held, N times each")
    add_json_option(parser)
    arguments = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    measurement, stamps = Measurement(__doc__), Stamps()
    if arguments.turns is not None:
        options = ["--tokens", str(arguments.tokens), "--rounds", str(arguments.rounds)]
        rows = in_turns(arguments.turns, options)
        measurement.end({"hot_us": arguments.hot_us, "turns": arguments.turns, "results": rows}, arguments.json)
        return
    driver = launch_without_gpu()
    from vllm_ndp.integration.cuda import messenger

    messenger.CORES = 1  # the thread sends, however few there are
    watch(stamps, driver)
    stand_in(arguments.hot_us, holds_gil=arguments.holds_gil)
    rows = run(stamps, "thread" if arguments.thread else "host", arguments.tokens, arguments.rounds)
    for row in rows:
        print(f"{row['part']:14s} {row['median_us']:8.1f} {row['tenth_us']:8.1f}")
    spin = os.environ.get("NDP_SPIN_US", "")
    holds = {"hot_us": arguments.hot_us, "holds_gil": arguments.holds_gil, "spin_us": spin}
    measurement.end({**holds, "results": rows}, arguments.json)


if __name__ == "__main__":
    main()
