"""Grids of comparisons: the same rows whoever finds them; what is refused, and where; and their page."""

import dataclasses
import os

import pytest
from paths import DATA

from ndp_device.common.errors import ConfigError, NdpError
from vllm_ndp.lab.compare import Replays, columns, compare, compare_all, processes
from vllm_ndp.lab.options import CAPACITY, GB, CompareSettings
from vllm_ndp.planning.bitwidths import nominal_loss
from vllm_ndp.traces.synthetic import read_routing, synthetic_trace
from vllm_ndp.traces.trace import Trace

TRACE = Trace.load(DATA / "tiny-mixtral-trace")
SETTINGS = CompareSettings(
    systems=("context_aware", "monde", "gpu_on_demand"), policies=("prefill", "oracle"), batches=(4, 64), fit=True
)
SMALL = {"gpu.hbm_capacity_bytes": 24 * 10**9}


def at(**changes) -> CompareSettings:
    return dataclasses.replace(SETTINGS, **changes)


def values(rows) -> list[dict]:
    """as_dict turns NaN into None, so that equal rows compare equal."""
    return [row.as_dict() for row in rows]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_grid_is_compare_at_every_point_in_every_field_for_any_number_of_processes(jobs):
    points = [
        at(model="mixtral-8x22b", options={"h_rounding": "ceil"}),
        at(hardware="h200-gen5", policy_options={"bit_rule": "layers"}),
    ]
    found = compare_all([TRACE], points, jobs=jobs)
    for settings, (point, here) in zip(points, found.points, strict=True):
        alone = compare(TRACE, settings)
        assert point == settings
        assert values(here.rows) == values(alone.rows)
        assert [one.decode_ps.tobytes() for one in here.replayed] == [o.decode_ps.tobytes() for o in alone.replayed]
        assert (here.config_hash, here.num_requests) == (alone.config_hash, alone.num_requests)
    assert found.skipped == ["batch 64: only 12 requests to replay"]
    assert found.rows()[0] == columns(points[0]) | found.points[0][1].rows[0].as_dict()


def test_each_model_takes_the_trace_of_its_routing_shape():
    olmoe = synthetic_trace(read_routing("", "olmoe").settings("olmoe", num_requests=4, prompt_len=4, decode_len=3))
    one = CompareSettings(systems=("fiddler",))
    found = compare_all([TRACE, olmoe], [dataclasses.replace(one, model=name) for name in ("olmoe", "mixtral-8x7b")])
    assert [comparison.num_requests for _, comparison in found.points] == [3, 12]


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([at(model="olmoe")], "8 experts top-2, the model 64 top-8"),
        ([at(model="olmoe"), at(model="olmoe")], "8 experts top-2, the model 64 top-8"),
        ([at(hardware="h100"), at(hardware="h200")], "did you mean"),
        ([at(systems=("fiddler",), fit=False, overrides=SMALL)], "gpu memory lacks"),
    ],
)
def test_where_nothing_can_be_replayed_the_first_reason_is_given(points, says):
    with pytest.raises(NdpError, match=says):
        compare_all([TRACE], points)


def test_traces_and_models_that_do_not_meet_are_refused():
    olmoe = synthetic_trace(read_routing("", "olmoe").settings("olmoe", num_requests=2, prompt_len=2, decode_len=1))
    with pytest.raises(ConfigError, match="64 experts top-8 as trace 2"):
        compare_all([TRACE, olmoe], [SETTINGS])
    with pytest.raises(ConfigError, match="add a trace of its routing shape"):
        compare_all([TRACE, olmoe], [at(model="qwen3-30b-a3b")])


def test_what_one_system_refuses_does_not_keep_the_others_from_a_point():
    """24 GB hold no four experts of 8x7B per layer, which Fiddler keeps, but MoNDE, which keeps none."""
    both = at(systems=("fiddler", "monde"), batches=(1,), fit=False)
    small = dataclasses.replace(both, overrides=SMALL)
    found = compare_all([TRACE], [small, both])
    assert [(row["memory_gb"], row["system"]) for row in found.rows()] == [
        *[(24, "monde")] * 3,
        (None, "fiddler"),
        *[(None, "monde")] * 3,
    ]
    ((point, why),) = found.refused
    assert point == small
    assert "gpu memory lacks" in why
    assert [(best.system, other and other.system) for _, _, best, other in found.winners()] == [
        ("monde", None),
        ("fiddler", "monde"),
    ]


def test_the_fastest_is_looked_for_among_those_that_lose_no_more_than_the_points_bits():
    """At 2 bits 8x7B is fastest with every expert on the GPU. At 3 bits 16 GB do not hold that: the plan wins, though
    all at 2 bits is faster. A point's bits alone change its row."""
    points = [
        at(systems=("quantized", "context_aware"), policies=("prefill",), batches=(1,), avg_bits=bits, fit=True,
           overrides={CAPACITY: 16 * GB})
        for bits in (2.0, 3.0)
    ]  # fmt: skip
    found = compare_all([TRACE], points)
    two, three = [best for _, _, best, _ in found.winners()]
    assert (two.system, two.policy, three.system) == ("quantized", "2 bits", "context_aware")
    assert three.decode_tokens_per_s < two.decode_tokens_per_s
    assert three.loss <= nominal_loss(3) < two.loss


def test_a_worker_that_dies_ends_the_work_in_one_sentence(monkeypatch):
    monkeypatch.setattr(Replays, "replay", lambda *_: os._exit(9))
    with pytest.raises(NdpError, match="fewer --jobs"):
        compare_all([TRACE], [SETTINGS], jobs=2)


@pytest.mark.parametrize("text", ["two", "0", "ray"])
def test_jobs_are_a_number_or_all(text):
    with pytest.raises(ConfigError, match="--jobs must be a number"):
        processes(text)
