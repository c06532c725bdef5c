"""Names that a person writes under `{"ndp": {...}}`: at most 20 on top, the rest in `policy` and `debug`.

Turns that into values by the names of NdpSettings' fields (config.py). Does not know ranges or effects.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import WIDTHS

TOP = (
    *(
        "hot_experts",
        "slot_bits",
        "linear_bits",
        "warm_experts",
        "plan",
        "avg_bits",
        "cold_precision",
        "execution",
        "prefill",
    ),
    *("policy", "replicas", "devices", "hardware", "hardware_overrides"),
    *("deadline_ms", "fallback", "itl_factor", "record", "debug"),
)
DEBUG = (*("device_experts", "bits_for", "offload_bits", "device_hosts", "gpu", "prices", "kernel"),)
"""Settings for researchers and tests. Each has a default that decides by itself."""
_PLACES = {
    **dict.fromkeys(TOP, ""),
    **dict.fromkeys(DEBUG, " in 'debug'"),
    **dict.fromkeys(("alpha", "bit_rule", "losses"), " in 'policy'"),
}
_DEVICES = '{"devices": 2}, {"devices": ADDRESS} or {"devices": [{"address": ADDRESS, "keys": FILE}, ...]}'


_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "None": "null",
    "Mapping[str, Any]": "an object",
}
"""Types as a person would say them."""


@dataclass(frozen=True)
class DeviceAddress:
    """A device that runs already."""

    address: str
    """ipc:// or tcp://"""
    keys: str | None = None
    """Key file of this host (`ndp-device keygen`) for a tcp address, or `insecure-loopback` for a device that was
    started with --insecure-loopback."""


def as_options(settings: Mapping[str, Any], prefix: str = "--additional-config.ndp") -> list[str]:
    """Words of vLLM's command line that give these settings: one option each, so that no JSON has to be quoted."""
    words: list[str] = []
    for name, value in settings.items():
        option = f"{prefix}.{name}"
        if isinstance(value, Mapping):
            words += as_options(value, option)
        else:
            words += [option, value if isinstance(value, str) else json.dumps(value)]
    return words


def by_field(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of NdpSettings' fields. Raises ConfigError for an unknown name, with the nearest one."""
    if "max_loss" in raw:
        raise ConfigError('unknown ndp setting \'max_loss\': write {"avg_bits": {"max_loss": NATS}}')
    for name in raw:
        if name not in TOP:
            raise ConfigError(f"unknown ndp setting {name!r}: {_hint(name, TOP, 'known settings are ')}")
    values = _policy(_budget(_devices(raw)))
    return values | _experts_of(_debug(values.pop("debug", {})))


def _debug(group: Any) -> dict[str, Any]:
    if not isinstance(group, Mapping):
        raise ConfigError(f"ndp setting 'debug' must be an object, got {group!r}")
    for name in group:
        if name not in DEBUG:
            if name in TOP:
                raise ConfigError(f"ndp setting {name!r} stands beside 'debug', not in it")
            raise ConfigError(f"unknown ndp setting {name!r} in 'debug': {_hint(name, DEBUG, 'known are ')}")
    return dict(group)


def _devices(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`devices` is a number of embedded ones, an address, or a list; an address may have its key file beside it."""
    values = dict(raw)
    asked = values.get("devices")
    if asked is None or (isinstance(asked, int) and not isinstance(asked, bool)):
        return values
    del values["devices"]
    if not isinstance(asked, list | tuple):
        return values | {"running": (_address(asked),)}
    if not asked:
        raise ConfigError("ndp setting 'devices' must name each device once, got []")
    return values | {"running": tuple(map(_address, asked))}


def _budget(values: dict[str, Any]) -> dict[str, Any]:
    """`avg_bits` is a number, or {"max_loss": NATS} within the widest replicas."""
    asked = values.get("avg_bits")
    if not isinstance(asked, Mapping):
        return values
    if set(asked) != {"max_loss"}:
        raise ConfigError(
            "ndp setting 'avg_bits' must be a number or {\"max_loss\": NATS}, or for an engine "
            f'{{"simulated_tokens_per_s": N}}, got {dict(asked)!r}'
        )
    return values | {"avg_bits": float(WIDTHS[-1]), "max_loss": asked["max_loss"]}


def _policy(values: dict[str, Any]) -> dict[str, Any]:
    """`policy` is a name, or options by name, among them "name"."""
    asked = values.get("policy")
    if not isinstance(asked, Mapping):
        return values
    options = {name: value for name, value in asked.items() if name != "name"}
    return values | {"policy": asked.get("name", "prefill"), "policy_options": options}


def _experts_of(values: dict[str, Any]) -> dict[str, Any]:
    """`device_experts` is "copies", "split", or {"copies": N}."""
    asked = values.get("device_experts")
    if not isinstance(asked, Mapping):
        return values
    if set(asked) != {"copies"}:
        raise ConfigError(
            f'ndp setting \'device_experts\' must be "copies", "split" or {{"copies": N}}, got {dict(asked)!r}'
        )
    return values | {"device_experts": "copies", "device_copies": asked["copies"]}


def _address(one: Any) -> DeviceAddress:
    if isinstance(one, str):
        return DeviceAddress(one)
    if isinstance(one, Mapping) and set(one) <= {"address", "keys"} and isinstance(one.get("address"), str):
        keys = one.get("keys")
        if keys is None or isinstance(keys, str):
            return DeviceAddress(one["address"], keys)
    raise ConfigError(f"ndp setting 'devices' must be {_DEVICES}, got {one!r}")


def _hint(name: object, known: Sequence[str], otherwise: str) -> str:
    near = difflib.get_close_matches(str(name), _PLACES, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}{_PLACES[near[0]]}?" if near else otherwise + ", ".join(known)


def typed(name: str, value: Any, kind: Any, words: str) -> Any:
    """The value as a field of this kind holds it. Raises ConfigError for another type, which `words` names."""
    try:
        held = msgspec.convert(value, kind)
        if all(_is_sound(one) for one in (held if isinstance(held, tuple) else (held,))):
            return held
    except (msgspec.ValidationError, OverflowError):
        pass
    kinds = " or ".join(_IN_WORDS.get(one, one) for one in words.split(" | "))
    raise ConfigError(f"ndp setting {name!r} must be {kinds}, got {value!r}")


def _is_sound(value: Any) -> bool:
    """Texts may become paths, of which an empty one is this directory; whole numbers floats, which hold them exactly up
    to 2**53."""
    return (
        value != "" and "\0" not in value
        if isinstance(value, str)
        else not isinstance(value, int) or abs(value) <= 1 << 53
    )
