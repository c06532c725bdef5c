"""Commands on the device: limits, conservation, monotony, both sides of every edge."""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ndp_device.__main__ import app
from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import PLAN_BITS
from ndp_device.timing.dram import channel_lines, stream, transfer
from ndp_device.timing.model import (
    DeviceModel,
    bulk_ps,
    hop_in,
    hop_out,
    matrix_ps,
    migration_ps,
    swiglu_ps,
    weight_passes,
    wire_bytes,
)
from ndp_device.timing.public_models import public_shape
from ndp_device.timing.spec import (
    FOLDER,
    PE_MODES,
    PRESETS,
    Hardware,
    field_types,
    load_hardware,
    measured_presets,
    nearest_card,
)
from ndp_device.timing.work import (
    BOUNDS,
    Timing,
    Work,
    execute_bytes,
    expert_bytes,
    single_expert_work,
)

HARDWARE = load_hardware("h100-ndp512")
IDEAL_DRAM = load_hardware("h100-ndp512", **{"dram.kind": "ideal"})
FAST_ARRAYS = load_hardware("h100-ndp512", clock_hz=10**15, tile_bytes=64)
MIXTRAL = public_shape("mixtral-8x7b")


def work_of(*experts: tuple[int, int], hidden: int = 1024, intermediate: int = 2048, scales: bool = True) -> Work:
    """Experts as (bits, tokens), one message for all."""
    tokens = max((count for _, count in experts), default=0)
    return Work(
        hidden_size=hidden,
        intermediate_size=intermediate,
        bytes_in=2 * hidden * tokens,
        bytes_out=4 * hidden * tokens,
        experts=tuple(
            (bits, count, expert_bytes(hidden, intermediate, bits, 128, scales=scales)) for bits, count in experts
        ),
    )


def run(hardware: Hardware, work: Work, submit_ps: int = 0) -> Timing:
    return DeviceModel(hardware).execute(work, submit_ps)


def device_ps(timing: Timing) -> int:
    return timing.dram_ps + timing.compute_ps + timing.dequant_ps + timing.vector_ps - timing.overlap_saved_ps


def mixtral(bits: int, tokens: int, hardware: Hardware, *, scales: bool = False) -> Timing:
    return run(hardware, single_expert_work(MIXTRAL, bits, tokens, 128, scales=scales))


EXPERTS = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(1, 40)), min_size=0, max_size=5)
ANY_HARDWARE = st.sampled_from(
    [HARDWARE, IDEAL_DRAM, FAST_ARRAYS]
    + [load_hardware("h100-ndp512", pe_mode=mode) for mode in PE_MODES]
    + [load_hardware("h100-ndp512-lpddr5", launch="dma"), load_hardware("h200-gen5", double_buffered=False)]
    + [load_hardware("cxl-expert-ndp"), load_hardware("cxl-expert-amx")]
)


@settings(max_examples=60)
@given(EXPERTS, ANY_HARDWARE, st.integers(0, 10**8))
def test_the_stages_add_up_to_the_total(experts: list[tuple[int, int]], hardware: Hardware, submit_ps: int) -> None:
    timing = run(hardware, work_of(*experts), submit_ps)
    around = timing.launch_ps + timing.link_in_ps + timing.queue_ps + timing.link_out_ps + timing.completion_ps
    assert around + device_ps(timing) == timing.total_ps == timing.done_ps - submit_ps
    assert timing.overlap_saved_ps >= 0
    assert timing.bound in BOUNDS
    assert 0 <= timing.array_utilisation <= 1
    assert 0 <= timing.dram_efficiency <= 1
    assert timing.refresh_stall_ps <= timing.dram_ps


def test_with_fast_arrays_an_expert_takes_exactly_its_dram_stream() -> None:
    """V1: the arrays hide in the stream; only the last tile and SwiGLU (below a nanosecond here) come on top."""
    for bits in (2, 16):
        timing = mixtral(bits, 1, FAST_ARRAYS)
        lines = channel_lines(FAST_ARRAYS.dram, timing.weight_bytes)
        alone = stream(FAST_ARRAYS.dram, lines, timing.start_ps).total_ps
        assert alone <= device_ps(timing) <= alone + 1000


def test_with_ideal_dram_an_expert_takes_exactly_its_cycles() -> None:
    """V1: gate and up 4096 x ceil(28672 / 256) = 458752, down 14336 x 16 = 229376, two fills of 10."""
    fast = replace(IDEAL_DRAM, dram=replace(IDEAL_DRAM.dram, ideal_bytes_per_s=10**18))
    timing = mixtral(16, 4, fast)
    assert timing.compute_ps == (458_752 + 229_376 + 20) * 1000
    assert device_ps(timing) == pytest.approx(timing.compute_ps + timing.vector_ps, rel=1e-6)


def test_nothing_to_do_costs_the_way_there_and_back() -> None:
    """Load-to-use 250 ns and half of it for the posted write, 20 ns to decode."""
    timing = run(HARDWARE, Work(1024, 2048, 0, 0, ()))
    assert timing.total_ps == 125_000 + 20_000 + 250_000
    assert timing.bound == "link"


def test_fp16_is_balanced_up_to_four_tokens_and_compute_doubles_at_five() -> None:
    """V3: 64 x 4 columns x 2 B x 1 GHz = 512 GB/s: with ideal DRAM 0.688 ms for one to four tokens of Mixtral-8x7B."""
    times = [device_ps(mixtral(16, tokens, IDEAL_DRAM)) for tokens in (1, 4, 5, 8)]
    assert times[0] == pytest.approx(688.1e6, rel=2e-3)
    assert times[1] == pytest.approx(times[0], rel=1e-3)
    assert times[2] == pytest.approx(2 * times[0], rel=2e-3)
    assert times[3] == pytest.approx(times[2], rel=1e-3)


@pytest.mark.parametrize(
    ("mode", "scales", "gain8", "gain3", "gain2"),
    [
        ("bit_scalable", False, 2.0, 16 / 3, 16 / 2),
        ("bit_scalable", True, 16 / 8.25, 16 / 3.25, 16 / 2.25),
        ("bit_scalable_pow2", False, 2.0, 16 / 4, 16 / 2),
        ("fp16_dequant", False, 1.0, 1.0, 1.0),
        ("int8", False, 2.0, 2.0, 2.0),
    ],
)
def test_what_few_bits_gain_depends_on_the_multipliers(
    mode: str, scales: bool, gain8: float, gain3: float, gain2: float
) -> None:
    """V3, ideal DRAM, one token: fp16 time / k-bit time. 0.25 bit per weight of scales and offsets at groups of 128."""
    hardware = load_hardware("h100-ndp512", pe_mode=mode, **{"dram.kind": "ideal"})
    full = device_ps(mixtral(16, 1, hardware))
    for bits, gain in ((8, gain8), (3, gain3), (2, gain2)):
        assert full / device_ps(mixtral(bits, 1, hardware, scales=scales)) == pytest.approx(gain, rel=0.01)


def test_dequantisation_counts_once_it_is_slower_than_the_arrays() -> None:
    """The arrays take 4 weights a cycle and unit at one token: 4 hide, 3 do not."""
    at4, at3 = (
        mixtral(3, 1, load_hardware("h100-ndp512", pe_mode="fp16_dequant", dequant_weights_per_cycle=rate))
        for rate in (4, 3)
    )
    assert at4.total_ps == pytest.approx(688.1e6, rel=0.01)
    assert device_ps(at3) / device_ps(at4) == pytest.approx(4 / 3, rel=0.01)
    fast = mixtral(
        3, 1, load_hardware("h100-ndp512", pe_mode="fp16_dequant", dequant_weights_per_cycle=2, clock_hz=8 * 10**9)
    )
    assert fast.dequant_ps > fast.dram_ps > fast.compute_ps
    assert fast.bound == "compute"


def test_weights_are_read_again_when_the_activations_do_not_fit() -> None:
    """Half of 64 x 128 KiB holds 4 MiB / (2 x (4096 + 14336) B) = 113 tokens."""
    array = HARDWARE.array
    assert weight_passes(array, 4096, 14336, 113) == 1
    assert weight_passes(array, 4096, 14336, 114) == 2
    small = replace(array, units=1, scratchpad_bytes=8192)
    assert weight_passes(small, 4096, 14336, 3) == 3  # not one token fits, and each is served
    assert mixtral(2, 114, HARDWARE).weight_bytes == 2 * mixtral(2, 113, HARDWARE).weight_bytes


def test_partial_passes_of_the_arrays_cost_whole_ones() -> None:
    """4 rows and 256 columns a pass: 5 tokens or 257 columns need a second one; three of 16 bits round up."""
    array = HARDWARE.array
    assert matrix_ps(array, 100, 256, 4, 16)[0] == (100 + 10) * 1000
    assert matrix_ps(array, 100, 257, 4, 16)[0] == (200 + 10) * 1000
    assert matrix_ps(array, 100, 256, 5, 16)[0] == (200 + 10) * 1000
    assert matrix_ps(array, 100, 256, 4, 3)[0] == (19 + 10) * 1000
    assert matrix_ps(array, 100, 256, 0, 3)[0] == 0
    assert swiglu_ps(array, 256, 1) == 1000
    assert swiglu_ps(array, 257, 1) == 2000


def test_a_second_command_waits_for_the_first_and_says_so() -> None:
    model = DeviceModel(HARDWARE)
    work = work_of((4, 1))
    first, second = model.execute(work, 0), model.execute(work, 0)
    assert first.queue_ps == 0
    assert second.start_ps == first.start_ps + device_ps(first)
    assert second.queue_ps == pytest.approx(device_ps(first), rel=0.01)
    third = model.execute(work, 0)
    assert third.bound == "queue"  # it waited for two
    later = model.execute(work, third.done_ps)
    assert later.queue_ps == 0


MESSAGES = st.tuples(st.integers(0, 300_000), st.integers(0, 300_000), EXPERTS, st.integers(0, 2 * 10**7))


@settings(max_examples=60)
@given(st.lists(MESSAGES, min_size=2, max_size=6), st.sampled_from(["cxlmem", "dma"]))
@example([(0, 250_000, [], 0), (0, 64, [], 0), (0, 64, [], 0)], "cxlmem")
@example([(0, 250_000, [], 0), (0, 250_000, [], 0)], "dma")
@example([(250_000, 0, [], 0), (64, 0, [], 0)], "cxlmem")
def test_each_wire_and_the_device_serve_one_command_at_a_time_in_order(
    messages: list[tuple[int, int, list[tuple[int, int]], int]], launch: str
) -> None:
    """Three queues in a row, each busy for what a command alone needs of it; DRAM without refresh, whose time is the
    same whenever it begins."""
    hardware = load_hardware("h100-ndp512", launch=launch, **{"dram.kind": "ideal"})
    link, model = hardware.link, DeviceModel(hardware)
    wire_in = device = wire_out = 0
    for bytes_in, bytes_out, experts, submit_ps in messages:
        work = replace(work_of(*experts), bytes_in=bytes_in, bytes_out=bytes_out)
        alone, timing = run(hardware, work), model.execute(work, submit_ps)
        into, out = hop_in(link, bytes_in), hop_out(link, bytes_out)
        sent = max(submit_ps + into.launch_ps, wire_in)
        wire_in = sent + into.serial_ps
        begun = max(sent + into.wire_ps + hardware.array.command_ps, device)
        device = begun + device_ps(alone)
        back = max(device + out.launch_ps, wire_out)
        wire_out = back + out.serial_ps
        assert (timing.start_ps, timing.done_ps) == (begun, back + out.wire_ps + out.completion_ps)
        waited = timing.total_ps - alone.total_ps
        assert timing.queue_ps == waited, "alone it waits for nothing"


def test_a_migration_slows_the_dram_by_its_share_and_leaves_no_trace_when_it_is_over() -> None:
    """25.6 of about 468 GB/s: an expert read beside a long migration takes about 6 % longer."""
    work = work_of((16, 1), hidden=4096, intermediate=14336)
    alone, beside = DeviceModel(HARDWARE), DeviceModel(HARDWARE)
    arrived = beside.migration_end_ps(beside.begin_migration(10**9, 0))
    assert arrived == pytest.approx(10**9 / 25.6e9 * 1e12, rel=0.001)
    ratio = beside.execute(work, 0).dram_ps / alone.execute(work, 0).dram_ps
    assert ratio == pytest.approx(1 + 25.6 / (468.5 - 25.6), rel=0.005)
    late = arrived + (-arrived % (10**6 * 3900))
    assert beside.execute(work, late).total_ps == alone.execute(work, late).total_ps
    assert beside.migration_end_ps(beside.begin_migration(0, 5)) == 5


def test_a_migration_takes_the_slower_of_dram_and_link_and_what_comes_before_it() -> None:
    """512 MB at 512 GB/s, or at 25.6; a launch of 6 us and a latency of 0.5, and the first stripe of 256 bytes."""
    fast = {"link.raw_bytes_per_s": 10**13, "link.bulk_bytes_per_s": 10**13}
    by_dram = load_hardware("h100-ndp512", **{"dram.kind": "ideal"}, **fast)
    assert migration_ps(by_dram, 512 * 10**6)[0] == pytest.approx(10**9 + 6_000_000, abs=10**4)
    by_link = migration_ps(IDEAL_DRAM, 512 * 10**6)
    assert by_link[0] == pytest.approx(20 * 10**9 + 6_500_000 + 500, abs=10**4)
    assert by_link[1] == pytest.approx(10**9, abs=10**4)


def test_results_hold_up_migrations_that_still_send_and_no_other() -> None:
    """They leave as the first of two migrations ends."""
    model = DeviceModel(HARDWARE)
    first, second = (model.begin_migration(10**6, 0) for _ in range(2))
    ends = [model.migration_end_ps(number) for number in (first, second)]
    model.execute(Work(1024, 2048, 0, 6400, ()), ends[0] - 125_000 - 20_000)
    sent = hop_out(HARDWARE.link, 6400).serial_ps
    assert [model.migration_end_ps(number) for number in (first, second)] == [ends[0], ends[1] + sent]
    model.begin_migration(1, ends[0])
    assert model.migration_end_ps(first) == ends[0], "one that ends as this is asked is still known"


def test_results_that_leave_after_a_migration_ended_keep_its_share_of_the_dram_from_nobody() -> None:
    """By DMA: they are there 1 us before its end, and launched 5 us after it."""
    hardware = load_hardware("h100-ndp512", launch="dma", **{"dram.kind": "ideal"})
    model, work = DeviceModel(hardware), work_of((16, 1))
    end = model.migration_end_ps(model.begin_migration(10**6, 0))
    model.execute(Work(1024, 2048, 0, 25 * 10**6, ()), end - 1_000_000 - 6_000_000 - 500_000 - 20_000)
    assert model.execute(work, end).dram_ps == run(hardware, work).dram_ps


def test_what_a_message_moves_is_activations_both_ways_and_the_pairs_inwards() -> None:
    """3 rows of 10 values; a pair is a row, an expert and a weight of 4 bytes each, and a byte of bits."""
    assert execute_bytes(3, 5, 10, 2) == (3 * 10 * 2 + 5 * 13, 3 * 10 * 2)
    assert execute_bytes(3, 5, 10, 4) == (3 * 10 * 4 + 5 * 13, 3 * 10 * 4)
    work = single_expert_work(MIXTRAL, 3, 5, 128)
    assert (work.bytes_in, work.bytes_out) == (5 * 4096 * 2, 5 * 4096 * 4)


def test_the_launch_path_is_an_option_with_a_price() -> None:
    """8 KiB in, 16 KiB out. CXL.mem: 85 wire bytes per 64 B line. DMA: two launches of 6 us, a poll of 1 us."""
    cxl, dma = load_hardware("h100-ndp512").link, load_hardware("h100-ndp512", launch="dma").link
    assert wire_bytes(cxl, 8192) == 128 * 85
    assert wire_bytes(dma, 8192) == 8192 + 64 * 26
    assert wire_bytes(cxl, 1) == 85
    assert wire_bytes(cxl, 0) == wire_bytes(dma, 0) == 0
    assert hop_in(cxl, 0).wire_ps * 2 == hop_out(cxl, 0).wire_ps == 250_000
    assert hop_in(dma, 8192).launch_ps == 6_000_000
    assert hop_out(dma, 8192).completion_ps == 1_000_000
    gap = mixtral(3, 1, load_hardware("h100-ndp512", launch="dma")).total_ps - mixtral(3, 1, HARDWARE).total_ps
    assert 12_000_000 < gap < 17_000_000


def test_bulk_copies_reach_the_effective_rate() -> None:
    assert bulk_ps(HARDWARE.link, 25_600_000) == 6_000_000 + 500_000 + 1_000_000_000
    assert bulk_ps(HARDWARE.link, 0) == 0


def test_energy_counts_events_once() -> None:
    """32 bytes of weights: a DRAM access (11.9 pJ a bit), two of scratchpads (2 x 0.113 nJ), 20 rows opened (1.8)."""
    work = Work(1, 1, 0, 0, ((4, 1, 32),))
    assert run(HARDWARE, work).energy_pj == int(32 * 8 * 11.9 + 226 + 20 * 1800)


def test_bytes_of_a_replica() -> None:
    """[2I, H] and [H, I] of 8 x 16: 3 x 128 weights at 3 bits = 144 B; groups of 16: 32 rows x 1 + 8 rows x 1 x 4 B."""
    assert expert_bytes(8, 16, 3, 16, scales=False) == 144
    assert expert_bytes(8, 16, 3, 16) == 144 + 4 * (32 + 8)
    assert expert_bytes(8, 16, 16, 16) == 768
    assert expert_bytes(20, 24, 3, 16) == 540 + 4 * (48 * 2 + 20 * 2)  # a group that is not whole has a scale, too
    assert expert_bytes(1, 1, 3, 16, scales=False) == 2  # 9 bits


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: public_shape("mixtral-8x7"), "did you mean 'mixtral-8x7b'"),
        (lambda: public_shape("MIXTRAL-8X7"), "did you mean 'mixtral-8x7b'"),
        (lambda: expert_bytes(8, 8, 5, 8), "bits"),
        (lambda: expert_bytes(8, 8, 4, 0), "group size"),
    ],
)
def test_impossible_work_is_refused(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


PIPELINES: dict[str, Hardware] = {
    "ddr5": load_hardware("h100-ndp512"),
    "lpddr5": load_hardware("h100-ndp512-lpddr5"),
    "gen5": load_hardware("h200-gen5"),
    "ideal": load_hardware("cxl-expert-ndp"),
    "no-refresh": load_hardware("h100-ndp512", **{"dram.refresh": "off"}),
    "single-buffered": load_hardware("h100-ndp512", **{"array.double_buffered": False}),
    "dequant": load_hardware("h100-ndp512", pe_mode="fp16_dequant"),
    "dma": load_hardware("h100-ndp512", **{"link.launch": "dma"}),
}


def drawn_command(random: np.random.Generator) -> Work:
    """Of a few experts or none; sizes small and large, so that what bounds a command changes."""

    def below(most_bits: int) -> int:
        return int(random.integers(0, 1 << random.integers(1, most_bits)))

    hidden, intermediate = (int(size) for size in random.choice([1, 100, 1000, 8192], 2))
    experts = tuple((int(random.choice(PLAN_BITS)), below(14), below(29)) for _ in range(below(4)))
    return Work(hidden, 2 * intermediate, below(25), below(25), experts)


DIGESTS = {
    "ddr5": "e6c4760f0a8f94d4",
    "lpddr5": "00c1ee3fd490ab3d",
    "gen5": "e06e52c688878c32",
    "ideal": "d3c95c7a8f5d19d8",
    "no-refresh": "1c09bb88324c3d92",
    "single-buffered": "2db5ba541e9f958f",
    "dequant": "819ca55aac16bb25",
    "dma": "18643394f33ab879",
}
"""Of what 400 drawn commands take, some beside a migration. Arithmetic in plain Python gave the same at 0b292267,
where names of the hardware were hashed, too."""


@pytest.mark.parametrize("name", PIPELINES)
def test_drawn_commands_take_what_they_took(name: str) -> None:
    model, random, now, took = DeviceModel(PIPELINES[name]), np.random.default_rng(0), 0, hashlib.sha256()
    for number in range(400):
        now += int(random.integers(0, 1 << random.integers(1, 43)))
        if number % 10 == 0:
            now = model.migration_end_ps(model.begin_migration(int(random.integers(0, 10**9)), now)) - now % 10**9
        timing = model.execute(drawn_command(random), now)
        took.update(repr(msgspec.structs.replace(timing, config_hash="")).encode())
    assert took.hexdigest()[:16] == DIGESTS[name]


def test_times_beyond_64_bits_are_computed_all_the_same() -> None:
    """The last one queues behind a command that ends after 2^63 ps, and takes there what the first one took."""
    work = Work(4096, 14336, 8192, 8192, ((16, 1, 352_000_000),))
    model = DeviceModel(PIPELINES["no-refresh"])
    first, *_, last = (model.execute(work, at) for at in (0, (1 << 61) - 1, 1 << 61, (1 << 63) - 1, 5))
    assert last.start_ps > 1 << 63
    assert last.done_ps - last.start_ps == first.done_ps - first.start_ps


# -- Hardware presets: complete, sourced, checked; impossible values are refused in one sentence -----------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_number_of_a_preset_has_a_unit_and_a_source(preset: str) -> None:
    table = PRESETS[preset]
    assert table.keys() == field_types().keys()
    for key, quantity in table.items():
        assert quantity.unit, key
        assert quantity.source.startswith(("[P]", "[J5]", "[JL]", "[D]", "[S]", "[O]")), key
    load_hardware(preset)


@pytest.mark.parametrize("preset", ["h100-ndp512", "h100-ndp512-lpddr5", "h200-gen5"])
def test_the_device_of_the_paper_has_512_gb_per_s_and_a_tera_mac(preset: str) -> None:
    """DDR5: 20 x 64 B / (8 x 0.3125 ns); LPDDR5: 40 x 32 B / (2 x 1.25 ns); 64 units x 16 x 1 GHz."""
    hardware = load_hardware(preset)
    assert hardware.dram.peak_bytes_per_s == 512 * 10**9
    assert hardware.array.macs_per_s == 1024 * 10**9


def test_the_commodity_set_ups_have_the_seed_s_rates() -> None:
    ndp, amx = load_hardware("cxl-expert-ndp"), load_hardware("cxl-expert-amx")
    assert ndp.dram.peak_bytes_per_s == amx.dram.peak_bytes_per_s == 64 * 10**9
    assert (2 * ndp.array.macs_per_s, 2 * amx.array.macs_per_s) == (2 * 10**12, 20 * 10**12)
    assert ndp.link.bulk_bytes_per_s == 32 * 10**9


def test_equal_values_have_equal_hashes_and_one_changed_value_another() -> None:
    plain = load_hardware("h100-ndp512")
    assert plain.config_hash == load_hardware("h100-ndp512", pe_mode="bit_scalable").config_hash
    assert plain.config_hash != load_hardware("h100-ndp512", rfc=947).config_hash


def test_the_hash_is_over_every_field_of_the_hardware() -> None:
    assert HARDWARE.values().keys() == field_types().keys()


def test_a_measured_preset_has_a_name_of_its_own(tmp_path: Path) -> None:
    measured = (FOLDER / "h100-host.json").read_text()
    (tmp_path / "mine.json").write_text(measured)
    assert list(measured_presets(tmp_path)) == ["mine"]
    measured_presets.cache_clear()
    (tmp_path / "rtx4090.json").write_text(measured)
    with pytest.raises(ConfigError, match=r"rtx4090\.json must be based on one of .* and have a name of its own"):
        measured_presets(tmp_path)


@pytest.mark.parametrize(
    ("gigabytes", "card"),
    [(None, "h100-ndp512"), (1, "rtx4060ti-8gb"), (23, "rtx4090"), (79, "h100-ndp512"), (999, "h200-gen5")],
)
def test_the_nearest_card_has_the_nearest_memory(gigabytes: int | None, card: str) -> None:
    assert nearest_card(None if gigabytes is None else gigabytes * 10**9) == card


def test_without_refresh_its_time_is_not_held_against_its_interval() -> None:
    assert load_hardware("h100-ndp512", rfc=12_500, refresh="off").dram.rfc == 12_500


def test_a_value_may_be_named_with_or_without_its_section_and_given_as_text() -> None:
    by_section = load_hardware("h100-ndp512", **{"dram.rfc": "1_315", "array.double_buffered": "off"})
    by_name = load_hardware("h100-ndp512", rfc=1315, double_buffered=False)
    assert by_section == by_name
    assert load_hardware("h100-ndp512", capacity_bytes=10**9, double_buffered="True") == load_hardware(
        "h100-ndp512", **{"dram.capacity_bytes": 10**9}
    )


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("h100-ndp521", {}, "did you mean 'h100-ndp512'"),
        ("h100-ndp512", {"pe_mod": "int8"}, "did you mean 'pe_mode'"),
        ("h100-ndp512", {"pe_mode": "int4"}, "one of bit_scalable"),
        ("h100-ndp512", {"channels": 0}, "dram.channels must lie in 1..16777216, got 0"),
        ("h100-ndp512", {"channels": "many"}, "must be int"),
        ("h100-ndp512", {"channels": 1.5}, "must be int"),
        ("h100-ndp512", {"channels": True}, "must be int"),
        ("h100-ndp512", {"double_buffered": "maybe"}, "must be bool"),
        ("h100-ndp512", {"stripe_bytes": 100}, "multiple of dram.line_bytes"),
        ("h100-ndp512", {"rfc": 12_500}, "no cycle is left"),
        ("h100-ndp512", {"rc": 102}, "must not be below dram.ras"),
        ("h100-ndp512", {"ccd_s": 7}, "burst <= ccd_s"),
        ("h100-ndp512", {"ccd_l": 7}, "burst <= ccd_s <= ccd_l"),
        ("h100-ndp512", {"rrd_l": 15}, "rrd_s <= rrd_l"),
        ("h100-ndp512-lpddr5", {"aad": 15}, "dram.aad must be below dram.rcd 15: .*, got 15"),
        ("h100-ndp512", {"lines_per_row": 2048}, "at most 65536, got 131072"),
        ("h100-ndp512", {"outstanding": -1}, "must lie in 0..2048, got -1"),
        ("h100-ndp512", {"clock_hz": 0}, "array.clock_hz"),
        ("h100-ndp512", {"clock_hz": 2**60 + 1}, f"array.clock_hz must be at most {2**60}, got"),
        ("h100-ndp512", {"scratchpad_bytes": 4096}, "four tiles"),
        ("h100-ndp512", {"bulk_bytes_per_s": 10**12}, "must not exceed link.raw_bytes_per_s"),
        ("h100-ndp512", {"cxl_line_wire_bytes": 63}, "at least link.cxl_line_bytes"),
        ("h100-ndp512", {"hbm_efficiency_percent": 101, "times": "roofline"}, "1..100"),
        ("h100-ndp512", {"hbm_efficiency_percent": 80}, "set gpu.times=roofline, too"),
        ("rtx4090", {"times": "measured"}, "one of roofline, measured-h100"),
    ],
)
def test_impossible_hardware_is_refused_in_one_sentence(
    preset: str, overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        load_hardware(preset, **overrides)
    assert "\n" not in str(refusal.value)


def last_line(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["time", *arguments, *(() if arguments[0] == "idle" else ("--json",))])
    assert result.exit_code == 0, result.output
    line = json.loads(result.output.splitlines()[-1])
    assert isinstance(line, dict)
    return line


def test_dram_prints_what_the_model_says() -> None:
    line = last_line("dram", "1MiB")
    expected = transfer(load_hardware("h100-ndp512").dram, 2**20)
    assert line["mean_ps"] == expected.mean_ps
    assert {"mean_ps", "min_ps", "max_ps", "gb_per_s", "efficiency"} <= line.keys()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1_000", 1000), ("7B", 7), ("2KB", 2000), ("2KiB", 2048), ("3mb", 3 * 10**6), ("1 GB", 10**9)],
)
def test_sizes_may_be_given_with_units_of_either_kind(text: str, num_bytes: int) -> None:
    assert last_line("dram", text)["bytes"] == num_bytes


def shown(*arguments: str) -> str:
    return CliRunner().invoke(app, ["time", *arguments], env={"COLUMNS": "300"}).output


def test_tables_for_people_say_what_the_line_says() -> None:
    """Nanoseconds of a read, microseconds of an expert, microjoules."""
    read, expert = last_line("dram", "1MiB"), last_line("expert", "olmoe", "--bits", "3")
    for word, stage in (("mean", "mean_ps"), ("fastest", "min_ps"), ("slowest", "max_ps")):
        assert re.search(rf"{word}\W+{read[stage] / 1e3:,.1f} ns", shown("dram", "1MiB"))
    for word, stage in (("dram", "dram_ps"), ("link_in", "link_in_ps"), ("total", "total_ps")):
        assert re.search(rf"{word}\W+{expert[stage] / 1e6:,.3f}", shown("expert", "olmoe", "--bits", "3"))
    assert f"{expert['energy_pj'] / 1e6:,.1f} uJ" in shown("expert", "olmoe", "--bits", "3")
    values = shown("hardware", "--set", "dram.cl=50")
    assert re.search(r"dram\.cl\W+50\b", values)
    assert values.count("by hand") == 1


def test_an_option_of_the_model_is_one_of_the_answer() -> None:
    assert last_line("idle", "hit", "--set", "dram.cl=50")["ps"] - last_line("idle", "hit")["ps"] == 4 * 312.5
    codes = last_line("expert", "olmoe", "--bits", "3", "--no-scales")["weight_bytes"]
    assert codes == 3 * 2048 * 1024 * 3 // 8 < last_line("expert", "olmoe", "--bits", "3")["weight_bytes"]
    refused = CliRunner().invoke(app, ["time", "expert", "olmoe", "--bits", "3", "--tokens", "0"])
    assert "--tokens must be at least 1, got 0" in str(refused.exception) + refused.output


def test_expert_prints_every_stage_and_the_other_modes_beside_it() -> None:
    options = ["mixtral-8x7b", "--bits", "3", "--tokens", "4"]
    line = last_line("expert", *options, "--set", "array.pe_mode=fp16_dequant")
    stages = ("launch", "link_in", "queue", "dram", "compute", "dequant", "vector", "link_out", "completion")
    total = sum(line[f"{stage}_ps"] for stage in stages) - line["overlap_saved_ps"]
    assert line["total_ps"] == total == line["total_ps_by_pe_mode"]["fp16_dequant"]
    assert line["pe_mode"] == "fp16_dequant"
    assert set(line["total_ps_by_pe_mode"]) == set(PE_MODES)
    assert last_line("expert", *options)["total_ps"] == line["total_ps_by_pe_mode"]["bit_scalable"]


def test_hardware_prints_every_value_and_marks_what_was_set_by_hand() -> None:
    line = last_line("hardware", "h200-gen5", "--set", "gpu.times=roofline")
    assert line["values"]["gpu.times"] == "roofline"
    assert line["config_hash"] == load_hardware("h200-gen5", times="roofline").config_hash
