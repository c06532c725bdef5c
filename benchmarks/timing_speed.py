"""How much CPU time does simulated time cost? Measured on this machine, one core.

The question of the timing model: an expert's 352 MB stream must take less than 50 ms of CPU, cold (constants taken
from the command-level controller first) and warm. Beside it: one whole command, and the controller itself.

    python benchmarks/timing_speed.py [--json FILE]

Prints a table, then one JSON object. Times are process CPU time, the best of several repetitions.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ndp_device.timing import dram as dram_timing
from ndp_device.timing.dram_controller import Controller, Idle
from ndp_device.timing.dram_map import StreamMap
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.shapes import public_shape, single_expert_work
from ndp_device.timing.spec import load_hardware

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measured import Measurement, add_json_option

STREAM_BYTES = 352_321_536
LIMIT_MS = 50.0


def cpu_ms(work: Callable[[], object], repetitions: int) -> float:
    best = float("inf")
    for _ in range(repetitions):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement = Measurement(__doc__)
    hardware = load_hardware("h100-ndp512")
    dram = hardware.dram
    lines = dram_timing.channel_lines(dram, STREAM_BYTES)
    variants = iter(
        replace(dram, refi=dram.refi + extra) for extra in range(1, 100)
    )  # not 0: the model below makes it warm

    def cold() -> None:
        dram_timing.stream(next(variants), lines, 123_456)  # constants are kept per device, so a new device each time

    model = DeviceModel(hardware)
    work = single_expert_work(public_shape("mixtral-8x7b"), 16, 1, 128)
    walk = 20_000
    results = {
        "stream_352mb_cold_ms": cpu_ms(cold, 5),
        "stream_352mb_warm_ms": cpu_ms(lambda: dram_timing.stream(dram, lines, 123_456), 200),
        "command_warm_ms": cpu_ms(lambda: model.execute(work, 10**15), 200),
        "controller_us_per_line": 1e3
        / walk
        * cpu_ms(lambda: Controller(dram, StreamMap(dram), Idle(5000), walk, skip=False).run(), 2),
        "controller_skipping_us_per_line": 1e3
        / walk
        * cpu_ms(lambda: Controller(dram, StreamMap(dram), Idle(5000), walk).run(), 2),
    }
    print(f"limit: a {STREAM_BYTES / 1e6:.0f} MB stream in {LIMIT_MS:.0f} ms of CPU\n")
    for name, value in results.items():
        print(f"{name:34s} {value:10.4f}")
    figures = {
        "within_limit": results["stream_352mb_cold_ms"] < LIMIT_MS,
        **{name: round(value, 5) for name, value in results.items()},
        "config_hash": hardware.config_hash,
    }
    measurement.end(figures, arguments.json)


if __name__ == "__main__":
    main()
