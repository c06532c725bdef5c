"""Settings of one device process. Frozen; checks itself. Knows no file content and no socket."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ndp_device.common.errors import ConfigError

PREPARE = ("idle", "asked")
NO_HARDWARE = "none"
"""Word in place of a preset for a device that is real hardware, whose answers have no simulated time."""


@dataclass(frozen=True)
class DeviceConfig:
    """`model_dir` serves full-precision experts, `replicas_dir` the 1 to 4 bit ones; at least one is needed."""

    address: str
    model_dir: Path | None = None
    replicas_dir: Path | None = None
    hardware: str = "h100-ndp512"
    pe_mode: str | None = None  # None = what the hardware preset says
    hardware_overrides: tuple[tuple[str, str], ...] = ()  # (section.field, value as text)
    kernel: str = "auto"
    prepare: str = "idle"  # convert experts before a plan asks for them, while nobody uses the cores; or only then

    def __post_init__(self) -> None:
        if self.model_dir is None and self.replicas_dir is None:
            raise ConfigError("a device needs experts: give a model, --replicas, or both")
        if self.hardware == NO_HARDWARE and (self.pe_mode or self.hardware_overrides):
            raise ConfigError("hardware 'none' simulates nothing: leave --set and --pe-mode out, or name a preset")
        if self.prepare not in PREPARE:
            raise ConfigError(f"prepare must be one of {', '.join(PREPARE)}, got {self.prepare!r}")
