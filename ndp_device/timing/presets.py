"""The hardware presets, every number with its unit and source: presets.toml has those that were written by hand.

Presets whose link, GPU and host were measured on a real machine ([M]) are JSON files in `measured/`, one a machine.
`benchmarks/gpu_check.py` writes them where there is a GPU. What no machine can tell (the near-data device) comes from
the preset that they are based on.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ndp_device.common.errors import ConfigError


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
