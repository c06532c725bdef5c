"""The joint plan of a live run: tier and width of every expert, for the requests that run, on modelled hardware.

    GPU memory of K full-precision experts per layer -> the fastest plan that is expected to lose no more than the
    paper's plan with the same memory and average bits, in nats where the replicas were made with text

What an expert may be (planning/joint.py chooses) and what each choice costs:

    gpu      what one more expert adds to a layer      device   what one more expert adds to a command
    host     the host's CPU, beside its memory         moving   bytes over the link from one choice to another

The lab's system `joint` plans by the same rule, with widths of its own. A pure function of scores and of the plan
before, so that plugin and exact replay plan alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import BYTE_BITS, FULL_PRECISION_BITS, REPLICA_WIDTHS, WIDTHS
from ndp_device.timing.work import PS_PER_S
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.prices import MeasuredPrices
from vllm_ndp.planning.bitwidths import LossTable, nominal_loss, powers
from vllm_ndp.planning.joint import Choice, JointPlan, JointProblem, least_time
from vllm_ndp.planning.plan import BitwidthPlan, Placement
from vllm_ndp.planning.replanner import Assigned

TIER_SETS = ("gpu+device", "gpu+host+device", "gpu+host", "gpu")
NATS, OF_ONE_BIT = "nats", "units of 1 bit"
"""Unit of a plan's loss: nats a token, or what each expert loses at 1 bit, the mean over layers."""
STEPS_TO_COME = 256
"""Decode steps over which moving is weighed unless it is said otherwise: a guess, about an answer's length."""
_SHARES = 65
"""Chances of an expert at which its time is computed; between them it is a straight line."""


@dataclass(frozen=True)
class Menu:
    """Choices for an expert on this hardware, and the cost of each to run n rows through."""

    costs: Costs
    widths: Mapping[str, Sequence[int]]
    """Widths in each tier, in the order of its choices."""
    max_rows: int
    prices: MeasuredPrices | None = None
    """Prices of this machine; None: those of the simulated hardware."""
    num_devices: int = 1
    """Devices that work on a layer at once, each with an equal share of the work."""

    @property
    def tiers(self) -> str:
        return "+".join(self.widths)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        replica = self.costs.replica_bytes
        return tuple(Choice(tier, bits, replica(bits)) for tier, widths in self.widths.items() for bits in widths)

    def index(self, tier: str) -> NDArray[np.int64]:
        """[256], the choice of each width in a tier, -1 where there is none."""
        found = np.full(256, -1)
        for c, choice in enumerate(self.choices):
            if choice.tier == tier:
                found[choice.bits] = c
        return found

    @cached_property
    def ps(self) -> NDArray[np.float64]:
        """[C, rows], one expert's time on its side."""
        prices, rows = self.prices or self.costs, range(1, self.max_rows + 1)
        return np.array([[0.0, *(prices.expert_ps(c.tier, c.bits, n) for n in rows)] for c in self.choices])

    @cached_property
    def moved_bytes(self) -> NDArray[np.float64]:
        """[C, C], over the link from one choice to another: the device and the host hold every width that they have.

        Replicas are nested: a wider one on the GPU needs its further planes and the scales of its width, a narrower one
        the scales alone. Where replicas have no 8 bits, these are rounded from the checkpoint's weights on arrival."""
        shape = self.costs.shape
        replicas = REPLICA_WIDTHS if self.costs.has_bytes else WIDTHS
        moved = np.zeros((len(self.choices), len(self.choices)))
        for to, after in enumerate(self.choices):
            if after.tier != "gpu":
                continue
            for start, before in enumerate(self.choices):
                moved[start, to] = after.held_bytes if after.bits in replicas else shape.expert_bytes
                if before.tier == "gpu" and max(before.bits, after.bits) <= WIDTHS[-1]:
                    planes = shape.weights_per_expert * min(before.bits, after.bits) // 8
                    moved[start, to] -= planes
        np.fill_diagonal(moved, 0.0)
        return moved

    def where(self, tier: str) -> NDArray[np.bool_]:
        """[C]."""
        return np.array([choice.tier == tier for choice in self.choices])

    @cached_property
    def bits(self) -> NDArray[np.uint8]:
        return np.array([choice.bits for choice in self.choices], np.uint8)

    @cached_property
    def openings(self) -> NDArray[np.float64]:
        """[C], picoseconds that a layer takes beside its experts if it has any of a choice."""
        prices = self.prices or self.costs
        return np.array([prices.opening_ps(choice.tier, choice.bits) for choice in self.choices], np.float64)

    @cached_property
    def _expected(self) -> NDArray[np.float64]:
        """[rows, C, shares], an expert's time in a step of so many rows that each choose it with that chance."""
        shares = np.linspace(0.0, 1.0, _SHARES)
        expected = np.zeros((self.max_rows + 1, len(self.choices), _SHARES))
        for rows in range(1, self.max_rows + 1):
            ways = np.array([math.comb(rows, n) for n in range(rows + 1)], np.float64)
            likely = ways * powers(shares, rows) * powers(1 - shares, rows)[:, ::-1]
            expected[rows] = (likely * self.ps[:, None, : rows + 1]).sum(axis=2)
        of_device = [choice.tier == "device" for choice in self.choices]
        expected[:, of_device] /= self.num_devices
        return expected

    def problem(
        self,
        importance: NDArray[np.float64],
        rows: int,
        losses: NDArray[np.float64],
        budgets: Mapping[str, float],
        moved: NDArray[np.float64],
        move_ps: float,
    ) -> JointProblem:
        """Make the problem for a step of so many rows that choose experts with this mean importance [L, E]. `losses`
        [L, E, 17]: by width. `moved` [C, L, E]: bytes over the link. `move_ps`: what each adds to a step."""
        chance = np.minimum(self.costs.shape.top_k * importance, 1.0)
        shares = np.linspace(0.0, 1.0, _SHARES)
        return JointProblem(
            self.choices,
            np.stack([np.interp(chance, shares, each) for each in self._expected[rows]]),
            np.moveaxis(importance[:, :, None] * losses[:, :, self.bits], 2, 0) / len(importance),
            budgets,
            moved,
            move_ps,
            1 - powers(1 - chance, rows)[..., rows],
            self.openings,
        )


def losses_by_width(loss: LossTable, unit: str) -> NDArray[np.float64]:
    """[L, E, 17], what every token would lose by an expert of a width in all layers; where replicas have no 8 bits,
    extrapolated. Raises ConfigError where they lack another width: a joint plan chooses among all."""
    if loss.dealt != WIDTHS:
        raise ConfigError(
            f"a joint plan needs replicas of {', '.join(map(str, WIDTHS))} bits, and these have {list(loss.widths)}: "
            f"run `vllm-ndp quantize` with --bits {','.join(map(str, WIDTHS))}"
        )
    table: NDArray[np.float64]
    if unit == NATS and loss.nats is not None:
        table = loss.by_width * (loss.mse.shape[0] * loss.nats * loss.layer_weights[:, None, None])
    else:
        table = loss.by_width / np.maximum(loss.mse[:, :, :1], np.finfo(np.float64).tiny)
    if loss.at_8 is None:
        table[:, :, BYTE_BITS] = table[:, :, WIDTHS[-1]] * nominal_loss(5)
    return table


def unit_of(loss: LossTable) -> str:
    """The unit of losses in joint plans: nats where the replicas say how much losses matter."""
    return OF_ONE_BIT if loss.nats is None else NATS


LIVE_WIDTHS = {"gpu": (16, 8, 4, 3, 2), "host": (16,), "device": (8, 4, 3, 2, 1)}
"""8 bits where the replicas have them."""
_MOST_ROWS = 64
"""Most rows of a step; plans do not tell larger batches apart."""


class JointRule:
    """Plans one after the other: each starts from what the one before has left."""

    def __init__(
        self,
        costs: Costs,
        widths: Mapping[str, Sequence[int]],
        losses: NDArray[np.float64],
        gpu_bytes: float,
        *,
        prices: MeasuredPrices | None = None,
        num_devices: int = 1,
        most_loss: float | None = None,
        steps_to_come: float = STEPS_TO_COME,
    ) -> None:
        """`widths`: as of Menu. `losses` [L, E, 17]: by width. `gpu_bytes`: for all these layers. `prices`: of this
        machine; None: of the simulated hardware. `num_devices`: that share a layer's experts. `most_loss`: None: what
        the paper's plan loses."""
        self._losses, self._most_loss, self._budgets = losses, most_loss, {"gpu": gpu_bytes}
        self._menu = lru_cache(_MOST_ROWS)(lambda rows: Menu(costs, widths, rows, prices, num_devices))
        bytes_per_s = costs.hardware.link.bulk_bytes_per_s if prices is None else prices.bulk_bytes_per_s
        self._move_ps = PS_PER_S / bytes_per_s / steps_to_come
        self.chosen: NDArray[np.int64] | None = None
        """[L, E] of the last plan."""

    @classmethod
    def live(
        cls,
        costs: Costs,
        tiers: str,
        loss: LossTable,
        num_hot: int,
        prices: MeasuredPrices | None = None,
        num_devices: int = 1,
    ) -> JointRule:
        """`tiers`: names with + between them. `num_hot`: K, whose full precision is the budget."""
        absent = () if costs.has_bytes else (BYTE_BITS,)
        widths = {tier: [bits for bits in LIVE_WIDTHS[tier] if bits not in absent] for tier in tiers.split("+")}
        gpu_bytes = float(len(loss.mse) * num_hot * costs.shape.expert_bytes)
        losses = losses_by_width(loss, unit_of(loss))
        return cls(costs, widths, losses, gpu_bytes, prices=prices, num_devices=num_devices)

    def choose(
        self,
        importance: NDArray[np.float64],
        rows: int,
        placement: Placement,
        bits: BitwidthPlan,
        streamed: NDArray[np.bool_] | None = None,
    ) -> JointPlan:
        """For a step of so many rows that choose experts with this mean importance [L, E]. placement and bits: the
        paper's plan for them. streamed [L, E]: experts that prompts streamed, which stay at 8 bits or more at no cost.
        Raises ConfigError where nothing keeps `most_loss`."""
        menu = self._menu(rows)
        moved = np.zeros((len(menu.choices), *importance.shape))
        if self.chosen is not None:
            moved = np.moveaxis(menu.moved_bytes[self.chosen], 2, 0).copy()
            if streamed is not None:
                wide = menu.where("gpu") & (menu.bits >= BYTE_BITS)
                moved[wide] = np.where(streamed, 0.0, moved[wide])
        problem = menu.problem(importance, rows, self._losses, self._budgets, moved, self._move_ps)
        if self._most_loss is not None:
            found = least_time(problem, self._most_loss)
        else:
            cold = menu.index("device")[bits.bits]
            cold = np.where(cold < 0, menu.index("device")[WIDTHS[-1]], cold)  # 16 may be no choice there
            papers = np.where(placement.hot, menu.index("gpu")[FULL_PRECISION_BITS], cold)
            found = JointPlan(problem, papers, problem.time_ps(papers), problem.lost(papers))
            with suppress(ConfigError):  # the search is no proof: the paper's plan fits, so there is one
                found = min(found, least_time(problem, found.loss), key=lambda plan: plan.time_ps)
        self.chosen = found.chosen
        return found

    def plan(
        self, importance: NDArray[np.float64], num_requests: int, placement: Placement, bits: BitwidthPlan
    ) -> Assigned:
        """For requests whose scores have this mean [L, E]. placement and bits: the paper's plan for them."""
        before, rows = self.chosen, min(num_requests, _MOST_ROWS)
        menu, chosen = self._menu(rows), self.choose(importance, rows, placement, bits).chosen
        hot, warm = menu.where("gpu")[chosen], menu.where("host")[chosen]
        widths = menu.bits[chosen]
        placement = Placement(hot, warm, np.where(hot, widths, 0))
        bits = BitwidthPlan(np.where(hot, 0, widths))
        if before is None:
            return Assigned(placement, bits, hot, 0)
        return Assigned(placement, bits, hot & (chosen != before), int(menu.moved_bytes[before, chosen].sum()))
