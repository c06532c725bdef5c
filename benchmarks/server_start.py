"""How long does `vllm serve` take until it answers: stock beside the plugin without settings, in turns.

    python benchmarks/server_start.py [--model MODEL --replicas REPLICAS] [--rounds 3]

From the command to the first 200 of /health, and to the first token of the first request. The first round is not
counted: it fills the system's file cache and measures prices that are kept for a machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from measured import ROOT, Measurement, add_json_option

VLLM = Path(sys.executable).parent / "vllm"
LIMIT_S = 180
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answered(url: str, question: dict[str, Any] | None = None) -> bool:
    data = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def start(model: Path, more: list[str]) -> dict[str, float]:
    """Seconds. Raises SystemExit for a server that does not come up."""
    port = free_port()
    command = [str(VLLM), "serve", str(model), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20), *more]
    began = time.monotonic()
    server = subprocess.Popen(command, env=QUIET | os.environ, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while not answered(f"http://127.0.0.1:{port}/health"):
            if server.poll() is not None or time.monotonic() > began + LIMIT_S:
                raise SystemExit(f"{' '.join(command)} did not come up: run it alone")
            time.sleep(0.05)
        ready = time.monotonic() - began
        question = {"model": str(model), "prompt": [5, 6, 7, 8], "max_tokens": 1}
        if not answered(f"http://127.0.0.1:{port}/v1/completions", question):
            raise SystemExit(f"{' '.join(command)} refused a request: run it alone")
        return {"ready_s": ready, "first_token_s": time.monotonic() - began}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/tiny-mixtral")
    parser.add_argument("--replicas", type=Path, default=ROOT / "models/tiny-mixtral-replicas")
    parser.add_argument("--rounds", type=int, default=3, help="that count, after one that does not")
    add_json_option(parser)
    given = parser.parse_args()
    settings = json.dumps({"ndp": {"replicas": str(given.replicas)}})
    ways = {"stock": [], "plugin": ["--quantization", "ndp", "--additional-config", settings]}
    measurement = Measurement(__doc__)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(given.rounds + 1):
        for name, more in ways.items():
            took = start(given.model, more)
            print(name, took, file=sys.stderr, flush=True)
            if number:
                rounds[name].append({key: round(value, 2) for key, value in took.items()})
    figures: dict[str, Any] = {"rounds": rounds}
    for key in ("ready_s", "first_token_s"):
        differences = [ours[key] - stock[key] for ours, stock in zip(rounds["plugin"], rounds["stock"], strict=True)]
        figures[f"stock_{key}"] = statistics.median(one[key] for one in rounds["stock"])
        figures[f"over_stock_{key}"] = round(statistics.median(differences), 2)
    measurement.end(figures, given.json)


if __name__ == "__main__":
    main()
