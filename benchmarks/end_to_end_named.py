"""The systems of end_to_end.py by name: what each is, and the job and environment of its process."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from end_to_end_systems import ISAS, Job

LONG_DEADLINE_MS = 20_000.0  # the batch of 32 at full width is slower than any deadline meant for real hardware


@dataclass(frozen=True)
class System:
    """One row of the table. `hot` and `bits` describe what its experts cost; hot None = no plugin."""

    kind: str  # vllm | llama
    bits: float  # of the experts that are not hot
    hot: float | None = None  # share of the experts
    settings: Mapping[str, Any] = field(default_factory=dict)  # `hot_experts` as a share
    file: str = ""
    linear_bits: float = 16
    before: bool = False  # runs the code of --before


def _plugin(hot: float, bits: float, **settings: Any) -> System:
    return System("vllm", bits, hot, {"hot_experts": hot, "avg_bits": bits, "execution": "paper", **settings})


_FOUR = {"linear_bits": 4}
SYSTEMS: dict[str, System] = {
    "stock-bf16": System("vllm", 16),
    "3db895e-cold4": replace(_plugin(0, 4), before=True),
    "defaults": System("vllm", 4, 0, linear_bits=8),
    "defaults-linear4": System("vllm", 4, 0, _FOUR, linear_bits=4),
    "slots4-linear4": System(
        "vllm", 4, 1, _FOUR | {"hot_experts": 1, "slot_bits": 4, "execution": "paper"}, linear_bits=4
    ),
    "all-hot": System("vllm", 16, 1, {"hot_experts": 1, "cold_precision": "full"}),
    "hot4-cold3": _plugin(1 / 2, 3),
    "hot4-cold3-balanced": _plugin(1 / 2, 3, execution="balanced"),
    "hot0-cold4": _plugin(0, 4),
    "llama-q4_0": System("llama", 4, file="q4_0"),
    "llama-q4_k": System("llama", 4, file="q4_k"),
}
"""By name, in the order of the table; hot4-cold3: half of the experts hot in bf16, the others at 3 bits on average.
defaults: what a server chooses that is told nothing; defaults-linear4: with linear layers at 4 bits instead of 8.
slots4-linear4: the engine's process holds every expert at 4 bits and computes prompts from those, too.
3db895e-cold4: that commit's code with no expert hot."""


class Unavailable(Exception):
    """Why a system cannot be measured here, in one sentence."""


def job_of(name: str, arguments: argparse.Namespace) -> Job:
    """Raises Unavailable."""
    system = SYSTEMS[name]
    model, engine = str(arguments.model), {}
    if system.kind == "llama":
        if arguments.gguf is None:
            raise Unavailable("--gguf was not given")
        path = arguments.gguf / f"{system.file}.gguf"
        if not path.exists():
            raise Unavailable(f"{path.name} is missing: run benchmarks/gguf_mixtral.py")
        if arguments.isa and arguments.llama is None:
            raise Unavailable("--llama was not given")
        model = str(path)
    elif system.hot is not None:
        settings = {"deadline_ms": LONG_DEADLINE_MS, **system.settings}
        if settings.get("cold_precision") != "full":
            if arguments.replicas is None:
                raise Unavailable("--replicas was not given")
            settings["replicas"] = str(arguments.replicas)
        if "hot_experts" in settings:
            settings["hot_experts"] = round(settings["hot_experts"] * config_of(arguments)["num_local_experts"])
        engine = {"quantization": "ndp", "additional_config": {"ndp": settings}}
    return Job(
        name,
        "llama" if system.kind == "llama" else "vllm",
        model,
        tuple(arguments.batches),
        arguments.prompt_tokens,
        arguments.tokens,
        engine,
        arguments.long_prompt,
    )


def config_of(arguments: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((arguments.model / "config.json").read_text())
    return config


def environment_of(name: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Of the system's process."""
    system = SYSTEMS[name]
    environment: dict[str, str] = {}
    if system.hot is None and system.kind == "vllm":
        # vLLM would leave one core to its scheduler, which sleeps meanwhile; the plugin sees to this itself
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, arguments.cores))
    if arguments.isa and system.kind == "vllm":
        environment |= ISAS[arguments.isa]
    elif arguments.isa:
        libraries = str(arguments.llama / "llama_cpp/lib")
        environment |= {"LLAMA_CPP_LIB_PATH": libraries, "LD_LIBRARY_PATH": libraries}
    return environment
