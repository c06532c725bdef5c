"""Do two hosts share one device fairly, what does a small host pay beside a big one, and beside one with a fault?

Hosts are processes, the device is the program itself with the bundled model in full precision. Shares are of the
device's time: calls of a host times what one of them costs, which calls in turns say. Both hosts always have calls
waiting where shares are taken. The small host has one row in flight at a time. Phases take turns, so that the machine's
other work meets all of them alike.

A host with a fault sends what is no message as fast as it can, or only takes a core: what that costs is the machine's.
Rates of the small host beside it, and after it has gone, are over those before.

    python benchmarks/fairness_of_hosts.py [--only faulty] [--seconds 2] [--rounds 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from measured import ROOT, Measurement, add_json_option

from ndp_device.transport.address import INSECURE_LOOPBACK
from vllm_ndp.device.client import DeviceClient

MODEL = ROOT / "models" / "tiny-mixtral"
LAYERS, EXPERTS, HIDDEN = 4, 8, 128
IN_FLIGHT = 8
PAIRS_OF = {"equal": (1024, 1024), "unequal": (1024, 256)}
"""Rows of the two hosts' calls, each of which asks two experts. All calls that a host may have in flight must outlast
the other's one: a host whose queue runs empty meanwhile asks for less than its share, and gets it.
"""


def host(address: str, rows: int, in_flight: int, orders: Connection) -> None:
    """A process: calls for as many seconds as it is told, and says how long each call took, in us."""
    keys = Path(INSECURE_LOOPBACK) if address.startswith("tcp") else None
    client = DeviceClient(address, deadline_ms=60_000, keys=keys)
    client.connect(60)
    client.install_plan(1, np.full((LAYERS, EXPERTS), 16, np.uint8))
    client.activate_plan(1)
    x = np.ones((rows, HIDDEN), np.float32)
    pair_rows = np.repeat(np.arange(rows, dtype=np.int32), 2)
    experts = np.tile(np.arange(EXPERTS, dtype=np.int32), rows)[: 2 * rows]
    bits, gates = np.full(2 * rows, 16, np.uint8), np.full(2 * rows, 0.5, np.float32)
    orders.send("ready")
    while (seconds := orders.recv()) is not None:
        taken, waiting, end = [], deque[Any](), time.perf_counter() + seconds
        while time.perf_counter() < end or waiting:
            while len(waiting) < in_flight and time.perf_counter() < end:
                begun = time.perf_counter()
                waiting.append((begun, client.begin_execute(0, 0, 0, x, pair_rows, experts, bits, gates)))
            begun, handle = waiting.popleft()
            client.finish_execute(handle)
            if time.perf_counter() <= end:
                taken.append((time.perf_counter() - begun) * 1e6)
        orders.send(taken)
    client.close()


class Host:
    def __init__(self, address: str, *what: int, target: Callable[..., None] = host) -> None:
        """what: rows and calls in flight of a host that is well."""
        spawn = multiprocessing.get_context("spawn")
        self._orders, theirs = spawn.Pipe()
        self._process = spawn.Process(target=target, args=(address, *what, theirs), daemon=True)
        self._process.start()
        assert self._orders.recv() == "ready"

    def begin(self, seconds: float) -> None:
        self._orders.send(seconds)

    def end(self) -> list[float]:
        taken: list[float] = self._orders.recv()
        return taken

    def alone(self, seconds: float) -> list[float]:
        self.begin(seconds)
        return self.end()

    def close(self) -> None:
        self._orders.send(None)
        self._process.join(10)


def costs(address: str, rows: tuple[int, int], rounds: int) -> list[float]:
    """Milliseconds of a call of each size: calls in turns, so that both meet the machine's other work alike."""
    taken: list[list[float]] = [[], []]
    hosts = [Host(address, count, 1) for count in rows]
    for _ in range(3 * rounds):
        for one, found in zip(hosts, taken, strict=True):
            found += one.alone(0.3)
    for one in hosts:
        one.close()
    return [statistics.median(found) / 1e3 for found in taken]


def shares(address: str, rows: tuple[int, int], seconds: float, rounds: int) -> dict[str, Any]:
    """Of the device's time, each host's: its calls times what one costs."""
    cost_ms = [1.0, 1.0] if rows[0] == rows[1] else costs(address, rows, rounds)
    hosts = [Host(address, count, IN_FLIGHT) for count in rows]
    calls = [0, 0]
    for _ in range(rounds):
        for one in hosts:
            one.begin(2 * seconds)
        for number, one in enumerate(hosts):
            calls[number] += len(one.end())
    used = [count * cost for count, cost in zip(calls, cost_ms, strict=True)]
    for one in hosts:
        one.close()
    return {
        "rows": list(rows),
        "call_cost": round(cost_ms[0] / cost_ms[1], 3),  # of the first host's, in those of the second
        "calls": calls,
        "share": round(used[0] / sum(used), 4),
    }


def beside(address: str, big_rows: int, seconds: float, rounds: int) -> dict[str, Any]:
    """The small host's calls alone and beside a big host that always has calls waiting."""
    small, big = Host(address, 1, 1), Host(address, big_rows, IN_FLIGHT)
    alone, together, of_big = [], [], []
    for _ in range(rounds):
        alone += small.alone(seconds)
        of_big += big.alone(seconds)
        big.begin(2 * seconds)
        small.begin(1.5 * seconds)
        together += small.end()
        big.end()
    small.close()
    big.close()
    big_ms = 1e3 * rounds * seconds / len(of_big)
    return {
        "big_rows": big_rows,
        "big_call_ms": round(big_ms, 3),
        "alone_p50_us": round(statistics.median(alone), 1),
        "beside_mean_us": round(statistics.mean(together), 1),
        "beside_p50_us": round(statistics.median(together), 1),
        "beside_p99_us": round(float(np.percentile(together, 99)), 1),
        "beside_mean_in_big_calls": round(statistics.mean(together) / 1e3 / big_ms, 3),
        "calls": [len(alone), len(together)],
    }


def faulty(address: str, sends: bool, orders: Connection) -> None:
    """A process: for as many seconds as it is told it sends nonsense, or counts."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    nonsense = os.urandom(64), os.urandom(8192)
    orders.send("ready")
    while (seconds := orders.recv()) is not None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            with suppress(zmq.Again):
                if sends:
                    socket.send_multipart(nonsense, zmq.NOBLOCK)
        orders.send([])
    socket.close()


def beside_faulty(address: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Rates of the small host beside a faulty one and after it, over that before."""
    found: dict[str, Any] = {}
    for name, sends in (("a busy core", False), ("nonsense", True)):
        small, other = Host(address, 1, 1), Host(address, sends, target=faulty)
        during, after = [], []
        for _ in range(rounds):
            before = len(small.alone(seconds))
            other.begin(1.2 * seconds)
            during.append(len(small.alone(seconds)) / before)
            other.end()
            after.append(len(small.alone(seconds)) / before)
        small.close()
        other.close()
        found[name] = {"beside": round(statistics.median(during), 3), "after": round(statistics.median(after), 3)}
    return found


@contextmanager
def device(address: str, *options: str) -> Iterator[str]:
    """The program with the bundled model; where it listens."""
    words = [sys.executable, "-m", "ndp_device", "serve", str(MODEL), "--address", address, *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready["ready"]
    try:
        yield ready["address"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=("shares", "faulty"), help="half of it")
    add_json_option(parser)
    given = parser.parse_args()
    measurement, figures = Measurement(__doc__ or ""), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        path = f"ipc://{folder}/private/device"
        if given.only != "faulty":
            with device(path) as address:
                figures |= {name: shares(address, rows, given.seconds, given.rounds) for name, rows in PAIRS_OF.items()}
                figures["small beside big"] = beside(address, 1024, given.seconds, given.rounds)
        if given.only != "shares":
            for way, where, *options in (("ipc", path), ("tcp", "tcp://127.0.0.1:0", "--insecure-loopback")):
                with device(where, *options) as address:
                    figures[f"beside a faulty host, {way}"] = beside_faulty(address, given.seconds, given.rounds)
    for name, found in figures.items():
        print(f"{name:18} " + ", ".join(f"{key} {value}" for key, value in found.items()))
    measurement.end(figures, given.json)


if __name__ == "__main__":
    main()
