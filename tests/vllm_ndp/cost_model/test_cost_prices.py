"""Prices of a machine decide who runs where; simulated times never hear of them."""

import msgspec
import numpy as np
import pytest
from balance_yardstick import offloaded

from ndp_device.common.errors import ConfigError
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.cost_model.prices import MeasuredPrices, together_ps
from vllm_ndp.layer.balance import Balancer, LayerLoad
from vllm_ndp.layer.joint_rule import JointRule
from vllm_ndp.layer.prefill_split import PrefillSplit
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import BitwidthPlan, top_experts

COSTS = Costs(load_hardware("h100-ndp512"), model_named("mixtral-8x7b"))
ROWS = (1, 4, 16)


def prices(
    gpu: int = 10, device: int = 10, message: int = 5, streamed: int = 40, beside: float = 1.0
) -> MeasuredPrices:
    """Of one row; a row more costs as much again. Any unit."""
    by_rows = lambda one: tuple(one * n for n in ROWS)  # noqa: E731
    widths = {f"gpu:{bits}": by_rows(gpu * bits // 2) for bits in (2, 3, 4)} | {"gpu:16": by_rows(gpu)}
    widths |= {f"device:{bits}": by_rows(device * bits // 2) for bits in (2, 3, 4, 16)} | {"device:1": by_rows(device)}
    return MeasuredPrices(
        rows=ROWS,
        experts=widths,
        slot_bits=16,
        messages=(message,) * 3,
        streamed=by_rows(streamed),
        copied=1000,
        expert_bytes=COSTS.shape.expert_bytes,
        beside=beside,
    )


def test_between_measured_numbers_of_rows_a_price_is_a_straight_line_and_goes_on_beyond():
    measured = prices()
    assert [measured.hot_ps(rows) for rows in (0, 1, 2, 4, 10, 16, 32)] == [0, 10, 20, 40, 100, 160, 320]
    assert measured.message_ps(3, 9) == 5
    assert measured.streamed_ps(0, 0) == 0
    assert measured.streamed_ps(2, 6) == 6 * 40 + 2  # an expert without its rows is never free


def test_prices_that_do_not_begin_at_zero_are_lines_through_what_was_measured():
    """100, 130 and 250 ps for a copied expert with 1, 4 and 16 rows: 10 a row, and 90 without any. A line that falls
    ends at nothing."""
    experts = {"gpu:16": [30, 20, 5]}
    measured = read(experts=experts, messages=[5, 8, 20], streamed=[100, 130, 250], shared=[6, 9, 21])
    assert measured.streamed_ps(2, 6) == 2 * 90 + 6 * 10
    assert read(streamed=[100, 90, 80]).streamed_ps(2, 6) == 2 * 100
    assert [measured.message_ps(rows, 0) for rows in (0, 1, 2, 10)] == [5, 5, 6, 14]
    assert [measured.shared_ps(rows) for rows in (0, 1, 2)] == [0, 6, 7]
    assert prices().shared_ps(2) == 0
    assert [measured.hot_ps(rows) for rows in (0, 1, 16, 1000)] == [0, 30, 5, 0]
    assert [measured.opening_ps(tier, 16) for tier in ("gpu", "host", "device")] == [0, 0, 5]
    assert measured.bulk_bytes_per_s == COSTS.shape.expert_bytes * 10**12 / 1000


@pytest.mark.parametrize(("beside", "took"), [(1.0, 10), (0.5, 12), (0.25, 13), (0.0, 14)])
def test_the_longer_side_hides_its_share_of_the_shorter_one(beside: float, took: float):
    assert together_ps(10, 4, beside) == together_ps(4, 10, beside) == took


def read(**change: object) -> MeasuredPrices:
    """Prices that a trace has recorded, changed."""
    return msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(prices()) | change), type=MeasuredPrices)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"messages": [1, 2]}, "one for each of 3 numbers of rows"),
        ({"shared": [1, 2]}, "one for each of 3 numbers of rows"),
        ({"streamed": [1, 2, 0]}, "must be above 0"),
        ({"rows": [1, 4, 4]}, "ascending numbers of rows from 1 on"),
        ({"rows": [2, 4, 16]}, "ascending numbers of rows from 1 on"),
        ({"beside": 2.0}, "by a share in 0..1, got 2.0"),
        ({"beside": -0.1}, "by a share in 0..1, got -0.1"),
    ],
)
def test_recorded_prices_that_are_none_cost_one_sentence(change: dict[str, object], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        read(**change)
    assert read() == prices()


def test_simulated_prices_of_a_hot_expert_and_a_launch_are_those_of_a_layer():
    for rows in (1, 3, 17):
        assert COSTS.hot_ps(0) + COSTS.hot_ps(rows) == COSTS.resident_ps(1, rows)
        assert COSTS.message_ps(rows, 2 * rows) == COSTS.link_ps(rows, 2 * rows) + COSTS.device_fill_ps


def test_balancing_follows_the_prices_it_is_given():
    """Two hot experts of one row: 20 on the GPU, or 10 beside message and device."""
    load = LayerLoad({1: (1, 0.2), 5: (1, 0.8)}, {}, (0, 0), 1)
    assert offloaded(Balancer(prices(gpu=10, device=10, message=5), 2), load) == {1}
    assert offloaded(Balancer(prices(gpu=10, device=16, message=5), 2), load) == frozenset()
    assert offloaded(Balancer(prices(gpu=10, device=10, message=11), 2), load) == frozenset()


def test_sides_that_share_their_cores_are_balanced_by_what_both_take():
    """Two experts of 10 on the GPU; one of 8 and a message of 5 on the device is longer where nothing overlaps."""
    load = LayerLoad({1: (1, 0.2), 5: (1, 0.8)}, {}, (0, 0), 1)
    assert offloaded(Balancer(prices(device=8, message=5), 2), load) == {1}
    assert offloaded(Balancer(prices(device=8, message=5, beside=0.0), 2), load) == frozenset()
    assert offloaded(Balancer(prices(device=2, message=5, beside=0.0), 2), load) == {1, 5}
    experts = np.repeat(np.arange(4), 2)
    alike = {"device": 10, "streamed": 60, "message": 1}
    assert 0 < len(PrefillSplit(COSTS, prices(**alike)).of_counts(*np.unique(experts, return_counts=True))) < 4
    assert not len(PrefillSplit(COSTS, prices(**alike, beside=0.0)).of_counts(*np.unique(experts, return_counts=True)))


def test_prompts_are_split_by_the_prices_they_are_given():
    experts = np.repeat(np.arange(4), 2)
    slow_device, slow_copies = prices(device=100, streamed=1), prices(device=1, streamed=10_000)
    assert not len(PrefillSplit(COSTS, slow_device).of_counts(*np.unique(experts, return_counts=True)))
    assert PrefillSplit(COSTS, slow_copies).of_counts(*np.unique(experts, return_counts=True)).tolist() == [0, 1, 2, 3]


def test_joint_plans_put_experts_where_this_machine_is_fast():
    loss, even = LossTable.nominal(2, 8), np.full((2, 8), 1 / 8)
    placement = top_experts(even, 4)
    bits = BitwidthPlan(np.where(placement.hot, 0, 3).astype(np.uint8))

    def on_gpu(measured: MeasuredPrices) -> int:
        return int(
            JointRule.live(COSTS, "gpu+device", loss, 4, measured).plan(even, 1, placement, bits).placement.hot.sum()
        )

    assert on_gpu(prices(gpu=1, device=100)) == 16
    assert on_gpu(prices(gpu=1000, device=1)) < 8


def test_a_price_that_was_never_measured_is_refused_by_name():
    with pytest.raises(ConfigError, match="16 bits on the host was never measured: measured are gpu:2"):
        prices().expert_ps("host", 16, 1)
    gone = {name: series for name, series in prices().experts.items() if name != "gpu:3"}
    measured = read(experts=gone)
    loss, even = LossTable.nominal(1, 8), np.full((1, 8), 1 / 8)
    placement = top_experts(even, 4)
    bits = BitwidthPlan(np.where(placement.hot, 0, 3).astype(np.uint8))
    joint = JointRule.live(COSTS, "gpu+device", loss, 4, measured)
    with pytest.raises(ConfigError, match="3 bits on the gpu was never measured"):
        joint.plan(even, 1, placement, bits)
    with pytest.raises(ConfigError, match="above 0"):
        read(copied=0)
    with pytest.raises(ConfigError, match="ascending numbers of rows from 1 on"):
        read(rows=[4, 1, 16])
