"""A `vllm serve` as a process of its own, and how a client asks it: completions, chats, plain GETs, metrics, reports.

Knows how to start and to end a server; which options it has is its test's. Knows no test.
"""

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
from engines import MODEL, PATIENCE_S, VLLM_PROGRAM, check_pairs
from prometheus_client.parser import text_string_to_metric_families
from until import until

from vllm_ndp.integration.report import PHASES
from vllm_ndp.layer.split import PAIR_KINDS

NAME = "tiny-mixtral"
KEY = "a key of this server"
TOKENS = 12
PAIRS_PER_ROW = 4 * 2


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    device: psutil.Process
    client: openai.OpenAI
    address: str
    runtime_dir: Path
    log: Path


@contextmanager
def serving(
    settings: Mapping[str, Any], options: Sequence[Any], port: int, environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """One of the bundled model once it is healthy; it is ended by SIGTERM unless it has ended before.

    In float32: an answer in bfloat16 depends on which side computed a prompt, hence on what the slots hold.
    """
    command = [VLLM_PROGRAM, "serve", MODEL, "--quantization", "ndp", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--additional-config", json.dumps({"ndp": settings}), "--dtype", "float32", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(64 << 20), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_healthy(process, port, log)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    def told() -> str:
        return log.read_text(errors="replace")[-3000:]

    def is_healthy() -> bool:
        assert process.poll() is None, told()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return True
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    until(is_healthy, PATIENCE_S, told=told, pause_s=0.5)


def complete(server: Server, prompt: str, *, ignore_eos: bool = True, **options: Any) -> Any:
    extra = {"ignore_eos": ignore_eos} | options.pop("extra_body", {})
    return server.client.completions.create(
        **({"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "extra_body": extra} | options)
    )


def chat(server: Server, text: str, **options: Any) -> Any:
    return server.client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": text}],
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
        **options,
    )


def get(server: Server, path: str, *, key: str | None = KEY) -> tuple[int, str]:
    """The status and the body of a GET."""
    request = urllib.request.Request(server.address + path)
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def get_json(server: Server, path: str) -> dict[str, Any]:
    status, body = get(server, path)
    assert status == 200, body
    answer = json.loads(body)
    assert isinstance(answer, dict)
    return answer


def report_of(response: Any) -> dict[str, Any]:
    report = response.model_extra["kv_transfer_params"]["ndp"]
    assert isinstance(report, dict)
    return report


def check_report(report: dict[str, Any], output_tokens: int) -> None:
    """Both clocks, and where each pair ran; one decode row per step."""
    assert report["output_tokens"] == output_tokens
    assert report["hot_experts"] == 2
    assert 1.0 <= report["avg_bits"] <= 3.0  # four at once share widths of 2.5 bits on average; one may read more
    assert report["fallback_pairs"] == 0
    assert report["cold_pairs"] > 0
    assert report["decode_rows"] == output_tokens - 1
    check_pairs(report, PAIRS_PER_ROW)
    assert report["measured_ttft_ms"] > 0
    assert report["simulated_ttft_us"] > 0
    assert len(report["measured_token_ms"]) == len(report["simulated_token_us"]) == output_tokens - 1
    assert min(report["simulated_token_us"]) > 0


def metrics_of(server: Server) -> dict[str, float]:
    """The plugin's samples by name and labels, vLLM's own two left out."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(get(server, "/metrics", key=None)[1]):
        for sample in family.samples:
            if sample.name.startswith("vllm:ndp_"):
                assert sample.labels.pop("model_name") == NAME
                assert sample.labels.pop("engine") == "0"
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                samples[f"{sample.name.removeprefix('vllm:')}{{{labels}}}"] = sample.value
    return samples


def check_sums(grown: dict[str, float], reports: list[dict[str, Any]]) -> None:
    """/metrics grew by what the reports tell, by kind and by phase; and each of them adds up."""
    counts = {f"{kind}_pairs": grown[f"ndp_pairs_total{{where={kind}}}"] for kind in PAIR_KINDS}
    counts |= {f"{phase}_rows": grown[f"ndp_rows_total{{phase={phase}}}"] for phase in PHASES}
    assert counts == {name: sum(report[name] for report in reports) for name in counts}
    for one in (counts, *reports):
        check_pairs(one, PAIRS_PER_ROW)
