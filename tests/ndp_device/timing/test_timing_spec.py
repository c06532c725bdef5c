"""Hardware presets: complete, sourced, checked; impossible values are refused in one sentence."""

from __future__ import annotations

import pytest

from ndp_device.common.errors import ConfigError
from ndp_device.timing.presets import PRESETS
from ndp_device.timing.spec import field_types, load_hardware


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


def test_a_value_may_be_named_with_or_without_its_section_and_given_as_text() -> None:
    by_section = load_hardware("h100-ndp512", **{"dram.rfc": "1_315", "array.double_buffered": "off"})
    by_name = load_hardware("h100-ndp512", rfc=1315, double_buffered=False)
    assert by_section == by_name


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
        ("h100-ndp512", {"outstanding": -1}, "must lie in 0..2048, got -1"),
        ("h100-ndp512", {"clock_hz": 0}, "array.clock_hz"),
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
