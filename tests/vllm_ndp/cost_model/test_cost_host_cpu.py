"""What warm experts take on the host's CPU: by hand, and the same in whole picoseconds as in the tables of replay."""

from __future__ import annotations

import numpy as np
import pytest
from balance_yardstick import load_of, offloaded

from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, HostCpu, model_named
from vllm_ndp.cost_model.gpu_timing import StepClock
from vllm_ndp.layer.balance import Balancer

COSTS = Costs(load_hardware("h100-ndp512", memory_efficiency_percent=100), model_named("mixtral-8x7b"))
CPU = HostCpu.of(COSTS)


def test_a_warm_expert_is_read_from_host_memory_and_its_row_goes_there_and_back():
    """Mixtral's expert is 3 x 4096 x 14336 x 2 = 352,321,536 bytes: 1,146,880,000 ps at 307.2 GB/s. A row of 8192 bytes
    is 128 lines of 85 bytes on the wire each way, beside half a load-to-use there and a whole one back: 125 + 250 ns.
    That is what a message to the device takes."""
    raw = COSTS.hardware.link.raw_bytes_per_s
    hop = 375_000 + 2 * -(-128 * 85 * 10**12 // raw)
    assert COSTS.hop_ps(1) == hop
    assert COSTS.link_ps(1, 1) == pytest.approx(hop, rel=0.05)
    assert CPU.expert_ps(COSTS, 1) == 1_146_880_000


def test_many_rows_of_one_expert_are_bound_by_arithmetic():
    """2 x 176,160,768 flops a row at 20 Tflop/s are 17,616,077 ps (rounded up): from 66 rows on above the read."""
    assert CPU.expert_ps(COSTS, 66) == -(-66 * 2 * 176_160_768 * 10**12 // (20 * 10**12)) > 1_146_880_000
    assert CPU.expert_ps(COSTS, 65) == 1_146_880_000


def test_whole_picoseconds_are_those_of_the_tables_that_replay_adds_up():
    counts, size = np.arange(1, 201), COSTS.shape.expert_bytes
    whole = [CPU.expert_ps(COSTS, count) for count in counts.tolist()]
    assert whole == pytest.approx(CPU.each_ps(COSTS, counts, size), abs=2)


def test_a_layer_takes_as_long_as_the_slowest_of_gpu_device_and_host():
    clock = StepClock(COSTS.gpu)
    clock.begin_step(1, 10)
    clock.begin_layer()
    alone = clock.end_layer([(1, 1)], device_ps=5, host_ps=3)
    clock.begin_layer()
    slow = clock.end_layer([(1, 1)], device_ps=5, host_ps=10**12)
    assert alone.total_ps == alone.attention_ps + alone.hot_ps + alone.overhead_ps
    assert slow.total_ps == slow.attention_ps + 10**12 + slow.overhead_ps


def test_hot_experts_stay_on_the_gpu_where_the_host_is_the_slowest_side_anyway():
    """Two hot experts and a warm one: without it one of the two would run on the device, at 3 bits."""
    rule, none = Balancer(COSTS, 3), np.zeros(8, np.bool_)
    is_hot, is_warm = np.arange(8) < 4, np.arange(8) == 6
    ids, weights, bits = np.array([[0, 1, 6]]), np.ones((1, 3), np.float32), np.full((1, 8), 16, np.uint8)
    two = load_of(is_hot, ids[:, :2], weights[:, :2], bits, none)
    assert len(offloaded(rule, two)) == 1
    with_warm = load_of(is_hot, ids, weights, bits, is_warm, COSTS.hop_ps(1) + CPU.expert_ps(COSTS, 1))
    assert with_warm.cold == {}
    assert with_warm.hot == two.hot
    assert offloaded(rule, with_warm) == frozenset()
