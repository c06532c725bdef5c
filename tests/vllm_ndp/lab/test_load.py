"""Requests that arrive, wait and join: arrivals by seed, steps as vLLM makes them, and a cause for every picosecond."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from paths import DATA, ROOT

from ndp_device.common.errors import ConfigError, NdpError, TraceError
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.cost_model.gpu_timing import LayerTime, StepTime
from vllm_ndp.cost_model.memory import Footprint, beside_device_memory
from vllm_ndp.lab.exact.engine import StepRun, alone, modelled_host
from vllm_ndp.lab.exact.live import RecordedRun, replay_live
from vllm_ndp.lab.load import run as load_run
from vllm_ndp.lab.load.latency import CAUSES, Tokens, as_bench_serve, percentiles, tokens_of
from vllm_ndp.lab.load.run import Host, ServedRequest, ServedStep, drawn, of_steps, recorded, serve, serve_again
from vllm_ndp.lab.load.scheduler import Request, ScheduledSpan, Scheduler
from vllm_ndp.lab.load.workload import Lengths, Workload, read_mooncake
from vllm_ndp.lab.options import LoadSettings
from vllm_ndp.layer.setup import Planning, Scheduling
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.format import ALL_REQUESTS
from vllm_ndp.traces.trace import Sequence, Trace, from_sequences

BUNDLED = Trace.load(DATA / "tiny-mixtral-trace")
TINY = str(ROOT / "models" / "tiny-mixtral")
SLOW = {"gpu.hbm_bytes_per_s": 10**9, "link.bulk_bytes_per_s": 10**9}
"""A GPU and link so slow that the test model's steps take long beside a launch."""


def short(requests: int, prompt: int, decode: int) -> Trace:
    """The bundled trace with short prompts and answers."""
    sequences = [
        dataclasses.replace(
            s,
            prompt_ids=s.prompt_ids[:prompt],
            prompt_weights=s.prompt_weights[:prompt],
            decode_ids=s.decode_ids[:decode],
            decode_weights=s.decode_weights[:decode],
        )
        for s in BUNDLED.sequences[:requests]
    ]
    return from_sequences(BUNDLED.provenance, sequences)


def settings(**changes) -> LoadSettings:
    return LoadSettings(**{"model": TINY, "overrides": dict(SLOW), "process": "together", "num_hot": 4} | changes)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_repeat_with_their_seed_and_gaps_vary_by_one_over_the_root_of_their_burstiness(burstiness, variation):
    at, again, other = (drawn(20_000, 10.0, seed, burstiness) for seed in (0, 0, 4))
    assert np.array_equal(at, again)
    assert not np.array_equal(at, other)
    gaps = np.diff(at) / 1e12
    assert gaps.mean() == pytest.approx(0.1, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.06)


def test_recorded_arrivals_are_taken_as_they_are_or_faster():
    trace = dataclasses.replace(short(3, 4, 2), arrival_s=np.array([0.0, 0.5, 2.0]))
    assert recorded(trace).tolist() == [0, 5 * 10**11, 2 * 10**12]
    assert recorded(trace, speed=10).tolist() == [0, 5 * 10**10, 2 * 10**11]


@pytest.mark.parametrize(
    ("at", "says"),
    [
        ([0.0, 2.0, 1.0], "out of order: request 2 comes at 1 s, after request 1 at 2 s"),
        ([0.0, -1.0, 2.0], "at least 0"),
    ],
)
def test_arrivals_that_no_clock_could_give_are_refused(at, says):
    with pytest.raises(TraceError, match=says):
        recorded(dataclasses.replace(short(3, 4, 2), arrival_s=np.array(at)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"process": "poison"}, "process must be one of"),
        ({"process": "poisson", "rate": 0.0}, "--rate must be greater than 0"),
        ({"process": "bursty", "burstiness": -1.0}, "--burstiness must be greater than 0"),
        ({"process": "recorded", "speed": float("nan")}, "--speed must be greater than 0"),
        ({"process": "recorded", "requests": 9}, "leave --requests out"),
        ({"process": "recorded"}, "does not tell when its requests came: take another --process"),
        ({"block_size": 16, "kv_tokens": 15}, "--kv-tokens must hold a block of 16, got 15"),
        ({"requests": 0}, "at least 1 request"),
        ({"execution": "fast"}, "execution must be one of"),
        ({"num_hot": 9}, "0..8"),
        ({"model": "olmoe"}, "64 top-8"),
        ({"model": "mixtral-8x7b", "overrides": {}, "devices": 3, "split": True}, "cannot be cut into 3 equal parts"),
        ({"split": True}, "--split gives each of several devices a part of every expert: give --devices"),
        ({"process": "steps", "devices": 2}, "leave --gpus and --devices out"),
        ({"process": "steps", "gpus": 2}, "leave --gpus and --devices out"),
        ({"overrides": {"gpu.hbm_capacity_bytes": 10**6}}, "gpu memory lacks"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(change, says):
    with pytest.raises(NdpError, match=says):
        serve([short(2, 4, 2)], settings(**change))


def test_a_trace_without_live_steps_has_no_arrivals_by_step():
    with pytest.raises(TraceError, match="no steps of a live run"):
        of_steps(BUNDLED)


def steps_of(requests: list[tuple[int, int, int]], limit: int = 30, **rules) -> list[list[tuple[int, int, int]]]:
    """requests: (before which step, prompt, rows in all). Each step as (request, start, rows)."""
    usual = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "block_size": 16, "kv_blocks": 1 << 20}
    scheduler = Scheduler(Scheduling(**usual | rules))
    left = [(when, Request(number, prompt, rows)) for number, (when, prompt, rows) in enumerate(requests)]
    steps = []
    while (left or scheduler.busy) and len(steps) < limit:
        while left and left[0][0] <= len(steps):
            scheduler.add(left.pop(0)[1])
        steps.append([(span.request, span.start, span.num_tokens) for span in scheduler.schedule()])
        scheduler.end_step()
    assert len(steps) < limit
    return steps


def test_running_requests_decode_beside_the_chunks_of_a_long_prompt():
    """4 tokens a step. 0 decodes with one of them, so 1's prompt of 7 comes in chunks of 3, 3 and 1."""
    assert steps_of([(0, 2, 6), (1, 7, 8)], max_num_batched_tokens=4) == [
        [(0, 0, 2)],
        [(0, 2, 1), (1, 0, 3)],
        [(0, 3, 1), (1, 3, 3)],
        [(0, 4, 1), (1, 6, 1)],
        [(0, 5, 1), (1, 7, 1)],
    ]


def test_who_finds_no_place_waits_for_one():
    steps = steps_of([(0, 2, 4), (0, 2, 3), (0, 2, 2)], max_num_seqs=2)
    assert [[request for request, _, _ in step] for step in steps] == [[0, 1], [0, 1], [0, 2]]


def test_newcomers_take_the_places_of_those_that_left_and_then_the_last_moves_down():
    """0, 1, 2 run; 0 and 1 leave together. 3 takes the first place; the second is filled with 2 from the end."""
    steps = steps_of([(0, 1, 1), (0, 1, 1), (0, 1, 4), (1, 1, 3)])
    assert [[request for request, _, _ in step] for step in steps] == [[0, 1, 2], [3, 2], [3, 2], [3, 2]]


def test_a_full_kv_cache_sends_back_the_one_admitted_last_which_then_computes_all_it_had_again():
    """Blocks of 2, three of them. Both prompts of 2 take one. In step 1 both want a second: 0 gets the last free one,
    1 has none to get but its own, and goes. When 0 has ended it comes back, with prompt and first output at once."""
    assert steps_of([(0, 2, 4), (0, 2, 4)], block_size=2, kv_blocks=3) == [
        [(0, 0, 2), (1, 0, 2)],
        [(0, 2, 1)],
        [(0, 3, 1)],
        [(1, 0, 3)],
        [(1, 3, 1)],
    ]


def test_a_request_that_sends_itself_back_is_counted():
    scheduler = Scheduler(Scheduling(max_num_batched_tokens=9, max_num_seqs=9, block_size=2, kv_blocks=3))
    for number in range(2):
        scheduler.add(Request(number, 2, 4))
    counts = []
    while scheduler.busy:
        scheduler.schedule()
        scheduler.end_step()
        counts.append(scheduler.preemptions)
    assert counts == [0, 1, 1, 1, 1]


def test_who_was_sent_back_comes_before_those_that_wait_and_nobody_is_admitted_in_the_same_step():
    """Three blocks of 2. In step 1 both running requests want a second block: 1 goes, and 2, which needs one and would
    find it, waits behind 1."""
    steps = steps_of([(0, 2, 4), (0, 2, 4), (1, 1, 1)], block_size=2, kv_blocks=3)
    assert steps[:3] == [[(0, 0, 2), (1, 0, 2)], [(0, 2, 1)], [(0, 3, 1)]]
    assert [[request for request, _, _ in step] for step in steps[3:]] == [[1, 2], [1]]


def test_a_prompt_is_admitted_where_all_of_it_fits_and_its_cached_tokens_are_not_computed():
    """Four tokens a step. Of a prompt of 8 the first 5 are cached, so its other 3 run at once. The next prompt of 6
    needs three blocks of 2: it waits for them, though its first chunk would fit."""
    scheduler = Scheduler(Scheduling(max_num_batched_tokens=4, max_num_seqs=9, block_size=2, kv_blocks=6))
    scheduler.add(Request(0, 8, 9, cached=5))
    scheduler.add(Request(1, 6, 6))
    steps = []
    while scheduler.busy:
        steps.append([tuple(span) for span in scheduler.schedule()])
        scheduler.end_step()
    assert steps == [[(0, 5, 3)], [(0, 8, 1)], [(1, 0, 4)], [(1, 4, 2)]]


def test_a_host_knows_how_many_share_its_device_and_has_whole_blocks_of_kv_cache():
    host = load_run._host(short(2, 4, 2), settings(kv_tokens=7 * 16 + 5, block_size=16), 0, None, 3)
    assert host.engine.setup.device_hosts == 3
    assert host._scheduler.rules.kv_blocks == 7


def test_room_is_left_for_the_states_of_as_many_requests_as_run_at_once(monkeypatch):
    seen = []
    monkeypatch.setattr(load_run, "kv_room", lambda costs, num_hot, requests, devices: seen.append(requests) or 1024)
    for most in (256, 1):
        load_run._host(short(2, 4, 2), settings(max_num_seqs=most), 0, None, 1)
    assert seen == [2, 1]


def test_what_the_weights_leave_of_gpu_memory_is_for_kv_cache():
    """Mixtral-8x7B: 4 of 8 experts and two that pass through, 128 KiB a token. Two GPUs have the same weights once."""
    for gpus in (1, 2):
        costs = Costs(load_hardware("h100-ndp512"), model_named("mixtral-8x7b"), num_gpus=gpus)
        shape = costs.shape
        weights = 2 * (shape.beside_weights + 2 * shape.head_weights) + (32 * 4 + 2) * shape.expert_bytes
        room = gpus * costs.hardware.gpu.hbm_capacity_bytes - weights
        assert load_run.kv_room(costs, 4, 1) == room // 131_072


def test_a_prefix_stays_only_where_the_kv_cache_has_room_for_it(tmp_path):
    line = '{"timestamp": 1, "input_length": 1100, "output_length": 1, "hash_ids": [1, 2, 3]}\n'
    (tmp_path / "a.jsonl").write_text(line * 2)
    for room, cached in ((512, 512), (1 << 20, 1099)):
        host = load_run._host(short(2, 4, 2), settings(process=str(tmp_path / "a.jsonl"), kv_tokens=room), 0, None, 1)
        assert [request.cached for request in host._requests] == [0, cached]


def test_a_position_that_ran_twice_gives_its_rows_in_turn_and_then_the_last_again():
    trace, rows = short(1, 2, 1), [0, 1, 0, 1, 2]
    columns = {name: getattr(trace, name)[rows] for name in ("request", "position", "phase", "ids", "weights")}
    found = load_run._Rows(dataclasses.replace(trace, step=np.array([0, 0, 1, 1, 2], np.int32), **columns))
    assert [found.of([ScheduledSpan(0, 0, 2)]).tolist() for _ in range(3)] == [[0, 1], [2, 3], [2, 3]]


def test_hosts_draw_arrivals_of_their_own():
    one, other = serve([short(2, 4, 2)] * 2, settings(process="poisson", rate=50.0))
    assert one.arrivals_ps.tolist() == drawn(2, 50.0, 0).tolist()
    assert other.arrivals_ps.tolist() == drawn(2, 50.0, 1).tolist()


def test_a_request_that_the_kv_cache_could_never_hold_is_refused():
    with pytest.raises(ConfigError, match="needs 3 blocks of KV cache for 5 tokens, there are 2"):
        steps_of([(0, 3, 5)], block_size=2, kv_blocks=2)
    with pytest.raises(ConfigError, match="max_num_seqs must be at least 1"):
        steps_of([], max_num_seqs=0)


def step(
    decided: int,
    start: int,
    spans: list[ScheduledSpan],
    layers: list[tuple[int, int]],
    yielded: tuple[int, ...],
    alone=None,
):
    """layers: (hot, device) of each; attention 10, overhead 0, head 0. alone: the layers without prefill rows."""

    def time(of: list[tuple[int, int]]) -> StepTime:
        made = tuple(LayerTime(10, 0, hot, 0, device, 0) for hot, device in of)
        return StepTime(start, start + sum(layer.total_ps for layer in made), made)

    decode_only = None if alone is None else time(alone)
    run = StepRun(time(layers), (None,) * len(layers), 0, start - decided, decode_only, False)
    return ServedStep(decided, tuple(spans), run, yielded)


def test_each_picosecond_between_two_tokens_has_the_cause_that_a_pencil_gives():
    """Request 0 (prompt 2) arrives at 0, request 1 (prompt 3) at 5; one layer; attention 10.

    step A, 0 to 30     0's prompt alone: 20 of experts.                            0: prefill 30
    step B, 36 to 86    after 6 of migration. 0 decodes, 1 has 2 of its 3 rows.
                        Alone the decode would be 10 + max(5, 15) = 25, of which the device 10.
                        0: migration 6, gpu 15, device 10, prefill of others 25
                        1: queue 25 (5 to 30), migration 6, gpu 15, device 10, prefill 25
    step C, 86 to 116   1's last prompt row alone; 0 is left out of it.             1: prefill 30
    step D, 116 to 146  0 decodes again: 10 + 20 of experts.                        0: queue 30, gpu 30
    """
    steps = [
        step(0, 0, [ScheduledSpan(0, 0, 2)], [(20, 0)], (0,)),
        step(30, 36, [ScheduledSpan(0, 2, 1), ScheduledSpan(1, 0, 2)], [(40, 15)], (0,), alone=[(5, 15)]),
        step(86, 86, [ScheduledSpan(1, 2, 1)], [(20, 0)], (1,)),
        step(116, 116, [ScheduledSpan(0, 3, 1)], [(20, 0)], (0,)),
    ]
    tokens = tokens_of(ServedRequest(np.array([0, 5]), np.array([2, 3]), steps, 0))
    found = [
        (int(r), int(n), {c: int(v) for c, v in zip(CAUSES, row, strict=True) if v})
        for r, n, row in zip(tokens.request, tokens.index, tokens.causes_ps, strict=True)
    ]
    assert found == [
        (0, 0, {"prefill": 30}),
        (0, 1, {"migration": 6, "gpu": 15, "device": 10, "prefill of others": 25}),
        (1, 0, {"queue": 25, "migration": 6, "gpu": 15, "device": 10, "prefill": 55}),
        (0, 2, {"queue": 30, "gpu": 30}),
    ]
    assert tokens.latency_ps.tolist() == [30, 86 - 30, 116 - 5, 146 - 86]


def test_prefill_of_a_step_is_shared_out_by_the_rows_that_ran_of_each_prompt():
    """Of 8 and 4 prompt rows 3 and 1 run in the first step, 100 long, and 5 and 3 in the second, 80 long."""
    steps = [
        step(0, 0, [ScheduledSpan(0, 0, 3), ScheduledSpan(1, 0, 1)], [(90, 0)], ()),
        step(100, 100, [ScheduledSpan(0, 3, 5), ScheduledSpan(1, 1, 3)], [(70, 0)], (0, 1)),
    ]
    tokens = tokens_of(ServedRequest(np.array([0, 0]), np.array([8, 4]), steps, 0))
    own, others = tokens.causes_ps[:, CAUSES.index("prefill")], tokens.causes_ps[:, CAUSES.index("prefill of others")]
    assert (own.tolist(), others.tolist()) == ([75 + 50, 25 + 30], [25 + 30, 75 + 50])


@pytest.mark.parametrize(("queue", "device", "hosts"), [(0, 10, 0), (4, 6, 4), (50, 0, 10)])
def test_other_hosts_cause_no_more_than_the_device_took_longer_than_the_gpu(queue, device, hosts):
    """The device 15, the GPU 5: a layer of 10 + 15."""
    one = step(0, 0, [ScheduledSpan(0, 2, 1)], [(5, 15)], (0,))
    run = dataclasses.replace(one.run, device=(SimpleNamespace(queue_ps=queue),))
    tokens = tokens_of(ServedRequest(np.array([0]), np.array([2]), [dataclasses.replace(one, run=run)], 0))
    found = dict(zip(CAUSES, tokens.causes_ps[0].tolist(), strict=True))
    assert (found["device"], found["other hosts"], found["gpu"]) == (device, hosts, 15)


def test_of_seven_tokens_the_fourth_is_the_middle_and_the_last_the_ninetieth():
    causes = np.zeros((7, len(CAUSES)), np.int64)
    causes[:, 0] = [3, 1, 7, 2, 6, 5, 4]
    tokens = Tokens(np.zeros(7, int), np.ones(7, int), np.arange(7), causes)
    assert [one.latency_ps for one in percentiles(tokens)] == [4, 7, 7, 7]


def test_figures_of_two_requests_by_hand():
    """One arrives at 1 s and answers after 2 s, then 100 and 300 ms; one arrives at 2 s and answers once, after 1 s."""
    causes = np.zeros((4, len(CAUSES)), np.int64)
    causes[:, -1] = np.array([2000, 1000, 100, 300]) * 10**9
    at_ps = np.array([3000, 3000, 3100, 3400]) * 10**9
    tokens = Tokens(np.array([0, 1, 0, 0]), np.array([0, 0, 1, 2]), at_ps, causes)
    served = ServedRequest(np.array([1, 2]) * 10**12, np.array([7, 5]), [], 0)
    found = as_bench_serve(tokens, served, {"ttft": 2000, "tpot": 200})
    assert found == pytest.approx(
        {
            "completed": 2,
            "total_input_tokens": 12,
            "total_output_tokens": 4,
            "request_throughput": 2 / 2.4,
            "output_throughput": 4 / 2.4,
            "total_token_throughput": 16 / 2.4,
            "mean_ttft_ms": 1500,
            "median_ttft_ms": 1500,
            "p99_ttft_ms": 1990,
            "mean_tpot_ms": 200,
            "median_tpot_ms": 200,
            "p99_tpot_ms": 200,
            "mean_itl_ms": 200,
            "median_itl_ms": 200,
            "p99_itl_ms": 298,
            "mean_e2el_ms": 1700,
            "median_e2el_ms": 1700,
            "p99_e2el_ms": 2386,
            "request_goodput": 2 / 2.4,
        }
    )
    for limits, good in (({"ttft": 1999, "tpot": 200}, 1), ({"tpot": 199}, 1), ({"e2el": 2400}, 2), ({"e2el": 999}, 0)):
        assert as_bench_serve(tokens, served, limits)["request_goodput"] == pytest.approx(good / 2.4)


def test_percentiles_are_tokens_by_nearest_rank():
    causes = np.zeros((1000, len(CAUSES)), np.int64)
    causes[:, -1] = np.arange(1000, 0, -1)
    tokens = Tokens(np.zeros(1000, int), np.ones(1000, int), np.arange(1000), causes)
    assert [(p.percent, p.latency_ps) for p in percentiles(tokens)] == [(50, 500), (90, 900), (99, 990), (99.9, 999)]
    assert list(percentiles(tokens.first())) == []


def check_causes(served: ServedRequest) -> Tokens:
    """Tokens whose causes add up to the time between them, in every request."""
    tokens = tokens_of(served)
    for request, arrival in enumerate(served.arrivals_ps.tolist()):
        own = tokens.request == request
        gaps = np.diff(np.concatenate([[arrival], tokens.at_ps[own]]))
        assert tokens.index[own].tolist() == list(range(own.sum()))
        assert tokens.latency_ps[own].tolist() == gaps.tolist()
    assert (tokens.causes_ps >= 0).all()
    return tokens


@pytest.fixture
def nothing_kept(monkeypatch):
    """What prompts stream leaves again, so that every change of plan moves experts."""
    monkeypatch.setattr(load_run, "PlannerRules", partial(PlannerRules, keeps_streamed=False))


@pytest.mark.parametrize(
    ("process", "execution"), [("together", "balanced"), ("poisson", "paper"), ("bursty", "balanced")]
)
def test_causes_add_up_to_the_latency_of_every_token(process, execution, nothing_kept):
    (served,) = serve(
        [short(6, 24, 10)],
        settings(
            process=process,
            execution=execution,
            rate=40.0,
            max_num_batched_tokens=16,
            max_num_seqs=3,
            kv_tokens=7 * 16,
        ),
    )
    tokens = check_causes(served)
    assert len(tokens.at_ps) == 6 * 11
    by_cause = dict(zip(CAUSES, tokens.causes_ps.sum(axis=0).tolist(), strict=True))
    assert {cause for cause, spent in by_cause.items() if not spent} <= {"other hosts", "device"}
    mixed = [step.run for step in served.steps if step.run.decode_only is not None]
    assert mixed
    assert all(run.decode_only.total_ps <= run.time.total_ps for run in mixed)
    for run in mixed:  # all prompts are streamed: what the device computes is of decode rows
        took = [0 if timing is None else timing.total_ps for timing in run.device]
        assert [layer.device_ps for layer in run.decode_only.layers] == took
    head_ps, prefilled = Costs(load_hardware("h100-ndp512", **SLOW), model_named(TINY)).gpu.head_ps, set[int]()
    for step in served.steps:
        if (time := step.run.decode_only) is not None:  # without the head of prompts that end in it
            head = time.total_ps - sum(layer.total_ps for layer in time.layers)
            assert head == head_ps(len(prefilled.intersection(step.yielded)))
        prefilled |= set(step.yielded)


def test_a_request_that_meets_no_other_takes_what_it_takes_alone():
    """Refresh counts absolute time, so the DRAM is ideal here; one request, since the hot set outlives it."""
    trace = short(1, 16, 6)
    overrides = SLOW | {"dram.kind": "ideal"}
    early, late = (
        serve([trace], settings(process=process, rate=1e-3, overrides=overrides))[0]
        for process in ("together", "poisson")
    )
    assert late.arrivals_ps[0] > 0
    first, second = tokens_of(early), tokens_of(late)
    assert np.array_equal(first.causes_ps, second.causes_ps)
    assert np.array_equal(second.at_ps - late.arrivals_ps[0], first.at_ps)


def test_hosts_that_share_a_device_wait_for_each_other_and_say_so():
    trace = short(2, 8, 12)
    (alone,) = serve([trace], settings(execution="paper"))
    both = serve([trace, trace], settings(execution="paper"))
    hosts = CAUSES.index("other hosts")
    assert tokens_of(alone).causes_ps[:, hosts].sum() == 0
    assert sum(int(tokens_of(served).causes_ps[:, hosts].sum()) for served in both) > 0
    for served in both:
        assert check_causes(served).at_ps.max() >= tokens_of(alone).at_ps.max()


def decode_ps(hosts: int = 1, **changes) -> int:
    """What the slowest host's tokens take behind their first, at Mixtral-8x7B's sizes on a DRAM without refresh."""
    big = settings(**{"model": "mixtral-8x7b", "overrides": {"dram.kind": "ideal"}, "num_hot": 2} | changes)
    return max(int(tokens_of(served).later().latency_ps.sum()) for served in serve([short(1, 8, 12)] * hosts, big))


def test_more_devices_help_hosts_that_share_them_and_parts_of_experts_help_one_that_is_alone():
    """Two chosen experts a layer: at most two devices have work for one request, unless each has a part of both."""
    alone = {devices: decode_ps(devices=devices) for devices in (1, 2, 4)}
    assert alone[1] >= alone[2] >= alone[4] > 0.98 * alone[2]
    split = decode_ps(devices=4, split=True)
    assert split < 0.95 * alone[4]
    assert decode_ps(2) > decode_ps(2, devices=4) >= alone[4]


def test_gpus_that_split_a_layer_are_faster_and_have_room_for_more_hot_experts():
    assert decode_ps(gpus=2) < decode_ps()
    with pytest.raises(NdpError, match="gpu memory lacks"):
        decode_ps(num_hot=8)
    assert decode_ps(num_hot=8, gpus=2) > 0


def test_several_devices_hold_together_what_one_cannot():
    """90 GB of experts and 28 of replicas, on devices of 70."""
    small = {"dram.kind": "ideal", "dram.capacity_bytes": 70 * 10**9}
    with pytest.raises(NdpError, match="device memory lacks"):
        decode_ps(overrides=small)
    assert decode_ps(overrides=small, devices=2) > 0


def test_hosts_that_know_of_each_other_are_no_slower_balanced_than_by_the_papers_rule():
    """Before, each offloaded as if the device were idle: at 8x7B's sizes 2 hosts took 303 us a layer instead of 240."""
    assert decode_ps(2, num_hot=4) <= decode_ps(2, num_hot=4, execution="paper")


def test_a_trace_is_taken_round_and_round_for_more_requests():
    trace = short(3, 4, 2)
    written = from_sequences(trace.provenance, [trace.sequences[n % 3] for n in range(7)])
    theirs, mine = serve([written], settings())[0], serve([trace], settings(requests=7))[0]
    assert tokens_of(mine).causes_ps.tolist() == tokens_of(theirs).causes_ps.tolist()
    assert [step.run.device for step in mine.steps] == [step.run.device for step in theirs.steps]
    assert len(serve([trace], settings(requests=2))[0].arrivals_ps) == 2


def test_a_recording_with_holes_is_refused():
    trace = short(2, 6, 3)
    columns = ("step", "request", "position", "phase", "ids", "weights")
    with pytest.raises(TraceError, match=r"request 1 has token 4 after 2 \(row 12\)"):
        dataclasses.replace(trace, **{name: np.delete(getattr(trace, name), 12, axis=0) for name in columns})
    with pytest.raises(TraceError, match="the recording is incomplete"):
        serve([dataclasses.replace(trace, prompt_len=trace.prompt_len + 9)], settings())


def test_a_request_of_its_prompt_alone_gives_one_token():
    one = BUNDLED.sequences[0]
    nothing = Sequence.of("", one.prompt_ids[:5], one.prompt_weights[:5], 5)
    (served,) = serve([from_sequences(BUNDLED.provenance, [nothing])], settings())
    assert [len(step.spans) for step in served.steps] == [1]
    assert tokens_of(served).index.tolist() == [0]


def test_routing_of_a_decode_is_needed_only_by_requests_that_decode():
    one = BUNDLED.sequences[0]
    nothing = Sequence.of("", one.prompt_ids[:5], one.prompt_weights[:5], 5)
    trace, prompts = from_sequences(BUNDLED.provenance, [nothing]), np.array([9])
    assert Workload(trace, prompts, np.array([1])).num_rows.tolist() == [9]
    with pytest.raises(TraceError, match="request 0 of the trace has no prompt or no decode to take routing from"):
        Workload(trace, prompts, np.array([2]))


MOONCAKE = """{"timestamp": 0, "input_length": 20, "output_length": 4, "hash_ids": [1]}
{"timestamp": 10, "input_length": 7, "output_length": 1, "hash_ids": [2]}
{"timestamp": 12.5, "input_length": 3, "output_length": 9}
"""


def test_a_file_of_mooncakes_gives_times_lengths_and_prefixes_and_the_trace_its_routing_round_and_round(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(MOONCAKE)
    assert read_mooncake(file, 2).output_lens.tolist() == [4, 1]
    trace = short(2, 6, 3)
    (served,) = serve([trace], settings(process=str(file), speed=2.0))
    assert served.arrivals_ps.tolist() == [0, 5 * 10**9, 6_250_000_000]
    assert np.bincount(tokens_of(served).request).tolist() == [4, 1, 9]
    rows = Workload(trace, np.array([20, 7, 3]), np.array([4, 1, 9]))
    first, second = trace.sequences[0], trace.sequences[1]
    of_first = rows.of([ScheduledSpan(0, 0, 23)])
    assert np.array_equal(rows.ids[of_first[:20]], np.resize(first.prompt_ids, (20, *first.prompt_ids.shape[1:])))
    assert np.array_equal(rows.ids[of_first[20:]], first.decode_ids)
    both = rows.of([ScheduledSpan(1, 2, 5), ScheduledSpan(2, 3, 8)])  # the third request is the first one again
    assert rows.request[both].tolist() == [1] * 5 + [2] * 8
    assert rows.position[both].tolist() == [2, 3, 4, 5, 6, *range(3, 11)]
    assert np.array_equal(rows.ids[both[:5]], second.prompt_ids[[2, 3, 4, 5, 0]])
    assert np.array_equal(rows.weights[both[5:]], np.resize(first.decode_weights, (8, *first.decode_weights.shape[1:])))


def test_a_prefix_that_was_there_is_not_computed_again_while_there_is_room_for_it():
    lens = np.full(4, 1200)
    prompts = Lengths(np.arange(4), lens, lens, [[1, 2, 3], [1, 2, 9], [4, 5, 6], [1, 2, 3]])
    assert prompts.cached(1 << 20).tolist() == [0, 1024, 0, 1199]
    assert prompts.cached(4 * 512).tolist() == [0, 1024, 0, 512]  # 1 is the last of its prompt to be driven out
    assert prompts.cached(0).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"timestamp": 1, "input_length": 0, "output_length": 4}', "line 2 is no request of Mooncake's"),
        ('{"timestamp": -1, "input_length": 3, "output_length": 4}', "line 2 is no request of Mooncake's"),
        ('{"input_length": 3}', "line 2 is no request of Mooncake's"),
        ("\xff", "line 2 is no request of Mooncake's"),
        ('{"timestamp": 0.5, "input_length": 3, "output_length": 4}', "line 2 comes at 0.5 ms, before"),
    ],
)
def test_another_file_is_refused_with_its_line(tmp_path, line, says):
    file = tmp_path / "a.jsonl"
    file.write_text('{"timestamp": 1, "input_length": 2, "output_length": 4}\n' + line + "\n", encoding="latin-1")
    with pytest.raises(TraceError, match=says):
        read_mooncake(file)
    file.write_text('{"timestamp": 1, "input_length": 2, "output_length": 4}')
    with pytest.raises(TraceError, match="holds 1 requests, and 5 were asked for"):
        read_mooncake(file, 5)


def test_figures_under_the_names_of_vllm_bench_serve_count_from_the_same_tokens():
    (served,) = serve([short(3, 5, 4)], settings())
    tokens = tokens_of(served)
    figures = as_bench_serve(tokens, served, {})
    ttft = tokens.latency_ps[tokens.index == 0] / 1e9
    last = [tokens.at_ps[tokens.request == r].max() / 1e9 for r in range(3)]
    assert figures["completed"] == 3
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (15, 15)
    assert figures["mean_ttft_ms"] == pytest.approx(ttft.mean())
    assert figures["mean_e2el_ms"] == pytest.approx(np.mean(last))
    assert figures["median_tpot_ms"] == pytest.approx(np.median((np.array(last) - ttft) / 4))
    assert figures["output_throughput"] == pytest.approx(15 / (max(last) / 1e3))
    assert "request_goodput" not in figures
    middle = float(np.median(last))
    good = as_bench_serve(tokens, served, {"e2el": middle, "ttft": 1e9})["request_goodput"]
    assert good == pytest.approx(sum(at <= middle for at in last) / (max(last) / 1e3))


# -- a run that was written down ---------------------------------------------------------------------------------------

NOMINAL = LossTable.nominal(4, 8)
PLANNING = Planning(policy="prefill", options={}, hot_experts=4, avg_bits=3.0)


@pytest.fixture(scope="module")
def written() -> Trace:
    """Three requests on two places, as a plugin would have recorded them."""
    trace, rules = short(3, 8, 6), PLANNING.rules(NOMINAL)
    scheduling = Scheduling(max_num_batched_tokens=12, max_num_seqs=2, block_size=16, kv_blocks=100)
    host = modelled_host(Costs(load_hardware("h100-ndp512", **SLOW), model_named(TINY)), rules, offload_bits=3)
    setup = msgspec.structs.replace(host, planning=PLANNING, scheduling=scheduling)
    served = alone(Host(trace, setup, rules, np.zeros(3, np.int64), scheduling).whole(), DeviceModel(setup.hardware))
    spans = [(number, span) for number, step in enumerate(served.steps) for span in step.spans]
    rows = [(number, span.request, at) for number, span in spans for at in range(span.start, span.end)]
    step, request, position = np.array(rows, np.int32).T
    of = [np.flatnonzero((trace.request == r) & (trace.position == at))[0] for _, r, at in rows]
    times = [step.run.time for step in served.steps]
    events = {
        "step": np.arange(len(times)),
        "simulated_start_ps": np.array([time.start_ps for time in times]),
        "simulated_step_ps": np.array([time.total_ps for time in times]),
        "fallback_pairs": np.zeros(len(times), np.int64),
    }
    return dataclasses.replace(
        trace,
        provenance=msgspec.structs.replace(trace.provenance, live=setup),
        step=step,
        request=request,
        position=position,
        phase=trace.phase[of],
        ids=trace.ids[of],
        weights=trace.weights[of],
        events=events,
    )


def with_events(trace: Trace, name: str, step: int, more: int) -> Trace:
    values = trace.events[name].copy()
    values[step] += more
    return dataclasses.replace(trace, events=trace.events | {name: values})


def test_a_run_is_replayed_and_served_again_to_the_picosecond(written):
    found, served = replay_live(written, NOMINAL), serve_again(written, NOMINAL)
    assert found.identical
    assert (found.steps_identical, found.plan_mismatches, found.fallback_steps) == (len(written.events["step"]), 0, 0)
    times = [(step.run.time.start_ps, step.run.time.total_ps) for step in served.steps]
    assert times == list(zip(*(of.tolist() for of in written.simulated_steps()), strict=True))
    first = int(written.step[written.request == 2][0])
    assert of_steps(written).tolist() == [0, 0, sum(times[first - 1])]


def test_a_step_that_began_or_took_otherwise_is_another_one(written):
    num_steps = len(written.events["step"])
    for name in ("simulated_start_ps", "simulated_step_ps"):
        found = replay_live(with_events(written, name, 3, 1), NOMINAL)
        assert (found.steps_identical, found.identical) == (num_steps - 1, False)
    fell_back = with_events(with_events(written, "fallback_pairs", 2, 5), "fallback_pairs", 4, 1)
    assert replay_live(fell_back, NOMINAL).fallback_steps == 2, "steps, not pairs"


def test_a_plan_that_was_made_otherwise_is_counted(written):
    engine = (again := RecordedRun(written, written.provenance.live, PLANNING.rules(NOMINAL))).engine
    while not again.run(int(again.steps[engine.planner.epoch])).replanned:
        pass
    tiers, bits = engine.planner.placement.tiers, engine.requests[0].plan.bits.bits
    for wrong in (None, 0, 1):
        cells = np.stack([tiers, bits])
        if wrong is not None:
            cells[wrong, 0, 0] += 1
        plans = {"epoch": np.full(2, engine.planner.epoch), "request": np.array([ALL_REQUESTS, 0]), "cells": cells}
        found = replay_live(dataclasses.replace(written, plans=plans), NOMINAL)
        assert (found.plan_mismatches, found.identical) == ((0, True) if wrong is None else (1, False))
    without_placement = {name: column[1:] for name, column in plans.items()}
    assert replay_live(dataclasses.replace(written, plans=without_placement), NOMINAL).plan_mismatches == 1


def test_a_run_that_the_modelled_memory_could_not_have_held_is_refused(written):
    setup = written.provenance.live
    room = Footprint.of(
        beside_device_memory(setup.costs_of(model_named(TINY)), 4),
        model_named(TINY),
        14 + 13,  # of the first request at its end, and of the second, whose prompt ended a step later
        2,
    ).gpu
    for capacity, fits in ((room, True), (room - 1, False)):
        overrides = setup.overrides | {"gpu.hbm_capacity_bytes": capacity}
        live = msgspec.structs.replace(setup, overrides=overrides)
        trace = dataclasses.replace(written, provenance=msgspec.structs.replace(written.provenance, live=live))
        if fits:
            assert replay_live(trace, NOMINAL).identical
        else:
            with pytest.raises(NdpError, match="the run with K 4 does not fit, gpu memory lacks 1 bytes"):
                replay_live(trace, NOMINAL)
