"""Every system that a trace can be replayed under, by name: ours, and those that installed packages register.

Entry point group `vllm_ndp.systems`: `name = "my_package:SYSTEM"`, a System; docs/extend.md shows one.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points

from ndp_device.common.errors import ConfigError, nearest
from vllm_ndp.lab.systems.cxl_expert import CXL_EXPERT
from vllm_ndp.lab.systems.expert_cache import EXPERT_CACHE, HYBRIMOE
from vllm_ndp.lab.systems.fixed import DYNAEXQ, LLAMA_CPP, QUANTIZED, VLLM_OFFLOAD
from vllm_ndp.lab.systems.gpu_on_demand import GPU_ON_DEMAND, KLOTSKI, MOE_INFINITY, MOEPIC, PREGATED
from vllm_ndp.lab.systems.hobbit import HOBBIT
from vllm_ndp.lab.systems.host_cpu import DAOP, FIDDLER, KTRANSFORMERS
from vllm_ndp.lab.systems.joint import JOINT
from vllm_ndp.lab.systems.near_memory import MONDE, PIMOE
from vllm_ndp.lab.systems.ours import BALANCED, CONTEXT_AWARE
from vllm_ndp.lab.systems.system import ReplayOptions, System, TooFewPlaces

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        CONTEXT_AWARE,
        BALANCED,
        JOINT,
        MONDE,
        HOBBIT,
        GPU_ON_DEMAND,
        CXL_EXPERT,
        MOEPIC,
        FIDDLER,
        MOE_INFINITY,
        QUANTIZED,
        VLLM_OFFLOAD,
        LLAMA_CPP,
        KTRANSFORMERS,
        DAOP,
        DYNAEXQ,
        HYBRIMOE,
        KLOTSKI,
        PIMOE,
        PREGATED,
        EXPERT_CACHE,
    )
}

ENTRY_POINT_GROUP = "vllm_ndp.systems"


for _entry in entry_points(group=ENTRY_POINT_GROUP):
    _system = _entry.load()
    if not isinstance(_system, System) or _system.name in SYSTEMS:
        _reason = f"whose name {_system.name!r} is taken" if isinstance(_system, System) else "which is no System"
        raise ConfigError(f"the entry point {_entry.name!r} of {ENTRY_POINT_GROUP} holds {_entry.value}, {_reason}")
    SYSTEMS[_system.name] = _system


def require_options(names: Iterable[str], systems: Iterable[str]) -> None:
    """Raises ConfigError for an option that none of the systems has."""
    known = {option: system for system in systems for option in SYSTEMS[system].options}
    for name in names:
        if name not in known:
            listed = ", ".join(f"{option} ({system})" for option, system in known.items()) or "none"
            raise ConfigError(f"unknown option {name!r}: the chosen systems have {listed}")


def system_named(name: str) -> System:
    if name not in SYSTEMS:
        raise ConfigError(f"system must be one of {', '.join(SYSTEMS)}, got {name!r}{nearest(name, SYSTEMS)}")
    return SYSTEMS[name]


__all__ = ["SYSTEMS", "ReplayOptions", "System", "TooFewPlaces", "require_options", "system_named"]
