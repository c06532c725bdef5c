"""`vllm serve MODEL --quantization ndp` as a user meets it: a process of its own, the real openai client, SIGTERM."""

import json
import os
import re
import shutil
import signal
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import burst
import openai
import psutil
import pytest
from browser import Browser
from engines import (
    PATIENCE_S,
    PATIENT_DEADLINE_MS,
    PROMPTS,
    REPLICAS,
    check_pairs,
    device_processes,
    free_port,
    user_environment,
)
from scraping import expressions, scraping, value_of
from served_model import (
    KEY,
    NAME,
    PAIRS_PER_ROW,
    TOKENS,
    Server,
    chat,
    check_report,
    check_sums,
    complete,
    get,
    get_json,
    metrics_of,
    report_of,
    serving,
)
from until import until

pytestmark = pytest.mark.vllm

SETTINGS = {"hot_experts": 2, "avg_bits": 2, "replicas": str(REPLICAS), "deadline_ms": PATIENT_DEADLINE_MS}
SETTINGS |= {"hardware": "h100-ndp512"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("serve")
    runtime_dir = Path(tempfile.mkdtemp(prefix="run-"))  # short: an ipc path may have 107 bytes
    port, log = free_port(), directory / "log"
    options = [
        *("--served-model-name", NAME, "--max-model-len", "512", "--max-num-seqs", "8", "--api-key", KEY),
        *("--middleware", "vllm_ndp.integration.serving.routes.NdpRoutes"),
    ]
    environment = user_environment(XDG_RUNTIME_DIR=str(runtime_dir), VLLM_LOGGING_LEVEL="WARNING")
    try:
        with serving(SETTINGS, options, port, environment, log) as process:
            (device,) = device_processes(process.pid)
            address = f"http://127.0.0.1:{port}"
            client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=120)
            yield Server(process, device, client, address, runtime_dir, log)
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)


def test_start_up_prints_what_is_effective(server: Server):
    log = server.log.read_text(errors="replace")
    assert "vllm-ndp: what is effective" in log
    assert "4 of 4" in log
    assert f"(pid {server.device.pid})" in log
    assert "Triton" not in log  # vLLM warns of it before it has a log to filter


def test_a_streamed_completion_is_the_same_text(server: Server):
    """vLLM sends kv_transfer_params only in responses that do not stream."""
    complete(server, PROMPTS[1])  # its prompt is in the prefix cache of both, so that the same rows are rounded alike
    chunks = list(complete(server, PROMPTS[1], stream=True))
    whole = complete(server, PROMPTS[1])
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert not any((chunk.model_extra or {}).get("kv_transfer_params") for chunk in chunks)
    check_report(report_of(whole), TOKENS)


def test_a_chat_answer_carries_both_clocks_and_streams_the_same_text_whose_report_is_found_by_its_id(server: Server):
    response = chat(server, MESSAGE)
    check_report(report_of(response), TOKENS)
    chunks = list(chat(server, MESSAGE, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == response.choices[0].message.content
    (report,) = reports_of(server, chunks[0].id).values()
    check_report(report, TOKENS)
    assert not any("ndp" in (chunk.model_extra or {}) for chunk in chunks)


# -- reports by every way ------------------------------------------------------------------------------------------


def reports_of(server: Server, answer_id: str) -> dict[str, dict[str, Any]]:
    """Of everything that was made of a client's request, once all of it has ended."""
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        status, body = get(server, f"/v1/ndp/requests/{answer_id}")
        found.update(json.loads(body) if status == 200 else {})
        return bool(found.get("finished")) and not found["running"]

    until(has_ended, PATIENCE_S)
    return dict(found["finished"])


def test_a_stop_string_costs_no_report(server: Server):
    """The front end sees it and aborts the request in the engine, after the answer has left without a report."""
    text = complete(server, PROMPTS[0]).choices[0].text
    stopped = complete(server, PROMPTS[0], stop=[text[len(text) // 2 :][:3]])
    assert stopped.choices[0].finish_reason == "stop"
    assert "kv_transfer_params" not in (stopped.model_extra or {}) or not stopped.model_extra["kv_transfer_params"]
    (report,) = reports_of(server, stopped.id).values()
    assert report["finish"] == "stop"
    assert report["output_tokens"] >= stopped.usage.completion_tokens
    assert report["cold_pairs"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_n_answers_and_of_several_prompts_has_its_report(server: Server, stream: bool):
    answer = complete(server, PROMPTS[1], stream=stream, n=3, temperature=1.0, seed=5)
    reports = reports_of(server, list(answer)[-1].id if stream else answer.id)
    assert sorted(name.partition("_")[0] for name in reports) == ["0", "1", "2"]
    of_prompts = reports_of(server, complete(server, list(PROMPTS[:2])).id)
    assert len(of_prompts) == 2
    for report in (*reports.values(), *of_prompts.values()):
        check_report(report, TOKENS)


MESSAGE = "Write a sentence about the sea."


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_the_responses_api_is_found_by_its_id(server: Server, stream: bool):
    asked = {"model": NAME, "input": MESSAGE, "max_output_tokens": TOKENS}
    answer = server.client.responses.create(**asked, stream=stream)
    answer = list(answer)[-1].response if stream else answer
    (report,) = reports_of(server, answer.id).values()
    assert report["output_tokens"] == answer.usage.output_tokens


def test_a_streamed_message_of_anthropics_is_found_by_its_id(server: Server):
    body = {"model": NAME, "messages": [{"role": "user", "content": MESSAGE}], "max_tokens": TOKENS, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.address}/v1/messages", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        begun = json.loads(answer.read().decode().partition("data: ")[2].partition("\n")[0])
    (report,) = reports_of(server, begun["message"]["id"]).values()
    assert report["output_tokens"] >= 1


def test_short_paths_lead_to_the_page(server: Server):
    for path in ("/", "/ndp", "/v1/ndp", "/v1/ndp/"):
        assert get(server, path, key=None) == get(server, "/ndp/", key=None)


def test_each_request_that_a_beam_search_is_made_of_has_its_report(server: Server):
    """vLLM asks its engine for one token of each beam at a time: 1, 2 and 2 requests."""
    beams = complete(server, PROMPTS[1], extra_body={"use_beam_search": True}, n=2, max_tokens=3)
    reports = reports_of(server, beams.id)
    assert sorted(name.partition("-beam-")[2][0] for name in reports) == ["0", "0", "0", "1", "1"]
    for report in reports.values():
        assert (report["output_tokens"], report["decode_rows"]) == (1, 0)
        check_pairs(report, PAIRS_PER_ROW)


def test_a_request_is_found_by_the_clients_id_even_when_it_was_aborted(server: Server):
    mine = complete(server, PROMPTS[2], extra_headers={"X-Request-Id": "mine"})
    for client_id in (mine.id, "mine"):
        (report,) = get_json(server, f"/v1/ndp/requests/{client_id}")["finished"].values()
        check_report(report, TOKENS)
    stream = complete(server, PROMPTS[2], stream=True, max_tokens=400, extra_headers={"X-Request-Id": "gone"})
    next(iter(stream))
    stream.close()
    until(lambda: "aborted" in get(server, "/v1/ndp/requests/gone")[1], PATIENCE_S)
    (report,) = get_json(server, "/v1/ndp/requests/gone")["finished"].values()
    assert report["finish"] == "aborted"
    assert 1 <= report["output_tokens"] < 400
    assert get(server, "/v1/ndp/requests/min")[0] == 404


def test_a_report_says_what_the_device_took_and_what_bound_it(server: Server):
    report = report_of(complete(server, PROMPTS[0]))
    stages = report["simulated_device_us"]
    parts = {stage: value for stage, value in stages.items() if stage not in ("total", "overlap_saved")}
    assert sum(parts.values()) - stages["overlap_saved"] == pytest.approx(stages["total"], abs=1e-4)
    messages = sum(report["simulated_device_bound"].values())
    assert 0 < messages <= (TOKENS - 1) * 4
    assert set(report["simulated_device_bound"]) <= {"link", "dram", "compute", "queue"}


# -- what a server tells ---------------------------------------------------------------------------------------------


def test_our_paths_are_behind_the_servers_key(server: Server):
    for path in ("/v1/ndp/status", "/v1/ndp/experts", "/v1/ndp/requests/x"):
        assert get(server, path, key=None)[0] == 401
        assert get(server, path, key="another")[0] == 401
    assert get(server, "/v1/models", key=None)[0] == 401
    assert get(server, "/metrics", key=None)[0] == 200


def test_status_tells_settings_totals_device_and_requests(server: Server):
    complete(server, PROMPTS[0], extra_headers={"X-Request-Id": "seen"})
    before = get_json(server, "/v1/ndp/status")
    assert (before["format"], before["model"]) == (1, NAME)
    (worker,) = before["workers"]
    assert worker["effective"]["hot_experts"] == 2
    assert worker["device"]["state"] == "up"
    assert worker["device"]["pid"] == server.device.pid
    assert worker["device"]["resident_bytes"] > 0
    assert worker["memory"]["engine"]["held"] > worker["memory"]["device"]["held"] > 0
    assert worker["memory"]["device"]["mapped"] > 0
    assert worker["plan"]["hot_experts"] == 2
    assert 1.0 <= worker["plan"]["avg_bits"] <= 2.0
    assert "cmpl-seen" in before["finished"][0]["id"]
    assert not any(isinstance(value, list) for value in before["finished"][0].values())
    complete(server, PROMPTS[0])
    (after,) = get_json(server, "/v1/ndp/status")["workers"]
    assert after["totals"]["cold_pairs"] > worker["totals"]["cold_pairs"]
    assert after["totals"]["simulated_device"]["total_ps"] > worker["totals"]["simulated_device"]["total_ps"]


def test_experts_tell_who_is_hot_where_and_bits(server: Server):
    complete(server, PROMPTS[0])
    (worker,) = get_json(server, "/v1/ndp/experts")["workers"]
    assert worker["layers"] == [0, 1, 2, 3]
    for hot, bits, importance in zip(worker["hot"], worker["bits"], worker["importance"], strict=True):
        assert sum(hot) == 2
        assert [value == 0 for value in bits] == [bool(value) for value in hot]
        assert sum(importance) == pytest.approx(1, abs=1e-3)


def test_metrics_count_what_reports_count(server: Server):
    before = metrics_of(server)
    reports = [report_of(complete(server, prompt)) for prompt in PROMPTS]
    after = metrics_of(server)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    check_sums(grown, reports)
    for bound in ("link", "dram", "compute", "queue"):
        told = sum(report["simulated_device_bound"].get(bound, 0) for report in reports)
        assert grown[f"ndp_simulated_device_bound_total{{bound={bound}}}"] == told
    assert grown["ndp_simulated_energy_joules_total{}"] > 0
    for name, key, unit_s in (
        ("ndp_measured_ttft_seconds", "measured_ttft_ms", 1e-3),
        ("ndp_measured_tpot_seconds", "measured_tpot_ms", 1e-3),
        ("ndp_simulated_ttft_seconds", "simulated_ttft_us", 1e-6),
        ("ndp_simulated_tpot_seconds", "simulated_tpot_us", 1e-6),
    ):
        assert grown[f"{name}_count{{}}"] == len(reports)
        assert grown[f"{name}_sum{{}}"] == pytest.approx(sum(report[key] for report in reports) * unit_s, rel=1e-4)
    messages = sum(sum(report["simulated_device_bound"].values()) for report in reports)
    assert grown["ndp_measured_device_round_trip_seconds_count{}"] == messages
    assert grown["ndp_device_messages_total{}"] == messages
    assert grown["ndp_measured_plan_seconds_count{}"] == grown["ndp_planned_prompts_total{}"] == len(reports)
    assert grown["ndp_requests_total{finish=length}"] == len(reports)
    assert after["ndp_device_up{}"] == 1


# -- Prometheus and Grafana -------------------------------------------------------------------------------------------


def test_every_expression_of_rules_and_dashboard_gives_data_of_a_real_server(server: Server, tmp_path: Path):
    waiting, values = expressions(NAME), dict[str, float]()
    assert len(waiting) > 40
    deadline = time.monotonic() + PATIENCE_S
    with scraping(server.address, tmp_path) as prometheus:
        while waiting and time.monotonic() < deadline:
            complete(server, PROMPTS[len(values) % 4])
            values |= {one: value for one in waiting if (value := value_of(prometheus, one)) is not None}
            waiting = [one for one in waiting if one not in values]
    assert waiting == []
    assert values["min by (model_name) (vllm:ndp_device_up)"] == 1
    assert 0 < values["ndp:hit_share"] < 1
    assert values["ndp:hit_share"] + values["ndp:device_share"] <= 1.5  # of two moments
    assert values["ndp:fallback_share"] == 0
    assert 0 < values["ndp:simulated_tpot_seconds:p50"] < 1e-3 < values["ndp:measured_tpot_seconds:p50"]


# -- the live page ---------------------------------------------------------------------------------------------------


def test_the_live_page_shows_the_server_and_follows_it_without_a_reload(server: Server, browser: Browser):
    """In a browser that reaches nothing but this machine: all that the page needs is in it."""
    complete(server, PROMPTS[0], extra_headers={"X-Request-Id": "looked-at"})
    document = browser.served(f"{server.address}/ndp/#{urllib.parse.quote(KEY)}", settle_ms=9000)
    assert f'<h1 id="model">{NAME}</h1>' in document
    assert "2 of 8 experts hot in each layer" in document
    assert "looked-at" in document
    assert 'class="tile up"' in document
    looks = re.search(r'data-looks="(\d+)"', document)
    assert looks is not None
    assert int(looks[1]) >= 2
    assert document.count('class="hot"') == 4 * 2


def test_the_live_page_asks_for_the_key_where_it_is_wrong(server: Server, browser: Browser):
    document = browser.served(f"{server.address}/ndp/#another")
    assert "answers 401" in document
    assert '<form id="form">' in document


def test_every_pair_of_a_burst_adds_up_and_nothing_is_left_of_it(server: Server):
    """64 streams of which half are left, and three kills of the device (burst.py): reports, /metrics and the worker's
    totals tell the same of every pair; a whole stream's rows are those that its client counted."""
    assert server.device.is_running()  # one device served all of the above
    burst.read_all(server, 64, 4, 0)  # what a server takes once for so many clients
    until(lambda: not get_json(server, "/v1/ndp/status")["running"], PATIENCE_S)
    time.sleep(2.0)  # vLLM closes connections of clients that left meanwhile
    open_before, before, totals = burst.is_open(server), metrics_of(server), totals_of(server)
    streams = burst.read_all(server, 64, 96, 3)
    reports = [burst.report_of_server(server, stream) for stream in streams]
    for stream, report in zip(streams, reports, strict=True):
        rows = report["decode_rows"], report["prompt_rows"]
        if stream.leaves_after is None:
            assert (stream.received, report["finish"]) == (stream.tokens, "length")
            assert rows == (stream.tokens - 1, stream.prompt_tokens)  # no two prompts begin alike
        else:
            assert report["finish"] == "aborted"
            assert rows[0] >= stream.received - 1
    until(lambda: grown_since(server, before)["ndp_requests_total{finish=aborted}"] >= 32, PATIENCE_S)
    grown = grown_since(server, before)
    check_sums(grown, reports)
    summed = {name: sum(report[name] for report in reports) for name in counted(reports[0])}
    after = totals_of(server)
    assert {name: after[name] - totals[name] for name in summed} == summed
    for cause, count in after["fallback_causes"].items():
        more = count - totals["fallback_causes"].get(cause, 0)
        assert grown.get(f"ndp_fallback_causes_total{{cause={cause}}}", 0) == more
    assert min(summed["fallback_pairs"], summed["cold_pairs"], summed["prefill_device_pairs"]) > 0
    until(lambda: report_of(complete(server, PROMPTS[0]))["cold_pairs"] > 0, PATIENCE_S)  # it serves again
    assert get_json(server, "/v1/ndp/status")["running"] == []
    time.sleep(2.0)
    grew = {name: now - open_before.get(name, 0) for name, now in burst.is_open(server).items()}
    assert max(grew.values()) < len(streams) / 4, grew  # one for each client would be 64
    server.device = psutil.Process(burst.device_of(server)["pid"])
    of_device = [line for line in server.log.read_text(errors="replace").splitlines() if "NDP device at" in line]
    assert len(of_device) >= 6
    assert all(re.match(r"\(EngineCore pid=\d+\) WARNING \d\d-\d\d \d\d:", line) for line in of_device), of_device


def counted(report: dict[str, Any]) -> dict[str, int]:
    """Pairs by kind and rows by phase."""
    return {name: count for name, count in report.items() if name.endswith(("_pairs", "_rows"))}


def totals_of(server: Server) -> dict[str, Any]:
    return dict(get_json(server, "/v1/ndp/status")["workers"][0]["totals"])


def grown_since(server: Server, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in metrics_of(server).items()}


def test_sigterm_ends_the_server_its_device_and_the_private_directory(server: Server):
    """The last test of this file: the server is gone after it.

    With vLLM's default --shutdown-timeout 0 the server kills all processes below it at once with SIGKILL, our device
    among them: nothing runs on, and the server itself removes the directory.
    """
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    _, alive = psutil.wait_procs([server.device], timeout=60)
    assert not alive
    assert os.listdir(server.runtime_dir) == []
