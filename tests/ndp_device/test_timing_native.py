"""The pipeline in C++ gives the same Timing as the Python model, to the picosecond, for any hardware and any works.

Every field is compared, command after command, so that the state between commands (queues, refresh phase, a migration
under way) is compared too.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndp_device.common.widths import PLAN_BITS
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import Hardware, load_hardware
from ndp_device.timing.work import ExpertWork, Work

HARDWARE: dict[str, Hardware] = {
    "ddr5": load_hardware("h100-ndp512"),
    "lpddr5": load_hardware("h100-ndp512-lpddr5"),
    "gen5": load_hardware("h200-gen5"),
    "ideal": load_hardware("seed002-cxl-ndp"),
    "no-refresh": load_hardware("h100-ndp512", **{"dram.refresh": "off"}),
    "per-bank": load_hardware("h100-ndp512-lpddr5", **{"dram.refresh": "per-bank"}),
    "single-buffered": load_hardware("h100-ndp512", **{"array.double_buffered": False}),
    "dequant": load_hardware("h100-ndp512", pe_mode="fp16_dequant"),
    "dma": load_hardware("h100-ndp512", **{"link.launch": "dma"}),
}


class InPython(DeviceModel):
    """All commands by the arithmetic that the C++ is held equal to."""

    _run = DeviceModel._run_in_python


experts = st.builds(
    ExpertWork,
    bits=st.sampled_from(PLAN_BITS),
    tokens=st.one_of(st.integers(0, 20), st.integers(0, 10_000)),
    dram_bytes=st.one_of(st.integers(0, 200_000), st.integers(0, 400_000_000)),
)
works = st.builds(
    Work,
    hidden_size=st.integers(1, 8192),
    intermediate_size=st.integers(1, 16384),
    bytes_in=st.integers(0, 1 << 24),
    bytes_out=st.integers(0, 1 << 24),
    experts=st.lists(experts, max_size=12).map(tuple),
)
moments = st.one_of(st.integers(0, 10**7), st.integers(0, 10**13), st.integers(0, 1 << 62))
steps = st.lists(st.tuples(works, moments, st.one_of(st.just(0), st.integers(0, 10**9))), min_size=1, max_size=5)


@pytest.mark.parametrize("name", HARDWARE)
@settings(max_examples=100)
@given(steps=steps)
def test_both_models_agree_on_every_field_of_every_command(name: str, steps: list[tuple[Work, int, int]]) -> None:
    native, python = DeviceModel(HARDWARE[name]), InPython(HARDWARE[name])
    now = 0
    for work, later, migrated in steps:
        now = later if later > 1 << 60 else now + later
        both = [model.migration_end_ps(model.begin_migration(migrated, now)) for model in (native, python)]
        assert both[0] == both[1]
        assert native.execute(work, now) == python.execute(work, now)


def test_times_beyond_64_bits_are_computed_all_the_same() -> None:
    """The C++ pipeline is not asked there; both models queue behind a command that ends after 2^63 ps."""
    work = Work(4096, 14336, 8192, 8192, (ExpertWork(16, 1, 352_000_000),))
    native, python = DeviceModel(HARDWARE["ddr5"]), InPython(HARDWARE["ddr5"])
    for submit_ps in (0, (1 << 61) - 1, 1 << 61, (1 << 63) - 1, 5):
        timing = native.execute(work, submit_ps)
        assert timing == python.execute(work, submit_ps)
    assert timing.start_ps > 1 << 63
