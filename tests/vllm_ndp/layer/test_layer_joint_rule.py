"""Joint plans of a live run: within the memory and the loss of the plan that they are compared with, and faster."""

import dataclasses
import itertools

import numpy as np
import pytest

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.cost_model.prices import MeasuredPrices
from vllm_ndp.layer.joint_rule import LIVE_WIDTHS, NATS, OF_ONE_BIT, JointRule, Menu, losses_by_width, unit_of
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement
from vllm_ndp.planning.policies import PolicySettings, load_policy
from vllm_ndp.planning.replanner import PlanChange, PlannerRules, Replanner

MIXTRAL = model_named("mixtral-8x7b")
LAYERS, EXPERTS = 4, 8
SHAPE = dataclasses.replace(MIXTRAL, num_layers=LAYERS, decoder=MIXTRAL.decoder[:LAYERS])
COSTS = Costs(load_hardware("h100-ndp512"), SHAPE)
LOSS = LossTable.nominal(LAYERS, EXPERTS)


def replanner(num_hot: int, tiers: str = "gpu+device") -> Replanner:
    joint = JointRule.live(COSTS, tiers, LOSS, num_hot)
    rules = PlannerRules(load_policy("prefill"), Budget(num_hot, 3.0), LOSS, keeps_streamed=False, joint=joint.plan)
    return Replanner(rules, LAYERS, EXPERTS)


def score(seed: int) -> ImportanceScore:
    return ImportanceScore.from_weights(np.random.default_rng(seed).dirichlet([0.5] * EXPERTS, LAYERS), 64)


def lost(change: PlanChange[str], importance: np.ndarray) -> float:
    bits = change.plans["a"].bits.bits
    widths = np.where(change.placement.hot, change.placement.widths, bits)
    table = losses_by_width(LOSS, OF_ONE_BIT)
    return float((importance * np.take_along_axis(table, widths[:, :, None].astype(np.int64), axis=2)[:, :, 0]).sum())


@pytest.mark.parametrize("num_hot", [1, 2, 4])
@pytest.mark.parametrize("tiers", ["gpu+device", "gpu+host+device"])
def test_a_joint_plan_holds_more_experts_in_the_same_memory_at_no_more_loss(num_hot: int, tiers: str):
    planner = replanner(num_hot, tiers)
    fixed = Replanner(PlannerRules(load_policy("prefill"), Budget(num_hot, 3.0), LOSS), LAYERS, EXPERTS)
    for seed in range(5):
        change, paper = planner.replan({"a": score(seed)}), fixed.replan({"a": score(seed)})
        values, place = score(seed).values, change.placement
        held = COSTS.bytes_of_width[place.widths].sum()
        assert held <= LAYERS * num_hot * SHAPE.expert_bytes
        papers = Placement(paper.placement.hot, widths=np.where(paper.placement.hot, 16, 0))
        wanted = lost(dataclasses.replace(paper, placement=papers), values)
        assert lost(change, values) <= wanted * (1 + 1e-9)
        assert place.hot.sum() >= LAYERS * num_hot
        assert ((place.widths > 0) == place.hot).all()
        assert place.warm.any() <= ("host" in tiers)
        assert (change.plans["a"].bits.bits[place.cold] <= 4).all()
    assert planner.placement.hot.sum() > LAYERS * num_hot, "four bits in place of 16 leave room for more"


def test_a_joint_plan_loses_no_more_nats_than_were_asked_for_whatever_its_layers_weigh():
    """The first layer's losses matter fifteen times as much as the last one's."""
    known = LossTable(LOSS.mse, np.array([3.0, 0.6, 0.2, 0.2]), nats=0.5)
    policy = load_policy("prefill", PolicySettings(bit_rule="layers"))
    for num_hot, nats in itertools.product((1, 2, 4), (0.02, 0.1)):
        joint = JointRule.live(COSTS, "gpu+device", known, num_hot)
        rules = PlannerRules(policy, Budget(num_hot, 4.0, max_loss=nats), known, joint=joint.plan)
        for seed in range(4):
            change = Replanner(rules, LAYERS, EXPERTS).replan({"a": score(seed)})
            widths = np.where(change.placement.hot, change.placement.widths, change.plans["a"].bits.bits)
            assert known.predicted_nats(score(seed), widths) <= nats * (1 + 1e-6)


def crossing(before: int, after: int) -> int:
    """Bytes of an expert on its way to so many bits in GPU memory, where it has so many, or none: 0."""
    whole = SHAPE.expert_bytes if after > 4 else COSTS.replica_bytes(int(after))
    planes = int(min(before, after)) if before <= 4 and after <= 4 else 0
    return whole - SHAPE.weights_per_expert * planes // 8


def test_only_what_changes_tier_or_width_moves_and_the_same_prompt_again_moves_nothing():
    planner = replanner(2)
    first = planner.replan({"a": score(1)})
    again = planner.replan({"a": score(1)})
    assert (again.num_moved, again.moved_bytes) == (0, 0)
    other = planner.replan({"a": score(2)})
    moved = other.placement.hot & (other.placement.widths != again.placement.widths)
    assert (other.moved == moved).all()
    assert other.num_moved > 0
    assert other.moved_bytes is not None
    assert other.moved_bytes == sum(
        crossing(*widths) for widths in zip(again.placement.widths[moved], other.placement.widths[moved], strict=True)
    )
    assert first.epoch + 2 == other.epoch


def test_two_planners_that_see_the_same_make_the_same_plans():
    one, other = replanner(3, "gpu+host+device"), replanner(3, "gpu+host+device")
    for seed in range(6):
        scores = {str(r): score(seed + 10 * r) for r in range(1 + seed % 3)}
        a, b = one.replan(scores), other.replan(scores)
        assert a.placement.tiers.tobytes() == b.placement.tiers.tobytes()
        assert a.plans["0"].bits.bits.tobytes() == b.plans["0"].bits.bits.tobytes()
        assert a.moved_bytes == b.moved_bytes


def test_a_trace_records_the_width_of_each_hot_expert():
    placement = Placement(
        np.array([[True, True, False, False]]), np.array([[False, False, True, False]]), np.array([[16, 4, 0, 0]])
    )
    assert placement.tiers.tolist() == [[48, 36, 2, 0]]
    with pytest.raises(ValueError, match="widths must be above 0 exactly where an expert is hot"):
        Placement(np.array([[True, False]]), widths=np.array([[0, 4]]))


def test_a_menu_has_the_prices_of_the_device_and_of_gpu_memory():
    """One row at batch 1: two experts of 4 bits in GPU memory and their launch take what the layer takes. The device
    has its table."""
    menu = Menu(COSTS, LIVE_WIDTHS, 1)
    gpu, device, host = (menu.index(tier) for tier in ("gpu", "device", "host"))
    layer = COSTS.gpu.experts_ps(SHAPE.top_k, SHAPE.top_k, SHAPE.top_k * COSTS.replica_bytes(4))
    assert menu.openings[gpu[4]] + SHAPE.top_k * menu.ps[gpu[4], 1] == pytest.approx(layer, rel=1e-6)
    assert menu.openings[gpu[4]] == menu.openings[gpu[3]] != menu.openings[gpu[16]]
    assert menu.ps[device[3], 1] == COSTS.device_expert_ps(3, 1)
    assert menu.ps[host[16], 1] == pytest.approx(SHAPE.expert_bytes / (0.85 * 307.2e9) * 1e12)
    assert device[16] == host[4] == -1


def test_what_a_step_of_two_rows_takes_loses_and_opens_is_expected_by_the_chance_of_each_expert():
    """All alike, top 2 of 8: a row chooses an expert with a chance of 1/4, so two rows with 3/8, 1/16 or not at all."""
    menu = Menu(COSTS, {"gpu": (16, 4), "device": (3,)}, 2)
    even, losses = np.full((LAYERS, EXPERTS), 1 / EXPERTS), losses_by_width(LOSS, OF_ONE_BIT)
    problem = menu.problem(even, 2, losses, {}, np.zeros((3, LAYERS, EXPERTS)), 0.0)
    for choice, ps, lost in zip(range(3), problem.ps, problem.loss, strict=True):
        assert ps == pytest.approx(np.full(even.shape, 3 / 8 * menu.ps[choice, 1] + menu.ps[choice, 2] / 16))
        assert lost == pytest.approx(losses[:, :, menu.bits[choice]] / EXPERTS / LAYERS)
    assert problem.used == pytest.approx(np.full(even.shape, 7 / 16))
    certain = np.zeros((LAYERS, EXPERTS)) + np.eye(EXPERTS)[0]
    once = menu.problem(certain, 2, losses, {}, np.zeros((3, LAYERS, EXPERTS)), 0.0)
    assert once.ps[:, 0, 0] == pytest.approx(menu.ps[:, 2]), "no chance is above 1"


def test_nats_are_of_all_layers_by_their_weight_and_8_bits_are_extrapolated_from_4():
    known = LossTable(LOSS.mse, np.array([3.0, 0.6, 0.2, 0.2]), nats=0.5)
    in_nats, plain = losses_by_width(known, unit_of(known)), losses_by_width(known, OF_ONE_BIT)
    assert in_nats[:, 0, 1] == pytest.approx([4 * 0.5 * weight for weight in (3.0, 0.6, 0.2, 0.2)])
    assert plain[:, 0, 1].tolist() == [1.0] * 4
    for table in (in_nats, plain):
        assert table[:, :, 8] == pytest.approx(table[:, :, 4] / 4.4**4)
    assert (unit_of(known), unit_of(LOSS)) == (NATS, OF_ONE_BIT)


def test_moving_is_weighed_by_the_measured_rate_of_copies_and_memory_is_that_of_all_layers():
    widths = {"gpu": (16, 4, 3, 2), "device": (4, 3, 2, 1)}
    experts = {f"{tier}:{bits}": (1000, 2000) for tier, each in widths.items() for bits in each}
    measured = MeasuredPrices((1, 2), experts, 16, (10, 20), (5, 6), copied=1024, expert_bytes=512)
    fixed = Replanner(PlannerRules(load_policy("prefill"), Budget(2, 3.0), LOSS), LAYERS, EXPERTS)
    paper = fixed.replan({"a": score(1)})
    given = (score(1).values, 2, paper.placement, paper.plans["a"].bits)
    problem = JointRule.live(COSTS, "gpu+device", LOSS, 2, measured).choose(*given).problem
    assert problem.move_ps == pytest.approx(2 / 256)
    assert problem.budgets == {"gpu": LAYERS * 2 * SHAPE.expert_bytes}


def test_cold_experts_in_full_precision_count_as_the_widest_replica_and_many_requests_as_64():
    fixed = Replanner(PlannerRules(load_policy("prefill"), Budget(2, 3.0), LOSS), LAYERS, EXPERTS)
    placement = fixed.replan({"a": score(1)}).placement
    full, four = (BitwidthPlan(np.where(placement.hot, 0, bits).astype(np.uint8)) for bits in (16, 4))
    plans = [
        JointRule.live(COSTS, "gpu+device", LOSS, 2).plan(score(1).values, rows, placement, bits)
        for rows, bits in ((64, full), (64, four), (2000, four))
    ]
    for plan in plans[1:]:
        assert plan.bits.bits.tobytes() == plans[0].bits.bits.tobytes()
        assert plan.placement.tiers.tobytes() == plans[0].placement.tiers.tobytes()


def test_two_devices_share_an_expert_and_what_prompts_streamed_stays_at_8_bits_or_more_at_no_cost() -> None:
    costs, paper = (
        dataclasses.replace(COSTS, has_bytes=True),
        Replanner(PlannerRules(load_policy("prefill"), Budget(2, 3.0), LOSS), LAYERS, EXPERTS).replan({"a": score(1)}),
    )
    given = (score(1).values, 2, paper.placement, paper.plans["a"].bits)
    one, two = (JointRule.live(costs, "gpu+device", LOSS, 2, num_devices=count) for count in (1, 2))
    alone, shared = one.choose(*given).problem, two.choose(*given).problem
    sides = np.array([choice.tier == "device" for choice in alone.choices])
    assert (shared.ps[sides] == alone.ps[sides] / 2).all()
    assert (shared.ps[~sides] == alone.ps[~sides]).all()
    assert alone.move_ps == pytest.approx(1e12 / costs.hardware.link.bulk_bytes_per_s / 256)
    moved = one.choose(*given, streamed=score(1).values > 0).problem.moved
    free = [(choice.tier, choice.bits) for choice, of in zip(alone.choices, moved, strict=True) if not of.any()]
    assert [bits for tier, bits in free if tier == "gpu"] == [16, 8]


@pytest.mark.parametrize("has_bytes", [True, False])
def test_8_bits_are_chosen_where_replicas_have_them_and_only_there(has_bytes: bool) -> None:
    """A plan of 16 bits on the GPU and 4 on the device has a loss that hot experts at 8 bits keep."""
    loss = LossTable(LOSS.mse, at_8=LOSS.mse[:, :, 3] / 100 if has_bytes else None)
    costs = dataclasses.replace(COSTS, has_bytes=has_bytes)
    rules = PlannerRules(
        load_policy("prefill"),
        Budget(4, 4.0),
        loss,
        keeps_streamed=False,
        joint=JointRule.live(costs, "gpu+device", loss, 4).plan,
    )
    change = Replanner(rules, LAYERS, EXPERTS).replan({"a": score(1)})
    widths = np.where(change.placement.hot, change.placement.widths, change.plans["a"].bits.bits)
    assert (widths == 8).any() == has_bytes


def test_a_joint_plan_beside_8_bits_on_average_loses_no_more_than_all_cold_at_8() -> None:
    loss = LossTable(LOSS.mse, at_8=LOSS.mse[:, :, 3] / 100)
    joint = JointRule.live(dataclasses.replace(COSTS, has_bytes=True), "gpu+device", loss, 4)
    rules = PlannerRules(load_policy("prefill"), Budget(4, 8.0), loss, keeps_streamed=False, joint=joint.plan)
    change = Replanner(rules, LAYERS, EXPERTS).replan({"a": score(2)})
    widths = np.where(change.placement.hot, change.placement.widths, change.plans["a"].bits.bits)
    assert (widths >= 8).any()
    table = np.take_along_axis(losses_by_width(loss, OF_ONE_BIT), widths[:, :, None].astype(np.int64), axis=2)[:, :, 0]
    assert (score(2).values * table).sum() <= LAYERS * float(losses_by_width(loss, OF_ONE_BIT)[0, 0, 8]) * (1 + 1e-9)


def test_an_8_bit_replica_crosses_the_link_as_it_is_and_a_rounded_one_in_full_precision() -> None:
    """8 bits share no plane with the nested widths."""
    widths = {"gpu": (16, 8, 4, 2), "device": (8, 4)}
    for has_bytes in (True, False):
        costs = dataclasses.replace(COSTS, has_bytes=has_bytes)
        menu = Menu(costs, widths, 1)
        on_gpu, on_device = menu.index("gpu"), menu.index("device")
        size = costs.replica_bytes(8) if has_bytes else SHAPE.expert_bytes
        assert menu.moved_bytes[on_device[4], on_gpu[8]] == menu.moved_bytes[on_gpu[4], on_gpu[8]] == size
        assert menu.moved_bytes[on_gpu[2], on_gpu[4]] == costs.replica_bytes(4) - SHAPE.weights_per_expert // 4
    assert (
        costs.stored_replica_bytes() + costs.replica_bytes(8)
        == dataclasses.replace(costs, has_bytes=True).stored_replica_bytes()
    )
