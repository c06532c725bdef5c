"""`vllm serve MODEL --quantization ndp` as a user meets it: a process of its own, the real openai client, SIGTERM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from engines import (
    MODEL,
    PATIENCE_S,
    PATIENT_DEADLINE_MS,
    PROMPTS,
    REPLICAS,
    VLLM_PROGRAM,
    device_processes,
    user_environment,
)

pytestmark = pytest.mark.vllm

NAME = "tiny-mixtral"
TOKENS = 12
SETTINGS = {"hot_experts": 2, "avg_bits": 2, "replicas": str(REPLICAS), "deadline_ms": PATIENT_DEADLINE_MS}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    device: psutil.Process
    client: openai.OpenAI
    runtime_dir: Path
    log: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("serve")
    (directory / "chat.jinja").write_text(CHAT_TEMPLATE)
    runtime_dir = Path(tempfile.mkdtemp(prefix="run-"))  # short: an ipc path may have 107 bytes
    port = _free_port()
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(VLLM_PROGRAM, "serve", MODEL, "--quantization", "ndp", "--served-model-name", NAME),
                *("--additional-config", json.dumps({"ndp": SETTINGS})),
                *("--host", "127.0.0.1", "--port", str(port), "--chat-template", directory / "chat.jinja"),
                *("--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)),
                *("--enforce-eager", "--shutdown-timeout", "30"),
            ],
            env=user_environment(XDG_RUNTIME_DIR=str(runtime_dir)),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_healthy(process, port, log)
        (device,) = device_processes(process.pid)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        yield Server(process, device, client, runtime_dir, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(runtime_dir, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(f"not healthy within {PATIENCE_S} s: {log.read_text(errors='replace')[-3000:]}")


def complete(server: Server, prompt: str, **options: Any) -> Any:
    return server.client.completions.create(
        model=NAME, prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}, **options
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


def report_of(response: Any) -> dict[str, Any]:
    report = response.model_extra["kv_transfer_params"]["ndp"]
    assert isinstance(report, dict)
    return report


def check_report(report: dict[str, Any], output_tokens: int) -> None:
    """Both clocks, and where each of the decode rows' pairs ran: 4 layers, 2 experts per row, one row per step."""
    assert report["output_tokens"] == output_tokens
    assert report["hot_experts"] == 2
    assert 1.0 <= report["avg_bits"] <= 2.0
    assert report["fallback_pairs"] == 0
    assert report["cold_pairs"] > 0
    assert report["hot_pairs"] + report["cold_pairs"] == (output_tokens - 1) * 4 * 2
    assert report["measured_ttft_ms"] > 0
    assert report["simulated_ttft_us"] > 0
    assert len(report["measured_token_ms"]) == len(report["simulated_token_us"]) == output_tokens - 1
    assert min(report["simulated_token_us"]) > 0


def test_start_up_prints_what_is_effective(server: Server):
    log = server.log.read_text(errors="replace")
    assert "vllm-ndp: what is effective" in log
    assert "4 of 4" in log
    assert f"(pid {server.device.pid})" in log


def test_the_device_is_a_process_of_its_own_behind_a_private_directory(server: Server):
    (private,) = [path for path in server.runtime_dir.iterdir() if path.name.startswith("ndp-")]
    assert private.stat().st_mode & 0o777 == 0o700
    assert (private / "device").is_socket()
    assert server.device.pid != server.process.pid


def test_a_completion_carries_both_clocks(server: Server):
    response = complete(server, PROMPTS[0])
    assert response.usage.completion_tokens == TOKENS
    assert response.choices[0].text
    check_report(report_of(response), TOKENS)


def test_a_streamed_completion_is_the_same_text(server: Server):
    """vLLM sends kv_transfer_params only in responses that do not stream; docs/compatibility.md says so."""
    chunks = list(complete(server, PROMPTS[1], stream=True))
    whole = complete(server, PROMPTS[1])
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert not any((chunk.model_extra or {}).get("kv_transfer_params") for chunk in chunks)
    check_report(report_of(whole), TOKENS)


def test_a_chat_answer_carries_both_clocks_and_streams_the_same_text(server: Server):
    response = chat(server, "Write a sentence about the sea.")
    check_report(report_of(response), TOKENS)
    chunks = list(chat(server, "Write a sentence about the sea.", stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == response.choices[0].message.content


def test_eight_concurrent_requests_are_each_answered_with_their_own_report(server: Server):
    prompts = [f"{number} {prompt}" for number in (1, 2) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(prompts)) as pool:
        responses = list(pool.map(lambda prompt: complete(server, prompt), prompts))
    assert len({response.id for response in responses}) == 8
    for response in responses:
        check_report(report_of(response), TOKENS)
    assert {report_of(r)["prompt_tokens"] for r in responses} == {r.usage.prompt_tokens for r in responses}


def test_a_client_that_goes_away_does_not_disturb_the_others(server: Server):
    stream = complete(server, PROMPTS[2], stream=True)
    next(iter(stream))
    stream.close()
    check_report(report_of(complete(server, PROMPTS[3])), TOKENS)


def test_sigterm_ends_the_server_its_device_and_the_private_directory(server: Server):
    """The last test of this file: the server is gone after it.

    With vLLM's default --shutdown-timeout 0 the server kills all processes below it at once with SIGKILL, our device
    among them: nothing runs on, but nobody is left to remove the directory.
    """
    assert server.device.is_running()  # one device served all of the above
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    _, alive = psutil.wait_procs([server.device], timeout=60)
    assert not alive
    deadline = time.monotonic() + 60  # the worker removes it once its device has ended
    while os.listdir(server.runtime_dir) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert os.listdir(server.runtime_dir) == []
