"""One run, which plugin and replay share: what reaches its plans, prices and clock; requests that end and are gone."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_ndp.cost_model.costs import model_named
from vllm_ndp.cost_model.prices import MeasuredPrices
from vllm_ndp.layer.run import Replanned, Run
from vllm_ndp.layer.setup import Planning, Setup
from vllm_ndp.layer.split import Split
from vllm_ndp.layer.tiers import Tiers
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import BitwidthPlan, Plan
from vllm_ndp.planning.stats import RoutingStats

MIXTRAL = model_named("mixtral-8x7b")
SHAPE = replace(MIXTRAL, num_layers=4, decoder=MIXTRAL.decoder[:4])


@dataclass
class Request:
    score: ImportanceScore | None = None
    plan: Plan | None = None


def run_of(warm_experts: int = 0, **told: Any) -> Run[str]:
    """Two hot experts of eight per layer, 0 and 1 at first, in their slots."""
    planning = Planning(policy="prefill", options={}, hot_experts=2, avg_bits=3.0, warm_experts=warm_experts)
    setup = Setup(
        preset="h100-ndp512",
        overrides={"dram.kind": "ideal"},
        host_dims={},
        expert_bytes={3: 1},
        group_size=128,
        activation_bytes=2,
        planning=planning,
        **told,
    )
    costs, rules = setup.costs_of(SHAPE), planning.rules(LossTable.nominal(4, 8))
    run = Run[str](setup, rules, costs, None, Tiers(4, 8), 2, lambda: ())
    placement = run.planner.placement
    run.tiers.activate(placement.hot, placement.warm, placement.widths)
    run.tiers.name_all()
    return run


def prompt_of(*experts: int) -> RoutingStats:
    """Six tokens that choose these two in every layer."""
    ids = np.tile(np.array(experts), (6, 4, 1))
    return RoutingStats.from_choices(ids, np.full(ids.shape, 0.5, np.float32), 8)


def split_of(run: Run[str], *chosen: int, prompt: bool = False) -> Split:
    """One row of layer 0 with these choices; the second has the larger weight."""
    ids, weights = np.array([chosen], np.int32), np.array([[0.4, 0.6]], np.float32)
    plan = None if prompt else BitwidthPlan(np.full((4, 8), 3, np.uint8))
    run.begin_step(np.zeros(1, np.int32), np.array([not prompt]), [plan], [(0, 1)])
    return run.splitter.split(0, ids.ctypes.data, weights.ctypes.data, with_device=True)


def test_the_clock_is_of_this_stage_and_of_gpus_with_whole_experts() -> None:
    model = run_of(stage=1, num_stages=2, whole_experts=True, num_gpus=2).clock.model
    assert (model.stage, model.num_stages, model.whole_experts) == (1, 2, True)


def test_a_step_is_timed_by_what_each_row_attends_to() -> None:
    """Positions 3 and 4 attend to 4 and 5 tokens, 0 and 1 of another request to 1 and 2; contexts are 5 and 2."""
    run, seen = run_of(), []
    run.clock = SimpleNamespace(begin_step=lambda *step: seen.append(step))  # type: ignore[assignment]
    run.streamed[:] = True
    spans = [(3, 5), (0, 2)]
    run.begin_step(np.array([0, 0, 1, 1], np.int32), np.zeros(4, np.bool_), [None, None], spans)
    assert seen == [(4, 7, 4 + 5 + 1 + 2, spans)]
    assert not run.streamed.any(), "what the step before streamed is another matter"


@pytest.mark.parametrize(("hosts", "moved"), [(1, [0]), (2, [])])
def test_hot_experts_leave_less_often_for_a_device_that_others_use_too(hosts: int, moved: list[int]) -> None:
    """Of two experts, 267 us on the GPU, the lighter takes 141 us on the device, and twice that beside another host."""
    run = run_of(spill_bits=3, device_hosts=hosts)
    split_of(run, 0, 1)
    assert run.splitter.native.moved() == moved


def prices(device: int) -> MeasuredPrices:
    """An expert takes 1000 on the GPU, and as many on the device as is said."""
    experts = {"gpu:16": (1000, 2000)} | {f"device:{bits}": (device, 2 * device) for bits in (1, 2, 3, 4, 16)}
    return MeasuredPrices((1, 2), experts, 16, (1, 2), (1000, 2000), 1000, 1)


def test_measured_prices_decide_who_leaves_for_the_device_of_hot_experts_and_of_prompts() -> None:
    for device, moved, sent in ((1, [0, 1], 2), (10**15, [], 0)):
        run = run_of(spill_bits=3, splits_prefill=True, prices=prices(device))
        split_of(run, 0, 1)
        assert run.splitter.native.moved() == moved
        assert len(split_of(run, 6, 7, prompt=True).device.experts) == sent


@pytest.mark.parametrize(("stored_bits", "bits"), [(0, 16), (4, 4)])
def test_the_device_computes_prompts_without_a_loss(stored_bits: int, bits: int) -> None:
    stored = {"stored_bits": stored_bits, "stored_bytes": 10**6} if stored_bits else {}
    run = run_of(splits_prefill=True, prices=prices(1), **stored)
    found = split_of(run, 6, 7, prompt=True)
    assert found.device.bits.tolist() == [bits, bits]
    price = MeasuredPrices((1, 2), prices(1).experts | {f"device:{bits}": (10**15, 10**15)}, 16, (1, 2), (1, 2), 1, 1)
    run = run_of(splits_prefill=True, prices=price, **stored)
    assert not split_of(run, 6, 7, prompt=True).device.experts.size, "by the price of that width"


def test_the_hosts_cpu_is_paid_for_warm_experts() -> None:
    run = run_of(warm_experts=2)
    found = split_of(run, 2, 3)
    assert found.warm.experts.tolist() == [2, 3]
    assert found.host_ps == run.costs.hop_ps(1) + 2 * run.costs.cpu_expert_ps(1)


def test_a_joint_plan_reads_each_hot_expert_at_its_width_and_knows_how_many_devices_share() -> None:
    run = run_of(joint_tiers="gpu+device", num_devices=2)
    one, other = np.flatnonzero(run.planner.placement.hot[0])[:2].tolist()
    widths = run.planner.placement.widths[0, [one, other]]
    assert split_of(run, one, other).hot_bytes == run.costs.bytes_of_width[widths].sum() < 2 * SHAPE.expert_bytes
    joint: Any = run.planner.rules.joint
    assert joint.__self__._menu(1).num_devices == 2
    request = Request()
    run.end_prefills([("a", request, prompt_of(6, 7))], lambda: [request])
    found = run.replan({"a": request})
    assert found.change is not None
    assert found.moved_bytes == found.change.moved_bytes is not None, "and copies as many bytes as those have"


def hot(run: Run[str]) -> list[int]:
    return np.flatnonzero(run.planner.placement.hot[0]).tolist()


def test_a_plan_is_made_for_those_that_are_still_there() -> None:
    """Two prompts end. One request is gone by then, and one by the name of another is none that ended."""
    run, one, two = run_of(), Request(), Request()
    there = {"a": one}
    run.end_prefills([("a", one, prompt_of(4, 5)), ("b", two, prompt_of(4, 5))], there.values)
    found = run.replan(there)
    assert found.change is not None
    assert (found.moves_slots, found.num_moved, found.num_ended, hot(run)) == (True, 4 * 2, 1, [4, 5])
    assert one.plan is not None
    assert two.plan is None
    assert run.replan(there) == Replanned()


def test_experts_that_slots_kept_for_a_request_that_is_gone_are_exchanged_again() -> None:
    """Two requests would make 6 and 7 hot, and slots kept these; before the next step both are others of their name."""
    run, one = run_of(), Request()
    run.end_prefills([("a", one, prompt_of(4, 5))], lambda: [one])
    run.replan({"a": one})
    late = {"b": Request(), "c": Request()}
    run.streamed[:] = True
    run.end_prefills([(name, each, prompt_of(6, 7)) for name, each in late.items()], lambda: [one, *late.values()])
    assert np.flatnonzero(run.planner.resident[0]).tolist() == [6, 7]
    found = run.replan({"a": one, "b": Request(), "c": Request()})
    assert (found.change, found.moves_slots, found.num_moved, hot(run)) == (None, True, 4 * 2, [4, 5])
    assert run.planner.resident.tolist() == run.planner.placement.hot.tolist()


def test_slots_keep_what_all_that_run_will_want_and_not_the_newcomer_alone() -> None:
    run, one, two, late = run_of(), Request(), Request(), Request()
    run.end_prefills([("a", one, prompt_of(4, 5)), ("b", two, prompt_of(4, 5))], lambda: [one, two])
    run.replan({"a": one, "b": two})
    run.streamed[:] = True
    run.end_prefills([("c", late, prompt_of(6, 7))], lambda: [one, two, late])
    assert np.flatnonzero(run.planner.resident[0]).tolist() == [4, 5]
