"""Hosts that share one device: a case worked by hand, and what must hold for any of them."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from paths import DATA

from ndp_device.common.errors import TraceError
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import Work
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.exact.engine import Asks, ReplayedCommand, ReplayedMigration, StepRun, modelled_host, together
from vllm_ndp.lab.exact.live import RecordedRun
from vllm_ndp.lab.load.run import with_layers
from vllm_ndp.lab.vectorised.batches import Loads
from vllm_ndp.lab.vectorised.cache import lcp, lfu, lru, visits
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.format import CACHED, CHANGED, DOWN, REJECTED
from vllm_ndp.traces.trace import Trace

NS = 1000
EASY = load_hardware(
    "h100-ndp512",
    **{
        "dram.kind": "ideal",  # 512 bytes/ns
        "array.clock_hz": 10**12,  # arrays wait for the DRAM
        "array.command_ps": 0,
        "link.raw_bytes_per_s": 85 * 10**9,  # a line of 64 B, 85 on the wire, takes 1 ns
        "link.dma_launch_ps": 0,
        "link.dma_latency_ps": 0,
    },
)
WORK = Work(
    hidden_size=1024,
    intermediate_size=1024,
    bytes_in=6400,  # 100 ns
    bytes_out=12800,  # 200 ns
    experts=((16, 1, 5_120_000),),  # 10 000 ns
)
TAIL = 316
"""ps: the last tile in the arrays, after the last byte."""


def sending(at_ns: Sequence[int]) -> Asks[list[tuple[int, int, int]]]:
    """A host that submits WORK at given times, or when the answer before has come: (submit, start, done) of each."""
    seen, now = [], 0
    for at in at_ns:
        now = max(now, at * NS)
        timing = yield ReplayedCommand(WORK, now)
        seen.append((now, timing.start_ps, timing.done_ps))
        now = timing.done_ps
    return seen


def moving(at_ns: int, num_bytes: int) -> Asks[int]:
    """A host that migrates once; when its last byte came."""
    return (yield ReplayedMigration(num_bytes, at_ns * NS))


def test_two_hosts_and_a_migration_take_what_a_pencil_says():
    """In ns. One command alone: 125 + 100 to the device, 10 000 read, 0.316 in the arrays, 250 + 200 back: 10 675.316.

    A submits at 0, B at 1000, C a migration of 25.6 MB at 2000, A again when its answer has come.

      A1   arrives 225, read to 10 225.316, done 10 675.316
      B    arrives 1225, waits for A1; 10 225.316 to 20 225.632; leaves to 20 425.632, done 20 675.632
      C    was submitted before A2: begins when B's result has left, 20 425.632. One stripe of 5120 B is read (10), then
           25.6 MB at 25.6 GB/s: 1 000 010. Its reads take 50 000 of that.
      A2   submitted 10 675.316, waits for B until 20 225.632. Beside C it reads for
           10 000 + 10 000 * 50 000 / (1 000 010 - 50 000) = 10 526.311: to 30 752.259, done 31 202.259
      C    A2's result has passed it for 200: 20 425.632 + 1 000 010 + 200 = 1 020 635.632
    """
    a, b, c = together([sending([0, 0]), sending([1000]), moving(2000, 25_600_000)], DeviceModel(EASY))
    assert a[0] == (0, 225 * NS, 10_675_316)
    assert b[0] == (1000 * NS, 10_225_316, 20_675_632)
    beside = 10_000 * NS + -(-10_000 * NS * 50_000 // (1_000_010 - 50_000))
    assert beside == 10_526_311
    assert a[1] == (10_675_316, 20_225_632, 20_225_632 + beside + TAIL + 450 * NS)
    assert c == 20_425_632 + 1_000_010 * NS + 200 * NS


def test_every_result_that_passes_a_migration_moves_its_end_and_that_of_those_that_wait_for_it():
    """40 commands of 10 675 ns or more each end before 1 ms is over; each result is 200 ns on the wire."""
    hosts = [moving(0, 25_600_000), moving(0, 25_600_000), sending([1] * 40)]
    first, second, commands = together(hosts, DeviceModel(EASY))
    assert all(done < 1_000_010 * NS for _, _, done in commands)
    assert first == 1_000_010 * NS + 40 * 200 * NS
    assert second == first + 1_000_010 * NS


def test_of_two_that_ask_at_once_the_first_host_goes_first():
    a, b = together([sending([5]), sending([5])], DeviceModel(EASY))
    assert a[0][1] < b[0][1]


def test_a_step_whose_devices_changed_needs_its_recorded_time():
    trace = Trace.load(DATA / "tiny-mixtral-trace").select([0])
    devices = {"step": np.array([2]), "device": np.array([-1]), "change": np.array([CHANGED])}
    rules = PlannerRules(load_policy("prefill", PolicySettings()), Budget(4, 3.0), LossTable.nominal(4, 8))
    setup = modelled_host(Costs(load_hardware(), model_named("mixtral-8x7b")), rules)
    with pytest.raises(TraceError, match="a device was lost in step 2, whose time the trace lacks"):
        RecordedRun(replace(trace, devices=devices), setup, rules)


ONE = Trace.load(DATA / "tiny-mixtral-trace").select([0])


def cold_run(devices: dict[str, np.ndarray] | None = None, trace: Trace = ONE, **how) -> RecordedRun:
    """Of Mixtral-8x7B with all experts cold, four layers of it, on a DRAM without refresh."""
    costs = Costs(load_hardware("h100-ndp512", **{"dram.kind": "ideal"}), model_named("mixtral-8x7b"))
    costs = replace(costs, shape=replace(costs.shape, num_layers=4, decoder=costs.shape.decoder[:4]))
    rules = PlannerRules(load_policy("prefill", PolicySettings()), Budget(0, 3.0), LossTable.nominal(4, 8))
    return RecordedRun(replace(trace, devices=devices or {}), modelled_host(costs, rules, **how), rules)


def test_a_layer_whose_experts_are_not_all_on_devices_that_are_up_has_no_timing():
    """The second of two devices is down in one step. The host stands in where either of a row's experts was its own."""
    down = cold_run({"step": np.array([2]), "device": np.array([1]), "change": np.array([DOWN])}, num_devices=2)
    trace, held = down.engine.trace, down.engine.devices.held
    for step in range(4):
        run = down.run(step)
        (row,) = np.flatnonzero(trace.step == step) if step else (0,)
        there = [held[layer, trace.ids[row, layer], 0].all() for layer in range(4)]
        if step == 2:
            assert [timing is not None for timing in run.device] == there
            assert 0 < sum(there) < 4
            assert [layer.stream_ps > 0 for layer in run.time.layers] == [not served for served in there]
        elif step:
            assert None not in run.device


def test_every_drafted_token_goes_through_the_head_and_only_accepted_ones_count_afterwards():
    """The first decode step has its token and two drafts, of which one is rejected; the next one has that position."""
    first = int(ONE.prompt_len[0])
    rows = [*range(first + 2), first + 2, *range(first + 2, len(ONE.step))]
    columns = {name: getattr(ONE, name)[rows] for name in ("step", "position", "request", "phase", "ids", "weights")}
    columns["step"] = columns["step"].copy()
    columns["step"][first + 1 : first + 3] = 1
    columns["step"][first + 3 :] -= 1
    columns["phase"] = columns["phase"].copy()
    columns["phase"][first + 2] = REJECTED
    again = cold_run(trace=replace(ONE, **columns))
    heads = []
    for step in range(4):
        time = again.run(step).time
        heads.append(time.total_ps - sum(layer.total_ps for layer in time.layers))
    head_ps = again.engine.costs.gpu.head_ps
    assert heads == [head_ps(1), head_ps(3), head_ps(1), head_ps(1)]


def test_replicas_of_a_joint_plan_move_as_the_bytes_that_they_are():
    """The second request's prompt changes the plan: its steps wait for planes and scales, not for whole experts."""
    first = cold_run()
    setup = msgspec.structs.replace(first.engine.setup, joint_tiers="gpu+device")
    rules = replace(first.engine.planner.rules, budget=Budget(2, 3.0), keeps_streamed=False)
    again = RecordedRun(Trace.load(DATA / "tiny-mixtral-trace").select([0, 1]), setup, rules)
    joint, costs, seen = again.engine.planner.rules.joint.__self__, again.engine.costs, 0
    for step in again.steps.tolist():
        before = joint.chosen
        run = again.run(step)
        if run.migrated_experts:
            moved = joint._menu(1).moved_bytes[before, joint.chosen].sum()
            assert run.migration_ps == pytest.approx(moved / costs.hardware.link.bulk_bytes_per_s * 1e12, rel=0.02)
            seen += moved < 0.8 * run.migrated_experts * costs.shape.expert_bytes
    assert seen


@pytest.mark.parametrize("same", [False, True])
def test_a_choice_counts_on_devices_that_are_up_unless_the_host_computes_the_same_without_them(same: bool):
    first = cold_run(num_devices=2)
    setup = msgspec.structs.replace(first.engine.setup, same_without=same)
    devices = {"step": np.array([0]), "device": np.array([1]), "change": np.array([DOWN])}
    again = RecordedRun(replace(ONE, devices=devices), setup, first.engine.planner.rules)
    again.run(0)
    assert again.engine._counted_on() == (True, same)


def answered(asks: Asks[StepRun], device: DeviceModel, queue_ps: int) -> StepRun:
    """Each command as if another host's had been before it."""
    answer = None
    while True:
        try:
            ask = asks.send(answer)
        except StopIteration as end:
            return end.value
        timing = device.execute(ask.work, ask.submit_ps)
        answer = msgspec.structs.replace(timing, queue_ps=queue_ps, total_ps=timing.total_ps + queue_ps)


def test_decode_rows_alone_would_have_waited_for_other_hosts_as_long():
    """A prompt of another request shares their message, and would not have been there."""
    found = []
    for queue_ps in (0, 10**9):
        again = cold_run(trace=Trace.load(DATA / "tiny-mixtral-trace").select([0, 1]), splits_prefill=True)
        trace, device = again.engine.trace, DeviceModel(again.engine.hardware)
        first, second = (np.flatnonzero(trace.request == request) for request in range(2))
        length = int(trace.prompt_len[0])
        answered(again.engine.step(first[:length]), device, 0)
        rows = np.concatenate([first[length : length + 1], second[:4]])
        run = answered(again.engine.step(rows), device, queue_ps)
        assert run.decode_only is not None
        found.append([layer.device_ps for layer in run.decode_only.layers])
    assert [late - idle for idle, late in zip(*found, strict=True)] == [10**9] * 4


def test_rows_that_the_prefix_cache_held_are_not_run():
    cached = ONE.phase.copy()
    cached[:3] = CACHED
    again, whole = cold_run(trace=replace(ONE, phase=cached)), cold_run()
    assert again.steps.tolist() == whole.steps.tolist()
    attention = [run.run(0).time.layers[0].attention_ps for run in (again, whole)]
    spans = [(3, int(ONE.prompt_len[0])), (0, int(ONE.prompt_len[0]))]
    before = [
        sum(
            again.engine.costs.gpu.before_experts_ps(
                end - start, end, (end - start) * (start + end + 1) // 2, [(start, end)]
            )
        )
        for start, end in spans
    ]
    assert attention[0] < attention[1]
    assert before[0] / before[1] == pytest.approx(attention[0] / attention[1], rel=1e-6)


def test_a_step_in_which_devices_changed_ends_when_it_did_and_the_next_one_finds_them_idle():
    """It is recorded as over long before its devices would have answered."""
    devices = {"step": np.array([2]), "device": np.array([-1]), "change": np.array([CHANGED])}
    steps = {
        "step": np.arange(4),
        "simulated_start_ps": np.array([0, 0, 70, 0]),
        "simulated_step_ps": np.array([0, 0, 7, 0]),
    }
    again = cold_run(devices, replace(ONE, events=steps))
    for step in range(3):
        again.run(step)
    assert again.engine.clock.now_ps == 77
    assert [timing.queue_ps for timing in again.run(3).device] == [0] * 4


def test_devices_with_half_of_each_expert_read_together_what_one_reads_in_half_the_time():
    one, two = (cold_run(num_devices=count, splits_experts=count > 1) for count in (1, 2))
    for step in range(3):
        alone, halves = one.run(step), two.run(step)
    for whole, half in zip(alone.device, halves.device, strict=True):
        assert half.weight_bytes == pytest.approx(whole.weight_bytes, rel=0.01)
        for part in ("dram_ps", "compute_ps"):
            assert getattr(half, part) == pytest.approx(getattr(whole, part) / 2, rel=0.02), part


def test_a_model_of_more_layers_takes_each_recorded_layer_as_often_as_it_must():
    trace = Trace.load(DATA / "tiny-mixtral-trace")
    longer, loss = with_layers(trace, LossTable.nominal(4, 8), 6)
    assert longer.provenance.num_layers == 6
    assert np.array_equal(longer.ids, trace.ids[:, [0, 0, 1, 2, 2, 3]])
    assert loss.mse.shape == (6, 8, 4)
    assert with_layers(trace, loss, 4)[0] is trace


# -- Caches that depend on the step before, by pencil. Golden rows of the systems hold whole replays, to ten digits ----


def one_lane(steps: list[list[int]]) -> Loads:
    ids = np.array(steps, np.int64)[None, None, :, None, :]
    return Loads.of(ids, np.ones((1, 1, len(steps)), np.bool_), 5)


@pytest.mark.parametrize(
    ("worth", "stays"),
    [(lru, [True, False, True, True]), (lfu, [False, True, False, True])],
)
def test_recency_and_frequency_throw_out_different_experts(worth, stays):
    """Two places. 0 is used twice, then 1, then 2: lru throws 0 out, lfu 1. Then 1, 0, 2, 0 are asked for."""
    start = np.zeros((1, 5), np.bool_)
    hits = [
        bool(visits(one_lane([[0], [0], [1], [2], [last]]), start, 2, worth).hit[0, 4, 0, 0]) for last in (1, 0, 3, 2)
    ]
    assert hits == [stays[0], stays[1], False, True]


def test_what_is_in_use_comes_first_and_ties_of_frequency_go_to_what_was_used_last():
    """One place: 1 is in use, so 0 leaves, though it was used three times. Two places: 0 and 1 were used once each."""
    nothing = np.zeros((1, 5), np.bool_)
    assert visits(one_lane([[0], [0], [0], [1], [1]]), nothing, 1, lfu).hit[0, 4, 0, 0]
    found = [visits(one_lane([[0], [1], [2], [last]]), nothing, 2, lfu).hit[0, 3, 0, 0] for last in (0, 1)]
    assert found == [False, True]


def test_what_was_never_used_leaves_before_what_was_and_counts_to_begin_with_stay_as_they_are():
    """Two places hold 0 and 3. 3 is used, then 1 comes: 0 leaves, and 3 is found again."""
    start, known = np.array([[True, False, False, True, False]]), np.zeros((1, 1, 5))
    found = visits(one_lane([[3], [1], [3]]), start, 2, lru, frequency=known)
    assert found.hit.ravel().tolist() == [True, False, True]
    assert not known.any()


def test_a_worth_fades_to_a_quarter_every_128_tokens():
    worth = lcp(0.25, 128.0)(np.full((1, 4), 8.0), np.array([[0.0, 64.0, 128.0, 256.0]]), np.zeros(1, np.int64))
    assert worth.ravel() == pytest.approx([8, 4, 2, 0.5], rel=1e-6)


def test_the_cache_guesses_before_it_looks():
    """Expected: 3 most, then 1. Nothing is held, so both of the first step's experts miss; only 3 was guessed."""
    nothing, known = np.zeros((1, 5), np.bool_), np.array([[0.0, 2.0, 1.0, 9.0, 0.0]])
    found = visits(one_lane([[2, 3]]), nothing, 2, lambda frequency, since, layers: known[layers], predict=1)
    assert found.hit.tolist() == [[[[False, False]]]]
    assert found.predicted.tolist() == [[[[False, True]]]]
    alike = visits(one_lane([[1, 3]]), nothing, 2, lambda frequency, since, layers: 0 * frequency, predict=2)
    assert alike.predicted.tolist() == [[[[True, False]]]]  # of equal ones the lower ids are guessed: 0 and 1
