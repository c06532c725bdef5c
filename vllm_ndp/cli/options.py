"""Options that several commands share, in groups that are handed on as one value. Imports nothing that takes time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ndp_device.common.command_line import HardwareOption, SetOption, assignments
from ndp_device.common.errors import ConfigError
from ndp_device.common.outputs import A_NEW_FOLDER
from ndp_device.common.widths import DEFAULT_AVG_BITS

TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE", help="Directory of the trace.")]
CheckpointArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint directory.")]
OutOption = Annotated[
    Path, A_NEW_FOLDER, typer.Option(help="Directory of the trace to write; must be empty or absent.")
]
ReplicasOption = Annotated[
    Path | None, typer.Option(help="Replica directory whose loss table is used; default: what the run used.")
]
PriorOption = Annotated[
    Path | None, typer.Option(help="Popularity of experts as .npy, layers x experts (see analyze --prior-out).")
]
HotOption = Annotated[int | None, typer.Option("--hot-experts", help="Hot experts per layer; default: half of them.")]


def judge_bits(avg_bits: float) -> float:
    """Say on stderr that so few bits are of no use, where they are not."""
    from vllm_ndp.planning.bitwidths import verdict_on

    if verdict := verdict_on(avg_bits):
        typer.echo(f"vllm-ndp: {verdict}", err=True)
    return avg_bits


AvgBitsOption = Annotated[float, typer.Option(help="Average bits of cold experts.", callback=judge_bits)]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option("--policy-option", metavar="NAME=VALUE", help="Option of a policy, e.g. alpha=0.7 or one of its own."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the last line only: one JSON object.")]
BatchOption = Annotated[str, typer.Option(help="Batch sizes with commas between them.")]


@dataclass(frozen=True)
class HardwareOptions:
    """Which model on which hardware the simulated times are for."""

    model: Annotated[
        str, typer.Option(help="Sizes that times are simulated for: a public shape or a checkpoint directory.")
    ] = "mixtral-8x7b"
    hardware: HardwareOption = "h100-ndp512"
    set_: SetOption = None

    def overrides(self) -> dict[str, str | int]:
        return hardware_values(self.set_)


@dataclass(frozen=True)
class GridOptions:
    """Models, hardware and GPU memory sizes that a sweep varies beside batch sizes, systems and policies."""

    model: Annotated[str, typer.Option(help="Sizes that times are simulated for, with commas between them.")] = (
        "mixtral-8x7b"
    )
    hardware: Annotated[str, typer.Option(help="Hardware presets with commas between them.")] = "h100-ndp512"
    memory: Annotated[str, typer.Option(help="GPU memory in GB, with commas; default: as the hardware has it.")] = ""
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change a value of every hardware.")
    ] = None


@dataclass(frozen=True)
class ArrivalOptions:
    """When requests arrive. Times are of the simulated clock."""

    process: Annotated[
        str, typer.Option(help="poisson, bursty, recorded, together, or steps (a live run again, as it was).")
    ] = "poisson"
    rate: Annotated[float, typer.Option(help="poisson, bursty: requests per second of each host.")] = 1.0
    burstiness: Annotated[float, typer.Option(help="bursty: as of vllm bench serve; below 1 is bursty.")] = 0.25
    speed: Annotated[float, typer.Option(help="recorded: so many times as fast as recorded.")] = 1.0
    requests: Annotated[
        int | None, typer.Option(help="Requests in all, the trace's taken round and round; default: each once.")
    ] = None
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The same seed gives the same arrivals.")] = 0


@dataclass(frozen=True)
class ServerOptions:
    """The host that serves them."""

    policy: Annotated[str, typer.Option(help="How hot experts are chosen.")] = "prefill"
    policy_option: PolicyOption = None
    hot_experts: HotOption = None
    avg_bits: AvgBitsOption = DEFAULT_AVG_BITS
    execution: Annotated[str, typer.Option(help="balanced: hot experts may run on the device; paper: never.")] = (
        "balanced"
    )
    migration: Annotated[str, typer.Option(help="kept: what a prefill streamed stays; difference.")] = "kept"
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once, as in vLLM.")] = 256
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of a step, as in vLLM.")] = 2048
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block, as in vLLM.")] = 16
    kv_tokens: Annotated[
        int | None, typer.Option(help="Room in the KV cache; default: what GPU memory holds beside the weights.")
    ] = None
    prior: PriorOption = None
    replicas: ReplicasOption = None


JobsOption = Annotated[
    str, typer.Option(help="Processes that share the work: a number, all (one per core), or ray (a Ray cluster).")
]


@dataclass(frozen=True)
class PlanOptions:
    """How hot experts and bits are chosen, and how experts move."""

    hot_experts: HotOption = None
    fit: Annotated[
        bool, typer.Option(help="Take as many hot experts, up to --hot-experts, and as wide replicas as memory holds.")
    ] = False
    avg_bits: AvgBitsOption = DEFAULT_AVG_BITS
    bit_rule: Annotated[
        str, typer.Option(help="What bits are chosen by: layers, importance, mse or uniform; pairs only in servers.")
    ] = "layers"
    bits_for: Annotated[
        str,
        typer.Option(
            help="request: bits of each request alone; batch: the same for all that run; auto: by how many run."
        ),
    ] = "auto"
    batch_rule: Annotated[
        str, typer.Option(help="How scores of a batch become one hot set: sum, max, tokens or fairness.")
    ] = "sum"
    migration: Annotated[
        str, typer.Option(help="How experts become hot: free, once, difference, kept or budgeted.")
    ] = "kept"
    moves: Annotated[int, typer.Option(help="budgeted: exchanges per layer and prefill.")] = 1
    hysteresis: Annotated[
        float, typer.Option(help="budgeted, adaptive: how much more important a newcomer must be.")
    ] = 0.1
    prior: PriorOption = None
    prior_tokens: Annotated[float, typer.Option(help="How many prompt tokens the prior is worth.")] = 16.0
    policy_option: PolicyOption = None
    replicas: ReplicasOption = None


@dataclass(frozen=True)
class SystemOptions:
    """Systems, policies and batch sizes to compare."""

    systems: Annotated[str, typer.Option(help="Names with commas between them, or all.")] = "all"
    policies: Annotated[str, typer.Option(help="Names with commas between them, or all.")] = "all"
    batch: BatchOption = "1"
    prefetch: Annotated[
        str, typer.Option(help="How well systems prefetch: measured on the trace, or published by their authors.")
    ] = "measured"
    regret: Annotated[
        bool, typer.Option(help="Say how much longer each row takes than the least time at its loss, with proof.")
    ] = True
    affinity: Annotated[bool, typer.Option(help="Batch requests whose prompts route alike.")] = False
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Option of a system, e.g. spill_bits=2 or frequency=lru."),
    ] = None

    def of_systems(self) -> dict[str, float | str]:
        return {name: _number_or_text(value) for name, value in assignments(self.option, "--option").items()}


def policy_options(pairs: list[str] | None) -> dict[str, Any]:
    """Read the values of --policy-option: whole numbers, numbers, else text."""
    given = assignments(pairs, "--policy-option")
    return {name: int(value) if value.isdigit() else _number_or_text(value) for name, value in given.items()}


def hardware_values(pairs: list[str] | None) -> dict[str, str | int]:
    """Read the values of --set."""
    given = assignments(pairs, "--set", "section.field=value")
    return {name: int(value) if value.lstrip("-").isdigit() else value for name, value in given.items()}


def integers(text: str, option: str, *, least: int | None = None) -> tuple[int, ...]:
    """Read "1,4,16" as (1, 4, 16)."""
    try:
        read = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{option} must be whole numbers with commas between them, such as 1,2,3,4, got {text!r}"
        ) from None
    if least is not None and min(read) < least:
        raise ConfigError(f"{option} must be at least {least}, got {min(read)}")
    return read


def names(text: str, every: tuple[str, ...]) -> tuple[str, ...]:
    """Read "a, b" as ("a", "b"), and "all" as every name there is."""
    return every if text == "all" else tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _number_or_text(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value
