"""Points of the scaling curves: by hand where a pencil does, and what more of everything may not do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import model_named
from vllm_ndp.lab.exact.engine import alone
from vllm_ndp.lab.scaling import PARTS, Pool, Scale, ScalingPoint, Setup, _Host, curve, pool, room_for_hot, stops_paying

HARDWARE = load_hardware("h100-ndp512")
SCALE = Scale("mixtral-8x7b", Setup(HARDWARE), 16)


def a_point(num_devices: int, tokens_per_s: float) -> ScalingPoint:
    return ScalingPoint("m", 1, 1, num_devices, 1, 4, 2, "paper", tokens_per_s, "head", {"head": 1.0})


def test_hot_experts_are_as_many_as_gpu_memory_holds():
    """8x7B: 1.6 G weights beside experts, in two bytes 3.2 GB; 4096 tokens of 131 072 bytes .5 GB. Of 80 GB 76.2 are
    left; an expert is 32 x 352 321 536 bytes = 11.27 GB, two staged ones .7: six fit, seven do not. Two GPUs hold all,
    and with 256 requests, 137 GB of cache, one."""
    shape = model_named("mixtral-8x7b")
    assert room_for_hot(shape, HARDWARE, 1, 1, 4096) == 6
    assert room_for_hot(shape, HARDWARE, 2, 1, 4096) == 8
    assert room_for_hot(shape, HARDWARE, 2, 256, 4096) == 1
    assert SCALE.point(256, 1, 1) is None


def test_a_step_is_the_sum_of_its_parts_and_tokens_come_out_of_it():
    """Every picosecond of a step is in one part, so the parts add up to when the last step has ended."""
    devices = SCALE._devices_of(2)
    host = _Host(SCALE, SCALE._costs_of(2), devices, 0, 8, 4)
    ended_ps = alone(host.run(), DeviceModel(HARDWARE), DeviceModel(HARDWARE))
    assert ended_ps == sum(host.parts.values()) > 0
    point = SCALE.point(8, 2, 2)
    assert point is not None
    assert set(point.shares) == set(PARTS)
    assert sum(point.shares.values()) == pytest.approx(1)
    assert point.shares[point.bound] == max(point.shares.values())


def test_all_reduces_take_time_on_several_gpus_only():
    one, two = SCALE.point(1, 1, 1), SCALE.point(1, 2, 1)
    assert one is not None
    assert two is not None
    assert one.shares["collectives"] == 0 < two.shares["collectives"]


def test_more_devices_never_make_a_batch_slower_and_one_cold_expert_gains_nothing_by_them():
    for batch in (1, 16):
        speeds = [point.tokens_per_s for point in curve(SCALE, [batch], [1], [1, 2, 4])]
        assert speeds == sorted(speeds)
    single = [point.tokens_per_s for point in curve(SCALE, [1], [1], [1, 4])]
    assert single[0] == single[1]
    assert speeds[0] * 1.3 < speeds[2]


def test_a_model_that_one_device_cannot_hold_needs_more_of_them():
    """Qwen3-235B's experts take 454 GB in bf16 and replicas 117: more than 550 GB of one device, less than of two."""
    scale = Scale("qwen3-235b-a22b", Setup(HARDWARE), 1)
    assert scale.point(1, 1, 1) is None
    assert scale.point(1, 1, 2) is not None


def test_hosts_with_devices_of_their_own_are_as_fast_as_one_and_hosts_that_share_are_not_faster():
    found = pool(SCALE, 4, 1, [1, 2, 8], 4)
    one = SCALE.point(4, 1, 1)
    assert found is not None
    assert one is not None
    assert found.private_tokens_per_s == 4 * one.tokens_per_s
    assert found.num_private == 1
    shared = {point.num_devices: point for point in found.shared}
    assert shared[1].tokens_per_s < shared[2].tokens_per_s < shared[8].tokens_per_s
    assert shared[1].tokens_per_s < 0.9 * found.private_tokens_per_s
    assert shared[1].shares["device queue"] > 0
    assert shared[1].execution == "paper", "each host offloads as if the device were its own, which is too much here"
    assert found.enough == min(
        count for count, one in shared.items() if one.tokens_per_s >= 0.9 * found.private_tokens_per_s
    )


def test_saved_devices_are_those_that_hosts_would_have_had_beyond_the_pool():
    shared = (a_point(2, 50.0), a_point(3, 91.0))
    assert Pool("m", 4, 1, 100.0, 1, shared).enough == 3
    assert Pool("m", 4, 1, 100.0, 1, shared).saved == 0.25
    assert Pool("m", 4, 1, 200.0, 1, shared).saved is None


def test_adding_stops_paying_where_one_more_brings_less_than_a_twentieth():
    points = [a_point(1, 100), a_point(2, 150), a_point(3, 157), a_point(4, 170)]
    assert stops_paying(points) == 2  # 157 < 150 x 1.05
    assert stops_paying(points[:2]) is None


def test_a_larger_context_leaves_less_room_for_hot_experts():
    longer = Scale("mixtral-8x7b", replace(SCALE.setup, context=65_536), 1)
    point, usual = longer.point(1, 1, 1), SCALE.point(1, 1, 1)
    assert point is not None
    assert usual is not None
    assert point.num_hot < usual.num_hot


def test_parts_of_experts_make_single_requests_faster_with_every_device_where_copies_do_nothing():
    """Mixtral at batch 1 has one cold expert in a layer, or none. Three parts of 14336 units are no whole scales."""
    split = Scale("mixtral-8x7b", replace(SCALE.setup, splits_experts=True), 1)
    parts = {point.num_devices: point.tokens_per_s for point in curve(split, [1], [1], [1, 2, 3, 4])}
    copies = {point.num_devices: point.tokens_per_s for point in curve(SCALE, [1], [1], [1, 2, 4])}
    assert list(parts) == [1, 2, 4]
    assert parts[1] == copies[1] == copies[2] == copies[4]
    assert parts[2] > 1.2 * parts[1]
    assert parts[4] > 1.2 * parts[2]
