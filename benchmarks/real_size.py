"""What does a person with a box without a GPU get from a model of today's size, with nothing set?

    python tests/checkpoints/make_real_size.py gpt-oss-20b MODEL     its layout, random weights, 13.8 GB
    python benchmarks/real_size.py MODEL --json FILE

`vllm serve MODEL --quantization ndp` twice: the first start makes replicas in an empty cache, the second finds them.
Then prompts and decode of one request and of eight, and four streams while a prompt of 2048 tokens arrives. The
server's own forecast stands beside what was measured. A quiet machine, as much disk again as the model has.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from measured import Measurement, add_json_option

PORT = 8471
CACHES = ("NDP_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
"""Empty before the first start: replicas, and what vLLM and torch compile."""
EXPECTED = re.compile(r"first token of a prompt of 64 after ([\d.]+) s, then ([\d.]+) tokens/s")


@contextmanager
def server(model: Path, cache: Path, found: dict[str, Any], name: str) -> Iterator[psutil.Process]:
    """Notes how long it takes until it is ready, and what it says at its start."""
    begun, log = time.monotonic(), cache / f"{name}.log"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--quantization", "ndp"]
    options = ["--max-model-len", "4096", "--skip-tokenizer-init", "--port", str(PORT)]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *options],
            env=os.environ | dict.fromkeys(CACHES, str(cache)) | {"HF_HUB_OFFLINE": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        while not _is_ready():
            if process.poll() is not None:
                raise SystemExit(f"the server ended:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        found[f"measured_ready_{name}_s"] = time.monotonic() - begun
        said = [line.split("vllm-ndp: ", 1)[1] for line in log.read_text().splitlines() if "vllm-ndp: " in line]
        found["said"] = [line for line in said if line.startswith(("sized", "expected", "by hand"))]
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def stream(model: Path, prompt: int, tokens: int) -> list[float]:
    """When the request was sent, and when each token came."""
    body = {"model": str(model), "prompt": [random.randrange(3, 4000) for _ in range(prompt)], "max_tokens": tokens}
    body |= {"ignore_eos": True, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times = [time.monotonic()]
    with urllib.request.urlopen(request, timeout=1800) as answer:
        times += [time.monotonic() for line in answer if line.startswith(b"data: {")]
    return times


def one_request(model: Path) -> dict[str, float]:
    stream(model, 64, 8)
    alone = [stream(model, 64, 64) for _ in range(3)]
    long = min(times[1] - times[0] for times in (stream(model, 512, 1) for _ in range(2)))
    return {
        "measured_first_token_s": statistics.median(times[1] - times[0] for times in alone),
        "measured_decode_tokens_per_s": statistics.median((len(t) - 2) / (t[-1] - t[1]) for t in alone),
        "measured_prefill_512_tokens_per_s": 512 / long,
    }


def eight_requests(model: Path) -> dict[str, float]:
    with ThreadPoolExecutor(8) as threads:
        streams = list(threads.map(lambda _: stream(model, 32, 48), range(8)))
    first, last = max(times[1] for times in streams), min(times[-1] for times in streams)
    tokens = sum(first < at <= last for times in streams for at in times[1:])
    return {"measured_decode_batch_8_tokens_per_s": tokens / (last - first)}


def beside_a_long_prompt(model: Path) -> dict[str, float]:
    alone = stream(model, 2048, 1)
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(stream, model, 32, 160) for _ in range(4)]
        time.sleep(10)
        long = stream(model, 2048, 1)
        streams = [one.result() for one in running]
    begun = max(times[1] for times in streams)
    quiet = sorted(b - a for t in streams for a, b in pairwise(t[1:]) if begun <= a and b <= long[0])
    beside = sorted(b - a for t in streams for a, b in pairwise(t[1:]) if long[0] <= b <= long[1])
    return {
        "measured_itl_quiet_p99_s": quiet[int(0.99 * (len(quiet) - 1))],
        "measured_itl_beside_p99_s": beside[int(0.99 * (len(beside) - 1))],
        "measured_first_token_2048_s": alone[1] - alone[0],
        "measured_first_token_2048_beside_s": long[1] - long[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    add_json_option(parser)
    arguments = parser.parse_args()
    measurement = Measurement(__doc__)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="real-size-") as cache:
        with server(arguments.model, Path(cache), found, "first"):
            pass
        with server(arguments.model, Path(cache), found, "again") as process:
            for part in (one_request, eight_requests, beside_a_long_prompt):
                found |= part(arguments.model)
                print(json.dumps(found), flush=True)
            family = [process, *process.children(recursive=True)]
            found["measured_held_bytes"] = sum(one.memory_full_info().uss for one in family)
    if expected := EXPECTED.search(" ".join(found["said"])):
        found["forecast_over_measured_first_token"] = float(expected[1]) / found["measured_first_token_s"]
        found["forecast_over_measured_decode"] = float(expected[2]) / found["measured_decode_tokens_per_s"]
    measurement.end(found, arguments.json)


if __name__ == "__main__":
    main()
