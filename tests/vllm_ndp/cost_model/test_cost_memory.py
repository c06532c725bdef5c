"""Memory: hand-added bytes of one model, and one sentence for what does not fit."""

from dataclasses import replace

import numpy as np
import pytest
from balance_yardstick import load_of, offloaded

from ndp_device.common.errors import ConfigError
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.cost_model.memory import CAPACITY_OF, DoesNotFit, Footprint, Memory, beside_device_memory, slots_bytes
from vllm_ndp.layer.balance import Balancer

SHAPE = model_named("mixtral-8x7b")
EXPERT = 2 * 3 * 4096 * 14336


def test_a_footprint_is_the_sum_that_a_pencil_gives():
    """Attention of a layer: 4096 x (2 x 4096 + 2 x 1024 + 8); head and embedding 4096 x 32000 each; 2 bytes a weight.
    A token's KV cache: 32 layers x 2 x 8 heads x 128 values x 2 bytes = 131072."""
    weights = 32 * 4096 * (2 * 4096 + 2 * 1024 + 8) + 2 * 4096 * 32000
    held = Footprint.of(Memory(gpu=5, device=7), SHAPE, kv_tokens=3, requests=1)
    assert held.by_place() == {"gpu": 5 + 2 * weights + 3 * 131072, "device": 7, "host": 0, "expander": 0}
    assert Footprint.of(Memory(), SHAPE, kv_tokens=3, requests=2).kv_cache == 3 * 131072  # of both together
    assert slots_bytes(SHAPE, 7) == (32 * 7 + 2) * EXPERT
    assert slots_bytes(SHAPE, 8) == slots_bytes(SHAPE, 9) == 32 * 8 * EXPERT


def test_a_state_is_held_for_each_request_and_weights_in_the_model_s_own_numbers():
    """Qwen3-Next's linear layers hold a state; in float32 other weights take twice as much."""
    three, one = (Footprint.of(Memory(), model_named("qwen3-next"), 0, requests) for requests in (3, 1))
    assert three.kv_cache == 3 * one.kv_cache > 0
    wide = Footprint.of(Memory(), replace(SHAPE, dtype="float32"), 0, 1)
    assert wide.other_weights == 2 * Footprint.of(Memory(), SHAPE, 0, 1).other_weights


def test_narrow_slots_stand_beside_the_device_s_experts_and_replicas():
    """7 of 8 experts in each of 32 layers are hot; two more of full precision come and go. The host holds all or none.
    At one bit a replica has a bit of each weight, and 4 bytes for each group of 128 of them."""
    narrow = replace(COSTS, slot_bits=4)
    weights = 3 * 4096 * 14336
    hot = 32 * 7 * (weights // 2 + 4 * weights // 128) + 2 * EXPERT
    assert slots_bytes(SHAPE, 7, 1000) == 32 * 7 * 1000 + 2 * EXPERT
    held = 32 * 8 * (EXPERT + weights // 8 + 4 * weights // 128)
    assert beside_device_memory(narrow, 7, 1) == Memory(hot, held)
    assert beside_device_memory(narrow, 7, 1, computes_on_host=True) == Memory(hot, held, host=32 * 8 * EXPERT)
    wider = beside_device_memory(replace(narrow, has_bytes=True), 7, 1).device - held
    assert wider == 32 * 8 * (weights + 4 * weights // 128)


def test_a_nested_replica_keeps_the_planes_of_its_widest_width_and_every_widths_scales():
    """4 bits of 3 x 4096 x 14336 weights, and per width 4 bytes for each group of 128 of them."""
    costs = Costs(load_hardware(), SHAPE)
    weights = 3 * 4096 * 14336
    assert costs.group_size == 128
    assert costs.stored_replica_bytes() == weights // 2 + 4 * 4 * weights // 128
    assert costs.stored_replica_bytes(1) == weights // 8 + 4 * weights // 128 == costs.replica_bytes(1)


def test_what_fits_to_the_byte_fits_and_one_byte_less_is_said_to_be_missing():
    held = Footprint.of(Memory(gpu=10, device=20, host=30, expander=40), SHAPE, kv_tokens=0, requests=1)
    exact = {CAPACITY_OF[place]: needs for place, needs in held.by_place().items()}
    assert list(exact.values()) == [held.gpu, 20, 30, 40]
    held.require(load_hardware(**exact), "it", "advice")
    for place, key in CAPACITY_OF.items():
        short = load_hardware(**{**exact, key: exact[key] - 1})
        with pytest.raises(DoesNotFit, match=f"it does not fit, {place} memory lacks 1 bytes: it needs .*: advice"):
            held.require(short, "it", "advice")


@pytest.mark.parametrize("key", CAPACITY_OF.values())
@pytest.mark.parametrize("value", [0, -1, 2**50 + 1])
def test_a_capacity_that_nothing_has_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"{key} must lie in 1\.\.1125899906842624, got {value}"):
        load_hardware(**{key: value})


# -- What warm experts take on the host's CPU: by hand, and the same in whole picoseconds as in the tables of repla ----


COSTS = Costs(load_hardware("h100-ndp512", memory_efficiency_percent=100), model_named("mixtral-8x7b"))


def test_a_warm_expert_is_read_from_host_memory_and_its_row_goes_there_and_back():
    """Mixtral's expert is 3 x 4096 x 14336 x 2 = 352,321,536 bytes: 1,146,880,000 ps at 307.2 GB/s. A row of 8192 bytes
    is 128 lines of 85 bytes on the wire each way, beside half a load-to-use there and a whole one back: 125 + 250 ns.
    That is what a message to the device takes."""
    raw = COSTS.hardware.link.raw_bytes_per_s
    hop = 375_000 + 2 * -(-128 * 85 * 10**12 // raw)
    assert COSTS.hop_ps(1) == hop
    assert COSTS.link_ps(1, 1) == pytest.approx(hop, rel=0.05)
    assert COSTS.cpu_expert_ps(1) == 1_146_880_000


def test_many_rows_of_one_expert_are_bound_by_arithmetic():
    """2 x 176,160,768 flops a row at 20 Tflop/s are 17,616,077 ps (rounded up): from 66 rows on above the read."""
    assert COSTS.cpu_expert_ps(66) == -(-66 * 2 * 176_160_768 * 10**12 // (20 * 10**12)) > 1_146_880_000
    assert COSTS.cpu_expert_ps(65) == 1_146_880_000


def test_whole_picoseconds_are_those_of_the_tables_that_replay_adds_up():
    counts, size = np.arange(1, 201), COSTS.shape.expert_bytes
    whole = [COSTS.cpu_expert_ps(count) for count in counts.tolist()]
    assert whole == pytest.approx(COSTS.cpu_experts_ps(counts, size), abs=2)


def test_hot_experts_stay_on_the_gpu_where_the_host_is_the_slowest_side_anyway():
    """Two hot experts and a warm one: without it one of the two would run on the device, at 3 bits."""
    rule, none = Balancer(COSTS, 3), np.zeros(8, np.bool_)
    is_hot, is_warm = np.arange(8) < 4, np.arange(8) == 6
    ids, weights, bits = np.array([[0, 1, 6]]), np.ones((1, 3), np.float32), np.full((1, 8), 16, np.uint8)
    two = load_of(is_hot, ids[:, :2], weights[:, :2], bits, none)
    assert len(offloaded(rule, two)) == 1
    with_warm = load_of(is_hot, ids, weights, bits, is_warm, COSTS.hop_ps(1) + COSTS.cpu_expert_ps(1))
    assert with_warm.cold == {}
    assert with_warm.hot == two.hot
    assert offloaded(rule, with_warm) == frozenset()
