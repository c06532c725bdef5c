"""Costs and execution: sums against the device model itself, fast paths against obvious ones, limits and edges."""

import dataclasses
from functools import partial

import numpy as np
import pytest
from paths import DATA

from ndp_device.common.errors import TraceError
from ndp_device.common.widths import PLAN_BITS
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import Work, execute_bytes
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.compare import popularity
from vllm_ndp.lab.exact.live import RecordedRun
from vllm_ndp.lab.systems import SYSTEMS, ReplayOptions, ours
from vllm_ndp.lab.systems.ours import Groups
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import copied_in_order, run_pairs, with_copies
from vllm_ndp.lab.vectorised.outcome import Summary, Traffic, step_times, summarise
from vllm_ndp.layer.setup import Setup
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.synthetic import SyntheticSettings, synthetic_trace
from vllm_ndp.traces.trace import Trace

TRACE = Trace.load(DATA / "tiny-mixtral-trace")
COSTS = Costs(load_hardware("h100-ndp512"), model_named("mixtral-8x7b"))


def device_ps(costs: Costs, experts: list[tuple[int, int]], rows: int) -> float:
    """The device model itself on one message of (bits, tokens) experts, mean over submit times."""
    pairs = sum(tokens for _, tokens in experts)
    bytes_in, bytes_out = execute_bytes(rows, pairs, costs.shape.hidden_size, costs.shape.dtype_bytes)
    parts = tuple((bits, tokens, costs.replica_bytes(bits)) for bits, tokens in experts)
    work = Work(costs.shape.hidden_size, costs.shape.intermediate_size, bytes_in, bytes_out, parts)
    return float(np.mean([DeviceModel(costs.hardware).execute(work, 244_140 * i).total_ps for i in range(16)]))


@pytest.mark.parametrize("model", ["mixtral-8x7b", "olmoe"])
@pytest.mark.parametrize("experts", [[(2, 1)], [(3, 1), (2, 1)], [(4, 3), (1, 1), (2, 6)], [(16, 1), (3, 2)]], ids=str)
def test_the_sum_over_experts_is_the_device_model_within_two_percent(model, experts):
    costs = Costs(load_hardware("h100-ndp512"), model_named(model))
    rows = max(tokens for _, tokens in experts)
    ours = costs.link_ps(rows, sum(t for _, t in experts)) + costs.device_fill_ps
    ours += sum(costs.device_expert_ps(bits, tokens) for bits, tokens in experts)
    assert ours == pytest.approx(device_ps(costs, experts, rows), rel=0.02)


def copied_by_hand(compute: list[float], missing: list[bool], before: float, each: list[float]) -> float:
    """One event after the other: copies what computes longest first, the GPU computes whatever has arrived.
    Its launch passes while copies arrive."""
    order = sorted((e for e, m in enumerate(missing) if m), key=lambda e: -compute[e])
    link, now = before + COSTS.copy_opening_ps, sum(c for c, m in zip(compute, missing, strict=True) if not m)
    for expert in order:
        link += each[expert]
        now = max(now, link) + compute[expert]
    return max(now, COSTS.launch_ps() + sum(compute))


def test_every_fetch_is_paid_by_one_rule_which_a_loop_over_events_gives():
    """One launch, copies in a row, compute beside them: at once for random experts, and where compute is the longer."""
    rng = np.random.default_rng(3)
    for scale in (0.05, 1.0, 30.0):
        compute = rng.random((50, 5)) * scale * COSTS.copy_ps
        missing = rng.random((50, 5)) < 0.5
        before = rng.random(50) * COSTS.copy_ps
        times = with_copies(compute, missing, COSTS, before_ps=before)
        each = [COSTS.copy_ps] * 5
        by_hand = [
            copied_by_hand(c, m, b, each) for c, m, b in zip(compute.tolist(), missing.tolist(), before, strict=True)
        ]
        assert times == pytest.approx(np.array(by_hand))
        falling = -np.sort(-np.where(missing, compute, 0.0), axis=1)
        here = np.where(missing, 0.0, compute).sum(axis=1)[:, None]
        all_copied = copied_in_order(falling, here, COSTS)[:, -1]
        assert all_copied == pytest.approx(with_copies(compute, missing, COSTS))


def test_copies_take_what_prompts_take_to_stream_the_same_bytes():
    """Six microseconds of launch, half of one on the way, and three experts at 25.6 GB/s."""
    missing = np.ones((1, 3), bool)
    alone = with_copies(np.full((1, 3), 1.0), missing, COSTS)[0]
    assert alone == pytest.approx(6_500_000 + 3 * 352_321_536 / 25.6e9 * 1e12 + 1.0)
    assert alone == pytest.approx(COSTS.streamed_ps(3, 3), rel=1e-6)
    low = with_copies(np.full((1, 3), 1.0), missing, COSTS, copy_ps=COSTS.copy_ps / 4)[0]
    assert low == pytest.approx(6_500_000 + 0.75 * COSTS.copy_ps + 1.0)
    begun = with_copies(np.full((1, 3), 1.0), missing, COSTS, before_ps=-COSTS.copy_ps)[0]
    assert begun == pytest.approx(alone - COSTS.copy_ps)


def test_the_first_token_comes_before_the_hot_set_moves_and_the_second_after_it_as_on_the_live_clock(monkeypatch):
    """One request on the exact engine: its first token to the picosecond, and the step after it within the 2 % of the
    averaged device. Two hot experts per layer of the prompt's choice are not those that the slots hold at first."""
    trace = TRACE.select([5])
    costs = Costs(COSTS.hardware, dataclasses.replace(COSTS.shape, num_layers=4, decoder=COSTS.shape.decoder[:4]))
    loss, policy = LossTable.nominal(4, 8), load_policy("prefill", PolicySettings())
    options = ReplayOptions(policy, Budget(2, 2.0), loss, popularity(TRACE))
    batches = Batches.of(trace)
    monkeypatch.setattr(ours, "PlannerRules", partial(PlannerRules, keeps_streamed=False))
    outcome = SYSTEMS["context_aware"].replay(batches, costs, options)
    setup = Setup(
        preset="h100-ndp512",
        overrides={},
        host_dims=costs.shape.recorded(),
        expert_bytes={bits: costs.replica_bytes(bits) for bits in PLAN_BITS},
        group_size=costs.group_size,
        activation_bytes=2,
    )
    recorded = RecordedRun(trace, setup, PlannerRules(policy, Budget(2, 2.0), loss, keeps_streamed=False))
    first, second = (recorded.run(int(step)) for step in recorded.steps[:2])
    assert outcome.prefill_ps[0, 0] == first.time.end_ps
    assert outcome.migration_ps[0] == second.time.start_ps - first.time.end_ps > 0
    between = second.time.end_ps - first.time.end_ps
    assert step_times(outcome, batches, costs)[0, 0] == pytest.approx(between, rel=0.02)
    assert summarise("context_aware", outcome, batches, costs).ttft_ms == first.time.end_ps / 1e9


def test_energy_of_pairs_is_that_of_the_device_model_and_of_bytes_over_the_wire():
    """All cold at 2 bits: what DeviceModel says of the same commands, but for rows reopened by refresh. All hot: HBM
    reads at 3.97 pJ a bit and nothing else."""
    batches = Batches.of(TRACE.select([0, 1]), 2).first_steps(3)
    hot = run_pairs(batches, np.zeros(batches.ids.shape, np.uint8), COSTS)[2]
    used = int((batches.loads.rows > 0).sum())
    assert hot == Traffic(hbm_bytes=used * COSTS.shape.expert_bytes)
    cold = run_pairs(batches, np.full(batches.ids.shape, 2, np.uint8), COSTS)[2]
    shape, total = COSTS.shape, 0.0
    for step in range(3):
        for layer in range(4):
            _, rows = np.unique(batches.ids[0, :, step, layer], return_counts=True)
            sizes = execute_bytes(2, 4, shape.hidden_size, shape.dtype_bytes)
            experts = tuple((2, int(n), COSTS.replica_bytes(2)) for n in rows)
            work = Work(shape.hidden_size, shape.intermediate_size, *sizes, experts)
            total += DeviceModel(COSTS.hardware).execute(work, 0).energy_pj
    link_pj = cold.link_bytes * 8 * COSTS.hardware.energy.link_bit_fj / 1e3
    assert cold.device_dram_pj + cold.device_arrays_pj + link_pj == pytest.approx(total, rel=0.005)
    assert cold.hbm_bytes == 0


def test_a_token_of_a_model_that_is_all_hot_costs_the_bits_it_reads():
    """Batch 1: 64 experts of 352 MB, attention and its cache, the head; one expert read costs 3.97 pJ for each bit."""
    batches = Batches.of(TRACE.select([0]))
    options = ReplayOptions(
        load_policy("prefill", PolicySettings()), Budget(8, 2.0), LossTable.nominal(4, 8), popularity(TRACE)
    )
    row = summarise("context_aware", SYSTEMS["context_aware"].replay(batches, COSTS, options), batches, COSTS)
    shape = COSTS.shape
    weights = 64 * shape.weights_per_expert + shape.beside_weights + shape.head_weights
    cached = 131_072 * batches.kv_tokens.mean()
    assert (row.energy_link_mj, row.energy_dram_mj, row.energy_arrays_mj) == (0, 0, 0)
    assert row.energy_gpu_mj == pytest.approx((2 * weights + cached) * 8 * 3.97e-9)
    assert row.energy_idle_mj == pytest.approx((70_000 + 100_000) / row.decode_tokens_per_s)  # no device computes
    assert row.energy_mj == row.energy_gpu_mj + row.energy_idle_mj


def test_a_row_says_what_it_has_in_the_units_of_its_headings():
    row = Summary(
        "a", "b", 2, 12.3456, 0.5, 1234.5, 81, 90.123, 0.25, 0.5, -2345.6, 0.1234, np.nan, 0.01, 0.2, 0.011,
        num_hot=4, gpu_gb=61.23, energy_link_mj=1, energy_dram_mj=2, energy_arrays_mj=3, energy_gpu_mj=4,
        energy_idle_mj=5,
    )  # fmt: skip
    told = "a|b|2|4|12.35 ± 0.50|+20.0 ± 1.1|1,234|81|90.12|0.25|0.5|-2,346|12.3|15|61.2|-|0.01"
    assert list(row.cells().values()) == told.split("|")
    assert dataclasses.replace(row, over_paper=np.nan, decode_tokens_per_s=1e4).cells()["over the paper %"] == "-"
    assert row.as_dict()["avg_bits"] is None


def test_requests_of_different_lengths_decode_until_the_longest_is_done():
    settings = SyntheticSettings(num_layers=2, num_experts=8, top_k=2, num_requests=2, prompt_len=3, decode_len=5)
    trace = synthetic_trace(settings)
    keep = ~((trace.request == 1) & (trace.position >= 6))
    trace = Trace(  # type: ignore[call-arg]  # of arrays by name
        trace.provenance,
        *(getattr(trace, n)[keep] for n in ("step", "request", "position", "phase", "ids", "weights")),
        trace.prompt_len,
        trace.arrival_s,
        trace.request_ids,
        trace.labels,
    )
    batches = Batches.of(trace, 2)
    assert batches.rows.tolist() == [[2, 2, 2, 1, 1]]
    assert batches.kv_tokens.tolist() == [[8, 10, 12, 7, 8]]
    assert batches.num_decisions == 8 * 2
    assert batches.loads.rows.sum() == 8 * 2 * 2


def test_a_batch_larger_than_the_trace_is_refused():
    with pytest.raises(TraceError, match="needs as many requests, the trace has 16"):
        Batches.of(TRACE, 17)


@pytest.mark.parametrize(("batch", "rule"), [(1, "pairs"), (3, "pairs"), (4, "layers")])
def test_the_plugins_own_run_takes_what_its_pairs_take_by_the_tables_of_rivals(batch, rule):
    """Where each pair ran is the run's; what that takes, twice: by the device model, and by averaged tables. Tables add
    up experts of one row and of two, each as measured; a run asks for their mean. At batch 1 that is the same."""
    policy = load_policy("prefill", PolicySettings(bit_rule=rule))
    batches = Batches.of(TRACE.select(range(batch)), batch)
    options = ReplayOptions(policy, Budget(4, 3.0), LossTable.nominal(4, 8), popularity(TRACE))
    ran, paper = (Groups(batches, COSTS, options, bits) for bits in (3, 0))
    found, _ = ran.run(), paper.run()
    gpu_ps, device_ps, _ = run_pairs(batches, ran.widths, COSTS)
    assert (ran.widths == 0).sum() < (paper.widths == 0).sum()  # hot experts ran on the device, too
    assert {0, 3} < set(np.unique(ran.widths).tolist()) <= {0, 1, 2, 3, 4}
    assert found.device_ps.sum() == pytest.approx(device_ps.sum(), rel=0.005)
    assert found.moe_ps.sum() == pytest.approx(np.maximum(gpu_ps, device_ps).sum(), rel=0.005 if batch == 1 else 0.02)
