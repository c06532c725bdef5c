"""A system: a way to decode a trace on modelled hardware. One file each; `SYSTEMS` in __init__ lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import FULL_PRECISION_BITS, WIDTHS
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.memory import DoesNotFit, Memory, all_experts_bytes, slots_bytes
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.cache import NextLayer
from vllm_ndp.lab.vectorised.outcome import Outcome
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget, highest
from vllm_ndp.planning.policies import Policy

T = TypeVar("T", bound=str | int)
WEIGHT_BITS = (FULL_PRECISION_BITS, 8, 4, 3, 2)
"""Widths of systems that hold every expert at one."""


class TooFewPlaces(DoesNotFit):
    """A system does not fit into the places of num_hot experts per layer that every system of a comparison gets."""


@dataclass(frozen=True)
class ReplayOptions:
    """Options that every system gets; a system may ignore some."""

    policy: Policy
    budget: Budget
    loss: LossTable
    prior: ImportanceScore
    """Popularity known beforehand: what caches start from."""
    clairvoyant: bool = False
    """The policy scores the decode itself instead of the prompt: the oracle."""
    predictor: NextLayer | None = None
    """Predictor by which systems prefetch; None: as accurate as each system has published."""
    widest: int = WIDTHS[-1]
    """The widest width that the device's replicas hold; plans that ask for more get it."""
    gpu_bytes: int | None = None
    """GPU memory for experts, where a system can use any number of bytes; None: that of num_hot full-precision ones."""
    own: dict[str, float | str] = field(default_factory=dict)
    """Options of single systems beside these fields, by name."""

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """An option in low..high. Raises ConfigError for anything else."""
        value = self.own.get(name, default)
        if isinstance(value, str) or not low <= value <= high:
            raise ConfigError(f"{name} must lie in {low:g}..{high:g}, got {value!r}")
        return value

    def choice(self, name: str, known: tuple[T, ...], default: T | None = None) -> T:
        """One of the known ones; the first unless told otherwise."""
        value = self.own.get(name, known[0] if default is None else default)
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")
        return next(one for one in known if one == value)

    def gpu_memory(self, costs: Costs) -> int:
        """Bytes of the GPU's memory that is for experts."""
        return slots_bytes(costs.shape, self.budget.num_hot) if self.gpu_bytes is None else self.gpu_bytes

    def room(self, costs: Costs) -> int:
        """Bytes of experts that stay in it, of the whole model."""
        shape = costs.shape
        if self.gpu_bytes is not None:
            return self.gpu_bytes - slots_bytes(shape, 0)
        return shape.num_layers * min(self.budget.num_hot, shape.num_experts) * shape.expert_bytes

    def held(self, costs: Costs, expert_bytes: int) -> int:
        """Experts of the whole model that stay in it if each takes so many bytes."""
        return min(self.room(costs) // expert_bytes, costs.shape.num_layers * costs.shape.num_experts)

    def popular(self, num: int) -> NDArray[np.bool_]:
        """[L, E], the most popular experts: a cache's content before the first request."""
        return highest(self.prior.values, num)

    @property
    def policy_name(self) -> str:
        return "oracle" if self.clairvoyant else self.policy.name


def beside_host_memory(costs: Costs, options: ReplayOptions) -> Memory:
    """Memory of systems that keep every expert in host memory and num_hot per layer on the GPU."""
    return Memory(options.gpu_memory(costs), host=all_experts_bytes(costs.shape))


@dataclass(frozen=True)
class System:
    """Name of a system, its assumptions, its replay, its memory and whether it follows a placement policy.

    The assumptions are printed beside every number. `memory`: bytes of the whole model's experts by place, which are
    checked against the hardware before a replay.
    """

    name: str
    assumptions: tuple[str, ...]
    replay: Callable[[Batches, Costs, ReplayOptions], Outcome]
    memory: Callable[[Costs, ReplayOptions], Memory] = beside_host_memory
    follows_policy: bool = False
    fills_memory: bool = False
    """Whether it can use any number of bytes on the GPU (`ReplayOptions.gpu_bytes`), not only whole experts."""
    options: tuple[str, ...] = ()
    """Names in `ReplayOptions.own`."""
