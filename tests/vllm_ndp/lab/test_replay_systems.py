"""Systems: golden results on the checked-in trace, bounds that hold for all, and each one's own edge."""

import json
from dataclasses import replace

import numpy as np
import pytest
from paths import DATA

from ndp_device.common.errors import ConfigError
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.compare import compare, popularity, split_requests
from vllm_ndp.lab.options import CompareSettings
from vllm_ndp.lab.systems import SYSTEMS, ReplayOptions, TooFewPlaces, joint
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import SKIPPED, gate_loss
from vllm_ndp.lab.vectorised.outcome import Outcome, ratio_se
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.traces.trace import Trace, from_sequences

WHOLE = Trace.load(DATA / "tiny-mixtral-trace")
KNOWN, REST = split_requests(WHOLE)
TRACE = REST.select(range(5))  # five of twelve: the exact replay takes most of these tests' time
PRIOR = popularity(KNOWN)
COSTS = Costs(load_hardware("h100-ndp512", **{"dram.kind": "ideal"}), model_named("mixtral-8x7b"))
PAIRS = 2 * 4 * int(Batches.of(TRACE).valid.sum())
"""Of all decode tokens and layers: the five decode alike, also in pairs."""
GOLDEN = DATA / "golden-replay.json"
GOLDEN_SETTINGS = CompareSettings(overrides={"dram.kind": "ideal"}, batches=(1, 4), avg_bits=2.0)


def options_of(policy: str = "prefill", **changes) -> ReplayOptions:
    fields = {"budget": Budget(4, 2.0), **changes}
    return ReplayOptions(
        policy=load_policy(policy, PolicySettings(prior=PRIOR)), loss=LossTable.nominal(4, 8), prior=PRIOR, **fields
    )


def run(system: str = "context_aware", batch: int = 1, policy: str = "prefill", **changes) -> Outcome:
    return SYSTEMS[system].replay(Batches.of(TRACE, batch), COSTS, options_of(policy, **changes))


def golden_rows(batches: tuple[int, ...] = GOLDEN_SETTINGS.batches) -> list[dict]:
    rows = compare(WHOLE, replace(GOLDEN_SETTINGS, batches=batches)).rows
    return [
        {name: float(f"{value:.10g}") if isinstance(value, float) else value for name, value in row.as_dict().items()}
        for row in rows
    ]


def test_every_system_gives_its_golden_result_on_the_checked_in_trace():
    """After a change that is meant to move them: PYTHONPATH=tests python FILE, with this file, writes them anew."""
    golden = json.loads(GOLDEN.read_text())
    assert {row["system"] for row in golden} == set(SYSTEMS)
    assert golden_rows() == golden


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("hot", [0, 8])
def test_every_system_survives_no_gpu_memory_and_enough_for_all(system, hot):
    if system in ("quantized", "dynaexq") and not hot:
        says = "take 0.396 GB, 0 hot ones leave room for 0.000 GB" if system == "quantized" else "bytes are missing"
        with pytest.raises(TooFewPlaces, match=rf"at 2 bits .*{says}"):
            run(system, budget=Budget(hot, 2.0))
        return
    outcome = run(system, budget=Budget(hot, 2.0))
    if system in ("context_aware", "balanced"):  # with all experts on the GPU the device holds none
        assert outcome.hot_pairs == hot / 8 * PAIRS
    if system in ("context_aware", "fiddler", "cxl_expert", "moe_infinity") and hot == 8:
        assert outcome.moe_ps == pytest.approx(np.full(outcome.moe_ps.shape, COSTS.resident_ps(2, 2)))


def test_memory_that_a_system_may_use_is_counted_to_the_expert():
    """Of 32 x 8 experts. Two places of any memory are for those that stream; more than all experts never stay."""
    expert, options = COSTS.shape.expert_bytes, options_of(budget=Budget(3, 2.0))
    assert (options.gpu_memory(COSTS), options.room(COSTS)) == ((32 * 3 + 2) * expert, 32 * 3 * expert)
    assert [options.held(COSTS, size) for size in (expert, expert // 2, expert // 4)] == [96, 192, 256]
    given = replace(options, gpu_bytes=10 * expert)
    assert (given.gpu_memory(COSTS), given.room(COSTS), given.held(COSTS, expert)) == (10 * expert, 8 * expert, 8)
    assert options_of(budget=Budget(9, 2.0)).room(COSTS) == 256 * expert


def test_an_option_is_one_of_the_known_ones_as_it_is_known():
    options = options_of(own={"bits": 4.0, "most": 1.5})
    assert type(options.choice("bits", (16, 4))) is int
    with pytest.raises(ConfigError, match=r"most must lie in 0\.\.1, got 1\.5"):
        options.number("most", 0.0, 0.0, 1.0)


def test_replicas_of_two_bits_give_plans_of_no_more_and_experts_that_leave_go_at_two():
    for system, policy in (("context_aware", "prefill"), ("balanced", "prefill, spill 2")):
        outcome = run(system, widest=2)
        assert outcome.policy == policy
        assert 1 <= outcome.cold.bits / outcome.cold.pairs <= 2
        assert (outcome.device_ps > 0).any()


def test_a_joint_plans_memory_and_widths_are_those_of_its_tiers():
    everything = 256 * COSTS.shape.expert_bytes
    for tiers, host, on_device in (
        ("gpu+host+device", everything, True),
        ("gpu+device", 0, True),
        ("gpu", everything, False),
    ):
        held = joint.memory(COSTS, options_of(own={"tiers": tiers}))
        assert (held.host, held.device > everything) == (host, on_device)
    for has_bytes, widest, widths in ((True, 4, (16, 8, 4, 3, 2, 1)), (False, 2, (16, 2, 1))):
        costs = replace(COSTS, has_bytes=has_bytes)
        assert joint.widths_of(costs, options_of(widest=widest))["device"] == widths
    even = ImportanceScore.from_weights(np.ones((4, 8)))
    _, bits = joint.papers(options_of(widest=2, budget=Budget(2, 4.0)), [even], even.values)
    assert bits.bits.max() == 2


KEEP_STATE = ("context_aware", "balanced", "joint")
"""What one group leaves in the slots, the next one finds."""


@pytest.mark.parametrize("system", sorted(set(SYSTEMS) - {*KEEP_STATE, "moepic"}))
def test_a_group_takes_what_it_takes_alone_whoever_decodes_longer(system):
    """Two requests, of which the second ends after 40 of 150 tokens; MoEpic chooses one theta for all."""
    sequences = [replace(s, decode_ids=s.decode_ids[:n], decode_weights=s.decode_weights[:n])
                 for s, n in zip(TRACE.sequences, (150, 40), strict=False)]  # fmt: skip
    both = Batches.of(from_sequences(TRACE.provenance, sequences))
    own = {"gpu_on_demand": {"cache": "lru"}}.get(system, {})
    found = SYSTEMS[system].replay(both, COSTS, options_of(own=own))
    alone = [
        SYSTEMS[system].replay(Batches.of(from_sequences(TRACE.provenance, [one])), COSTS, options_of(own=own))
        for one in sequences
    ]
    for group, one in enumerate(alone):
        steps = one.moe_ps.shape[1]
        assert found.moe_ps[group, :steps] == pytest.approx(one.moe_ps[0], rel=1e-3)  # of the longest context
        assert found.prefill_ps[group] == pytest.approx(one.prefill_ps[0])
    for name in ("hot_pairs", "migrated_bytes"):
        assert getattr(found, name) == pytest.approx(sum(getattr(one, name) for one in alone), rel=1e-6, abs=2), name
    for name in ("hbm_bytes", "host_bytes", "link_bytes", "device_dram_pj", "device_arrays_pj"):
        whole = sum(getattr(one.traffic, name) for one in alone)
        assert getattr(found.traffic, name) == pytest.approx(whole, rel=1e-6), name


def test_a_width_that_does_not_fit_is_said_beside_the_others_and_alone_refused():
    settings = CompareSettings(systems=("quantized", "fiddler"), num_hot=2)
    result = compare(WHOLE, settings)
    assert [row.policy for row in result.rows] == ["3 bits", "2 bits", "static"]
    assert [note.partition(" take")[0].rpartition("at ")[2] for note in result.skipped] == [
        "16 bits",
        "8 bits",
        "4 bits",
    ]
    with pytest.raises(TooFewPlaces, match="16 bits take"):
        compare(WHOLE, replace(settings, systems=("quantized",), num_hot=1))


def test_skipping_an_expert_loses_all_of_it_and_no_width_loses_more():
    everything, nothing = (
        gate_loss(Batches.of(TRACE), np.full(Batches.of(TRACE).ids.shape, width), LossTable.nominal(4, 8))
        for width in (SKIPPED, 1)
    )
    assert everything == pytest.approx(nothing / (1 - 2 / np.pi))
    assert nothing == pytest.approx(1.0, rel=1e-3)  # in units of the loss at 1 bit; gates of a row sum to 1


def test_prompts_on_both_sides_begin_to_answer_sooner_and_end_no_later_than_one_copy_a_layer():
    """What the device computed and will be hot has to move afterwards: at most one copy more than streaming it all."""
    streamed, split = (run("balanced", own={"prefill": kind}) for kind in ("streamed", "split"))
    assert run("balanced").prefill_ps.tobytes() == streamed.prefill_ps.tobytes()
    assert (split.prefill_ps < streamed.prefill_ps).all()
    assert split.prefill_ps.sum() < 0.6 * streamed.prefill_ps.sum()
    assert split.moe_ps == pytest.approx(streamed.moe_ps, rel=0.02)  # refresh falls elsewhere
    both = [outcome.prefill_ps.sum(axis=1) + outcome.migration_ps for outcome in (streamed, split)]
    assert (both[1] <= both[0] + COSTS.shape.num_layers * COSTS.copy_ps).all()
    with pytest.raises(ConfigError, match="prefill must be one of streamed, split"):
        run("balanced", own={"prefill": "both"})


def test_spilling_to_the_device_only_happens_where_it_shortens_a_layer():
    plain, balanced = run(), run("balanced")
    assert (balanced.moe_ps <= plain.moe_ps * 1.02).all()  # refresh falls elsewhere
    assert balanced.moe_ps.sum() < 0.95 * plain.moe_ps.sum()
    assert balanced.hot_pairs < plain.hot_pairs
    saved = [plain.moe_ps.sum() - run("balanced", own={"spill_bits": bits}).moe_ps.sum() for bits in (2, 3, 4)]
    assert saved[0] >= saved[1] > saved[2] > 0  # at 3 bits the device is done before the GPU already


@pytest.mark.parametrize(
    ("system", "own", "says"),
    [
        ("monde", {"h_rounding": "up"}, "h_rounding"),
        ("joint", {"max_gate_loss": "many"}, "max_gate_loss must lie in 0..1, got 'many'"),
        ("joint", {"max_gate_loss": float("nan")}, "max_gate_loss must lie in 0..1"),
        ("gpu_on_demand", {"cache": "fifo"}, "cache must be"),
        ("balanced", {"spill_bits": 7}, "spill_bits"),
        ("quantized", {"weight_bits": 5}, "weight_bits must be one of 16, 8, 4, 3, 2, got 5"),
        ("vllm_offload", {"offload_backend": "disk"}, "offload_backend must be one of uva, prefetch"),
        ("llama_cpp", {"gguf_bits": 6}, "gguf_bits must be one of"),
        ("ktransformers", {"cpu_bits": 3}, "cpu_bits must"),
    ],
)
def test_an_impossible_option_is_refused(system, own, says):
    with pytest.raises(ConfigError, match=says):
        run(system, own=own)


def test_every_option_has_its_system_and_others_are_refused_before_anything_runs():
    CompareSettings(systems=("balanced", "hobbit"), options={"spill_bits": 2})
    with pytest.raises(ConfigError, match=r"unknown option 'spill_bit': the chosen systems have spill_bits"):
        CompareSettings(systems=("balanced",), options={"spill_bit": 2})
    with pytest.raises(ConfigError, match="the chosen systems have none"):
        CompareSettings(systems=("fiddler",), options={"theta": 0.5})


def test_errors_are_those_of_leaving_one_group_out():
    """Rates 10/1, 10/2, 10/4 s: leaving one out gives 20/6, 20/5, 20/3; their spread x (G - 1) / G, root of the sum."""
    left = np.array([20 / 6, 20 / 5, 20 / 3])
    expected = np.sqrt(2 / 3 * ((left - left.mean()) ** 2).sum())
    assert ratio_se(np.full(3, 10.0), np.array([1.0, 2.0, 4.0])) == pytest.approx(expected)
    assert np.isnan(ratio_se(np.ones(1), np.ones(1)))


def test_gains_over_the_paper_are_of_the_same_requests():
    """By rooflines, requests are slow or fast for both: errors of pairs are smaller than those of two means."""
    settings = CompareSettings(
        systems=("context_aware", "balanced", "monde"),
        policies=("prefill", "static"),
        overrides={"gpu.times": "roofline"},
    )
    rows = compare(WHOLE.select(range(6)), settings).rows
    paper = next(row for row in rows if (row.system, row.policy) == ("context_aware", "prefill"))
    assert (paper.over_paper, paper.over_paper_se) == (0.0, 0.0)
    for row in rows:
        assert row.over_paper == pytest.approx(row.decode_tokens_per_s / paper.decode_tokens_per_s - 1)
    balanced = next(row for row in rows if row.policy == "prefill, spill 3")
    apart = np.hypot(balanced.decode_tokens_per_s_se, paper.decode_tokens_per_s_se) / paper.decode_tokens_per_s
    assert 0 < balanced.over_paper_se < apart
    without = compare(WHOLE.select(range(6)), replace(settings, systems=("monde",))).rows
    assert all(np.isnan(row.over_paper) for row in without)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden_rows(), indent=0) + "\n")
