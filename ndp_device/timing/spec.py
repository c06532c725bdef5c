"""Hardware as data: frozen, self-checking values of one memory device, its link, its arrays and the GPU beside it.

`load_hardware` turns a preset and overrides into a Hardware. presets.toml has the presets that were written by hand,
every number with its unit and source.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, get_origin, get_type_hints

from msgspec import Meta

from ndp_device.common.errors import ConfigError, nearest
from ndp_device.timing.work import FS_PER_PS, PS_PER_S, ceil_div

REFRESH_MODES = ("all-bank", "off")
PE_MODES = ("bit_scalable", "bit_scalable_pow2", "fp16_dequant", "int8")
LAUNCH_PATHS = ("cxlmem", "dma")
DRAM_KINDS = ("bank", "ideal")
MEASURED = "measured-"
GPU_TIMES = ("roofline", *(MEASURED + card for card in ("h100", "h200", "l40s", "rtxpro6000")))
"""Of what the GPU's times are made: rooflines alone, or a card's measured kernels (vllm_ndp/cost_model/silicon.py)."""
MAX_VALUE = 1 << 60
MAX_CYCLES = 2048
"""Longest delay between two commands, twice that of any JEDEC device: the controller steps through every cycle of
refresh that falls into a delay."""
MAX_ROW_SPAN = 1 << 16
"""Lines in one row of every bank, 8 times DDR5's: so many are simulated once per device."""


NotNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1, le=2**50)]
Banks = Annotated[int, Meta(ge=1, le=64)]
InRow = Annotated[int, Meta(ge=1, le=MAX_ROW_SPAN)]
Cycles = Annotated[int, Meta(ge=1, le=MAX_CYCLES)]
CyclesOrNone = Annotated[int, Meta(ge=0, le=MAX_CYCLES)]
RefreshCycles = Annotated[int, Meta(ge=1, le=1 << 24)]


class _Section:
    """Values of one part of the hardware. Each field's annotation says what it may be: limits, or words."""

    section: ClassVar[str]
    _allowed: ClassVar[Mapping[str, Meta | tuple[str, ...]]]

    def __init_subclass__(cls) -> None:
        hints = get_type_hints(cls, include_extras=True)
        cls._allowed = {name: kind.__metadata__[0] for name, kind in hints.items() if get_origin(kind) is Annotated}

    def __post_init__(self) -> None:
        for name, allowed in self._allowed.items():
            key, value = f"{self.section}.{name}", getattr(self, name)
            if not isinstance(allowed, Meta):
                if value not in allowed:
                    raise ConfigError(f"{key} must be one of {', '.join(allowed)}, got {value!r}")
            elif allowed.le is None:  # MAX_VALUE, as of all that is given
                if value < allowed.ge:
                    raise ConfigError(f"{key} must be at least {allowed.ge}, got {value}")
            elif not allowed.ge <= value <= allowed.le:
                raise ConfigError(f"{key} must lie in {allowed.ge}..{allowed.le}, got {value}")


@dataclass(frozen=True)
class DramSpec(_Section):
    """Identical channels of one JEDEC device. Times in cycles of tck_fs; `ideal` reads at peak rate with no latency."""

    section = "dram"

    kind: Annotated[str, DRAM_KINDS]  # bank | ideal
    standard: str
    capacity_bytes: Bytes
    ideal_bytes_per_s: Positive  # used by kind "ideal" only
    channels: Annotated[int, Meta(ge=1, le=1 << 24)]
    ranks: Banks
    bank_groups: Banks
    banks_per_group: Banks
    lines_per_row: InRow
    line_bytes: InRow  # one burst on one channel
    stripe_bytes: Positive  # consecutive bytes on one channel
    tck_fs: Positive
    burst: Cycles  # data bus cycles of one line
    cl: Cycles
    rcd: Cycles
    rp: Cycles
    rp_ab: Cycles  # precharge all banks
    ras: Cycles
    rc: Cycles
    rtp: Cycles
    ccd_s: Cycles
    ccd_l: Cycles
    rrd_s: Cycles
    rrd_l: Cycles
    faw: Cycles
    ppd: Cycles  # precharge to precharge
    rank_switch: CyclesOrNone  # bubble on the data bus between ranks
    act_cycles: Cycles  # command bus cycles of an activate
    aad: CyclesOrNone  # LPDDR5: an activate is two commands, the second at most so many cycles later; 0 = one command
    read_cycles: Cycles  # command bus cycles of a read
    wck_sync: CyclesOrNone  # LPDDR5: cycles the clock of the data bus stays in sync after a burst; 0 = no such clock
    refresh: Annotated[str, REFRESH_MODES]  # all-bank | off
    rfc: RefreshCycles
    refi: RefreshCycles
    queue_entries: Cycles
    outstanding: CyclesOrNone  # lines in flight per channel; 0 = as many as the queue holds

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.row_span > MAX_ROW_SPAN:
            raise ConfigError(
                f"dram.ranks x bank_groups x banks_per_group x lines_per_row must be at most {MAX_ROW_SPAN}, got "
                f"{self.row_span}"
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
        if self.refresh == "all-bank" and self.rfc >= self.refi:
            raise ConfigError(f"dram.rfc {self.rfc} must be below dram.refi {self.refi}, or no cycle is left for data")

    @property
    def banks(self) -> int:
        """Banks of one rank."""
        return self.bank_groups * self.banks_per_group

    @property
    def row_span(self) -> int:
        """Lines of one row of every bank."""
        return self.ranks * self.banks * self.lines_per_row

    def place(self, position: int) -> tuple[int, int]:
        """Bank and row of a line of one sequential stream from the beginning of a channel.

        Lowest bits first: bank group, column, bank, rank, row.
        """
        rest, group = divmod(position, self.bank_groups)
        rest, bank = divmod(rest // self.lines_per_row, self.banks_per_group)
        row, rank = divmod(rest, self.ranks)
        return (rank * self.bank_groups + group) * self.banks_per_group + bank, row

    @property
    def peak_bytes_per_s(self) -> int:
        if self.kind == "ideal":
            return self.ideal_bytes_per_s
        return self.channels * self.line_bytes * PS_PER_S * FS_PER_PS // (self.burst * self.tck_fs)

    def cycles_to_ps(self, cycles: int) -> int:
        return ceil_div(cycles * self.tck_fs, FS_PER_PS)


@dataclass(frozen=True)
class LinkSpec(_Section):
    """The way between host and device: activations by `launch`, weights in bulk by DMA. Full duplex."""

    section = "link"

    launch: Annotated[str, LAUNCH_PATHS]  # cxlmem | dma
    raw_bytes_per_s: Positive  # per direction, after line coding
    packet_payload_bytes: Positive  # PCIe maximum payload
    packet_header_bytes: NotNegative
    bulk_bytes_per_s: Positive  # what long DMA copies reach
    cxl_line_bytes: Positive
    cxl_line_wire_bytes: int  # bytes on the wire per line
    load_to_use_ps: NotNegative  # CXL.mem read of the host; a posted write takes half
    dma_launch_ps: NotNegative  # one cudaMemcpyAsync
    dma_latency_ps: NotNegative  # one way
    completion_ps: NotNegative  # poll that sees a DMA finished

    def __post_init__(self) -> None:
        super().__post_init__()
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
class ArraySpec(_Section):
    """`units` of rows x cols processing elements beside the DRAM; each element multiplies fp16 by fp16 once a cycle."""

    section = "array"

    units: Positive
    rows: Positive  # tokens side by side
    cols: Positive  # output columns side by side
    clock_hz: Positive
    pe_mode: Annotated[str, PE_MODES]
    fill_cycles: NotNegative  # pipeline fill and drain of one matrix
    tile_bytes: Positive  # per unit; weights handed over at a time
    scratchpad_bytes: Positive  # per unit; half holds weights in flight, half activations
    double_buffered: bool
    dequant_weights_per_cycle: Positive  # per unit, fp16_dequant only
    vector_lanes: Positive  # per unit, SwiGLU elements a cycle
    command_ps: NotNegative  # decode and dispatch of one command

    def __post_init__(self) -> None:
        super().__post_init__()
        if 4 * self.tile_bytes > self.scratchpad_bytes:
            raise ConfigError(
                f"array.scratchpad_bytes must hold four tiles of {self.tile_bytes} bytes, got {self.scratchpad_bytes}"
            )

    @property
    def macs_per_s(self) -> int:
        """Rate of fp16 multiply-accumulates."""
        return self.units * self.rows * self.cols * self.clock_hz


@dataclass(frozen=True)
class GpuSpec(_Section):
    """The GPU: rates of its rooflines, and whose measured kernels give its times."""

    section = "gpu"

    times: Annotated[str, GPU_TIMES]
    flops_per_s: Positive  # dense 16-bit
    hbm_bytes_per_s: Positive
    hbm_efficiency_percent: Annotated[int, Meta(ge=1, le=100)]
    hbm_capacity_bytes: Bytes
    layer_overhead_ps: NotNegative  # launches and synchronisation of one layer


@dataclass(frozen=True)
class HostSpec(_Section):
    """The host's processor as two rooflines, its memory, and a CXL expander that some systems put beside it."""

    section = "host"

    cpu_flops_per_s: Positive  # dense 16-bit
    memory_bytes_per_s: Positive
    memory_efficiency_percent: Annotated[int, Meta(ge=1, le=100)]  # of that rate, where the CPU reads experts
    memory_capacity_bytes: Bytes
    cxl_flops_per_s: Positive  # of an expander that multiplies
    cxl_bytes_per_s: Positive
    cxl_capacity_bytes: Bytes


@dataclass(frozen=True)
class EnergySpec(_Section):
    """Energy per event, femtojoules, and power without events. Indicative: the arrays themselves are not in it."""

    section = "energy"

    dram_line32_fj: NotNegative  # one 32 B access
    activate_fj: NotNegative  # activate and precharge of one row
    link_bit_fj: NotNegative
    scratchpad_access_fj: NotNegative  # one 32 B access
    hbm_bit_fj: NotNegative  # of the GPU's memory
    gpu_idle_mw: NotNegative  # milliwatts that flow whatever moves
    host_idle_mw: NotNegative
    device_idle_mw: NotNegative


SECTIONS: dict[str, type[Any]] = {
    spec.section: spec for spec in (DramSpec, LinkSpec, ArraySpec, GpuSpec, HostSpec, EnergySpec)
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


@cache
def field_types() -> Mapping[str, type[Any]]:
    """'section.field' -> int, str or bool."""
    kinds = {section: get_type_hints(spec) for section, spec in SECTIONS.items()}
    return {f"{section}.{f.name}": kinds[section][f.name] for section, spec in SECTIONS.items() for f in fields(spec)}


# -- presets -----------------------------------------------------------------------------------------------------------


class Quantity(NamedTuple):
    value: int | str | bool
    unit: str
    source: str


Table = Mapping[str, Quantity]


def _written(all_of_them: Mapping[str, Any], name: str) -> Table:
    sections = dict(all_of_them[name])
    base = sections.pop("based_on", None)
    own = {f"{section}.{key}": Quantity(*of) for section, values in sections.items() for key, of in values.items()}
    return own if base is None else {**_written(all_of_them, base), **own}


_FILE = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PRESETS: Mapping[str, Table] = {name: _written(_FILE, name) for name in _FILE}


FOLDER = Path(__file__).parent / "measured"
"""Presets whose link, GPU and host were measured on a real machine ([M]), one JSON file a machine, which
`benchmarks/gpu_check.py` writes. What no machine can tell (the near-data device) comes from the preset that they are
based on."""
MEASURABLE = ("link.", "gpu.", "host.")
"""Sections of a machine that exists. The device is simulated whatever the machine."""


@cache
def measured_presets(folder: Path) -> Mapping[str, Table]:
    """Raises ConfigError for a file that cannot be a preset."""
    return {path.stem: _read_measured(path) for path in sorted(folder.glob("*.json"))}


def _read_measured(path: Path) -> Table:
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


def nearest_card(num_bytes: int | None) -> str:
    """The preset whose GPU has the memory that is nearest to this; None: the default one."""
    if num_bytes is None:
        return "h100-ndp512"
    capacity = {name: int(table["gpu.hbm_capacity_bytes"].value) for name, table in PRESETS.items()}
    return min(capacity, key=lambda name: abs(capacity[name] - num_bytes))


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
    efficiency, times = "gpu.hbm_efficiency_percent", values["gpu.times"]
    if values[efficiency] != table[efficiency].value and str(times).startswith(MEASURED):
        raise ConfigError(f"{efficiency} is of rooflines, and gpu.times is {times}: set gpu.times=roofline, too")
    sections = {
        section: spec(**{field.name: values[f"{section}.{field.name}"] for field in fields(spec)})
        for section, spec in SECTIONS.items()
    }
    return Hardware(preset=preset, **sections)


def preset_table(preset: str) -> Table:
    """Of a preset that was written, or measured."""
    if preset in PRESETS:
        return PRESETS[preset]
    known = {**measured_presets(FOLDER), **PRESETS}
    if preset not in known:
        raise ConfigError(f"hardware must be one of {', '.join(known)}, got {preset!r}{nearest(preset, known)}")
    return known[preset]


def _full_key(key: str, types: Mapping[str, type[Any]]) -> str:
    if key in types:
        return key
    matches = [full for full in types if full.endswith(f".{key}")]
    if len(matches) == 1:
        return matches[0]
    names = [*types, *(full.split(".")[1] for full in types)]
    raise ConfigError(f"unknown hardware value {key!r}{nearest(key, names)}")


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
