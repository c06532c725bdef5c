"""Grids of comparisons: the same rows whoever finds them; what is refused, and where; what fits into memories."""

import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from paths import DATA

from ndp_device.common.errors import ConfigError, NdpError
from vllm_ndp.cost_model.costs import model_named
from vllm_ndp.cost_model.memory import CAPACITY_OF, DoesNotFit
from vllm_ndp.lab.compare import (
    Compared,
    Comparison,
    Replayed,
    Replays,
    Workload,
    _comparison,
    _trace_of,
    beside_fastest,
    columns,
    compare,
    compare_all,
    named,
    processes,
)
from vllm_ndp.lab.options import CAPACITY, GB, CompareSettings
from vllm_ndp.lab.systems import SYSTEMS
from vllm_ndp.planning.bitwidths import LossTable, nominal_loss
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.traces.format import DECODE, REJECTED
from vllm_ndp.traces.synthetic import read_routing, synthetic_trace
from vllm_ndp.traces.trace import Trace

TRACE = Trace.load(DATA / "tiny-mixtral-trace")
SETTINGS = CompareSettings(
    systems=("context_aware", "monde", "gpu_on_demand"), policies=("prefill", "oracle"), batches=(4, 64), fit=True
)
SIX = TRACE.select(range(6))  # four are replayed: bytes need no more
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
    with pytest.raises(ConfigError, match=r"trace 2 \(of synthetic, 64 experts top-8\) is for no model of the grid"):
        compare_all([TRACE, olmoe], [SETTINGS])
    with pytest.raises(ConfigError, match=r"trace 2 .* or a trace before it has the same"):
        compare_all([TRACE, TRACE], [SETTINGS])
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


def row(system: str, speed: float, loss: float, policy: str = "static", batch: int = 1) -> Any:
    return SimpleNamespace(system=system, decode_tokens_per_s=speed, loss=loss, policy=policy, batch=batch)


def compared(*points: tuple[CompareSettings, list[Any], list[str]], loss: LossTable | None = None) -> Compared:
    made = [(at, Comparison([SimpleNamespace(row=one) for one in of], notes, "", 1)) for at, of, notes in points]
    return Compared(made, [], loss)


def test_the_fastest_and_the_fastest_of_another_system_by_hand():
    """Oracles take no part, though they are faster; of batch 4 nothing loses as little as 3 bits do, so all count."""
    three = nominal_loss(3)
    rows = [
        row("fiddler", 1, 0),
        row("balanced", 2, three),
        row("balanced", 3, three / 2),
        row("joint", 9, 0, "oracle, all"),
        row("quantized", 8, 2 * three, "2 bits"),
        row("monde", 5, 1, batch=4),
        row("fiddler", 6, 1, batch=4),
    ]
    found = [(batch, best, other) for _, batch, best, other in compared((at(avg_bits=3.0), rows, [])).winners()]
    assert found == [(1, rows[2], rows[0]), (4, rows[6], rows[5])]


def test_what_the_points_bits_lose_is_a_rows_or_the_mean_of_the_table():
    known = LossTable(LossTable.nominal(2, 2).mse * np.array([1.0, 3.0])[:, None])
    found, rows = compared((at(), [], []), loss=known), [row("quantized", 1, 0.5, "3 bits")]
    assert found._loss_at(3, []) == pytest.approx(2 * nominal_loss(3), rel=1e-5)
    assert found._loss_at(8, []) == pytest.approx(2 * nominal_loss(4), rel=1e-5)
    assert 0.5 < found._loss_at(3, rows) < 0.5001


def test_replicas_with_8_bits_are_priced_with_them():
    nominal = LossTable.nominal(4, 8)
    for at_8 in (None, nominal.mse[:, :, 3] / 100):
        replays = Replays(Workload(SIX), at(systems=("monde",), batches=(1,)), LossTable(nominal.mse, at_8=at_8))
        assert replays.costs.has_bytes == (at_8 is not None)


def test_a_note_of_some_points_names_them():
    one, other = at(model="olmoe"), at()
    found = compared((one, [], ["a", "b"]), (other, [], ["b"]))
    assert found.skipped == ["b", f"{named(one)}: a"]


def test_every_row_stands_beside_the_fastest_of_all_requests_of_its_batch():
    """4 + 4 is less than 1 + 9; of a batch of 2 there is a single group."""
    rows = [
        Replayed(row("a", 1, 0, batch=b), np.array(of), 0.0) for b, of in ((1, [1, 9.0]), (1, [4, 4.0]), (2, [1.0]))
    ]
    first, second, alone = beside_fastest(rows)
    assert (first.mean, second.mean, alone) == (0.25, 0, None)
    told: Any = SimpleNamespace(
        skipped=[], num_requests=1, costs=SimpleNamespace(hardware=SimpleNamespace(config_hash=""))
    )
    assert _comparison(rows[::-1], [told]).replayed == [rows[1], rows[0], rows[2]], "by batch size, then as given"


def test_a_model_takes_the_first_trace_that_chooses_as_many_of_as_many_experts():
    one, two = (SimpleNamespace(provenance=SimpleNamespace(num_experts=8, top_k=k)) for k in (1, 2))
    assert _trace_of("mixtral-8x7b", [one, two, two]) == 1


def test_a_predictor_learns_from_no_rejected_draft_and_where_none_are_held_out_from_prompts_alone():
    other = (TRACE.ids + 1) % 8
    decoded = dataclasses.replace(TRACE, ids=np.where((TRACE.phase == DECODE)[:, None, None], other, TRACE.ids))
    even = ImportanceScore.from_weights(np.ones((4, 8)))
    chances = [Workload(trace, prior=even).predictor.chances for trace in (TRACE, decoded)]
    assert np.array_equal(*chances)
    twice = {name: np.repeat(getattr(TRACE, name), 2, axis=0) for name in ("step", "request", "position", "weights")}
    drafts = np.arange(2 * len(TRACE.step)) % 2 == 0  # one before each row
    drafted = dataclasses.replace(
        TRACE,
        **twice,
        ids=np.where(drafts[:, None, None], np.repeat(other, 2, axis=0), np.repeat(TRACE.ids, 2, axis=0)),
        phase=np.where(drafts, REJECTED, np.repeat(TRACE.phase, 2)).astype(np.uint8),
    )
    assert np.array_equal(Workload(drafted).predictor.chances, Workload(TRACE).predictor.chances)


def test_a_worker_that_dies_ends_the_work_in_one_sentence(monkeypatch):
    monkeypatch.setattr(Replays, "replay", lambda *_: os._exit(9))
    with pytest.raises(NdpError, match="fewer --jobs"):
        compare_all([TRACE], [SETTINGS], jobs=2)


@pytest.mark.parametrize("text", ["two", "0", "ray"])
def test_jobs_are_a_number_or_all(text):
    with pytest.raises(ConfigError, match="--jobs must be a number"):
        processes(text)


# -- capacities bind ---------------------------------------------------------------------------------------------------

SHAPE = model_named("mixtral-8x7b")
EXPERT = SHAPE.expert_bytes
BESIDE = (
    2 * (SHAPE.beside_weights + 2 * SHAPE.head_weights) + 2 * EXPERT
)  # other weights, and two places through which experts stream
KV_TOKEN = 131072


def rows(systems=("context_aware",), batches=(1,), **changes):
    overrides = {"dram.kind": "ideal", **changes.pop("overrides", {})}
    settings = CompareSettings(overrides=overrides, systems=systems, policies=("prefill",), batches=batches, **changes)
    return compare(SIX, settings).rows


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_is_refused_a_byte_of_each_memory(system):
    # at 4 bits every expert fits on the GPU, and a variant that runs keeps its system from being refused
    own = {"options": {"llama_cpp": {"gguf_bits": 16}, "ktransformers": {"gpu_bits": 16}}.get(system, {})}
    held = rows((system,), **own)[0]
    places = {"gpu": held.gpu_gb, "device": held.device_gb, "host": held.host_gb, "expander": held.expander_gb}
    for place, needs in places.items():
        key = CAPACITY_OF[place]
        if needs:
            with pytest.raises(DoesNotFit, match=rf"{system} with K \d at batch 1.* lacks \d+ bytes.* is 1:"):
                rows((system,), overrides={key: 1}, **own)
        else:
            rows((system,), overrides={key: 1}, **own)


def test_a_row_says_what_it_holds():
    """K = 4: 32 x 4 experts; the trace's requests end with 512 tokens, so batch 4 caches four times as many."""
    one, four = rows(batches=(1, 4))
    assert one.gpu_gb * 1e9 == pytest.approx(BESIDE + 128 * EXPERT + 512 * KV_TOKEN)
    assert four.gpu_gb - one.gpu_gb == pytest.approx(3 * 512 * KV_TOKEN / 1e9)
    assert (one.num_hot, one.host_gb) == (4, 0)
    assert rows(("monde",))[0].num_hot == 0


def test_a_system_that_fits_at_one_batch_size_alone_is_refused():
    room = BESIDE + 128 * EXPERT + 512 * KV_TOKEN
    assert rows(overrides={"gpu.hbm_capacity_bytes": room})[0].num_hot == 4
    with pytest.raises(DoesNotFit, match="context_aware with K 4 at batch 4 does not fit"):
        rows(batches=(1, 4), overrides={"gpu.hbm_capacity_bytes": room})


def test_fit_gives_a_cache_of_any_size_all_that_is_left():
    room = BESIDE + 5 * 32 * EXPERT + 512 * KV_TOKEN + 12_345
    held = rows(("expert_cache",), fit=True, overrides={"gpu.hbm_capacity_bytes": room})[0]
    assert held.gpu_gb * 1e9 == pytest.approx(room, abs=1)


def test_fit_takes_the_most_hot_experts_that_fit_and_never_more_than_asked_for():
    """Room for five experts of each layer to the byte, then one byte less."""
    room = BESIDE + 5 * 32 * EXPERT + 512 * KV_TOKEN
    assert rows(fit=True, overrides={"gpu.hbm_capacity_bytes": room})[0].num_hot == 5
    assert rows(fit=True, overrides={"gpu.hbm_capacity_bytes": room - 1})[0].num_hot == 4
    assert rows(fit=True, num_hot=3, overrides={"gpu.hbm_capacity_bytes": room})[0].num_hot == 3
    assert rows(fit=True, overrides={"gpu.hbm_capacity_bytes": 10**12})[0].num_hot == 8  # needs no staging places


def test_fit_takes_narrower_replicas_where_the_device_is_small():
    """All experts in fp16 and, for each of 256, 2 planes and two sets of scales."""
    weights = SHAPE.weights_per_expert
    room = 256 * (2 * weights + 2 * weights // 8 + 2 * 4 * weights // 128)
    narrow = rows(fit=True, avg_bits=3.0, overrides={"dram.capacity_bytes": room})[0]
    wide = rows(fit=True, avg_bits=3.0)[0]
    assert narrow.avg_bits <= 2 < wide.avg_bits
    with pytest.raises(DoesNotFit, match="nothing of it fits"):
        rows(fit=True, overrides={"dram.capacity_bytes": 256 * 2 * weights})


def test_with_fit_systems_that_fit_are_shown_and_the_others_named():
    tight = {"dram.capacity_bytes": 256 * EXPERT}  # MoNDE's experts, no replicas
    settings = CompareSettings(overrides=tight, systems=("context_aware", "monde"), policies=("prefill",), fit=True)
    result = compare(SIX, settings)
    assert {row.system for row in result.rows} == {"monde"}
    assert len(result.skipped) == 1
    assert "context_aware with K 0 at batch 1 does not fit, device memory lacks" in result.skipped[0]


def test_one_variant_that_fits_is_enough_for_its_system():
    """Without a cache GPU on demand needs two places, with one K per layer."""
    tight = {"gpu.hbm_capacity_bytes": BESIDE + 512 * KV_TOKEN}
    settings = CompareSettings(overrides=tight, systems=("gpu_on_demand",))
    result = compare(SIX, settings)
    assert [row.policy for row in result.rows] == ["no cache"]
    assert len(result.skipped) == 2
