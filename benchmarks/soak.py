"""Does anything grow over a long night? Memory, descriptors and threads of server, engine and device as they serve.

`vllm serve` with the bundled model and its embedded device; clients ask all the time with prompts and lengths of every
kind, hang up in the middle now and then, and the device is killed every `--kill-every` seconds, for the first
`--kill-hours`: what a device itself takes shows only in one that is left alone. With `--pause` a run is a small load
beside other work. Everything so far goes to `--json FILE` at each sample, so that a run that is stopped is a run.

Growth is a line through the last two thirds: what a server takes once is not what it takes every hour. Its interval
(95 %) comes from the means of eight parts of that time, because neighbouring samples say the same thing twice.

    python benchmarks/soak.py --hours 72 --json soak.json [--clients 4] [--pause 3] [--kill-every 300] [--kill-hours 36]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measured import ROOT, Measurement, add_json_option

MODEL = ROOT / "models" / "tiny-mixtral"
NDP = {"replicas": str(ROOT / "models" / "tiny-mixtral-replicas"), "hot_experts": 2}
SERVE = [
    *(str(Path(sys.executable).parent / "vllm"), "serve", str(MODEL), "--served-model-name", "tiny"),
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32", "--host", "127.0.0.1"),
    *("--quantization", "ndp", "--additional-config", json.dumps({"ndp": NDP})),
]  # fmt: skip
READY_WITHIN_S = 900
PARTS, T95 = 8, 2.447  # of a line through eight points, which leaves six degrees of freedom
GOAL_MIB_PER_HOUR = 1.0
WORDS = ("def", "parse", "(line):", "return", "the", "sea", "static", "void", "CREATE", "TABLE", "orders", "{", "}")


class Clients:
    """Threads that ask as long as they are told, and count how it ended."""

    def __init__(self, port: int, count: int, *, model: str = "tiny", key: str = "", pause_s: float = 0.0) -> None:
        """pause_s: between two requests of a client, on average."""
        self._pause_s = pause_s
        self._port, self._model, self._key, self.ended = port, model, key, threading.Event()
        self.counted: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        while not self.ended.is_set():
            try:
                self.counted[self._one(rng)] += 1
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.counted[f"failed: {type(error).__name__}"] += 1
                self.ended.wait(1.0)
            self.ended.wait(2 * self._pause_s * rng.random())

    def _one(self, rng: random.Random) -> str:
        count, streams = rng.randrange(1, 64), rng.random() < 0.5
        prompt = " ".join(rng.choices(WORDS, k=rng.randrange(1, 120)))
        asked = {"model": self._model, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "stream": streams}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
            connection.request("POST", "/v1/completions", json.dumps(asked), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                return f"status {answer.status}"
            if streams and rng.random() < 0.1:
                answer.read(200)
                return "hung up"
            data = answer.read()
            self.counted["tokens"] += count
            return "answered" if streams or json.loads(data)["usage"]["completion_tokens"] == count else "short"
        finally:
            connection.close()


class Processes:
    """API server, engine and device by name, as they are now."""

    def __init__(self, server: int) -> None:
        self._server = psutil.Process(server)

    def now(self) -> dict[str, psutil.Process]:
        found = {"server": self._server}
        for child in self._server.children(recursive=True):
            with suppress(psutil.Error):
                words = " ".join(child.cmdline())
                if "ndp_device" in words:
                    found["device"] = child
                elif "EngineCore" in words or "EngineCore" in child.name():
                    found["engine"] = child
        return found

    def sample(self) -> dict[str, dict[str, float]]:
        taken = {}
        for name, process in self.now().items():
            with suppress(psutil.Error):
                memory, spent = process.memory_info(), process.cpu_times()
                taken[name] = {
                    "pid": process.pid, "rss_mib": round(memory.rss / 2**20, 2),
                    "own_mib": round((memory.rss - memory.shared) / 2**20, 2),  # without maps of files
                    "fds": process.num_fds(), "threads": process.num_threads(),
                    "cpu_s": round(spent.user + spent.system, 1),
                }  # fmt: skip
        return taken


def growth_per_hour(series: list[dict[str, Any]], name: str, what: str) -> dict[str, float] | None:
    """Slope of a line through the last two thirds of the samples of a process, of its present life; and its interval.

    None: there are too few samples.
    """
    points = [(sample["at_s"], sample[name]) for sample in series if name in sample]
    points = [(at_s, seen[what]) for at_s, seen in points if seen["pid"] == points[-1][1]["pid"]]
    points = points[len(points) // 3 :]
    if len(points) < PARTS:
        return None
    parts = [np.mean(part, axis=0) for part in np.array_split(np.array(points), PARTS)]
    hours, values = np.array(parts).T / [[3600], [1]]
    slope, level = np.polyfit(hours, values, 1)
    spread = float(np.sum((values - slope * hours - level) ** 2)) / (PARTS - 2)
    half = T95 * (spread / float(np.sum((hours - hours.mean()) ** 2))) ** 0.5
    return {
        "per_hour": round(float(slope), 3), "low": round(float(slope) - half, 3),
        "high": round(float(slope) + half, 3), "over_hours": round((points[-1][0] - points[0][0]) / 3600, 3),
    }  # fmt: skip


def watch(
    processes: Processes,
    clients: Clients,
    *,
    seconds: float,
    sample_s: float,
    kill_every_s: float = 0.0,
    kill_for_s: float = float("inf"),
    seen: Callable[[dict[str, Any]], object] = lambda figures: None,
) -> dict[str, Any]:
    """Sample for so long, or until interrupted; `seen` gets everything so far after each."""
    series: list[dict[str, Any]] = []
    kills, start, next_kill_s = 0, time.monotonic(), kill_every_s or float("inf")
    figures: dict[str, Any] = {}
    with suppress(KeyboardInterrupt):
        while (at_s := time.monotonic() - start) < seconds:
            series.append({"at_s": round(at_s, 1), **processes.sample(), "requests": dict(clients.counted)})
            seen(figures := found(series, kills))
            if next_kill_s < at_s < kill_for_s and "device" in (now := processes.now()):
                os.kill(now["device"].pid, signal.SIGKILL)
                kills, next_kill_s = kills + 1, at_s + kill_every_s
            time.sleep(min(sample_s, max(seconds - at_s, 0.1)))
    return figures


def found(series: list[dict[str, Any]], kills: int) -> dict[str, Any]:
    """What there is to say so far."""
    last = series[-1]
    return {
        "hours": round(last["at_s"] / 3600, 3), "kills": kills, "requests": last["requests"],
        "goal_mib_per_hour": GOAL_MIB_PER_HOUR,
        "growth": {
            name: {what: growth_per_hour(series, name, what) for what in ("rss_mib", "own_mib", "fds", "threads")}
            for name in ("server", "engine", "device") if name in last
        },
        "series": series,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=0.5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="of a client between two requests")
    parser.add_argument("--kill-every", type=float, default=0.0, metavar="SECONDS", help="0 = the device is left alone")
    parser.add_argument("--kill-hours", type=float, default=float("inf"), metavar="HOURS", help="then it is left alone")
    parser.add_argument("--sample", type=float, default=60.0, metavar="SECONDS")
    add_json_option(parser)
    given = parser.parse_args()
    measurement = Measurement(__doc__)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def keep(figures: dict[str, Any]) -> None:
        measurement.save(figures, given.json)
        print(json.dumps(figures["series"][-1]), flush=True)

    server = subprocess.Popen([*SERVE, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    clients: Clients | None = None
    try:
        wait_until_ready(server, port)
        clients = Clients(port, given.clients, pause_s=given.pause)
        figures = watch(
            Processes(server.pid), clients, seconds=given.hours * 3600, sample_s=given.sample,
            kill_every_s=given.kill_every, kill_for_s=given.kill_hours * 3600, seen=keep,
        )  # fmt: skip
    finally:
        if clients is not None:
            clients.close()
        server.terminate()
        server.wait(60)
    measurement.end(figures, given.json)


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < end:
        assert server.poll() is None, "vllm serve ended"
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(1.0)
    raise AssertionError(f"vllm serve was not ready within {READY_WITHIN_S} s")


if __name__ == "__main__":
    main()
