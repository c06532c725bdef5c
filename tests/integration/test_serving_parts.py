"""Parts of what a server tells, without a server: which requests are meant by an id, a bounded memory, refusals."""

import dataclasses
import errno
import json
import re
import shlex
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from paths import ROOT
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from starlette.testclient import TestClient
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from ndp_device.common.errors import ConfigError
from vllm_ndp.config import NdpSettings
from vllm_ndp.cost_model.gpu_timing import PipelineClock
from vllm_ndp.integration.controller import StepLog
from vllm_ndp.integration.refusals import sentence_of, serves_ndp
from vllm_ndp.integration.report import (
    _SUMMED,
    DEVICE_STAGES,
    RequestReport,
    StepReport,
    counts_of,
    of_all_stages,
)
from vllm_ndp.integration.serving.metrics import COUNTERS, DEVICE_UP, HISTOGRAMS, NdpMetrics, NdpStats
from vllm_ndp.integration.serving.routes import NdpEndpoints, addresses
from vllm_ndp.integration.serving.status import (
    FinishedRequests,
    _carrier,
    _cold,
    _memory,
    _predicted_loss,
    made_of,
    plan_in_force,
    running,
)
from vllm_ndp.layer.split import PAIR_KINDS

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("client_id", "names", "meant"),
    [
        ("cmpl-X", ["cmpl-X-0-1a2b3c4d", "cmpl-X-1-1a2b3c4d", "cmpl-XY-0-1a2b3c4d"], 2),
        ("X", ["cmpl-X-0-1a2b3c4d", "chatcmpl-X-1a2b3c4d", "chatcmpl-Z-X-1a2b3c4d"], 2),
        ("cmpl-X", ["0_cmpl-X-0-1a2b3c4d", "11_cmpl-X-0-1a2b3c4d", "a_cmpl-X-0-1a2b3c4d"], 2),
        ("7", ["7-1a2b3c4d", "0_7-1a2b3c4d", "17-1a2b3c4d", "70-1a2b3c4d"], 2),
        ("cmpl-X", ["cmpl-X-0-1a2b3c4d5e6f7a8b-beam-1-1a2b3c4d", "cmpl-X-0-beam-1-1a2b3c4d"], 1),
        ("resp_X", ["resp_X_0-1a2b3c4d", "resp_XY_0-1a2b3c4d"], 1),
        (".*", ["cmpl-X-0-1a2b3c4d"], 0),
        ("", ["cmpl-X-0-1a2b3c4d"], 0),
    ],
)
def test_an_id_means_what_vllm_made_of_it_and_nothing_else(client_id: str, names: list[str], meant: int):
    assert made_of(client_id, names) == names[:meant]


def test_only_the_last_reports_are_kept_and_shown_the_newest_first():
    finished = FinishedRequests(kept=3)
    for number in range(5):
        finished.note({f"cmpl-{number}-0-1a2b3c4d": {"output_tokens": number, "measured_token_ms": [1.0]}})
    assert finished.find("cmpl-1") == {}
    assert [report for _, report in finished.latest(2)] == [{"output_tokens": 4}, {"output_tokens": 3}]
    (report,) = finished.find("cmpl-4").values()
    assert report["measured_token_ms"] == [1.0]


@pytest.mark.parametrize(("predicted", "told"), [(0.05, 0.05), (0.31, None), (None, None)])
def test_a_report_leaves_out_a_predicted_loss_that_is_not_to_be_trusted(predicted: float | None, told: float | None):
    report = RequestReport(0.0, plan={"epoch": 1, "predicted_nats": predicted})
    assert report.as_dict(1, "stop")["predicted_nats"] == told
    assert "predicted_nats" not in RequestReport(0.0).as_dict(0, "aborted"), "no plan, no prediction"


@pytest.mark.parametrize("sent", ["cold", "spilled", "prefill_device"])
def test_stages_of_the_device_are_told_to_requests_that_sent_something_and_to_no_others(sent: str):
    """Of two that share each step one has pairs there in the first step, and none has in the second."""
    there, here = (dict.fromkeys(PAIR_KINDS, 0) | {kind: 2} for kind in (sent, "hot"))
    stages = dict.fromkeys(_SUMMED, 1000000)
    told = {name: RequestReport(0.0) for name in ("a", "b")}
    for number, pairs in enumerate(({"a": there, "b": here}, {"a": here, "b": here})):
        step = StepReport(number, number + 1, pairs, {}, {}, 8, device=stages, device_bounds={"dram": 1})
        for name, report in told.items():
            report.add(name, step, number + 1, 0.0)
    dicts = {name: report.as_dict(2, "length") for name, report in told.items()}
    assert dicts["a"]["simulated_device_us"] == dict.fromkeys((*DEVICE_STAGES, "overlap_saved", "total"), 1.0)
    assert dicts["a"]["simulated_device_bound"] == {"dram": 1}
    assert not {"simulated_device_us", "simulated_device_bound"} & dicts["b"].keys()


def test_a_step_is_told_what_was_planned_since_the_one_before_and_a_device_is_up_while_one_of_them_is():
    planner = SimpleNamespace(migrated_experts=0, kept_experts=0, prefills=0)
    parts = SimpleNamespace(planner=planner, device=SimpleNamespace(link=None, up=(False, True)))
    worker: Any = SimpleNamespace(parts=parts, unsimulated="")
    step: Any = SimpleNamespace(plan_s=0.5)
    log, told = StepLog(worker, None), list[tuple[object, ...]]()
    for more in (5, 2):
        planner.migrated_experts, planner.kept_experts = planner.migrated_experts + 2 * more, 5
        planner.prefills += more
        report = StepReport(0, 0, {}, {}, {}, 8)
        log._note_costs(step, report)
        told.append((report.migrated_experts, report.kept_experts, report.prefills, report.plan_s, report.device_up))
    assert told == [(10, 5, 5, 0.5, True), (4, 0, 2, 0.5, True)]


def test_a_request_is_told_both_clocks_and_of_the_simulated_one_nothing_once_something_is_not_in_it():
    report = RequestReport(100.0)
    for number, (start_us, end_us, now_s) in enumerate([(10, 30, 101.0), (30, 40, 101.25), (40, 60, 102.0)], 1):
        step = StepReport(start_us * 10**6, end_us * 10**6, {}, {}, {}, 8)
        report.add("a", step, number, now_s)
    told = report.as_dict(3, "length")
    assert (told["measured_ttft_ms"], told["measured_tpot_ms"], told["measured_token_ms"]) == (1000, 500, [250, 750])
    assert (told["simulated_ttft_us"], told["simulated_tpot_us"], told["simulated_token_us"]) == (20, 15, [10, 20])
    report.add("a", dataclasses.replace(step, unsimulated="a proposer"), 4, 102.0)
    report.add("a", step, 5, 102.0)
    told = report.as_dict(5, "length")
    assert (told["unsimulated"], told["simulated_ttft_us"], told["measured_ttft_ms"]) == ("a proposer", None, 1000)


def test_the_report_of_a_pipeline_is_the_sum_of_its_stages_each_by_its_layers():
    """Three layers of top-2 and one, in the order in which no worker answers first."""

    def stage(number: int, layers: int, bits: float, took_ps: int, cause: str) -> StepReport:
        pairs = dict.fromkeys(PAIR_KINDS, 0) | {"cold": layers, "hot": layers}
        costs = "", 0.5 * layers, [0.25] * layers, layers, 10 * layers, 1, number == 0, {cause: layers, "late": 1}
        sums = dict.fromkeys(_SUMMED, layers)
        plan = {"avg_bits": bits, "predicted_nats": 0.25 * layers}
        return StepReport(
            *(7, 7 + took_ps, {"a": pairs}, {"a": plan}, {}, 2 * layers, {"a": (1, 0)}, number, 7),
            *(sums, {"dram": layers}, *costs),
        )

    stages, clock = [stage(1, 1, 2.0, 50, "down"), stage(0, 3, 4.0, 100, "lost")], PipelineClock(2)
    whole = of_all_stages(stages, clock)
    assert (whole.before_ps, whole.start_ps, whole.end_ps, whole.pairs_per_row) == (0, 0, 150, 8)
    stages[1].unsimulated = "the device's time"
    later = of_all_stages(stages, clock)
    assert (later.before_ps, later.unsimulated) == (150, "the device's time")
    assert whole.pairs == {"a": dict.fromkeys(PAIR_KINDS, 0) | {"cold": 4, "hot": 4}}
    assert whole.rows == {"a": (1, 0)}
    assert whole.plans == {"a": {"avg_bits": (3 * 4.0 + 2.0) / 4, "predicted_nats": 1.0}}
    assert (whole.device, whole.device_bounds) == (dict.fromkeys(_SUMMED, 4), {"dram": 4})
    assert (whole.plan_s, whole.round_trips_s, whole.device_up) == (1.5, [0.25] * 4, False)
    assert (whole.migrated_experts, whole.kept_experts, whole.prefills) == (4, 40, 1)
    assert whole.fallbacks == {"lost": 3, "down": 1, "late": 2}


@pytest.mark.parametrize(
    ("settings", "nats", "said"),
    [
        ({"hot_experts": 4, "plan": "joint"}, None, "known for each plan"),
        ({"hot_experts": 4, "cold_precision": "full"}, None, ""),
        ({"hot_experts": 8}, None, ""),
        (
            {"hot_experts": 4, "policy": {"bit_rule": "mse", "losses": "absolute"}},
            None,
            "unknown: only",
        ),
        ({"hot_experts": 4}, None, "unknown: the replicas do not say"),
        ({"hot_experts": 4, "avg_bits": {"max_loss": 0.01}}, 0.010001, "0.01 nats a token"),
        ({"hot_experts": 4}, 0.01, "0.01 nats a token .* less by single pairs"),
        ({"hot_experts": 4, "avg_bits": 4}, 0.0, "0 nats a token$"),
        ({"hot_experts": 4, "debug": {"bits_for": "batch"}}, 0.01, "0.01 nats a token[^;]*$"),
        ({"hot_experts": 4, "avg_bits": {"max_loss": 0.001}}, 0.01, "0.01 nats a token .* above the max_loss of 0.001"),
    ],
)
def test_the_startup_table_gives_the_true_reason_where_no_loss_is_predicted(
    settings: dict[str, Any], nats: float | None, said: str
):
    row = _predicted_loss(NdpSettings.from_mapping(settings), 8, nats)
    assert re.match(said, row) if said else row == ""
    assert ("above the max_loss" in row) == ("above" in said)


def test_the_startup_table_gives_bits_of_cold_experts_where_there_are_any() -> None:
    told = {"avg_bits": 8.0, "policy": "prefill", "max_loss": None, "predicted_loss": "0 nats a token"}
    assert _cold(told | {"cold_experts": 6, "joint_tiers": ""}) == "8 bits on average, by prefill"
    assert _cold(told | {"cold_experts": 0, "joint_tiers": "gpu+device"})
    assert _cold(told | {"cold_experts": 0, "joint_tiers": ""}) == ""


def test_what_goes_on_is_told_as_json_has_it() -> None:
    hot = np.array([[1, 1, 0], [1, 0, 0]], np.bool_)
    replanner: Any = SimpleNamespace(epoch=0, placement=SimpleNamespace(hot=hot, warm=~hot & False))
    nothing_planned = {"epoch": 0, "hot_experts": 1.5, "warm_experts": 0, "avg_bits": None}
    assert plan_in_force(replanner, []) == nothing_planned
    sizes = {"prompt_len": 3, "num_output_tokens": 1}
    known: Any = {name: SimpleNamespace(request_id=name, prefilled=name == "b", **sizes) for name in "ab"}
    assert [(one["id"], one["phase"]) for one in running(SimpleNamespace(requests=known))] == [
        ("a", "prefill"),
        ("b", "decode"),
    ]
    clients = [SimpleNamespace(uses_shared_memory=shares) for shares in (True, False)]
    said = [_carrier(SimpleNamespace(clients=some)) for some in (clients[:1], clients[1:], clients)]
    assert said == ["shared memory", "sockets", "shared memory or sockets"]
    held = {"hot_bytes": 3000, "staging_bytes": 1000, "kv_cache_bytes": 2000, "sidecar_bytes": 0, "device_bytes": 0}
    assert _memory(held).startswith("hot slots 4 kB + KV cache 2 kB = 6 kB")


def app_of(quantization: str, api_key: list[str] | None, answers: list[Any]) -> FastAPI:
    """A server whose workers give these answers."""

    async def collective_rpc(name: str, args: tuple[str, ...]) -> list[Any]:
        return answers

    config, app = SimpleNamespace(model_config=SimpleNamespace(quantization=quantization)), FastAPI()
    app.state.engine_client = SimpleNamespace(
        vllm_config=config, engine_core=SimpleNamespace(), collective_rpc=collective_rpc
    )
    app.state.args = SimpleNamespace(api_key=api_key, uds="a socket")
    NdpEndpoints().attach_router(app)
    return app


@pytest.mark.parametrize(
    ("quantization", "method", "path", "status", "kind"),
    [
        ("ndp", "GET", "/v1/ndp/experts", 200, ""),
        ("fp8", "GET", "/v1/ndp/experts", 404, ""),
        ("ndp", "GET", "/v1/ndp/nothing", 404, "Not Found"),
        ("ndp", "GET", "/v1/ndp/requests", 404, "Not Found"),
        ("ndp", "POST", "/v1/ndp/status", 405, "Method Not Allowed"),
    ],
)
def test_an_endpoint_plugin_adds_the_routes_to_servers_of_this_plugin_only_and_refuses_the_rest_in_vllms_own_form(
    quantization: str, method: str, path: str, status: int, kind: str
):
    """With a server's `app` in the scope, where a router of Starlette raises and leaves the answer to the server."""

    app = app_of(quantization, ["secret"], [])
    with TestClient(app) as client:
        answer = client.request(method, path, headers={"Authorization": "Bearer secret"})
    assert answer.status_code == status
    if kind:
        error = {"message": f"{kind}: {method} {path}", "type": kind, "param": None, "code": status}
        assert answer.json()["error"] == error
        assert ("GET" in answer.headers.get("allow", "")) == (status == 405)


def test_paths_below_a_proxys_prefix_are_ours_too_and_behind_a_key_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    app = app_of("ndp", None, [{"finished": {}, "running": ["cmpl-x-0-1"]}])
    with TestClient(app, root_path="/llm") as client:
        assert client.get("/llm/ndp", follow_redirects=False).headers["location"] == "/llm/ndp/"
        assert client.get("/llm/v1/ndp/requests/x").status_code == 401
        answer = client.get("/llm/v1/ndp/requests/x", headers={"Authorization": "Bearer secret"})
    assert answer.json() == {"id": "x", "finished": {}, "running": ["cmpl-x-0-1"]}


def test_a_request_without_a_time_is_in_no_histogram():
    """As one of a single token, which has no time between two."""
    stats = NdpStats()
    stats.add_request({"finish": "aborted", "measured_ttft_ms": 5.0, "measured_tpot_ms": None})
    assert stats.data == {"finish:aborted": 1, "ndp_measured_ttft_seconds": [0.005]}
    clocks = {"measured_tpot_ms": 4000.0, "simulated_ttft_us": 3e6, "simulated_tpot_us": 2e6}
    stats = NdpStats()
    stats.add_request({"finish": "stop", **clocks})
    times = {"measured_tpot": [4.0], "simulated_ttft": [3.0], "simulated_tpot": [2.0]}
    assert stats.data == {"finish:stop": 1} | {f"ndp_{name}_seconds": pytest.approx(of) for name, of in times.items()}


def test_every_counter_shows_its_own_sum_in_its_own_unit():
    device = {"bytes_in": 11, "bytes_out": 13, "weight_bytes": 17, "dram_ps": 2 * 10**12, "energy_pj": 5 * 10**12}
    step = StepReport(3 * 10**12, 4 * 10**12, {}, {}, {}, 8, {"a": (19, 23)}, before_ps=10**12, device=device)
    step = dataclasses.replace(step, migrated_experts=29, kept_experts=31, prefills=37, round_trips_s=[0.1] * 41)
    sums = counts_of(step)
    shown = {
        name.removeprefix("ndp_"): {label: unit * sums[key] for label, key in of.items() if sums[key]}
        for name, (_, _, of, unit) in COUNTERS.items()
    }
    assert {name: values for name, values in shown.items() if values} == {
        "rows": {"decode": 19, "prompt": 23},
        "steps": {"": 1},
        "device_messages": {"": 41},
        "planned_prompts": {"": 37},
        "migrated_experts": {"": 29},
        "kept_experts": {"": 31},
        "simulated_seconds": {"": 3},
        "simulated_device_seconds": {"dram": 2},
        "simulated_device_bytes": {"in": 11, "out": 13, "weights": 17},
        "simulated_energy_joules": {"": 5},
    }


def test_a_page_begins_with_a_device_that_is_up_and_shows_sums_in_their_units() -> None:
    unregister_vllm_metrics()
    kinds: Any = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    page = NdpMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]})
    value = REGISTRY.get_sample_value
    assert value("vllm:ndp_device_up", {"engine": "0"}) == 1
    page.observe({"simulated_ps": 2 * 10**12, DEVICE_UP: 0, "ndp_measured_plan_seconds": [0.25, 0.5]})
    shown = ("device_up", "simulated_seconds_total", "measured_plan_seconds_sum", "measured_plan_seconds_count")
    assert [value(f"vllm:ndp_{name}", {"engine": "0"}) for name in shown] == [0, 2, 0.75, 2]
    unregister_vllm_metrics()


def test_sums_of_two_steps_add_up_and_the_last_state_of_the_device_counts():
    first = NdpStats({"steps": 1, "ndp_measured_plan_seconds": [0.1], DEVICE_UP: 1})
    both = first.aggregate(NdpStats({"steps": 2, "pairs:hot": 3, "ndp_measured_plan_seconds": [0.2], DEVICE_UP: 0}))
    assert both.data == {"steps": 3, "pairs:hot": 3, "ndp_measured_plan_seconds": [0.1, 0.2], DEVICE_UP: 0}
    assert both.reduce() == {"steps": 3, "pairs:hot": 3, DEVICE_UP: 0}


def test_every_metric_stands_on_its_page() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    names = [*(f"{name}_total" for name in COUNTERS), *HISTOGRAMS]
    assert [name for name in names if f"`{name.removeprefix('ndp_')}`" not in page] == []


@pytest.mark.parametrize(
    ("given", "where", "key"),
    [
        ({"host": None}, "http://localhost:8000", False),
        ({"host": "::"}, "http://localhost:8000", False),
        ({"host": "0.0.0.0", "root_path": "/llm"}, "http://localhost:8000/llm", False),
        ({"host": "::1", "api_key": ["k"]}, "http://[::1]:8000", True),
        ({"host": "gpu7", "ssl_certfile": "c.pem"}, "https://gpu7:8000", False),
    ],
)
def test_a_server_says_where_it_answers_and_a_line_that_asks_it(given: dict[str, Any], where: str, key: bool) -> None:
    usual = {"port": 8000, "root_path": "", "ssl_certfile": None, "uds": None, "served_model_name": None, "model": "m"}
    places, line = addresses(SimpleNamespace(**(usual | {"api_key": None} | given)))
    assert places == f"live page {where}/ndp/, metrics {where}/metrics, all settings {where}/v1/ndp/status"
    words = shlex.split(line.removeprefix("try: "))
    assert words[:2] == ["curl", f"{where}/v1/completions"]
    assert json.loads(words[-1])["model"] == "m"
    assert ("Authorization: Bearer $VLLM_API_KEY" in words) == key
    assert addresses(SimpleNamespace(uds="/run/socket")) == []


@pytest.mark.parametrize(
    ("words", "serves"),
    [
        ("vllm serve M --quantization ndp", True),
        ("/usr/bin/vllm serve M -q ndp --port 1", True),
        ("vllm serve M --quantization=ndp", True),
        ("vllm serve M --quantization fp8", False),
        ("vllm serve ndp", False),
        ("vllm bench throughput --quantization ndp", False),
        ("python program.py --quantization ndp", False),
    ],
)
def test_only_a_server_with_the_plugin_ends_in_one_sentence(words: str, serves: bool) -> None:
    assert serves_ndp(words.split()) == serves


def test_the_sentence_of_an_error_is_its_cause() -> None:
    after = RuntimeError("Engine core initialization failed. See root cause above.")
    after.__cause__ = ConfigError("the cause")
    assert sentence_of(after) == "the cause"
    assert sentence_of(RuntimeError("Engine core initialization failed. Failed core proc(s): {}")) == ""
    assert "signal 9" in sentence_of(RuntimeError("Engine core initialization failed. Failed core proc(s): {'e': -9}"))
    assert "--port" in sentence_of(OSError(errno.EADDRINUSE, "Address already in use"))
    assert sentence_of(ValueError("one\n  two")) == "one two"
    assert sentence_of(KeyError("x")).startswith("unexpected KeyError: 'x'")
