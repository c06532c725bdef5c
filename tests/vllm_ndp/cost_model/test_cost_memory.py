"""Memory: hand-added bytes of one model, and one sentence for what does not fit."""

from __future__ import annotations

import pytest

from ndp_device.common.errors import ConfigError
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.cost_model.memory import CAPACITY_OF, DoesNotFit, Footprint, Memory, slots_bytes

SHAPE = model_named("mixtral-8x7b")
EXPERT = 2 * 3 * 4096 * 14336


def test_a_footprint_is_the_sum_that_a_pencil_gives():
    """Attention of a layer: 4096 x (2 x 4096 + 2 x 1024 + 8); head and embedding 4096 x 32000 each; 2 bytes a weight.
    A token's KV cache: 32 layers x 2 x 8 heads x 128 values x 2 bytes = 131072."""
    weights = 32 * 4096 * (2 * 4096 + 2 * 1024 + 8) + 2 * 4096 * 32000
    held = Footprint.of(Memory(gpu=5, device=7), SHAPE, kv_tokens=3, requests=1)
    assert held.by_place() == {"gpu": 5 + 2 * weights + 3 * 131072, "device": 7, "host": 0, "expander": 0}
    assert slots_bytes(SHAPE, 7) == (32 * 7 + 2) * EXPERT
    assert slots_bytes(SHAPE, 8) == slots_bytes(SHAPE, 9) == 32 * 8 * EXPERT


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
        assert held.missing(short) == {place: 1}
        with pytest.raises(DoesNotFit, match=f"it does not fit, {place} memory lacks 1 bytes: it needs .*: advice"):
            held.require(short, "it", "advice")


@pytest.mark.parametrize("key", CAPACITY_OF.values())
@pytest.mark.parametrize("value", [0, -1, 2**50 + 1])
def test_a_capacity_that_nothing_has_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"{key} must lie in 1\.\.1125899906842624, got {value}"):
        load_hardware(**{key: value})


def test_bytes_below_zero_are_a_mistake_of_the_system_that_states_them():
    with pytest.raises(ValueError, match="device memory must not be negative, got -1"):
        Memory(device=-1)
