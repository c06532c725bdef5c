"""How close to the memory limit does an expert run at 4, 3, 2 and 1 bits?

One Mixtral-8x7B expert (w1, w3 [14336, 4096], w2 [4096, 14336], SwiGLU: 176.2 M weights), M tokens, one core. The limit
is this machine's own read bandwidth in the same run; the floor of a width is its bytes (codes, fp16 scale and offset
per 128 weights) at that bandwidth. Distinct experts take turns so that none stays in a cache; all contestants and the
bandwidth take turns too; times are thread CPU time, the smallest of all calls, because neighbours only ever slow a
call down. Beside every time stands its error against float64 over the same quantized weights (M = 1).

    python benchmarks/kernel_lowbit.py [--bits 4,3,2,1] [--tokens 1,4,16,128] [--rounds 3]
    python benchmarks/kernel_lowbit.py --forms avx2,avx512vnni [--tokens 1,4,16] [--rounds 3]

`--forms PATHS` measures stored forms instead, on the named paths in turns, in experts of 4096 x 2048.
`--threads 2` adds what a second core brings (M = 1, wall time, in turns with one thread, so only on a quiet machine).
`--gate` ends with exit code 1 where a ratio misses its target by more than a quarter; CI runs it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from ndp_device.calibration.data_free import dequantize
from ndp_device.checkpoint.values import MXFP4, NVFP4, StoredForm
from ndp_device.common.errors import ConfigError, NdpError
from ndp_device.common.widths import WIDTHS
from ndp_device.experts.expert import NestedMatrix, QuantizedExpert, QuantizedMatrix
from ndp_device.kernels.native import NativeExpert, NativeKernel
from vllm_ndp.operating.speed import random_expert as random_stored

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measured import Measurement, add_json_option

FORMS = (
    ("nested", 4, None),
    ("nested", 8, None),
    ("int4", 4, StoredForm("int4", 128)),
    ("int4 of 32", 4, StoredForm("int4", 32)),
    ("mxfp4", 4, MXFP4),
    ("nvfp4", 4, NVFP4),
    ("int8", 8, StoredForm("int8", 0)),
    ("fp8", 8, StoredForm("float8", 0)),
)
"""Name, bits, form. Integers with and without zero points have the same bytes and the same kernel."""
FORM_HIDDEN, FORM_INTERMEDIATE, FORM_BYTES = 4096, 2048, 2e8
HIDDEN, INTERMEDIATE, GROUP = 4096, 14336, 128
FOOTPRINT_BYTES = 1.2e9
STREAM_BYTES = 512 << 20
# Required fractions of the limit at M = 1 by (mode, bits), and how much faster 2 bits are than 4, on paths with VNNI.
WITH_TARGETS = ("amx", "avx512bf16", "avx512vnni")
"""Paths; others are bound by instructions."""
TARGETS = {
    **{("two_limb", bits): fraction for bits, fraction in {4: 0.85, 3: 0.65, 2: 0.74, 1: 0.50}.items()},
    **{("a8", bits): fraction for bits, fraction in {4: 0.85, 3: 0.78, 2: 0.80, 1: 0.63}.items()},
}
TWO_OVER_FOUR = 1.75
ERROR_LIMIT = 2e-4  # two limbs
SLACK = 0.75  # of a target, on machines with neighbours
RETRIES = 3  # of a gate that missed: its cases are measured again and the faster time counts
MODES = {"two_limb": 2, "a8": 1}
"""Limbs of activations; the library's choice by width is LIMBS."""


@dataclass
class Contestant:
    """`call(i)` computes with expert i of `num_experts`; a round makes `calls` calls."""

    name: str
    tokens: int
    call: Callable[[int], object]
    num_experts: int
    calls: int
    bits: int
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        for _ in range(self.calls):
            expert = len(self.seconds) % self.num_experts
            start = time.thread_time()
            self.call(expert)
            self.seconds.append(time.thread_time() - start)

    @property
    def ms(self) -> float:
        return 1e3 * min(self.seconds)


class Stream:
    """The limit: the best read bandwidth seen in this run, over numbers of streams and prefetch distances."""

    WAYS = ((1, 2048), (2, 1024), (2, 2048), (4, 512), (4, 1024))

    def __init__(self, kernel: NativeKernel) -> None:
        self._kernel = kernel
        self._data = np.ones(STREAM_BYTES, np.uint8)
        self.bytes_per_s = 0.0

    def run(self) -> None:
        for streams, prefetch in self.WAYS:
            start = time.thread_time()
            self._kernel.read_stream(self._data, streams=streams, prefetch_bytes=prefetch)
            self.bytes_per_s = max(self.bytes_per_s, STREAM_BYTES / (time.thread_time() - start))


def random_expert(rng: np.random.Generator, bits: int) -> QuantizedExpert:
    def matrix(rows: int, columns: int) -> QuantizedMatrix:
        planes = rng.integers(0, 256, (bits, rows, columns // 8), dtype=np.uint8)
        scale = (rng.random((rows, columns // GROUP), np.float32) + 0.5) / (2**bits * np.sqrt(columns))
        offset = -scale * (2**bits - 1) / 2
        return QuantizedMatrix(bits, planes, scale.astype(np.float16), offset.astype(np.float16), GROUP)

    return QuantizedExpert(bits, matrix(2 * INTERMEDIATE, HIDDEN), matrix(HIDDEN, INTERMEDIATE))


def copy_of(expert: QuantizedExpert) -> QuantizedExpert:
    """The same numbers at another place in memory, as a container of several widths has them."""
    w13, w2 = (
        NestedMatrix((m.bits,), m.planes.copy(), m.scale[None], m.offset[None], m.group_size).at(m.bits)
        for m in (expert.w13, expert.w2)
    )
    return QuantizedExpert(expert.bits, w13, w2)


def exact_row(expert: QuantizedExpert, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """W2 (silu(W1 x) * (W3 x)) in float64, some rows at a time: a whole expert would take 1.4 GB."""

    def times(m: QuantizedMatrix, v: NDArray[np.float64]) -> NDArray[np.float64]:
        y = []
        for start in range(0, m.shape[0], 1024):
            part = slice(start, start + 1024)
            block = QuantizedMatrix(m.bits, m.planes[:, part], m.scale[part], m.offset[part], m.group_size)
            y.append(dequantize(block).astype(np.float64) @ v)
        return np.concatenate(y)

    gate, up = np.split(times(expert.w13, x.astype(np.float64)), 2)
    return times(expert.w2, gate / (1 + np.exp(-gate)) * up)


def compute(kernel: NativeKernel, x: NDArray[np.float32], prepared: NativeExpert) -> NDArray[np.float32]:
    rows = np.arange(len(x), dtype=np.int32)
    return kernel.execute(x, [prepared], rows, np.zeros_like(rows), np.ones(len(x), np.float32))


def calls_per_round(tokens: int) -> int:
    return 8 if tokens == 1 else max(1, 16 // tokens)


def measure(bits: int, tokens: list[int], rounds: int, stream: Stream) -> list[dict[str, Any]]:
    """Rows of the table at this width."""
    rng = np.random.default_rng(bits)
    expert = random_expert(rng, bits)
    kernel, packer = NativeKernel(threads=1), NativeKernel()
    copies = [copy_of(expert) for _ in range(int(FOOTPRINT_BYTES // expert.nbytes) + 1)]
    prepared, seconds = {}, {}
    for mode, limbs in MODES.items():  # the second shares the first one's codes
        packer.limbs, started = {bits: limbs}, time.perf_counter()
        prepared[mode] = [packer.prepare(one) for one in copies]
        seconds[mode] = (time.perf_counter() - started) / len(copies)

    x = {m: rng.standard_normal((m, HIDDEN)).astype(np.float32) for m in {1, *tokens}}
    exact = exact_row(expert, x[1][0])
    errors = {
        mode: float(np.linalg.norm(compute(kernel, x[1], own[0])[0] - exact) / np.linalg.norm(exact))
        for mode, own in prepared.items()
    }

    def ours(mode: str, m: int) -> Contestant:
        own = prepared[mode]
        return Contestant(mode, m, lambda i: compute(kernel, x[m], own[i]), len(own), calls_per_round(m), bits)

    mine = [ours(mode, m) for mode in MODES for m in tokens]
    for _ in range(rounds):
        stream.run()
        for contestant in mine:
            contestant.run()
    return [
        {
            "mode": c.name,
            "bits": bits,
            "tokens": c.tokens,
            "ms": round(c.ms, 3),
            "expert_mb": round(expert.nbytes / 1e6, 1),
            "rel_error": float(f"{errors[c.name]:.2g}"),
            "prepare_s": round(max(seconds.values()), 2),
        }
        for c in mine
    ]


def measure_forms(isas: list[str], tokens: list[int], rounds: int, stream: Stream) -> list[dict[str, Any]]:
    """Rows of the table of stored forms."""
    rng, contestants = np.random.default_rng(0), []
    x = {m: rng.standard_normal((m, FORM_HIDDEN)).astype(np.float32) for m in tokens}
    for form, bits, stored in FORMS:
        expert = random_stored(FORM_HIDDEN, FORM_INTERMEDIATE, bits, stored)
        if isinstance(expert, QuantizedExpert) and stored is None and bits in WIDTHS:
            expert = copy_of(expert)
        nbytes = sum(part.nbytes for part in vars(expert).values() if hasattr(part, "nbytes"))
        experts = [copy.deepcopy(expert) for _ in range(int(FORM_BYTES // nbytes) + 1)]
        for isa in isas:
            kernel = NativeKernel(isa=isa, threads=1)
            own = [kernel.prepare(expert) for expert in experts]

            def call(i: int, m: int, kernel: NativeKernel = kernel, own: list[NativeExpert] = own) -> object:
                return compute(kernel, x[m], own[i])

            for m in tokens:
                run = functools.partial(call, m=m)
                contestant = Contestant(form, m, run, len(own), max(2, 8 // m), bits)
                contestants.append((isa, nbytes, contestant))
    for _ in range(rounds):
        stream.run()
        for _, _, contestant in contestants:
            contestant.run()
    return [
        {
            "form": c.name,
            "bits": c.bits,
            "isa": isa,
            "tokens": c.tokens,
            "ms": round(c.ms, 3),
            "expert_mb": round(nbytes / 1e6, 1),
        }
        for isa, nbytes, c in contestants
    ]


def print_forms(limit: float, results: list[dict[str, Any]]) -> None:
    print(f"limit {limit / 1e9:.2f} GB/s\n{'form':12}{'bits':>5} {'path':12}{'M':>4}{'ms':>9}{'of limit':>10}")
    for r in results:
        print(f"{r['form']:12}{r['bits']:5} {r['isa']:12}{r['tokens']:4}{r['ms']:9.2f}{r['fraction_of_limit']:10.2f}")


def second_core(bits: int, threads: int, rounds: int) -> dict[str, Any]:
    """Wall time of one row with 1 and with `threads` threads, in turns over the same experts."""
    rng = np.random.default_rng(bits)
    expert = random_expert(rng, bits)
    kernels = [NativeKernel(threads=count) for count in (1, threads)]
    prepared = [kernels[1].prepare(copy_of(expert)) for _ in range(int(FOOTPRINT_BYTES // expert.nbytes) + 1)]
    x = rng.standard_normal((1, HIDDEN)).astype(np.float32)
    best = [float("inf"), float("inf")]
    for index in range(8 * rounds):
        for side, kernel in enumerate(kernels):
            start = time.perf_counter()
            compute(kernel, x, prepared[(2 * index + side) % len(prepared)])
            best[side] = min(best[side], time.perf_counter() - start)
    ms = [round(1e3 * seconds, 3) for seconds in best]
    return {"bits": bits, "threads": threads, "ms_one": ms[0], "ms": ms[1], "speedup": round(best[0] / best[1], 2)}


def set_fractions(results: list[dict[str, Any]], stream: Stream) -> None:
    for row in results:
        floor_ms = row["expert_mb"] * 1e9 / stream.bytes_per_s
        row["fraction_of_limit"] = round(floor_ms / row["ms"], 3)


def keep_faster(results: list[dict[str, Any]], again: list[dict[str, Any]]) -> None:
    """Take the smaller time of two measurements of a case: a neighbour can make one slower, nothing makes it faster."""
    cases = {(row["mode"], row["bits"], row["tokens"]): row for row in results}
    for row in again:
        case = cases[row["mode"], row["bits"], row["tokens"]]
        case["ms"] = min(case["ms"], row["ms"])


def shortfalls(isa: str, results: list[dict[str, Any]]) -> list[str]:
    """A sentence for each ratio below its target with slack."""
    if isa not in WITH_TARGETS:
        return []
    ones = {(r["mode"], r["bits"]): r for r in results if r["tokens"] == 1}
    wanted = [(f"{mode} {bits}-bit, fraction of the limit", ones[mode, bits]["fraction_of_limit"], TARGETS[mode, bits])
              for mode, bits in ones]  # fmt: skip
    if {("two_limb", 4), ("two_limb", 2)} <= set(ones):
        ratio = ones["two_limb", 4]["ms"] / ones["two_limb", 2]["ms"]
        wanted.append(("4-bit time over 2-bit time", round(ratio, 2), TWO_OVER_FOUR))
    found = [
        f"{what}: {came} came, {target} is the target, {SLACK * target:.2f} the gate"
        for what, came, target in wanted
        if came < SLACK * target
    ]
    found += [
        f"two_limb {bits}-bit: error {row['rel_error']:.1e} is above {ERROR_LIMIT:.0e}"
        for (mode, bits), row in ones.items()
        if mode == "two_limb" and row["rel_error"] > ERROR_LIMIT
    ]
    return found


def print_table(limit: float, results: list[dict[str, Any]]) -> None:
    print(f"limit {limit / 1e9:.2f} GB/s (best read of {STREAM_BYTES >> 20} MiB in this run, one core)\n")
    print(f"{'':14}{'bits':>5}{'M':>5}{'ms':>10}{'floor':>8}{'x floor':>9}{'of limit':>10}{'error':>10}")
    for r in results:
        floor = r["expert_mb"] * 1e9 / limit
        print(
            f"{r['mode']:14}{r['bits']:5}{r['tokens']:5}{r['ms']:10.2f}{floor:8.2f}{r['ms'] / floor:9.2f}"
            f"{r['fraction_of_limit']:10.2f}{r['rel_error']:10.1e}"
        )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=numbers, default=[4, 3, 2, 1])
    parser.add_argument("--tokens", type=numbers, default=[1, 4, 16, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--forms", type=lambda text: text.split(","), metavar="PATHS", help="measure stored forms on these"
    )
    parser.add_argument("--threads", type=int, default=1, help="also measure one row with so many threads")
    parser.add_argument("--gate", action="store_true", help="exit 1 where a ratio misses its target by a quarter")
    add_json_option(parser)
    arguments = parser.parse_args()
    if not set(arguments.bits) <= {1, 2, 3, 4} or min(*arguments.tokens, arguments.rounds, arguments.threads) < 1:
        raise ConfigError("--bits must be among 1, 2, 3, 4; --tokens, --rounds and --threads at least 1")
    if arguments.gate and 1 not in arguments.tokens:
        raise ConfigError(f"--gate looks at one token, --tokens {arguments.tokens} has none: add 1")
    stream = Stream(NativeKernel(threads=1))
    measurement = Measurement(__doc__)
    results: list[dict[str, Any]] = []
    if arguments.forms:
        results = measure_forms(arguments.forms, arguments.tokens, arguments.rounds, stream)
        set_fractions(results, stream)
        print_forms(stream.bytes_per_s, results)
        measurement.end({"limit_gb_per_s": round(stream.bytes_per_s / 1e9, 2), "results": results}, arguments.json)
        return 0
    for bits in arguments.bits:
        results += measure(bits, arguments.tokens, arguments.rounds, stream)
        print(f"{bits} bits done", file=sys.stderr)
    isa = NativeKernel(threads=1).isa
    set_fractions(results, stream)
    for _ in range(RETRIES if arguments.gate else 0):
        if not shortfalls(isa, results):
            break
        again = [row for bits in arguments.bits for row in measure(bits, [1], arguments.rounds, stream)]
        keep_faster(results, again)
        set_fractions(results, stream)
    print_table(stream.bytes_per_s, results)
    scaling = [second_core(b, arguments.threads, arguments.rounds) for b in arguments.bits if arguments.threads > 1]
    for row in scaling:
        print(f"{row['bits']} bits, {row['threads']} threads: {row['ms']} ms, {row['speedup']}x one thread (wall)")
    missed = shortfalls(isa, results) if arguments.gate else []
    for sentence in missed:
        print(f"gate: {sentence}")
    if arguments.gate:
        print("gate: no targets on this path" if isa not in WITH_TARGETS else f"gate: {len(missed)} missed")
    figures = {
        "isa": isa,
        "limit_gb_per_s": round(stream.bytes_per_s / 1e9, 2),
        "results": results,
        "scaling": scaling,
    }
    measurement.end(figures, arguments.json)
    return 1 if missed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NdpError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
