"""The numbers of each hardware preset, every one with its unit and source; spec.py checks them.

Sources:

    [P]   the paper's Table 2
    [J5]  JESD79-5 (DDR5) speed bin 6400AN and refresh tables
    [JL]  JESD209-5 (LPDDR5)
    [D]   derived, the arithmetic is given
    [S]   another public source, named
    [O]   our assumption

Presets whose link, GPU and host were measured on a real machine ([M]) are JSON files in `measured/`, one a machine.
`benchmarks/gpu_check.py` writes them where there is a GPU. What no machine can tell (the near-data device) comes from
the preset that they are based on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ndp_device.common.errors import ConfigError


@dataclass(frozen=True)
class Quantity:
    value: int | str | bool
    unit: str
    source: str


Table = Mapping[str, Quantity]


def _q(value: int | str | bool, unit: str, source: str) -> Quantity:
    return Quantity(value, unit, source)


_DDR5: Table = {
    "dram.kind": _q("bank", "name", "[O] command-level model of every channel; ideal = peak rate, no latency"),
    "dram.standard": _q("DDR5-6400AN 16Gb x4", "name", "[O] Table 2 says DDR, 512 GB/s; this device gives 512.0"),
    "dram.capacity_bytes": _q(512 * 2**30, "byte", "[P]"),
    "dram.ideal_bytes_per_s": _q(512_000_000_000, "byte/s", "[P]"),
    "dram.channels": _q(20, "sub-channels of 32 bit", "[D] 512 GB/s / (6400 MT/s x 4 B)"),
    "dram.ranks": _q(2, "count", "[O]"),
    "dram.bank_groups": _q(8, "per rank", "[J5] x4"),
    "dram.banks_per_group": _q(4, "count", "[J5] 16 Gb"),
    "dram.lines_per_row": _q(128, "bursts", "[J5] 2048 columns / BL16"),
    "dram.line_bytes": _q(64, "byte", "[J5] BL16 x 32 bit"),
    "dram.stripe_bytes": _q(256, "byte", "[O] channel interleave"),
    "dram.tck_fs": _q(312_500, "fs", "[J5] 6400 MT/s"),
    "dram.burst": _q(8, "cycle", "[J5] BL16 / 2"),
    "dram.cl": _q(46, "cycle", "[J5] 6400AN"),
    "dram.rcd": _q(46, "cycle", "[J5] 6400AN"),
    "dram.rp": _q(46, "cycle", "[J5] 6400AN"),
    "dram.rp_ab": _q(46, "cycle", "[J5] same as tRP"),
    "dram.ras": _q(103, "cycle", "[J5] 32 ns"),
    "dram.rc": _q(149, "cycle", "[J5] tRAS + tRP"),
    "dram.rtp": _q(24, "cycle", "[J5] 7.5 ns"),
    "dram.ccd_s": _q(8, "cycle", "[J5]"),
    "dram.ccd_l": _q(16, "cycle", "[J5] 5 ns"),
    "dram.rrd_s": _q(16, "cycle", "[J5] 5 ns, 1 KB page"),
    "dram.rrd_l": _q(16, "cycle", "[J5] 5 ns"),
    "dram.faw": _q(64, "cycle", "[J5] 20 ns"),
    "dram.ppd": _q(2, "cycle", "[J5] tPPD"),
    "dram.rank_switch": _q(2, "cycle", "[J5] read postamble and preamble between ranks"),
    "dram.act_cycles": _q(2, "cycle", "[J5] two-cycle command"),
    "dram.aad": _q(0, "cycle", "[J5] one command"),
    "dram.read_cycles": _q(2, "cycle", "[J5] two-cycle command"),
    "dram.wck_sync": _q(0, "cycle", "[J5] none"),
    "dram.refresh": _q("all-bank", "name", "[O] default mode of the standard"),
    "dram.rfc": _q(946, "cycle", "[J5] tRFC1 295 ns, 16 Gb; 32 Gb: 410 ns = 1315"),
    "dram.refi": _q(12_500, "cycle", "[J5] tREFI 3.9 us"),
    "dram.queue_entries": _q(32, "lines per channel", "[O] common controller"),
    "dram.outstanding": _q(0, "lines per channel", "[O] 0 = the queue is kept full"),
}

_LPDDR5: Table = {
    **_DDR5,
    "dram.standard": _q("LPDDR5-6400 16Gb x16", "name", "[S] MoNDE names LPDDR; speed and width [O]"),
    "dram.channels": _q(40, "channels of 16 bit", "[D] 512 GB/s / (6400 MT/s x 2 B)"),
    "dram.ranks": _q(1, "count", "[O]"),
    "dram.bank_groups": _q(4, "per rank", "[JL] bank-group mode"),
    "dram.banks_per_group": _q(4, "count", "[JL]"),
    "dram.lines_per_row": _q(64, "bursts", "[JL] 1024 columns / BL16"),
    "dram.line_bytes": _q(32, "byte", "[JL] BL16 x 16 bit"),
    "dram.tck_fs": _q(1_250_000, "fs", "[JL] CK 800 MHz, WCK 4:1"),
    "dram.burst": _q(2, "cycle", "[JL] BL/n_min"),
    "dram.cl": _q(17, "cycle", "[JL]"),
    "dram.rcd": _q(15, "cycle", "[JL] 18 ns"),
    "dram.rp": _q(15, "cycle", "[JL] tRPpb 18 ns"),
    "dram.rp_ab": _q(17, "cycle", "[JL] 21 ns"),
    "dram.ras": _q(34, "cycle", "[JL] 42 ns"),
    "dram.rc": _q(49, "cycle", "[JL] tRAS + tRPpb"),
    "dram.rtp": _q(8, "cycle", "[JL]"),
    "dram.ccd_s": _q(2, "cycle", "[JL] BL/n_min"),
    "dram.ccd_l": _q(4, "cycle", "[JL] BL/n_max"),
    "dram.rrd_s": _q(4, "cycle", "[JL] 5 ns"),
    "dram.rrd_l": _q(4, "cycle", "[JL] 5 ns"),
    "dram.faw": _q(16, "cycle", "[JL] 20 ns"),
    "dram.ppd": _q(2, "cycle", "[JL] tPPD"),
    "dram.rank_switch": _q(2, "cycle", "[JL] not used with one rank"),
    "dram.act_cycles": _q(1, "cycle", "[JL] ACT-1 and ACT-2, one each"),
    "dram.aad": _q(8, "cycle", "[JL] tAAD"),
    "dram.read_cycles": _q(1, "cycle", "[JL]"),
    "dram.wck_sync": _q(1, "cycle", "[JL] tWCKPST, then a CAS must precede the next read"),
    "dram.rfc": _q(224, "cycle", "[JL] tRFCab 280 ns, 16 Gb; 32 Gb: 380 ns = 304"),
    "dram.refi": _q(3_125, "cycle", "[JL] tREFI 3.906 us"),
}

_GEN4: Table = {
    "link.launch": _q("cxlmem", "name", "[O] commands are posted CXL.mem writes; dma = two copies and a poll"),
    "link.raw_bytes_per_s": _q(31_507_692_307, "byte/s each way", "[P] Gen4 x16: 16 GT/s x 16 x 128/130 / 8"),
    "link.packet_payload_bytes": _q(128, "byte", "[O] common maximum payload"),
    "link.packet_header_bytes": _q(26, "byte", "[S] framing 2, sequence 2, header 16, ECRC and LCRC 6: 83 % of raw"),
    "link.bulk_bytes_per_s": _q(25_600_000_000, "byte/s", "[O] between 25 and 28.6 with flow control; sweep it"),
    "link.cxl_line_bytes": _q(64, "byte", "[S] CXL.mem access"),
    "link.cxl_line_wire_bytes": _q(85, "byte", "[D] 1 header + 4 data slots of 16 B, 4 slots in a 68 B flit"),
    "link.load_to_use_ps": _q(250_000, "ps", "[S] published cards 150-400 ns"),
    "link.dma_launch_ps": _q(6_000_000, "ps", "[S] DualPath 2602.21548: 5-7 us per cudaMemcpyAsync"),
    "link.dma_latency_ps": _q(500_000, "ps", "[O] PCIe one way through switch and root port"),
    "link.completion_ps": _q(1_000_000, "ps", "[O] poll; an interrupt takes 5 us"),
}

_GEN5: Table = {
    **_GEN4,
    "link.raw_bytes_per_s": _q(63_015_384_615, "byte/s each way", "[D] Gen5 x16: 32 GT/s x 16 x 128/130 / 8"),
    "link.bulk_bytes_per_s": _q(52_400_000_000, "byte/s", "[D] 63 x 0.83"),
}

_ARRAYS: Table = {
    "array.units": _q(64, "count", "[P]"),
    "array.rows": _q(4, "tokens", "[P] 4 x 4"),
    "array.cols": _q(4, "columns", "[P] 4 x 4"),
    "array.clock_hz": _q(1_000_000_000, "Hz", "[P]"),
    "array.pe_mode": _q("bit_scalable", "name", "[O] the paper's 5x and 8x need it; compare with fp16_dequant"),
    "array.fill_cycles": _q(10, "cycle", "[D] 4 + 4 - 2 to fill the array, 4 pipeline stages [O]"),
    "array.tile_bytes": _q(2 * 1024, "byte per unit", "[O] weights handed from DRAM to arrays at a time"),
    "array.scratchpad_bytes": _q(128 * 1024, "byte per unit", "[S] M2NDP's scratchpad; MoNDE's is not public"),
    "array.double_buffered": _q(True, "flag", "[O]"),
    "array.dequant_weights_per_cycle": _q(16, "per unit", "[O] above the 4 the arrays take"),
    "array.vector_lanes": _q(4, "elements per unit and cycle", "[O] one per array column"),
    "array.command_ps": _q(20_000, "ps", "[O] 20 cycles to decode and dispatch"),
}

_SILICON = "[S] vLLM 0.24.0's kernels timed by NVIDIA: aiconfigurator-core 0.12.0"

_H100: Table = {
    "gpu.times": _q("measured-h100", "name", _SILICON),
    "gpu.flops_per_s": _q(989_400_000_000_000, "flop/s", "[P]"),
    "gpu.hbm_bytes_per_s": _q(3_350_000_000_000, "byte/s", "[S] H100 SXM data sheet"),
    "gpu.hbm_efficiency_percent": _q(100, "%", "[O] a roofline; 70-90 is measured on real kernels"),
    "gpu.hbm_capacity_bytes": _q(80 * 10**9, "byte", "[P]"),
    "gpu.layer_overhead_ps": _q(0, "ps", "[O] none; inverting the paper's ratios gives 29-36 us"),
}

_H200: Table = {
    **_H100,
    "gpu.times": _q("measured-h200", "name", _SILICON),
    "gpu.hbm_bytes_per_s": _q(4_800_000_000_000, "byte/s", "[S] H200 SXM data sheet"),
    "gpu.hbm_capacity_bytes": _q(141 * 10**9, "byte", "[S] H200 SXM data sheet"),
}


def _card(
    table: Table, flops: int, hbm: int, gigabytes: int, idle_watts: int, what: str, times: str = "roofline"
) -> Table:
    """A GPU that people have: rates (fp16 with fp32 sums, dense) and GB/s of its data sheet.

    Held on 2026-11-28 against published tables of specifications: memory's rate and size of all, and the fp16 rates of
    the RTX 4090 and the L40S, agree. The other fp16 rates follow from the same tables' fp32 rate: twice it on GeForce
    cards, four times on the RTX PRO 6000.
    """
    return {
        **table,
        "gpu.times": _q(times, "name", "[O] none was measured" if times == "roofline" else _SILICON),
        "gpu.flops_per_s": _q(flops * 10**11, "flop/s", f"[S] {what}: dense fp16 with fp32 accumulation"),
        "gpu.hbm_bytes_per_s": _q(hbm * 10**9, "byte/s", f"[S] {what}"),
        "gpu.hbm_capacity_bytes": _q(gigabytes * 10**9, "byte", f"[S] {what}"),
        "gpu.hbm_efficiency_percent": _q(100, "%", "[O] a roofline, as of the H100"),
        "energy.gpu_idle_mw": _q(idle_watts * 1000, "mW", "[O] of a card of its size that waits; sweep it"),
        "energy.hbm_bit_fj": _q(14_000, "fJ/bit", "[S] GDDR5, O'Connor et al., Fine-Grained DRAM, MICRO 2017"),
    }


_HOST: Table = {
    "host.cpu_flops_per_s": _q(20_000_000_000_000, "flop/s", "[S] CXL-Expert's description: 20 TFLOPS of AMX"),
    "host.memory_bytes_per_s": _q(307_200_000_000, "byte/s", "[D] 8 channels of DDR5-4800 x 8 B"),
    "host.memory_efficiency_percent": _q(
        85,
        "%",
        "[S] the most that an engine is published to reach; KTransformers reaches 33 on these 8 channels",
    ),
    "host.memory_capacity_bytes": _q(2**40, "byte", "[O] 16 modules of 64 GiB, two on each of the 8 channels"),
    "host.cxl_flops_per_s": _q(
        2_000_000_000_000, "flop/s", "[S] CXL-Expert's description: 2 TFLOPS where the expander multiplies"
    ),
    "host.cxl_bytes_per_s": _q(64_000_000_000, "byte/s", "[S] CXL-Expert's description, a commodity CXL 2.0 expander"),
    "host.cxl_capacity_bytes": _q(256 * 2**30, "byte", "[S] CXL-Expert's description"),
}

_ENERGY: Table = {
    "energy.dram_line32_fj": _q(
        3_046_400,
        "fJ per 32 B",
        "[S] 11.9 pJ/bit: DDR5-6400 by DRAMsim3 on vendors' currents, in a public gem5 project",
    ),
    "energy.activate_fj": _q(1_800_000, "fJ per row", "[S] M2NDP energy table"),
    "energy.link_bit_fj": _q(8_000, "fJ/bit", "[S] M2NDP energy table"),
    "energy.scratchpad_access_fj": _q(113_000, "fJ per 32 B", "[S] M2NDP energy table"),
    "energy.hbm_bit_fj": _q(3_970, "fJ/bit", "[S] HBM2, O'Connor et al., Fine-Grained DRAM, MICRO 2017"),
    "energy.gpu_idle_mw": _q(70_000, "mW", "[O] an H100 SXM that waits, about; sweep it"),
    "energy.host_idle_mw": _q(100_000, "mW", "[O] one socket and its memory, waiting"),
    "energy.device_idle_mw": _q(25_000, "mW", "[O] a card with 512 GiB of DDR5 in standby"),
}

_ENERGY_LPDDR5: Table = {**_ENERGY, "energy.dram_line32_fj": _q(1_110_000, "fJ per 32 B", "[S] M2NDP energy table")}

_CXL_EXPERT: Table = {
    **_DDR5,
    **_GEN5,
    **_ARRAYS,
    **_H100,
    **_HOST,
    **_ENERGY,
    "dram.kind": _q("ideal", "name", "[S] CXL-Expert's description gives a bandwidth only"),
    "dram.standard": _q("commodity CXL expander", "name", "[S] CXL-Expert's description"),
    "dram.capacity_bytes": _q(256 * 2**30, "byte", "[S] CXL-Expert's description"),
    "dram.ideal_bytes_per_s": _q(64_000_000_000, "byte/s", "[S] CXL-Expert's description"),
    "link.launch": _q("dma", "name", "[O] a commodity expander has no command window"),
    "link.raw_bytes_per_s": _q(
        32_000_000_000, "byte/s each way", "[S] CXL-Expert's description, called PCIe 5.0 (32 is Gen4)"
    ),
    "link.bulk_bytes_per_s": _q(32_000_000_000, "byte/s", "[S] CXL-Expert's description"),
    "link.packet_header_bytes": _q(0, "byte", "[S] CXL-Expert's description counts no headers"),
    "link.dma_launch_ps": _q(0, "ps", "[S] CXL-Expert's description counts none"),
    "link.dma_latency_ps": _q(100_000, "ps", "[S] CXL-Expert's description"),
    "link.completion_ps": _q(0, "ps", "[S] CXL-Expert's description counts none"),
    "array.pe_mode": _q("fp16_dequant", "name", "[O] general-purpose units"),
    "gpu.times": _q("roofline", "name", "[S] CXL-Expert's description gives rates only"),
    "host.memory_efficiency_percent": _q(100, "%", "[S] CXL-Expert's description gives rates only"),
    "array.command_ps": _q(0, "ps", "[S] CXL-Expert's description counts none"),
    "gpu.flops_per_s": _q(200_000_000_000_000, "flop/s", "[S] CXL-Expert's description"),
    "gpu.hbm_bytes_per_s": _q(800_000_000_000, "byte/s", "[S] CXL-Expert's description"),
    "gpu.layer_overhead_ps": _q(0, "ps", "[S] CXL-Expert's description counts none"),
}

_X8: Table = {  # PCIe 4.0 x8, which is what a 4060 Ti has
    **_GEN4,
    "link.raw_bytes_per_s": _q(15_753_846_153, "byte/s each way", "[D] Gen4 x8: 16 GT/s x 8 x 128/130 / 8"),
    "link.bulk_bytes_per_s": _q(12_800_000_000, "byte/s", "[D] half of x16's"),
}
_BESIDE: Table = {**_DDR5, **_ARRAYS, **_H100, **_HOST, **_ENERGY}

PRESETS: Mapping[str, Table] = {
    "rtx4060ti-8gb": {**_BESIDE, **_card(_X8, 441, 288, 8, 10, "RTX 4060 Ti, Ada whitepaper")},
    "rtx4060ti-16gb": {**_BESIDE, **_card(_X8, 441, 288, 16, 10, "RTX 4060 Ti, Ada whitepaper")},
    "rtx4090": {**_BESIDE, **_card(_GEN4, 1652, 1008, 24, 25, "RTX 4090, Ada whitepaper")},
    "rtx5090": {**_BESIDE, **_card(_GEN5, 2095, 1792, 32, 30, "RTX 5090, Blackwell whitepaper")},
    "l40s": {**_BESIDE, **_card(_GEN4, 3620, 864, 48, 35, "L40S data sheet", "measured-l40s")},
    "rtxpro6000": {
        **_BESIDE,
        **_card(_GEN5, 5038, 1792, 96, 30, "RTX PRO 6000 Blackwell data sheet", "measured-rtxpro6000"),
    },
    "h100-ndp512": {**_DDR5, **_GEN4, **_ARRAYS, **_H100, **_HOST, **_ENERGY},
    "h100-ndp512-lpddr5": {**_LPDDR5, **_GEN4, **_ARRAYS, **_H100, **_HOST, **_ENERGY_LPDDR5},
    "h200-gen5": {**_DDR5, **_GEN5, **_ARRAYS, **_H200, **_HOST, **_ENERGY},
    "cxl-expert-ndp": {
        **_CXL_EXPERT,
        "array.units": _q(125, "count", "[D] 2 TFLOP/s = 1000 x 10^9 multiply-accumulates/s = 125 x 4 x 2 x 1 GHz"),
        "array.cols": _q(2, "columns", "[D] see array.units"),
    },
    "cxl-expert-amx": {
        **_CXL_EXPERT,
        "array.units": _q(625, "count", "[D] 20 TFLOP/s = 10^13 multiply-accumulates/s = 625 x 4 x 4 x 1 GHz"),
    },
}


FOLDER = Path(__file__).parent / "measured"
MEASURABLE = ("link.", "gpu.", "host.")
"""Sections of a machine that exists. The device is simulated whatever the machine."""


def known_presets() -> Mapping[str, Table]:
    """All presets by name: the written ones, and those that were measured."""
    return {**measured_presets(FOLDER), **PRESETS}


@cache
def measured_presets(folder: Path) -> Mapping[str, Table]:
    """Raises ConfigError for a file that cannot be a preset."""
    return {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}


def _read(path: Path) -> Table:
    try:
        content = json.loads(path.read_text())
        base, machine, date, values = (content[name] for name in ("based_on", "machine", "date", "values"))
        table = {key: _measured(f"{path.name}: {key}", of, f"{machine}, {date}") for key, of in values.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path.name} is no measured preset: {error!r}; write it with benchmarks/gpu_check.py"
        ) from None
    if base not in PRESETS or path.stem in PRESETS:
        raise ConfigError(f"{path.name} must be based on one of {', '.join(PRESETS)} and have a name of its own")
    if foreign := sorted(key for key in table if key not in PRESETS[base] or not key.startswith(MEASURABLE)):
        raise ConfigError(f"{path.name}: {foreign[0]} is not a value of a host, its GPU or its link")
    return {**PRESETS[base], **table}


def _measured(what: str, of: Mapping[str, Any], where: str) -> Quantity:
    value, unit, how = of["value"], of["unit"], of["how"]
    if type(value) not in (int, str) or not unit or not how:
        raise ConfigError(f"{what} must have a value, a unit and how it was measured, got {of}")
    return Quantity(value, unit, f"[M] {how}; {where}")
