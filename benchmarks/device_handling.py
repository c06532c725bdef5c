"""How long does the device take for one Execute, its kernel apart? Measured on this machine, one core.

From the two frames of a request to the two frames of its reply: decode, check against the session, find the experts,
simulated time, encode. Routing is random, another layer and later submit time in each request, as decode sends them.
Limit: 40 us. Each figure is the median over all requests, and the lowest of several rounds of it beside it.

    free      a kernel that computes nothing
    native    the reply with the native kernel, less the time inside its kernel call
    model     of it, DeviceModel.execute for the same works

    python benchmarks/device_handling.py [--requests N] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.config import DeviceConfig
from ndp_device.handler import Handler
from ndp_device.protocol import codec
from ndp_device.protocol import messages as msg
from ndp_device.replicas.store import ExpertStore
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import ExpertWork, Work

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_random_mixtral import config_of, write
from measured import Measurement, add_json_option

ROOT = Path(__file__).resolve().parent.parent
TINY, TINY_REPLICAS = ROOT / "models" / "tiny-mixtral", ROOT / "models" / "tiny-mixtral-replicas"
LIMIT_US = 40.0
CLIENT = b"benchmark"


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    top_k: int
    widths: tuple[int, ...]  # of which each expert has one at random, as in a plan


@dataclass(frozen=True)
class Request:
    """One Execute as it arrives, and what its simulated time is computed from."""

    frames: tuple[bytes, bytes]
    work: Work
    submit_ps: int


class TimedKernel:
    """The native kernel, and how long its last call took."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.last_ns = kernel, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def execute(self, *arguments: Any) -> NDArray[np.float32]:
        start = time.perf_counter_ns()
        y: NDArray[np.float32] = self._kernel.execute(*arguments)
        self.last_ns = time.perf_counter_ns() - start
        return y


class FreeKernel:
    """The native kernel, but nothing is computed."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def execute(self, x: NDArray[np.float32], *_: object) -> NDArray[np.float32]:
        return np.empty(x.shape, np.float32)


def new_handler(model: Path, replicas: Path | None, *, free: bool) -> Handler:
    handler = Handler.from_config(DeviceConfig("ipc:///benchmark", model, replicas, kernel="native"))
    handler._kernel = (FreeKernel if free else TimedKernel)(handler._kernel)  # type: ignore[assignment]
    shape = next(iter(handler._shelves)).store.shape
    plan = np.full((shape.num_layers, shape.num_experts), 31 if replicas else 16, np.uint8)
    for request, tensors in (
        (msg.Hello(1, versions=(msg.VERSION, msg.VERSION), client="benchmark"), None),
        (msg.InstallPlan(2, epoch=1, expected_epoch=0), {"replicas": plan}),
        (msg.ActivatePlan(3, epoch=1), None),
    ):
        answer, _ = codec.decode_reply(*handler.reply(CLIENT, codec.encode(request, tensors)))
        assert not isinstance(answer, msg.Refusal), answer
    return handler


def requests_of(case: Case, handler: Handler, count: int) -> list[Request]:
    rng = np.random.default_rng(0)
    store: ExpertStore = next(iter(handler._shelves)).store
    shape = store.shape
    bits_of = rng.choice(case.widths, (shape.num_layers, shape.num_experts))
    requests = []
    for number in range(count):
        layer, submit_ps = number % shape.num_layers, number * 50_000_000
        x = rng.standard_normal((case.rows, shape.hidden_size), np.float32)
        rows = np.repeat(np.arange(case.rows, dtype=np.int32), case.top_k)
        experts = np.concatenate([rng.permutation(shape.num_experts)[: case.top_k] for _ in range(case.rows)])
        bits = bits_of[layer, experts]
        gates = rng.uniform(0, 1, len(rows)).astype(np.float32)
        execute = msg.Execute(10 + number, epoch=1, layer=layer, step=number, submit_ps=submit_ps, ttl_us=1_000_000)
        tensors = {
            "x": x,
            "pair_rows": rows,
            "pair_experts": experts.astype(np.int32),
            "pair_bits": bits.astype(np.uint8),
            "gates": gates,
        }
        header, body = codec.encode(execute, tensors)
        distinct = list(dict.fromkeys(zip(experts.tolist(), bits.tolist(), strict=True)))
        index = np.array([distinct.index(pair) for pair in zip(experts.tolist(), bits.tolist(), strict=True)], np.int32)
        works = [
            ExpertWork(layer, expert, width, int((index == at).sum()), store.expert_bytes(layer, expert, width))
            for at, (expert, width) in enumerate(distinct)
        ]
        activations = case.rows * shape.hidden_size * 4
        work = Work(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            group_size=store.group_size,
            tokens=case.rows,
            bytes_in=activations + 13 * len(rows),
            bytes_out=activations,
            experts=tuple(works),
        )
        requests.append(Request((header, bytes(body)), work, submit_ps))
    return requests


def median_us(call: Callable[[Request], object], requests: Sequence[Request]) -> float:
    times = []
    for request in requests:
        start = time.perf_counter_ns()
        call(request)
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def measure(case: Case, model: Path, replicas: Path | None, num_requests: int, rounds: int) -> dict[str, list[float]]:
    free, native = (new_handler(model, replicas, free=free) for free in (True, False))
    hardware = load_hardware()
    requests = requests_of(case, native, num_requests)
    for request in requests:  # what a run asks again and again is known after its first second
        free.reply(CLIENT, request.frames)
    found: dict[str, list[float]] = {"free": [], "native": [], "model": []}
    for _ in range(rounds):
        found["free"].append(median_us(lambda r: free.reply(CLIENT, r.frames), requests))
        model_of = DeviceModel(hardware)
        for request in requests:
            model_of.execute(request.work, request.submit_ps)
        found["model"].append(median_us(lambda r, m=model_of: m.execute(r.work, r.submit_ps + 10**13), requests))
        apart = []
        for request in requests:
            start = time.perf_counter_ns()
            native.reply(CLIENT, request.frames)
            apart.append(time.perf_counter_ns() - start - native._kernel.last_ns)  # type: ignore[attr-defined]
        found["native"].append(statistics.median(apart) / 1e3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement = Measurement(__doc__)
    results: dict[str, dict[str, dict[str, float]]] = {}
    print(f"limit {LIMIT_US:.0f} us; microseconds, median of the rounds (lowest)\n")
    print(f"{'':34s} {'free':>16s} {'native':>16s} {'model':>16s}")
    with tempfile.TemporaryDirectory() as directory:
        wide = Path(directory) / "wide"
        write(wide, config_of(2048, 32, 1, 128, 8), 0)  # narrow experts: their bytes do not matter here
        for case, model, replicas in (
            (Case("tiny-mixtral, 1 row x 2 pairs", 1, 2, (1, 2, 3, 4)), TINY, TINY_REPLICAS),
            (Case("tiny-mixtral, 8 rows x 2 pairs", 8, 2, (1, 2, 3, 4)), TINY, TINY_REPLICAS),
            (Case("128 experts, 1 row x 8 pairs", 1, 8, (16,)), wide, None),
            (Case("128 experts, 8 rows x 8 pairs", 8, 8, (16,)), wide, None),
        ):
            found = measure(case, model, replicas, arguments.requests, arguments.rounds)
            results[case.name] = {
                name: {"median_us": round(statistics.median(times), 1), "lowest_us": round(min(times), 1)}
                for name, times in found.items()
            }
            cells = [f"{cell['median_us']:.1f} ({cell['lowest_us']:.1f})" for cell in results[case.name].values()]
            print(f"{case.name:34s} " + " ".join(f"{cell:>16s}" for cell in cells), flush=True)
    worst = max(cells["free"]["median_us"] for cells in results.values())
    measurement.end({"limit_us": LIMIT_US, "worst_free_us": worst, "cases": results}, arguments.json)


if __name__ == "__main__":
    main()
