"""`vllm serve MODEL --quantization ndp` as a user meets it: a process of its own, the real openai client, SIGTERM."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import burst
import openai
import psutil
import pytest
from browser import Browser
from engines import (
    MODEL,
    NDP_PROGRAM,
    PATIENCE_S,
    PATIENT_DEADLINE_MS,
    PROMPTS,
    REPLICAS,
    ROOT,
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
    chunk_with_reports,
    collecting,
    complete,
    get,
    get_json,
    metrics_of,
    report_of,
    serving,
)
from until import until

pytestmark = pytest.mark.vllm

ASKING = {"X-NDP-Report": "1"}
SETTINGS = {"hot_experts": 2, "avg_bits": 2, "replicas": str(REPLICAS), "deadline_ms": PATIENT_DEADLINE_MS}
SETTINGS |= {"hardware": "h100-ndp512"}


@pytest.fixture(scope="module")
def spans() -> list[Any]:
    """What the server's traces hold so far."""
    return []


@pytest.fixture(scope="module")
def collector(spans: list[Any]) -> Iterator[str]:
    with collecting(spans) as address:
        yield address


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: str) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("serve")
    runtime_dir = Path(tempfile.mkdtemp(prefix="run-"))  # short: an ipc path may have 107 bytes
    port, log = free_port(), directory / "log"
    options = [
        *("--quantization", "ndp", "--served-model-name", NAME, "--additional-config", json.dumps({"ndp": SETTINGS})),
        *("--max-model-len", "512", "--max-num-seqs", "8"),
        # An answer in bfloat16 depends on which side computed a prompt, hence on what the slots hold.
        *("--dtype", "float32"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager", "--api-key", KEY),
        *("--middleware", "vllm_ndp.integration.serving.routes.NdpRoutes", "--otlp-traces-endpoint", collector),
    ]
    environment = user_environment(
        XDG_RUNTIME_DIR=str(runtime_dir),
        OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    try:
        with serving(MODEL, options, port, environment, log) as process:
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


def test_the_device_is_a_process_of_its_own_behind_a_private_directory(server: Server):
    (private,) = [path for path in server.runtime_dir.iterdir() if path.name.startswith("ndp-")]
    assert private.stat().st_mode & 0o777 == 0o700
    assert (private / "device").is_socket()
    assert server.device.pid != server.process.pid


def test_a_streamed_completion_is_the_same_text(server: Server):
    """vLLM sends kv_transfer_params only in responses that do not stream."""
    complete(server, PROMPTS[1])  # its prompt is in the prefix cache of both, so that the same rows are rounded alike
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


# -- reports by every way ------------------------------------------------------------------------------------------


def test_a_streamed_chat_that_asks_gets_its_report_and_the_usage_it_asked_for(server: Server):
    options = {"stream": True, "stream_options": {"include_usage": True}, "extra_headers": ASKING}
    chunks, reports = chunk_with_reports(chat(server, "Write a sentence about the sea.", **options))
    (report,) = reports.values()
    check_report(report, TOKENS)
    assert sum(chunk.usage is not None for chunk in chunks) == 1


def test_a_stop_string_costs_no_report(server: Server):
    """The front end sees it and aborts the request in the engine, after the answer has left without a report."""
    text = complete(server, PROMPTS[0]).choices[0].text
    options = {"stop": [text[len(text) // 2 :][:3]], "extra_headers": ASKING}
    stopped = complete(server, PROMPTS[0], **options)
    assert stopped.choices[0].finish_reason == "stop"
    assert "kv_transfer_params" not in (stopped.model_extra or {}) or not stopped.model_extra["kv_transfer_params"]
    (report,) = stopped.model_extra["ndp"].values()
    assert report["finish"] == "stop"
    assert report["output_tokens"] >= stopped.usage.completion_tokens
    assert report["cold_pairs"] > 0
    _, reports = chunk_with_reports(complete(server, PROMPTS[0], stream=True, **options))
    assert [report["finish"] for report in reports.values()] == ["stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_n_answers_has_its_report(server: Server, stream: bool):
    options = {"n": 3, "temperature": 1.0, "seed": 5, "extra_headers": ASKING}
    if stream:
        _, reports = chunk_with_reports(complete(server, PROMPTS[1], stream=True, **options))
    else:
        reports = complete(server, PROMPTS[1], **options).model_extra["ndp"]
    assert sorted(name.partition("_")[0] for name in reports) == ["0", "1", "2"]
    for report in reports.values():
        check_report(report, TOKENS)


def test_an_answer_of_the_responses_api_has_its_report_and_is_found_by_its_id(server: Server):
    asked = {"model": NAME, "input": "Write a sentence about the sea.", "max_output_tokens": TOKENS}
    answer = server.client.responses.create(**asked, extra_headers=ASKING)
    (report,) = answer.model_extra["ndp"].values()
    assert report["output_tokens"] == answer.usage.output_tokens
    assert list(get_json(server, f"/v1/ndp/requests/{answer.id}")["finished"].values()) == [report]


def test_the_last_event_of_a_streamed_response_has_its_report(server: Server):
    asked = {"model": NAME, "input": "Write a sentence about the sea.", "max_output_tokens": TOKENS}
    *_, last = server.client.responses.create(**asked, stream=True, extra_headers=ASKING)
    (report,) = last.response.model_extra["ndp"].values()
    assert (last.type, report["output_tokens"]) == ("response.completed", last.response.usage.output_tokens)
    with server.client.responses.stream(**asked, extra_headers=ASKING) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        answer = stream.get_final_response()
    assert answer.output_text == text
    (again,) = answer.model_extra["ndp"].values()
    assert list(get_json(server, f"/v1/ndp/requests/{answer.id}")["finished"].values()) == [again]
    *_, last = server.client.responses.create(**asked, stream=True)
    assert "ndp" not in (last.response.model_extra or {})


def test_a_streamed_message_of_anthropics_has_its_report_before_the_end(server: Server):
    messages = [{"role": "user", "content": "Write a sentence about the sea."}]
    body = {"model": NAME, "messages": messages, "max_tokens": TOKENS, "stream": True}
    headers = ASKING | {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.address}/v1/messages", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        events = [event for event in answer.read().decode().split("\n\n") if event.startswith("event: ")]
    assert [event.partition("\n")[0] for event in events[-2:]] == ["event: ndp.report", "event: message_stop"]
    (report,) = json.loads(events[-2].partition("data: ")[2])["ndp"].values()
    assert report["output_tokens"] >= 1


def test_anthropics_client_reads_a_stream_that_has_a_report(server: Server):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.address, auth_token=KEY, max_retries=0)
    messages = [{"role": "user", "content": "Write a sentence about the sea."}]
    with client.messages.stream(model=NAME, messages=messages, max_tokens=TOKENS, extra_headers=ASKING) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(part.text for part in message.content) == text
    (report,) = get_json(server, f"/v1/ndp/requests/{message.id}")["finished"].values()
    assert report["output_tokens"] >= message.usage.output_tokens


NPM_OPENAI, LITELLM = "openai@6.49.0", "litellm==1.72.6"
OF_NPM = """
import OpenAI from 'openai';
const [baseURL, apiKey, model, prompt] = process.argv.slice(2);
const client = new OpenAI({baseURL, apiKey, maxRetries: 0}), headers = {'X-NDP-Report': '1'};
const asked = {model, prompt, max_tokens: 6, temperature: 0};
const whole = await client.completions.create(asked, {headers});
const read = async more => {
  const chunks = [], stream = await client.completions.create({...asked, ...more, stream: true}, {headers});
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
};
const messages = [{role: 'user', content: prompt}];
const chat = await client.chat.completions.stream({model, messages, max_tokens: 6}, {headers}).finalChatCompletion();
const response = await client.responses.stream({model, input: prompt, max_output_tokens: 6}, {headers}).finalResponse();
const plain = await read({}), counted = await read({stream_options: {include_usage: true}});
console.log(JSON.stringify({whole, plain, counted, chat, response}));
"""
OF_LITELLM = """
import json, sys
import litellm
base, key, model, prompt = sys.argv[1:]
asked = dict(model="openai/" + model, api_base=base, api_key=key, max_tokens=6, temperature=0, num_retries=0,
             extra_headers={"X-NDP-Report": "1"}, messages=[{"role": "user", "content": prompt}])
read = lambda **more: [chunk.model_dump() for chunk in litellm.completion(**asked, **more, stream=True)]
whole = litellm.completion(**asked).model_dump()
print(json.dumps({"whole": whole, "plain": read(), "counted": read(stream_options={"include_usage": True})}))
"""


def _client(name: str, *install: str | Path) -> Path:
    """A folder with a pinned client, installed once; skipped where it cannot be."""
    folder = ROOT / ".cache" / "clients" / name
    if not (folder / "whole").exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run([*install, folder, name], check=True, capture_output=True, timeout=PATIENCE_S)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"{name} cannot be installed here: {error}")
        (folder / "whole").touch()
    return folder


def _text(chunks: list[dict[str, Any]]) -> str:
    """As most loops read a stream without usage: each chunk has a choice."""
    first = [chunk["choices"][0] for chunk in chunks if chunk["choices"] or not chunk.get("usage")]
    return "".join(one["text"] if "text" in one else one["delta"]["content"] or "" for one in first)


def test_npms_client_reads_answers_and_streams_that_have_a_report(server: Server):
    folder = _client(NPM_OPENAI, "npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix")
    node = ["node", "--input-type=module", "-", f"{server.address}/v1", KEY, NAME, PROMPTS[0]]
    done = subprocess.run(node, input=OF_NPM, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for answer in (said["whole"], said["plain"][-1], said["counted"][-1], said["response"]):
        (report,) = answer["ndp"].values()
        assert report["output_tokens"] == 6
    assert all(chunk["choices"] for chunk in said["plain"])
    assert said["counted"][-1]["usage"]["completion_tokens"] == 6
    assert _text(said["plain"]) == _text(said["counted"]) == said["whole"]["choices"][0]["text"]
    assert said["chat"]["choices"][0]["finish_reason"] == "length"
    assert get_json(server, f"/v1/ndp/requests/{said['chat']['id']}")["finished"]


def test_litellm_reads_answers_and_streams_that_have_a_report(server: Server):
    """Of a stream it hands on no field that it does not know: the report is found by the answer's id."""
    folder = _client(LITELLM, sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target")
    words = [sys.executable, "-c", OF_LITELLM, f"{server.address}/v1", KEY, NAME, PROMPTS[0]]
    environment = user_environment(PYTHONPATH=str(folder), LITELLM_LOCAL_MODEL_COST_MAP="True")
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    (report,) = said["whole"]["ndp"].values()
    assert report["output_tokens"] == 6
    assert _text(said["plain"]) == _text(said["counted"]) == said["whole"]["choices"][0]["message"]["content"]
    assert said["counted"][-1]["usage"]["completion_tokens"] == 6
    assert get_json(server, f"/v1/ndp/requests/{said['plain'][0]['id']}")["finished"]


@pytest.mark.parametrize(("value", "asks"), [("0", False), ("off", False), ("1", True), ("yes", True)])
def test_the_header_means_what_its_value_says_and_touches_answers_only(server: Server, value: str, asks: bool):
    answer = complete(server, PROMPTS[0], max_tokens=2, extra_headers={"X-NDP-Report": value})
    assert ("ndp" in answer.model_extra) == asks
    models = server.client.models.list(extra_headers={"X-NDP-Report": value})
    assert "ndp" not in (models.model_extra or {})


def test_short_paths_lead_to_the_page_and_arguments_that_nobody_reads_are_refused(server: Server):
    for path in ("/", "/v1/ndp"):
        assert get(server, path, key=None) == get(server, "/v1/ndp/", key=None)
    with pytest.raises(openai.BadRequestError, match="nothing on this server reads: start it with --logits-processors"):
        complete(server, PROMPTS[0], extra_body={"vllm_xargs": {"ndp_forced_tokens": [5, 6, 7]}})


def test_each_request_that_a_beam_search_is_made_of_has_its_report(server: Server):
    """vLLM asks its engine for one token of each beam at a time: 1, 2 and 2 requests."""
    beams = {"extra_body": {"use_beam_search": True}, "n": 2, "max_tokens": 3, "extra_headers": ASKING}
    reports = complete(server, PROMPTS[1], **beams).model_extra["ndp"]
    assert sorted(name.partition("-beam-")[2][0] for name in reports) == ["0", "0", "0", "1", "1"]
    for report in reports.values():
        assert (report["output_tokens"], report["decode_rows"]) == (1, 0)
        check_pairs(report, PAIRS_PER_ROW)


def test_each_prompt_of_one_call_has_its_report(server: Server):
    reports = complete(server, list(PROMPTS[:2]), extra_headers=ASKING).model_extra["ndp"]
    assert len(reports) == 2
    for report in reports.values():
        check_report(report, TOKENS)


def test_a_client_that_does_not_ask_gets_what_stock_vllm_sends(server: Server):
    assert "ndp" not in (complete(server, PROMPTS[0]).model_extra or {})
    assert {chunk.object for chunk in complete(server, PROMPTS[0], stream=True)} == {"text_completion"}


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
    assert min(report[f"simulated_{part}_uj"] for part in ("link", "dram", "arrays")) > 0


# -- what a server tells ---------------------------------------------------------------------------------------------


def test_our_paths_are_behind_the_servers_key(server: Server):
    for path in ("/v1/ndp/", "/v1/ndp/status", "/v1/ndp/experts", "/v1/ndp/requests/x"):
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
    for part in ("link", "dram", "arrays"):
        told = sum(report[f"simulated_{part}_uj"] for report in reports)
        assert grown[f"ndp_simulated_energy_joules_total{{part={part}}}"] == pytest.approx(told / 1e6, rel=1e-4)
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


def test_top_shows_what_the_server_does(server: Server):
    """The terminal's view, twice a second while a request runs: rates of both clocks, requests, the plan."""
    top = [NDP_PROGRAM, "top", server.address]
    done = subprocess.run(top, capture_output=True, text=True, timeout=60, env=user_environment())
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "give --api-key" in done.stderr
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(complete, server, PROMPTS[0], max_tokens=200)
        done = subprocess.run(
            [*top, "--json", "--interval", "0.5", "--count", "6"],
            capture_output=True,
            text=True,
            timeout=120,
            env=user_environment(VLLM_API_KEY=KEY),
        )
        asked.result()
    assert done.returncode == 0, done.stderr
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(looks) == 5
    assert max(look["rates"]["per_s"]["output tokens"] for look in looks) > 0
    assert max(look["levels"]["running"] for look in looks) >= 1
    assert any(look["status"]["running"] for look in looks)
    assert 0 < max(look["rates"]["hot_share"] or 0 for look in looks) < 1
    assert looks[-1]["levels"]["device up"] == 1
    assert looks[-1]["totals"]["cold pairs"] > 0 < looks[-1]["totals"]["simulated seconds"]
    drawn = subprocess.run(
        [*top, "--count", "2", "--interval", "0.2", "--all"],
        capture_output=True,
        text=True,
        timeout=60,
        env=user_environment(VLLM_API_KEY=KEY, COLUMNS="160"),
    )
    assert drawn.returncode == 0, drawn.stderr
    for word in ("measured", "simulated", "hot share", "experts hot", "h100-ndp512", "prices of plans", "slot kernel"):
        assert word in drawn.stdout


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
    status, form = get(server, "/v1/ndp/", key=None)
    assert (status, "its API key" in form) == (401, True)
    document = browser.served(f"{server.address}/v1/ndp/#{urllib.parse.quote(KEY)}", settle_ms=9000)
    assert f'<h1 id="model">{NAME}</h1>' in document
    assert "2 of 8 experts hot in each layer" in document
    assert "looked-at" in document
    assert 'class="tile up"' in document
    looks = re.search(r'data-looks="(\d+)"', document)
    assert looks is not None
    assert int(looks[1]) >= 2
    assert document.count("bk-Figure") >= 6  # two heat maps, four charts


def test_the_live_page_says_when_the_key_is_wrong(server: Server, browser: Browser):
    assert "It says: 401" in browser.served(f"{server.address}/v1/ndp/#another")


# -- traces ------------------------------------------------------------------------------------------------------------


def test_a_span_of_each_traced_request_lies_beside_vllms_in_the_clients_trace(server: Server, spans: list[Any]):
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    before = len(spans)
    complete(server, PROMPTS[0])  # of a client that does not trace
    complete(server, PROMPTS[0], extra_headers={"traceparent": f"00-{trace}-{parent}-01"})

    def named(name: str) -> list[Any]:
        return [span for span in spans[before:] if span.name == name]

    until(lambda: named("ndp.request") and len(named("llm_request")) > 1, PATIENCE_S)
    (ours,) = named("ndp.request")
    assert len({span.span_id for span in spans}) == len(spans), "vLLM's start-up spans among them"
    theirs = [span for span in named("llm_request") if span.parent_span_id == ours.parent_span_id]
    assert len(theirs) == 1
    assert ours.trace_id.hex() == theirs[0].trace_id.hex() == trace
    assert ours.parent_span_id.hex() == parent
    values = {value.key: value.value for value in ours.attributes}
    assert values["ndp.output_tokens"].int_value == TOKENS
    simulated_s = values["ndp.simulated_tpot_us"].double_value * (TOKENS - 1) / 1e6
    assert 0 < simulated_s < (ours.end_time_unix_nano - ours.start_time_unix_nano) / 1e9  # the axis is the wall's


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
            assert {name: stream.report[name] for name in counted(report)} == counted(report)
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
