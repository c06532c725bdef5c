"""This worker among the others that run the same model: its part of it, and the little that ranks must tell each other.

Tensor parallelism splits each layer over the ranks of a group; with expert parallelism each of them holds some of the
hot experts whole. Rank 0, the leader, speaks to the device and sends rows for whole experts. The leader adds what comes
back to its own partial sum, before vLLM's all-reduce adds up the ranks. Every rank makes the same plans by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ndp_device.common.errors import ConfigError
from ndp_device.experts.expert import WHOLE, Part

T = TypeVar("T")

_MOST_CORES = 8192  # of one host


class Ranks:
    """The group of ranks that split each layer, seen from one of them."""

    def __init__(self, group: Any, stages: Any, *, holds_whole_experts: bool = False) -> None:
        """group: vLLM's tensor-parallel group; stages: its pipeline-parallel group, of the same part of each stage.

        holds_whole_experts: each rank has some of the hot experts, and not a part of each (expert parallelism).
        """
        self._group, self._stages = group, stages
        self.holds_whole_experts = holds_whole_experts and group.world_size > 1
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self.stage = Part(stages.rank_in_group, stages.world_size)
        """Of the model's layers, in a pipeline."""

    @classmethod
    def of_this_worker(cls, *, holds_whole_experts: bool) -> Ranks:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        return cls(get_tp_group(), get_pp_group(), holds_whole_experts=holds_whole_experts)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def share(self) -> Part:
        """Of each expert that this rank holds."""
        return WHOLE if self.holds_whole_experts else Part(self.rank, self.size)

    @property
    def description(self) -> str:
        stage = f"stage {self.stage.index} of {self.stage.count}: " if self.stage.count > 1 else ""
        if self.size == 1:
            return stage + ("a device, plan and clock of its own" if stage else "one: the whole model")
        each = f"1/{self.size} of the hot experts" if self.holds_whole_experts else f"1/{self.size} of every hot expert"
        return f"{stage}{self.size}, each {each}; rank 0 sends whole cold experts' rows to the device"

    def from_leader(self, value: Any = None) -> Any:
        """Return the leader's value; every rank of the group must ask."""
        return value if self.size == 1 else self._group.broadcast_object(value if self.leads else None)

    def after_the_first(self, act: Callable[[], T]) -> T:
        """Have the first rank of all act, and then the others, so that nothing is made twice at once."""
        is_first = self.leads and self.stage.index == 0
        made = [act()] if is_first else []
        for group in self._groups:
            group.broadcast_object(True if group.rank_in_group == 0 else None)
        return made[0] if made else act()

    def merge(self, cores: set[int]) -> set[int]:
        """The cores that any of the ranks names; every rank must ask."""
        named = torch.zeros(_MOST_CORES, dtype=torch.uint8)
        named[sorted(cores)] = 1
        for group in self._groups:
            dist.all_reduce(named, dist.ReduceOp.MAX, group=group.cpu_group)
        return set(named.nonzero().flatten().tolist())

    @property
    def _groups(self) -> list[Any]:
        """Groups with other ranks in them. A message through both groups reaches every rank."""
        return [group for group in (self._group, self._stages) if group.world_size > 1]

    def require_equal(self, seen: dict[str, str]) -> None:
        """Compare what this rank was started with with the first one's. Raises ConfigError on the rank that differs."""
        for group in self._groups:
            rank, theirs = group.rank_in_group, group.broadcast_object(seen if group.rank_in_group == 0 else None)
            for what, mine in seen.items():
                if mine != theirs[what]:
                    raise ConfigError(
                        f"rank {rank} has {what} {mine}, rank 0 has {theirs[what]}: "
                        "start every rank with the same settings, checkpoint and replicas"
                    )

    def agree(self, *, devices_up: tuple[bool, ...], plans: int) -> tuple[bool, ...]:
        """Before a step of several ranks: which of the leader's devices are up, which every rank then goes by.

        `plans`: checksum of the plans in force, which must be the same on every rank. Another plan on one rank would
        leave pairs out or count them twice, in silence.
        """
        leaders_up, leaders = self.from_leader((devices_up, plans))
        if plans != leaders:
            raise RuntimeError(
                f"rank {self.rank} planned otherwise than rank 0 (checksums {plans:08x} and {leaders:08x}): "
                "the router did not choose the same experts on both; nothing that follows would be right"
            )
        return tuple(leaders_up)
