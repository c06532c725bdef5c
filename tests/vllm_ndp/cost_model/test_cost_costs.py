"""Prices that replay indexes: what they are by hand, and what the device's own model says of the same command."""

from dataclasses import replace

import numpy as np
import pytest

from ndp_device.common.errors import ConfigError
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.public_models import public_shape
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import Work, execute_bytes
from vllm_ndp.cost_model.costs import Costs, each_case, each_ps

H100 = load_hardware("h100-ndp512", times="roofline")
IDEAL = load_hardware("h100-ndp512", times="roofline", **{"dram.kind": "ideal"})
MIXTRAL = public_shape("mixtral-8x7b")
OLMOE = public_shape("olmoe")
COSTS = Costs(H100, MIXTRAL)


def test_message_and_expert_are_what_the_device_takes_on_average_over_a_refresh_interval() -> None:
    sizes = execute_bytes(1, 1, OLMOE.hidden_size, OLMOE.dtype_bytes)
    work = Work(OLMOE.hidden_size, OLMOE.intermediate_size, *sizes, ((16, 1, OLMOE.expert_bytes),))
    interval = H100.dram.cycles_to_ps(H100.dram.refi)
    took = [DeviceModel(H100).execute(work, interval * part // 16).total_ps for part in range(16)]
    costs = Costs(H100, OLMOE)
    assert costs.message_ps(1, 1) + costs.device_expert_ps(16, 1) == pytest.approx(sum(took) / 16, abs=1)


def test_one_more_expert_takes_what_reading_it_takes_and_whole_passes_of_the_arrays() -> None:
    """4 rows share a pass. Of an ideal DRAM at 512 GB/s; the arrays keep up with it up to there."""
    costs = Costs(IDEAL, OLMOE)
    assert costs.device_expert_ps(16, 1) == pytest.approx(OLMOE.expert_bytes / 0.512, rel=2e-3)
    assert costs.device_expert_ps(16, 5) == pytest.approx(2 * costs.device_expert_ps(16, 1), rel=1e-2)
    assert costs.device_expert_ps(3, 1) == costs.device_expert_ps(3, 4) < costs.device_expert_ps(3, 5)
    assert costs.device_expert_ps(3, 5) == costs.device_expert_ps(3, 8)


@pytest.mark.parametrize("launch", ["cxlmem", "dma"])
def test_a_message_alone_takes_what_the_device_says_but_for_decoding_it(launch: str) -> None:
    hardware = load_hardware("h100-ndp512", launch=launch)
    work = Work(4096, 14336, *execute_bytes(3, 6, 4096, 2), ())
    alone = DeviceModel(hardware).execute(work, 0).total_ps - hardware.array.command_ps
    assert Costs(hardware, MIXTRAL).link_ps(3, 6) == alone
    assert Costs(hardware, MIXTRAL).link_ps(0, 0) == 0


def test_bytes_of_a_message_on_the_wire_are_whole_lines_both_ways() -> None:
    """A row of 8192 bytes is 128 lines, its pair of 13 bytes one more; 85 bytes a line."""
    assert COSTS.message_wire_bytes(1, 1) == (129 + 128) * 85
    assert COSTS.message_wire_bytes(0, 0) == 0


def test_energy_of_one_more_expert_is_that_of_its_lines_and_rows() -> None:
    """32 bytes a line: an access, and scratchpads twice. A row holds 8 KiB; each matrix begins one anew."""
    energy, costs = H100.energy, Costs(H100, OLMOE)
    dram, arrays = costs.device_energy(8)
    lines = OLMOE.expert_bytes / 32
    assert arrays[16, 1] == pytest.approx(lines * 2 * energy.scratchpad_access_fj / 1000, rel=1e-9)
    opened = (dram[16, 1] * 1000 - lines * energy.dram_line32_fj) / energy.activate_fj
    assert OLMOE.expert_bytes / 8192 <= opened < 2 * OLMOE.expert_bytes / 8192
    assert (arrays[:, 1] == arrays[:, 4]).all()
    assert (dram[:, 5] == dram[:, 8]).all()
    assert dram[4, 1] < dram[16, 1] / 3
    assert not dram[[0, 5]].any()
    assert not dram[:, 0].any()


def test_the_cpu_reads_at_the_share_of_its_memory_or_at_the_rate_it_is_told() -> None:
    """33 % of 307.2 GB/s are 101.376 GB/s."""
    costs = Costs(load_hardware("h100-ndp512", memory_efficiency_percent=33), MIXTRAL)
    assert costs.host_bytes_per_s == 101_376_000_000
    counts = np.array([0, 1])
    assert costs.cpu_experts_ps(counts, 101_376.0).tolist() == [0, pytest.approx(17_616_076.8)]  # arithmetic
    assert costs.cpu_experts_ps(counts, 1e9).tolist() == [0, pytest.approx(1e21 / 101_376_000_000)]
    assert costs.cpu_experts_ps(counts, 1e9, 10**10).tolist() == [0, pytest.approx(1e11)]


def test_a_layer_on_the_cpu_is_its_experts_and_the_way_of_each_row_once() -> None:
    """Five pairs of a model that chooses two experts are three rows."""
    counts = np.array([[4, 1, 0, 0, 0, 0, 0, 0]])
    experts = COSTS.cpu_experts_ps(counts, MIXTRAL.expert_bytes).sum()
    assert COSTS.cpu_layers_ps(counts, MIXTRAL.expert_bytes).tolist() == [experts + COSTS.hop_ps(3)]


@pytest.mark.parametrize("preset", ["h100-ndp512", "rtx4090"])
def test_prices_of_an_expert_by_tier_are_of_its_width_there(preset: str) -> None:
    costs = Costs(load_hardware(preset), MIXTRAL)
    size = costs.replica_bytes(4)
    assert costs.expert_ps("device", 4, 2) == costs.device_expert_ps(4, 2)
    assert costs.expert_ps("gpu", 4, 2) == costs.gpu.growing_ps(1, 2, size) < costs.gpu.growing_ps(1, 2, 4 * size)
    assert costs.expert_ps("host", 4, 2) == pytest.approx(size * 1e12 / costs.host_bytes_per_s)
    assert costs.opening_ps("gpu", 4) == costs.gpu.launch_ps(size)
    assert costs.opening_ps("host") == costs.hop_ps(1)
    assert costs.opening_ps("device") == costs.message_ps(1, 1)


def test_slots_of_few_bits_are_what_is_resident_and_copies_bring_full_precision() -> None:
    """A Mixtral expert of 352,321,536 bytes at 25.6 GB/s; before the first copy a launch of 6 us and 0.5 of latency."""
    costs = replace(COSTS, slot_bits=4)
    size = COSTS.replica_bytes(4)
    assert costs.resident_ps(3, 5) == costs.gpu.experts_ps(3, 5, 3 * size)
    assert costs.gpu_expert_ps(5) == costs.gpu.growing_ps(1, 5, size)
    assert costs.gpu_expert_ps(5, num_bytes=2 * size) == costs.gpu.growing_ps(1, 5, 2 * size) > costs.gpu_expert_ps(5)
    stored = replace(costs, stored=(4, 77))
    assert (stored.slot_bytes, stored.replica_bytes(4), stored.stored_replica_bytes()) == (77, 77, 77)
    assert stored.replica_bytes(3) == costs.replica_bytes(3)
    of_link = COSTS.streamed_ps(7, 9) / COSTS.shape.expert_bytes
    assert replace(costs, stored=(4, size)).streamed_ps(7, 9) == pytest.approx(of_link * size, rel=0.1)
    assert replace(costs, stored=(4, size), slot_bits=16).streamed_ps(7, 9) == COSTS.streamed_ps(7, 9)
    assert costs.copy_ps == pytest.approx(352_321_536 / 0.0256)
    assert costs.copy_opening_ps == 6_500_000
    assert costs.fetch_ps() == pytest.approx(6_500_000 + costs.copy_ps, abs=1)
    assert costs.fetch_ps(256) == 6_500_000 + 10_000


def test_several_gpus_split_what_is_resident() -> None:
    assert replace(COSTS, num_gpus=2).resident_ps(2, 2) == pytest.approx(COSTS.resident_ps(2, 2) / 2, abs=1)


def test_a_replica_is_its_codes_and_a_scale_and_an_offset_of_each_group() -> None:
    weights = 3 * 4096 * 14336
    assert replace(COSTS, scales=False).replica_bytes(3) == weights * 3 // 8
    assert COSTS.replica_bytes(3) == weights * 3 // 8 + 4 * weights // 128
    narrow = Costs(H100, public_shape("qwen3-30b-a3b"))  # 2048 and 768: the narrower side decides
    assert (COSTS.group_size, narrow.group_size, replace(narrow, group_size=32).group_size) == (128, 64, 32)
    table = COSTS.bytes_of_width
    assert (len(table), np.flatnonzero(table).tolist()) == (256, [1, 2, 3, 4, 8, 16])
    assert (table[3], table[16]) == (COSTS.replica_bytes(3), 2 * weights)


def test_a_model_of_wide_numbers_moves_as_many_bytes_as_they_have() -> None:
    """In float32 a row of 4096 values is 256 lines of 64 bytes; a weight of an expert has 4 bytes."""
    wide = Costs(H100, replace(MIXTRAL, dtype="float32"))
    assert wide.message_wire_bytes(1, 1) == (257 + 256) * 85
    alone = DeviceModel(H100).execute(Work(4096, 14336, *execute_bytes(3, 6, 4096, 4), ()), 0).total_ps
    assert wide.link_ps(3, 6) == alone - H100.array.command_ps
    assert wide.replica_bytes(16) == 4 * 3 * 4096 * 14336
    assert wide.replica_bytes(4) == COSTS.replica_bytes(4)


def test_costs_of_the_gpu_are_those_of_its_model_for_as_many_rows() -> None:
    """By arithmetic: streamed pairs, and rows of shared experts. A layer's launches are what the preset says."""
    hardware = load_hardware("h100-ndp512", times="roofline", layer_overhead_ps=30_000_000)
    costs = Costs(hardware, public_shape("deepseek-v3"))
    assert costs.streamed_ps(2, 80_000) == costs.gpu.prefill_stream_ps(2, 80_000) > costs.streamed_ps(2, 2)
    assert costs.shared_ps(3000) == costs.gpu.shared_ps(3000) > costs.shared_ps(1)
    assert costs.overhead_ps == 30_000_000


def test_attention_is_the_mean_of_layers_that_differ() -> None:
    """gpt-oss-120b: half of its layers see 128 tokens."""
    costs = Costs(H100, public_shape("gpt-oss-120b"))
    layers = costs.gpu.before_experts_ps(1, 100_000)
    assert costs.attention_ps(1, 100_000) == pytest.approx(sum(layers) / 36)
    assert max(layers) > 2 * min(layers)


def test_a_trace_of_another_routing_is_refused() -> None:
    COSTS.require(8, 2)
    for sizes in ((8, 1), (16, 2)):
        with pytest.raises(ConfigError, match=f"the trace has {sizes[0]} experts top-{sizes[1]}, the model 8 top-2"):
            COSTS.require(*sizes)


def test_tables_give_each_case_what_it_was_asked_for() -> None:
    """And no rows take no time, whatever is asked about them."""
    first, second = np.array([[3, 0, 1], [3, 2, 0]]), np.array([[0, 7, 7], [7, 1, 0]])
    assert each_case(first, second, lambda a, b: 100 * a + b).tolist() == (100 * first + second).tolist()
    assert each_ps(first, lambda rows: 5.0 + rows).tolist() == [[8, 0, 6], [8, 7, 0]]
