"""Does every pair of a burst add up while half its clients leave and the device is killed three times?

`vllm serve` with the bundled model and its embedded device. 64 clients ask at once for streams; every second one leaves
in the middle, at a random token. Meanwhile the device gets kill -9 each time it is up and a further part of all tokens
has come. Three accounts of pairs by kind are compared: the requests' reports, `/metrics`, and the workers' totals. Each
must be rows x top-k x layers, of decode and of prompts; a whole stream's rows must be those that its client counted.

Then: no request still runs, no descriptor, thread or process is left over, and nothing outlives the server.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from engines import ROOT
from prometheus_client.parser import text_string_to_metric_families

from vllm_ndp.integration.report import DECODE_KINDS, PAIR_KINDS, PHASES, PROMPT_KINDS

REPLICAS = ROOT / "models" / "tiny-mixtral-replicas"
PREFILL = ("split", "auto")  # in turns: prompts on the device as well, or as it finds best
SERVE = [
    *(str(Path(sys.executable).parent / "vllm"), "serve", str(ROOT / "models" / "tiny-mixtral")),
    *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
    *("--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32", "--host", "127.0.0.1"),
    *("--no-enable-prefix-caching", "--middleware", "vllm_ndp.integration.serving.routes.NdpRoutes"),
    *("--shutdown-timeout", "30", "--quantization", "ndp"),
]  # fmt: skip
PATIENCE_S = 300.0
READY_WITHIN_S = 900
WORDS = ("def", "parse", "(line):", "return", "the", "sea", "static", "void", "CREATE", "TABLE", "orders", "{", "}")
KINDS = {"decode": DECODE_KINDS, "prompt": PROMPT_KINDS}
COUNTED = [f"{kind}_pairs" for kind in PAIR_KINDS] + [f"{phase}_rows" for phase in PHASES]
Counts = dict[str, int]


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


@dataclass
class Stream:
    """What a client wants and what it got."""

    name: str
    prompt: str
    tokens: int
    leaves_after: int | None  # tokens
    received: int = 0
    prompt_tokens: int = 0
    ended: str = "running"  # left, whole, short, or what failed
    report: dict[str, Any] = field(default_factory=dict)  # inside the stream

    @property
    def wanted(self) -> int:
        return self.tokens if self.leaves_after is None else self.leaves_after


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


@contextmanager
def asked(port: int, path: str, body: Mapping[str, Any] | None = None, **headers: str) -> Iterator[Any]:
    """The answer to a GET, or to a POST where there is a body; the connection ends with the block."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        method = "GET" if body is None else "POST"
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"} | headers)
        yield connection.getresponse()
    finally:
        connection.close()


def get_json(port: int, path: str) -> dict[str, Any]:
    with asked(port, path) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def read(port: int, stream: Stream) -> None:
    """Until it is whole or its client leaves."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "prompt": stream.prompt, "max_tokens": stream.tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": usage}
    headers = {"X-Request-Id": stream.name, "X-NDP-Report": "1"}
    try:
        with asked(port, "/v1/completions", body, **headers) as answer:
            stream.ended = _read_lines(answer, stream)
    except (OSError, http.client.HTTPException, ValueError) as error:
        stream.ended = f"failed: {type(error).__name__}: {error}"


def _read_lines(answer: Any, stream: Stream) -> str:
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if chunk.get("object") == "ndp.report":
            (stream.report,) = chunk["ndp"].values()
        elif chunk.get("usage"):
            stream.received = chunk["usage"]["completion_tokens"]
            stream.prompt_tokens = chunk["usage"]["prompt_tokens"]
        if stream.leaves_after is not None and stream.received >= stream.leaves_after:
            return "left"
    return "whole" if stream.received == stream.tokens and stream.report else "short"


class Killer:
    """kill -9 of the device each time that a further part of all wanted tokens has come, once it is up again."""

    def __init__(self, port: int, all_streams: list[Stream], kills: int) -> None:
        self.killed: list[int] = []
        self._port, self._streams, self._kills = port, all_streams, kills
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        wanted = sum(stream.wanted for stream in self._streams)
        while len(self.killed) < self._kills and not self._ended.wait(0.05):
            came = sum(stream.received for stream in self._streams)
            device = device_of(self._port)
            is_next = came * (self._kills + 1) > wanted * (len(self.killed) + 1)
            if is_next and device["state"] == "up" and device["pid"] not in self.killed:
                os.kill(device["pid"], signal.SIGKILL)
                self.killed.append(device["pid"])


def device_of(port: int) -> dict[str, Any]:
    found: dict[str, Any] = get_json(port, "/v1/ndp/status")["workers"][0]["device"]
    return found


def pairs_per_row(port: int) -> int:
    effective = get_json(port, "/v1/ndp/status")["workers"][0]["effective"]
    return int(effective["moe_layers"] * effective["top_k"])


def totals(port: int) -> Counter[str]:
    """Pairs by kind, rows by phase and causes of fallbacks since the start, as the worker tells them."""
    (worker,) = get_json(port, "/v1/ndp/status")["workers"]
    causes = {f"cause {cause}": count for cause, count in worker["totals"]["fallback_causes"].items()}
    return Counter({name: worker["totals"][name] for name in COUNTED} | causes)


def metrics(port: int) -> Counter[str]:
    """The same from /metrics; `requests`: that have ended."""
    counts: Counter[str] = Counter()
    with asked(port, "/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
        for sample in (sample for family in families for sample in family.samples):
            for metric, label, name in (
                ("vllm:ndp_pairs_total", "where", "{}_pairs"),
                ("vllm:ndp_rows_total", "phase", "{}_rows"),
                ("vllm:ndp_fallback_causes_total", "cause", "cause {}"),
                ("vllm:ndp_requests_total", "finish", "requests"),
            ):
                if sample.name == metric:
                    counts[name.format(sample.labels[label])] += sample.value
    return counts


def reports_of(port: int, all_streams: list[Stream]) -> list[dict[str, Any]]:
    """What the server tells of each request, in order; {} of one it does not know."""
    found = [get_json(port, f"/v1/ndp/requests/{stream.name}").get("finished", {}) for stream in all_streams]
    return [next(iter(told.values()), {}) for told in found]


def wait_until(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not (so := is_so()) and time.monotonic() < end:
        time.sleep(0.1)
    return so


@dataclass
class Accounts:
    """Of pairs and rows: what the worker's totals and /metrics say so far."""

    totals: Counter[str]
    metrics: Counter[str]

    @classmethod
    def now(cls, port: int) -> Accounts:
        return cls(totals(port), metrics(port))

    def since(self, before: Accounts) -> dict[str, Counts]:
        return {"totals": minus(self.totals, before.totals), "metrics": minus(self.metrics, before.metrics)}


def minus(after: Counter[str], before: Counter[str]) -> Counts:
    return {name: int(count - before[name]) for name, count in after.items()}


def measure(port: int, server: int, all_streams: list[Stream], kills: int) -> dict[str, Any]:
    """One burst on a server with nothing else to do."""
    warm_up(port, len(all_streams))
    processes, begun_s = Processes(server), time.monotonic()
    open_before, before = processes.sample(), Accounts.now(port)
    killed = read_all(port, all_streams, kills)
    seconds = time.monotonic() - begun_s
    wait_until(lambda: metrics(port)["requests"] - before.metrics["requests"] >= len(all_streams))
    accounts = Accounts.now(port).since(before)
    reports = reports_of(port, all_streams)
    figures = {
        "asked": dict(Counter("whole" if stream.leaves_after is None else "left" for stream in all_streams)),
        "ends": dict(Counter(stream.ended for stream in all_streams)), "kills": killed, "seconds": round(seconds, 1),
        "still_running": len(get_json(port, "/v1/ndp/status")["running"]),
        "pairs_per_row": pairs_per_row(port),
        "accounts": {"reports": summed(reports)} | accounts,
        "wrong": wrong(all_streams, reports, accounts, pairs_per_row(port)),
        "serves_again": serves_again(port),
    }  # fmt: skip
    time.sleep(2.0)  # vLLM closes connections of clients that left meanwhile
    return figures | {"left_over": left_over(open_before, processes.sample())}


def warm_up(port: int, count: int) -> None:
    """What a server takes once for so many clients."""
    few = streams(count, 4, 1 << 20)
    read_all(port, few, 0)
    assert wait_until(lambda: not get_json(port, "/v1/ndp/status")["running"]), "the first requests did not end"
    time.sleep(2.0)


def read_all(port: int, all_streams: list[Stream], kills: int) -> int:
    """All at once; how many devices were killed meanwhile.

    Where a device is slow to come back, as on a busy machine, eight more streams come until it was killed so often.
    """
    killer, end = Killer(port, all_streams, kills), time.monotonic() + PATIENCE_S
    try:
        with ThreadPoolExecutor(len(all_streams)) as pool:
            list(pool.map(lambda stream: read(port, stream), all_streams))
            while len(killer.killed) < kills and time.monotonic() < end:
                more = streams(8, all_streams[0].tokens, len(all_streams) << 24)
                all_streams += more
                list(pool.map(lambda stream: read(port, stream), more))
    finally:
        killer.close()
    return len(killer.killed)


def summed(reports: list[dict[str, Any]]) -> Counts:
    return {name: sum(report.get(name, 0) for report in reports) for name in COUNTED}


def wrong(
    all_streams: list[Stream], reports: list[dict[str, Any]], accounts: Mapping[str, Counts], per_row: int
) -> list[str]:
    """Whatever does not add up, in words."""
    found = [f"{stream.name}: {what}" for stream, report in zip(all_streams, reports, strict=True)
             for what in wrong_of_request(stream, report, per_row)]  # fmt: skip
    told = summed(reports)
    for account, counts in accounts.items():
        found += [f"{account}: {what}" for what in wrong_sums(counts, per_row)]
        found += [f"{name}: {counts[name]} in {account}, {told[name]} in reports"
                  for name in COUNTED if counts[name] != told[name]]  # fmt: skip
    return found


def wrong_of_request(stream: Stream, report: dict[str, Any], per_row: int) -> list[str]:
    if not report:
        return ["no report"]
    found = wrong_sums(report, per_row)
    rows = report["decode_rows"], report["prompt_rows"]
    if stream.ended == "whole" and rows != (stream.tokens - 1, stream.prompt_tokens):
        found.append(f"rows {rows}, its client counted {stream.tokens - 1, stream.prompt_tokens}")
    if stream.ended == "whole" and any(stream.report[name] != report[name] for name in COUNTED):
        found.append("the stream's report is another than the server's")
    if stream.ended == "left" and (report["finish"] != "aborted" or rows[0] < stream.received - 1):
        found.append(f"{report['finish']} after {rows[0]} decode rows, its client left after {stream.received} tokens")
    return found


def wrong_sums(counts: Mapping[str, Any], per_row: int) -> list[str]:
    """Kinds of a phase that are not rows x top-k x layers."""
    sums = {phase: sum(counts[f"{kind}_pairs"] for kind in kinds) for phase, kinds in KINDS.items()}
    return [
        f"{pairs} pairs of {phase}, {counts[f'{phase}_rows']} rows x {per_row}"
        for phase, pairs in sums.items() if pairs != counts[f"{phase}_rows"] * per_row
    ]  # fmt: skip


def serves_again(port: int) -> bool:
    """Whether the device does, once requests come: nobody asks for it where an engine takes no step."""

    def is_up() -> bool:
        (one,) = streams(1, 4, 1 << 21)
        read(port, one)
        return one.ended == "whole" and device_of(port)["state"] == "up" and one.report["cold_pairs"] > 0

    return wait_until(is_up)


def left_over(before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]) -> dict[str, Counts]:
    """Descriptors and threads more than before, of each process."""
    return {
        name: {what: int(now[what] - before[name][what]) for what in ("fds", "threads")} for name, now in after.items()
    }


def burst(requests: int, tokens: int, kills: int, seed: int) -> dict[str, Any]:
    """A server, a burst, and what there is of it after SIGTERM. Its log is shown where something was not right."""
    with (
        socket.socket() as free,
        tempfile.TemporaryDirectory(prefix="run-") as runtime,
        tempfile.TemporaryFile() as log,
    ):
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ndp = {"replicas": str(REPLICAS), "hot_experts": 2, "prefill": PREFILL[seed % len(PREFILL)]}
        command = [*SERVE, "--port", str(port), "--additional-config", json.dumps({"ndp": ndp})]
        environment = os.environ | {"XDG_RUNTIME_DIR": runtime}
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(server, port)
            figures = measure(port, server.pid, streams(requests, tokens, seed), kills)
            figures |= after_its_end(server, Path(runtime))
        finally:
            server.kill()
            server.wait()
        figures["not_as_it_should_be"] = verdict(figures, kills)
        if figures["not_as_it_should_be"]:
            log.seek(0)
            print(log.read().decode(errors="replace"), file=sys.stderr)
        return figures


def after_its_end(server: subprocess.Popen[bytes], runtime: Path) -> dict[str, Any]:
    """Processes and files that outlive a server which SIGTERM ended; `exit` is None where it did not end."""
    below = psutil.Process(server.pid).children(recursive=True)
    server.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(PATIENCE_S)
    _, alive = psutil.wait_procs(below, timeout=60)
    wait_until(lambda: not list(runtime.iterdir()))
    return {"exit": server.poll(), "outlive": len(alive), "files_left": len(list(runtime.iterdir()))}


def verdict(figures: dict[str, Any], kills: int) -> list[str]:
    """What was not as it should be."""
    expected = {
        "ends": figures["asked"], "kills": kills, "still_running": 0, "wrong": [], "serves_again": True,
        "exit": 0, "outlive": 0, "files_left": 0,
    }  # fmt: skip
    return [f"{name}: {figures[name]}, not {value}" for name, value in expected.items() if figures[name] != value]
