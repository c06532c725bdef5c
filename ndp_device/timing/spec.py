"""Hardware as data: frozen, self-checking values of one memory device, its link, its arrays and the GPU beside it.

`load_hardware` turns a preset (presets.py) and overrides into a Hardware.
Knows units and limits, not how time passes.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, get_type_hints

from ndp_device.common.errors import ConfigError
from ndp_device.timing.presets import DENSITY_REFRESH, PRESETS, Quantity, known_presets
from ndp_device.timing.units import FS_PER_PS, PS_PER_S, ceil_div

REFRESH_MODES = ("all-bank", "per-bank", "off")
PE_MODES = ("bit_scalable", "bit_scalable_pow2", "fp16_dequant", "int8")
LAUNCH_PATHS = ("cxlmem", "dma")
DRAM_KINDS = ("bank", "ideal")
_MOST_BYTES = 2**50


def _choose(section: str, field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{section}.{field} must be one of {', '.join(allowed)}, got {value!r}")


def _at_least(section: str, spec: object, minimum: int, *names: str) -> None:
    for name in names:
        if getattr(spec, name) < minimum:
            raise ConfigError(f"{section}.{name} must be at least {minimum}, got {getattr(spec, name)}")


def _capacity(key: str, num_bytes: int) -> None:
    if not 1 <= num_bytes <= _MOST_BYTES:
        raise ConfigError(f"{key} must lie in 1..{_MOST_BYTES} (a pebibyte), got {num_bytes}")


def _at_most(section: str, spec: object, maximum: int, *names: str) -> None:
    for name in names:
        if getattr(spec, name) > maximum:
            raise ConfigError(f"{section}.{name} must be at most {maximum}, got {getattr(spec, name)}")


MAX_VALUE = 1 << 60
MAX_CYCLES = 2048
"""Longest delay between two commands, twice that of any JEDEC device: the controller steps through every cycle of
refresh that falls into a delay."""
MAX_ROW_SPAN = 1 << 16
"""Lines in one row of every bank, 8 times DDR5's: so many are simulated once per device."""


@dataclass(frozen=True)
class DramSpec:
    """Identical channels of one JEDEC device. Times in cycles of tck_fs; `ideal` reads at peak rate with no latency."""

    kind: str  # bank | ideal
    standard: str
    capacity_bytes: int
    ideal_bytes_per_s: int  # used by kind "ideal" only
    channels: int
    ranks: int
    bank_groups: int
    banks_per_group: int
    lines_per_row: int
    line_bytes: int  # one burst on one channel
    stripe_bytes: int  # consecutive bytes on one channel
    tck_fs: int
    burst: int  # data bus cycles of one line
    cl: int
    rcd: int
    rp: int
    rp_ab: int  # precharge all banks
    ras: int
    rc: int
    rtp: int
    ccd_s: int
    ccd_l: int
    rrd_s: int
    rrd_l: int
    faw: int
    ppd: int  # precharge to precharge
    rank_switch: int  # bubble on the data bus between ranks
    act_cycles: int  # command bus cycles of an activate
    aad: int  # LPDDR5: an activate is two commands, the second at most so many cycles after the first; 0 = one command
    read_cycles: int  # command bus cycles of a read
    wck_sync: int  # LPDDR5: cycles the clock of the data bus stays in sync after a burst; 0 = no such clock
    refresh: str  # all-bank | per-bank | off
    rfc: int
    refi: int
    rfc_pb: int  # per-bank refresh; 0 = the device has none
    refi_pb: int
    pbr_to_pbr: int
    pbr_to_act: int
    queue_entries: int
    outstanding: int  # lines in flight per channel; 0 = as many as the queue holds
    bank_group_interleave: bool

    def __post_init__(self) -> None:
        _choose("dram", "kind", self.kind, DRAM_KINDS)
        _choose("dram", "refresh", self.refresh, REFRESH_MODES)
        _capacity("dram.capacity_bytes", self.capacity_bytes)
        _at_least("dram", self, 1, "ideal_bytes_per_s", "channels", "ranks", "bank_groups")
        _at_least("dram", self, 1, "banks_per_group", "lines_per_row", "line_bytes", "stripe_bytes", "tck_fs", "burst")
        _at_least("dram", self, 1, "cl", "rcd", "rp", "rp_ab", "ras", "rc", "rtp", "ccd_s", "ccd_l", "rrd_s", "rrd_l")
        _at_least("dram", self, 1, "faw", "ppd", "act_cycles", "read_cycles", "rfc", "refi", "queue_entries")
        _at_least("dram", self, 0, "aad", "rank_switch", "wck_sync", "rfc_pb", "refi_pb", "pbr_to_pbr", "pbr_to_act")
        _at_least("dram", self, 0, "outstanding")
        _at_most("dram", self, MAX_CYCLES, "burst", "cl", "rcd", "rp", "rp_ab", "ras", "rc", "rtp", "ccd_s", "ccd_l")
        _at_most(
            "dram", self, MAX_CYCLES, "rrd_s", "rrd_l", "faw", "ppd", "rank_switch", "act_cycles", "aad", "pbr_to_act"
        )
        _at_most("dram", self, MAX_CYCLES, "read_cycles", "wck_sync", "queue_entries", "outstanding", "pbr_to_pbr")
        _at_most("dram", self, 1 << 24, "rfc", "refi", "rfc_pb", "refi_pb", "channels")
        _at_most("dram", self, 64, "ranks", "bank_groups", "banks_per_group")
        _at_most("dram", self, MAX_ROW_SPAN, "lines_per_row", "line_bytes")
        if self.ranks * self.banks * self.lines_per_row > MAX_ROW_SPAN:
            raise ConfigError(
                f"dram.ranks x bank_groups x banks_per_group x lines_per_row must be at most {MAX_ROW_SPAN}, got "
                f"{self.ranks * self.banks * self.lines_per_row}"
            )
        if self.stripe_bytes % self.line_bytes:
            raise ConfigError(
                f"dram.stripe_bytes must be a multiple of dram.line_bytes {self.line_bytes}, got {self.stripe_bytes}"
            )
        if self.rc < self.ras:
            raise ConfigError(f"dram.rc must not be below dram.ras {self.ras}, got {self.rc}")
        if self.ccd_s < self.burst or self.ccd_l < self.ccd_s or self.rrd_l < self.rrd_s:
            raise ConfigError("dram needs burst <= ccd_s <= ccd_l and rrd_s <= rrd_l: a burst may not overlap the next")
        if self.aad >= self.rcd:
            raise ConfigError(
                f"dram.aad must be below dram.rcd {self.rcd}: a row is open before it is read, got {self.aad}"
            )
        if self.refresh == "per-bank" and not (self.rfc_pb and self.refi_pb):
            raise ConfigError(f"{self.standard} has no per-bank refresh: use dram.refresh all-bank or off")
        if self.refresh == "all-bank" and self.rfc >= self.refi:
            raise ConfigError(f"dram.rfc {self.rfc} must be below dram.refi {self.refi}, or no cycle is left for data")
        if self.refresh == "per-bank" and self.rfc_pb >= self.refi_pb * self.banks:
            raise ConfigError(f"dram.rfc_pb {self.rfc_pb} leaves no cycle for data at dram.refi_pb {self.refi_pb}")

    @property
    def banks(self) -> int:
        """Banks of one rank."""
        return self.bank_groups * self.banks_per_group

    @property
    def peak_bytes_per_s(self) -> int:
        if self.kind == "ideal":
            return self.ideal_bytes_per_s
        return self.channels * self.line_bytes * PS_PER_S * FS_PER_PS // (self.burst * self.tck_fs)

    @property
    def lines_in_flight(self) -> int:
        return min(self.outstanding, self.queue_entries) if self.outstanding else self.queue_entries

    def cycles_to_ps(self, cycles: int) -> int:
        return ceil_div(cycles * self.tck_fs, FS_PER_PS)


@dataclass(frozen=True)
class LinkSpec:
    """The way between host and device: activations by `launch`, weights in bulk by DMA. Full duplex."""

    launch: str  # cxlmem | dma
    raw_bytes_per_s: int  # per direction, after line coding
    packet_payload_bytes: int  # PCIe maximum payload
    packet_header_bytes: int
    bulk_bytes_per_s: int  # what long DMA copies reach
    cxl_line_bytes: int
    cxl_line_wire_bytes: int  # bytes on the wire per line
    load_to_use_ps: int  # CXL.mem read of the host; a posted write takes half
    dma_launch_ps: int  # one cudaMemcpyAsync
    dma_latency_ps: int  # one way
    completion_ps: int  # poll that sees a DMA finished

    def __post_init__(self) -> None:
        _choose("link", "launch", self.launch, LAUNCH_PATHS)
        _at_least("link", self, 1, "raw_bytes_per_s", "packet_payload_bytes", "bulk_bytes_per_s", "cxl_line_bytes")
        _at_least("link", self, 0, "packet_header_bytes", "load_to_use_ps", "dma_launch_ps", "dma_latency_ps")
        _at_least("link", self, 0, "completion_ps")
        if self.cxl_line_wire_bytes < self.cxl_line_bytes:
            raise ConfigError(
                f"link.cxl_line_wire_bytes must be at least link.cxl_line_bytes {self.cxl_line_bytes}, "
                f"got {self.cxl_line_wire_bytes}"
            )
        if self.bulk_bytes_per_s > self.raw_bytes_per_s:
            raise ConfigError(
                f"link.bulk_bytes_per_s must not exceed link.raw_bytes_per_s {self.raw_bytes_per_s}, "
                f"got {self.bulk_bytes_per_s}"
            )


@dataclass(frozen=True)
class ArraySpec:
    """`units` of rows x cols processing elements beside the DRAM; each element multiplies fp16 by fp16 once a cycle."""

    units: int
    rows: int  # tokens side by side
    cols: int  # output columns side by side
    clock_hz: int
    pe_mode: str
    fill_cycles: int  # pipeline fill and drain of one matrix
    tile_bytes: int  # per unit; weights handed over at a time
    scratchpad_bytes: int  # per unit; half holds weights in flight, half activations
    double_buffered: bool
    dequant_weights_per_cycle: int  # per unit, fp16_dequant only
    vector_lanes: int  # per unit, SwiGLU elements a cycle
    command_ps: int  # decode and dispatch of one command

    def __post_init__(self) -> None:
        _choose("array", "pe_mode", self.pe_mode, PE_MODES)
        _at_least("array", self, 1, "units", "rows", "cols", "clock_hz", "tile_bytes", "scratchpad_bytes")
        _at_least("array", self, 1, "dequant_weights_per_cycle", "vector_lanes")
        _at_least("array", self, 0, "fill_cycles", "command_ps")
        if 4 * self.tile_bytes > self.scratchpad_bytes:
            raise ConfigError(
                f"array.scratchpad_bytes must hold four tiles of {self.tile_bytes} bytes, got {self.scratchpad_bytes}"
            )

    @property
    def macs_per_s(self) -> int:
        """Rate of fp16 multiply-accumulates."""
        return self.units * self.rows * self.cols * self.clock_hz


@dataclass(frozen=True)
class GpuSpec:
    """The GPU as a roofline, and the way its weights come in."""

    flops_per_s: int  # dense 16-bit
    hbm_bytes_per_s: int
    hbm_efficiency_percent: int
    hbm_capacity_bytes: int
    layer_overhead_ps: int  # launches and synchronisation of one layer

    def __post_init__(self) -> None:
        _at_least("gpu", self, 1, "flops_per_s", "hbm_bytes_per_s", "hbm_efficiency_percent")
        _capacity("gpu.hbm_capacity_bytes", self.hbm_capacity_bytes)
        _at_least("gpu", self, 0, "layer_overhead_ps")
        if self.hbm_efficiency_percent > 100:
            raise ConfigError(f"gpu.hbm_efficiency_percent must be 1..100, got {self.hbm_efficiency_percent}")


@dataclass(frozen=True)
class HostSpec:
    """The host's processor as two rooflines, its memory, and a CXL expander that some systems put beside it."""

    cpu_flops_per_s: int  # dense 16-bit
    memory_bytes_per_s: int
    memory_capacity_bytes: int
    cxl_flops_per_s: int  # of an expander that multiplies
    cxl_bytes_per_s: int
    cxl_capacity_bytes: int

    def __post_init__(self) -> None:
        _at_least("host", self, 1, "cpu_flops_per_s", "memory_bytes_per_s", "cxl_flops_per_s", "cxl_bytes_per_s")
        _capacity("host.memory_capacity_bytes", self.memory_capacity_bytes)
        _capacity("host.cxl_capacity_bytes", self.cxl_capacity_bytes)


@dataclass(frozen=True)
class EnergySpec:
    """Energy per event, femtojoules, and power without events. Indicative: the arrays themselves are not in it."""

    dram_line32_fj: int  # one 32 B access
    activate_fj: int  # activate and precharge of one row
    link_bit_fj: int
    scratchpad_access_fj: int  # one 32 B access
    hbm_bit_fj: int  # of the GPU's memory
    gpu_idle_mw: int  # milliwatts that flow whatever moves
    host_idle_mw: int
    device_idle_mw: int

    def __post_init__(self) -> None:
        _at_least("energy", self, 0, "dram_line32_fj", "activate_fj", "link_bit_fj", "scratchpad_access_fj")
        _at_least("energy", self, 0, "hbm_bit_fj", "gpu_idle_mw", "host_idle_mw", "device_idle_mw")


SECTIONS: dict[str, type[Any]] = {
    "dram": DramSpec,
    "link": LinkSpec,
    "array": ArraySpec,
    "gpu": GpuSpec,
    "host": HostSpec,
    "energy": EnergySpec,
}


@dataclass(frozen=True)
class Hardware:
    """One host with its GPU, and one CXL-NDP device."""

    preset: str
    dram: DramSpec
    link: LinkSpec
    array: ArraySpec
    gpu: GpuSpec
    host: HostSpec
    energy: EnergySpec

    @cached_property
    def config_hash(self) -> str:
        """16 hex digits over every value; two equal hashes give equal times for equal work."""
        text = json.dumps(self.values(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def values(self) -> dict[str, Any]:
        return {
            f"{section}.{field.name}": getattr(getattr(self, section), field.name)
            for section, spec in SECTIONS.items()
            for field in fields(spec)
        }


def field_types() -> dict[str, type[Any]]:
    """'section.field' -> int, str or bool."""
    return {
        f"{section}.{name}": kind for section, spec in SECTIONS.items() for name, kind in get_type_hints(spec).items()
    }


def load_hardware(preset: str = "h100-ndp512", /, **overrides: Any) -> Hardware:
    """A preset with some values replaced: keys are `section.field`, or the field alone where only one section has it.

    Raises ConfigError for an unknown preset or key (naming the nearest) and for an impossible value.
    """
    table = preset_table(preset)
    types = field_types()
    values: dict[str, Any] = {key: quantity.value for key, quantity in table.items()}
    for key, value in overrides.items():
        full = _full_key(key, types)
        values[full] = _convert(full, types[full], value)
    sections = {
        section: spec(**{field.name: values[f"{section}.{field.name}"] for field in fields(spec)})
        for section, spec in SECTIONS.items()
    }
    return Hardware(preset=preset, **sections)


def density_overrides(preset: str, gbit: int) -> Mapping[str, int]:
    """Changes to a preset for DRAM parts of another density."""
    standard = str(preset_table(preset)["dram.standard"].value)
    known = DENSITY_REFRESH.get(standard.split()[0], {})
    if gbit not in known:
        raise ConfigError(f"the density of {standard} must be one of {list(known)} Gbit, got {gbit}")
    return known[gbit]


def preset_table(preset: str) -> Mapping[str, Quantity]:
    if preset in PRESETS:
        return PRESETS[preset]
    known = known_presets()
    if preset not in known:
        nearest = difflib.get_close_matches(preset, known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown hardware preset {preset!r}: did you mean {nearest!r}? Known: {', '.join(known)}")
    return known[preset]


def _full_key(key: str, types: Mapping[str, type[Any]]) -> str:
    if key in types:
        return key
    matches = [full for full in types if full.endswith(f".{key}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"hardware value {key!r} is ambiguous: write one of {', '.join(matches)}")
    names = [*types, *(full.split(".")[1] for full in types)]
    nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
    raise ConfigError(f"unknown hardware value {key!r}: did you mean {nearest!r}?")


def _convert(key: str, kind: type[Any], value: Any) -> Any:
    """Accept the type itself, or its text from a command line."""
    if kind is bool and isinstance(value, str) and value.lower() in ("on", "off", "true", "false"):
        return value.lower() in ("on", "true")
    if kind is int and isinstance(value, str):
        try:
            return int(value.replace("_", ""))
        except ValueError:
            pass
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not kind:
        raise ConfigError(f"hardware value {key} must be {kind.__name__}, got {value!r}")
    if kind is int and abs(value) > MAX_VALUE:
        raise ConfigError(f"hardware value {key} must be at most {MAX_VALUE}, got {value}")
    return value
