"""How long does a device take to convert an expert from the file's bit planes, beside what its memory could do?

One Mixtral-8x7B expert (w1, w3 [14336, 4096], w2 [4096, 14336]: 176.2 M weights), from random planes in memory to
what the native kernel streams, into fresh memory as a device does. The ceiling is every byte read once and written
once at this machine's own read bandwidth; the system also clears every fresh page before it is written, which is
timed alone. Widths, paths and threads take turns; of each the fastest call, because neighbours only slow a call down.

    python benchmarks/prepare_expert.py [--isas avx512vnni,avx2,portable] [--threads 1,2] [--rounds 5]

Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ndp_device.experts.expert import NestedMatrix, QuantizedExpert, QuantizedMatrix
from ndp_device.kernels import _native
from ndp_device.kernels.native import NativeKernel

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measured import Measurement, add_json_option

HIDDEN, INTERMEDIATE, GROUP, BITS = 4096, 14336, 128, (4, 3, 2, 1)
STREAM_BYTES = 512 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap does not name it yet


def random_container(rng: np.random.Generator) -> dict[int, QuantizedExpert]:
    """The replicas of one expert, cut from one set of planes."""

    def matrix(rows: int, cols: int) -> dict[int, QuantizedMatrix]:
        planes = np.frombuffer(rng.bytes(4 * rows * cols // 8), np.uint8).reshape(4, rows, cols // 8)
        scale = np.full((rows, cols // GROUP), 0.01, np.float16)
        scales = np.stack([scale] * len(BITS))
        return NestedMatrix(tuple(BITS), planes, scales, scales, GROUP).by_width()

    w13, w2 = matrix(2 * INTERMEDIATE, HIDDEN), matrix(HIDDEN, INTERMEDIATE)
    return {bits: QuantizedExpert(bits, w13[bits], w2[bits]) for bits in BITS}


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU of all threads) in seconds. What the call returns is freed afterwards."""
    start, cpu = time.perf_counter(), time.process_time()
    result = call()
    times = time.perf_counter() - start, time.process_time() - cpu
    del result
    return times


def fresh_pages(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(MADV_POPULATE_WRITE)
    return memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    native = [isa for isa in _native.supported_isas() if "amx" not in isa]  # AMX converts as AVX-512 does
    parser.add_argument("--isas", default=",".join(native))
    parser.add_argument("--threads", default=f"1,{len(os.sched_getaffinity(0))}")
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    options = parser.parse_args()
    measurement = Measurement(__doc__)
    rng = np.random.default_rng(0)
    experts = [random_container(rng) for _ in range(2)]
    stream = np.ones(STREAM_BYTES, np.uint8)
    threads = sorted(set(map(int, options.threads.split(","))))
    kernels = {(isa, n): NativeKernel(isa=isa, threads=n) for isa in options.isas.split(",") for n in threads}
    best: dict[tuple[str, int, int], tuple[float, float]] = {}
    read = clear = float("inf")
    clear_bytes = 64 << 20
    for turn in range(options.rounds):
        reader = kernels[options.isas.split(",")[0], threads[0]]
        read = min(read, timed(lambda reader=reader: reader.read_stream(stream, streams=2, prefetch_bytes=1024))[1])
        clear = min(clear, timed(lambda: fresh_pages(clear_bytes))[1])
        for bits in BITS:
            for key, kernel in kernels.items():
                expert = experts[turn % len(experts)][bits]
                wall, cpu = timed(lambda kernel=kernel, expert=expert: kernel.prepare(expert))
                before = best.get((*key, bits), (wall, cpu))
                best[*key, bits] = min(wall, before[0]), min(cpu, before[1])
    limit, clears = STREAM_BYTES / read / 1e9, clear_bytes / clear / 1e9
    table = Table(title=f"read limit {limit:.1f} GB/s per core; fresh pages are cleared at {clears:.1f} GB/s")
    for column in ("path", "threads", "bits", "MB", "ms wall", "ms CPU", "floor ms CPU", "of it", "clearing ms CPU"):
        table.add_column(column, justify="right")
    rows = []
    for (isa, n, bits), (wall, cpu) in sorted(best.items(), key=lambda item: (item[0][0], item[0][1], -item[0][2])):
        num_bytes = experts[0][bits].nbytes
        floor, clearing = 2 * num_bytes / limit / 1e9, num_bytes / clears / 1e9
        row = {"isa": isa, "threads": n, "bits": bits, "bytes": num_bytes, "wall_ms": round(wall * 1e3, 2)}
        rows.append(row | {"cpu_ms": round(cpu * 1e3, 2), "floor_ms": round(floor * 1e3, 2)})
        cells = (isa, n, bits, f"{num_bytes / 1e6:.1f}", f"{wall * 1e3:.1f}", f"{cpu * 1e3:.1f}")
        cells += (f"{floor * 1e3:.1f}", f"{floor / cpu:.0%}", f"{clearing * 1e3:.1f}")
        table.add_row(*map(str, cells))
    Console().print(table)
    figures = {"read_gb_per_s": round(limit, 2), "clear_gb_per_s": round(clears, 2), "prepare": rows}
    measurement.end(figures, options.json)


if __name__ == "__main__":
    main()
