"""Options of the lab's commands, one record each: what a command asks for is what the lab is given.

Imports nothing that takes time, so that a help appears at once. Computes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from ndp_device.common.command_line import HardwareOption, Written, assignments
from ndp_device.common.errors import ConfigError
from ndp_device.common.outputs import A_NEW_FILE, A_NEW_TABLE
from ndp_device.common.widths import DEFAULT_AVG_BITS
from vllm_ndp.cli.shared import AvgBitsOption, hardware_values, integers, judge_bits

BUNDLED = "tests/data/tiny-mixtral-trace"
"""A trace that examples use."""
CAPACITY = "gpu.hbm_capacity_bytes"
GB = 10**9
ORACLE = "oracle"
"""The policy that scores the decode itself."""
PREFETCHES = ("measured", "published")
ARRIVALS = ("poisson", "bursty", "recorded", "steps", "together")
EXECUTIONS = ("balanced", "paper")

TableOption = Annotated[
    Path | None, A_NEW_TABLE, typer.Option("--out", help="Write rows to this .parquet, .csv or .md file.")
]
PageOption = Annotated[Path | None, A_NEW_FILE, typer.Option("--html", help="Draw one page of plots into this file.")]
HotOption = Annotated[int | None, typer.Option("--hot-experts", help="Hot experts per layer; default: half of them.")]
PriorOption = Annotated[
    Path | None, typer.Option(help="Popularity of experts as .npy, layers x experts (see analyze --prior-out).")
]
ReplicasOption = Annotated[
    Path | None,
    typer.Option(
        help="Replicas whose loss table is used; default: those of a run that is replayed, else usual losses."
    ),
]


def _values(pairs: list[str] | None, option: str) -> dict[str, float | str]:
    return {name: _value(text) for name, text in assignments(pairs, option).items()}


def _value(text: str) -> float | str:
    """A number where it is one, a whole one where it is written so."""
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        return text


def _listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _require(record: Any, **words: tuple[str, ...]) -> None:
    for name, known in words.items():
        if getattr(record, name) not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(record, name)!r}")


def _limits(written: list[str] | None) -> dict[str, float]:
    """Of `vllm bench serve --goodput`, in milliseconds."""
    found = {}
    for one in written or ():
        name, _, value = one.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not found[name] > 0:
            raise ConfigError(f"--goodput must be ttft:MS, tpot:MS or e2el:MS with a time above 0, got {one!r}")
    return found


PolicyOptions = Annotated[
    dict[str, Any],
    typer.Option("--policy-option", metavar="NAME=VALUE", help="Option of a policy, e.g. alpha=0.7 or one of its own."),
    Written(partial(_values, option="--policy-option"), None, list[str] | None),
]


@dataclass(frozen=True)
class CompareSettings:
    """Systems, policies and batch sizes to compare, and the model and hardware to compare them on."""

    model: str = "mixtral-8x7b"
    hardware: str = "h100-ndp512"
    overrides: dict[str, str | int] = field(default_factory=dict)
    avg_bits: float = DEFAULT_AVG_BITS
    systems: Annotated[
        tuple[str, ...],
        typer.Option(help="Names with commas between them, or all."),
        Written(_listed, "context_aware,balanced,fiddler,ktransformers,gpu_on_demand,quantized"),
    ] = ("all",)
    policies: Annotated[
        tuple[str, ...], typer.Option(help="Names with commas between them, or all."), Written(_listed, "prefill")
    ] = ("all",)
    batches: Annotated[
        tuple[int, ...],
        typer.Option("--batch", help="Batch sizes with commas between them."),
        Written(partial(integers, option="--batch"), "1"),
    ] = (1,)
    prefetch: Annotated[
        str, typer.Option(help="How well systems prefetch: measured on the trace, or published by their authors.")
    ] = "measured"
    options: Annotated[
        dict[str, float | str],
        typer.Option("--option", metavar="NAME=VALUE", help="Option of a system, e.g. spill_bits=2."),
        Written(partial(_values, option="--option"), None, list[str] | None),
    ] = field(default_factory=dict)
    num_hot: HotOption = None
    fit: Annotated[
        bool, typer.Option(help="Take as many hot experts, up to --hot-experts, and as wide replicas as memory holds.")
    ] = False
    policy_options: PolicyOptions = field(default_factory=dict)

    def __post_init__(self) -> None:
        from vllm_ndp.lab.systems import SYSTEMS, require_options, system_named
        from vllm_ndp.planning.policies import POLICIES, require_known

        for name, known in (("systems", SYSTEMS), ("policies", (*POLICIES, ORACLE))):
            if getattr(self, name) == ("all",):
                object.__setattr__(self, name, tuple(known))
        for name in self.systems:
            system_named(name)
        for name in self.policies:
            require_known(name, ORACLE)
        require_options(self.options, self.systems)
        if self.num_hot is not None and self.num_hot < 0:
            raise ConfigError(f"hot experts per layer must be at least 0, got {self.num_hot}")
        _require(self, prefetch=PREFETCHES)
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"batch sizes must be at least 1, got {list(self.batches)}")


def _widths(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(judge_bits(float(part)) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"--avg-bits must be numbers with commas between them, got {text!r}") from None


def _memory(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(integers(text, "--memory", least=1))) if text else ()


@dataclass(frozen=True)
class GridOptions:
    """Values of which every combination is compared."""

    model: Annotated[
        tuple[str, ...],
        typer.Option(help="Sizes that times are simulated for, with commas: public shapes or checkpoint directories."),
        Written(_listed, "mixtral-8x7b"),
    ]
    hardware: Annotated[
        tuple[str, ...], typer.Option(help="Hardware presets with commas."), Written(_listed, "h100-ndp512")
    ]
    memory: Annotated[
        tuple[int, ...],
        typer.Option(help="GPU memory in GB, with commas, filled as with --fit; default: as the hardware has it."),
        Written(_memory, ""),
    ]
    avg_bits: Annotated[
        tuple[float, ...],
        typer.Option(help="Average bits of cold experts, with commas."),
        Written(_widths, f"{DEFAULT_AVG_BITS:g}"),
    ]
    overrides: Annotated[
        dict[str, str | int],
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change a value of every hardware."),
        Written(hardware_values, None, list[str] | None),
    ]

    def points(self, settings: CompareSettings) -> list[CompareSettings]:
        return [
            replace(
                settings,
                model=model,
                hardware=hardware,
                avg_bits=bits,
                fit=settings.fit or memory is not None,  # half of the experts would not fit a small one
                overrides=self.overrides | ({} if memory is None else {CAPACITY: memory * GB}),
            )
            for model, hardware, memory, bits in product(
                self.model, self.hardware, self.memory or (None,), self.avg_bits
            )
        ]


@dataclass(frozen=True)
class LoadSettings:
    """When requests arrive, in times of the simulated clock, and the host that serves them."""

    model: Annotated[
        str, typer.Option(help="Sizes that times are simulated for: a public shape or a checkpoint directory.")
    ] = "mixtral-8x7b"
    hardware: HardwareOption = "h100-ndp512"
    overrides: Annotated[
        dict[str, str | int],
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change a value of the hardware."),
        Written(hardware_values, None, list[str] | None),
    ] = field(default_factory=dict)
    process: Annotated[
        str,
        typer.Option(
            help="poisson, bursty, recorded, together, steps (a live run again, as it was), or a .jsonl file of "
            "Mooncake's: times, lengths and shared prefixes."
        ),
    ] = "poisson"
    rate: Annotated[float, typer.Option(help="poisson, bursty: requests per second of each host.")] = 1.0
    burstiness: Annotated[float, typer.Option(help="bursty: as of vllm bench serve; below 1 is bursty.")] = 0.25
    speed: Annotated[float, typer.Option(help="recorded, or a file: so many times as fast as recorded.")] = 1.0
    requests: Annotated[
        int | None, typer.Option(help="Requests in all, the trace's taken round and round; default: each once.")
    ] = None
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The same seed gives the same arrivals.")] = 0
    num_hot: HotOption = None
    avg_bits: AvgBitsOption = DEFAULT_AVG_BITS
    execution: Annotated[str, typer.Option(help="balanced: hot experts may run on the device; paper: never.")] = (
        "balanced"
    )
    gpus: Annotated[int, typer.Option(help="GPUs of a host, which split each layer.", metavar="N", min=1)] = 1
    devices: Annotated[int, typer.Option(help="Devices that all hosts share.", metavar="N", min=1)] = 1
    split: Annotated[bool, typer.Option(help="Each device has a part of every expert, not copies of some.")] = False
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once, as in vLLM.")] = 256
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of a step, as in vLLM.")] = 2048
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block, as in vLLM.")] = 16
    kv_tokens: Annotated[
        int | None, typer.Option(help="Room in the KV cache; default: what GPU memory holds beside the weights.")
    ] = None
    goodput: Annotated[
        dict[str, float],
        typer.Option("--goodput", metavar="NAME:MS", help="A request is good within it: ttft:500, tpot:50, e2el:9000."),
        Written(_limits, None, list[str] | None),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self, execution=EXECUTIONS, **({} if self.file else {"process": ARRIVALS}))
        for name in ("rate", "burstiness", "speed"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"--{name} must be greater than 0, got {value:g}")
        if self.requests is not None and self.requests < 1:
            raise ConfigError(f"there must be at least 1 request, got {self.requests}")
        if self.split and self.devices == 1:
            raise ConfigError("--split gives each of several devices a part of every expert: give --devices, too")
        if self.kv_tokens is not None and self.kv_tokens < self.block_size:
            raise ConfigError(f"--kv-tokens must hold a block of {self.block_size}, got {self.kv_tokens}")
        if self.process == "steps" and (self.gpus, self.devices) != (1, 1):
            raise ConfigError(
                "steps are those of the recorded run, on its own GPUs and devices: leave --gpus and --devices out"
            )
        if self.process == "recorded" and self.requests is not None:
            raise ConfigError("recorded arrivals are those of the trace's own requests: leave --requests out")

    @property
    def file(self) -> Path | None:
        """Of requests that come as somebody recorded, with lengths of their own."""
        return Path(self.process) if self.process.endswith(".jsonl") else None
