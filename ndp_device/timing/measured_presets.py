"""Presets whose link, GPU and host were measured on a real machine: JSON files in `measured/`, one a machine.

`benchmarks/gpu_check.py` writes them where there is a GPU; what no machine can tell (the near-data device) comes from
the preset they are based on. Knows files and which values may be measured; not how they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ndp_device.common.errors import ConfigError
from ndp_device.timing.presets import PRESETS, Quantity, Table

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
