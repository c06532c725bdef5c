"""A burst on a server: 64 clients ask at once for streams, every second one leaves in the middle, and the device gets
kill -9 each time it is up and a further part of all tokens has come.
"""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
from served_model import Server, complete, get, get_json
from until import until

PATIENCE_S = 300.0
WORDS = ("def", "parse", "(line):", "return", "the", "sea", "static", "void", "CREATE", "TABLE", "orders", "{", "}")


@dataclass
class Stream:
    """What a client wants and what it got."""

    name: str
    prompt: str
    tokens: int
    leaves_after: int | None  # tokens
    received: int = 0
    prompt_tokens: int = 0

    @property
    def wanted(self) -> int:
        return self.tokens if self.leaves_after is None else self.leaves_after

    def read(self, server: Server) -> None:
        """Until it is whole or its client leaves."""
        usage = {"include_usage": True, "continuous_usage_stats": True}
        headers = {"X-Request-Id": self.name}
        asked = {"max_tokens": self.tokens, "stream_options": usage, "extra_headers": headers}
        with complete(server, self.prompt, stream=True, **asked) as chunks:
            for chunk in chunks:
                if chunk.usage:
                    self.received, self.prompt_tokens = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
                if self.leaves_after is not None and self.received >= self.leaves_after:
                    return


def streams(count: int, tokens: int, seed: int) -> list[Stream]:
    """Every second one leaves in the middle."""
    rng = random.Random(seed)
    return [
        Stream(
            name=f"burst-{seed}-{number}",
            prompt=f"{number} " + " ".join(rng.choices(WORDS, k=rng.randrange(1, 120))),
            tokens=tokens,
            leaves_after=rng.randrange(1, tokens * 3 // 4) if number % 2 else None,
        )
        for number in range(count)
    ]


def read_all(server: Server, count: int, tokens: int, kills: int) -> list[Stream]:
    """All at once. Where a device is slow to come back, as on a busy machine, eight more come until it was killed so
    often."""
    some = streams(count, tokens, kills)
    wanted, ended, killed = sum(stream.wanted for stream in some), threading.Event(), list[int]()

    def kill() -> None:
        while len(killed) < kills and not ended.wait(0.05):
            came, device = sum(stream.received for stream in some), device_of(server)
            is_next = came * (kills + 1) > wanted * (len(killed) + 1)
            if is_next and device["state"] == "up" and device["pid"] not in killed:
                os.kill(device["pid"], signal.SIGKILL)
                killed.append(device["pid"])

    killer, end = threading.Thread(target=kill), time.monotonic() + PATIENCE_S
    killer.start()
    try:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda stream: stream.read(server), some))
            while len(killed) < kills:
                assert time.monotonic() < end, "the device did not come back"
                more = streams(8, tokens, len(some) << 24)
                some += more
                list(pool.map(lambda stream: stream.read(server), more))
    finally:
        ended.set()
        killer.join()
    return some


def device_of(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = get_json(server, "/v1/ndp/status")["workers"][0]["device"]
    return found


def report_of_server(server: Server, stream: Stream) -> dict[str, Any]:
    """What the server tells of the request once it has ended; vLLM may still have to hear that its client left."""
    until(lambda: '"finish"' in get(server, f"/v1/ndp/requests/{stream.name}")[1], PATIENCE_S, told=lambda: stream)
    (report,) = get_json(server, f"/v1/ndp/requests/{stream.name}")["finished"].values()
    return dict(report)


def is_open(server: Server) -> dict[str, int]:
    """Descriptors and threads of API server and engine, and their processes."""
    root, found = psutil.Process(server.process.pid), {}
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            if "ndp_device" not in process.cmdline():
                found |= {f"{process.pid} fds": process.num_fds(), f"{process.pid} threads": process.num_threads()}
    return found
