"""The joint plan of a live run: tier and width of every expert, for the requests that run, on modelled hardware.

    GPU memory of K full-precision experts per layer -> the fastest plan that is expected to lose no more than the
    paper's plan with the same memory and average bits, in nats where the replicas were made with text

As the lab's system `joint`, with the widths that a live run has kernels for. A pure function of scores and of the plan
before, so that plugin and exact replay plan alike. Knows prices and losses. Does not know requests or tensors.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import BYTE_BITS, FULL_PRECISION_BITS, WIDTHS
from ndp_device.timing.units import PS_PER_S
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.prices import MeasuredPrices
from vllm_ndp.layer.joint_menu import STEPS_TO_COME, Menu, losses_by_width, unit_of
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.joint import least_time
from vllm_ndp.planning.plan import BitwidthPlan, Placement
from vllm_ndp.planning.replanner import Assigned

LIVE_WIDTHS = {"gpu": (16, 8, 4, 3, 2), "host": (16,), "device": (8, 4, 3, 2, 1)}
"""8 bits where the replicas have them."""
_MOST_ROWS = 64
"""Most rows of a step; plans do not tell larger batches apart."""


class JointRule:
    def __init__(
        self,
        costs: Costs,
        tiers: str,
        loss: LossTable,
        num_hot: int,
        prices: MeasuredPrices | None = None,
        num_devices: int = 1,
    ) -> None:
        """`tiers`: names with + between them. `num_hot`: K, whose full precision is the budget. `prices`: of this
        machine; None: of the simulated hardware. `num_devices`: that share a layer's experts."""
        layers, experts = loss.mse.shape[:2]
        absent = () if costs.has_bytes else (BYTE_BITS,)
        widths = {tier: [bits for bits in LIVE_WIDTHS[tier] if bits not in absent] for tier in tiers.split("+")}
        self._costs, self._losses = costs, losses_by_width(loss, unit_of(loss))
        self._budgets = {"gpu": float(layers * num_hot * costs.shape.expert_bytes)}
        self._menu = lru_cache(_MOST_ROWS)(lambda rows: Menu(costs, widths, rows, prices, num_devices))
        self._bytes_per_s = costs.hardware.link.bulk_bytes_per_s if prices is None else prices.bulk_bytes_per_s
        self._chosen: NDArray[np.int64] | None = None
        self.shape = layers, experts

    def plan(
        self, importance: NDArray[np.float64], num_requests: int, placement: Placement, bits: BitwidthPlan
    ) -> Assigned:
        """For requests whose scores have this mean [L, E]. placement and bits: the paper's plan for them."""
        rows = min(num_requests, _MOST_ROWS)
        menu = self._menu(rows)
        before = self._chosen
        moved = np.zeros((len(menu.choices), *self.shape))
        if before is not None:
            moved = np.moveaxis(menu.moved_bytes[before], 2, 0)
        move_ps = PS_PER_S / self._bytes_per_s / STEPS_TO_COME
        problem = menu.problem(importance, rows, self._losses, self._budgets, moved, move_ps)
        on_device, on_gpu = menu.index("device"), menu.index("gpu")
        # A policy may want 16, which is no choice here.
        cold = on_device[np.where(bits.bits == FULL_PRECISION_BITS, WIDTHS[-1], bits.bits)]
        papers = np.where(placement.hot, on_gpu[FULL_PRECISION_BITS], cold)
        chosen = papers
        try:
            found = least_time(problem, problem.lost(papers))
        except ConfigError:  # the search is no proof: the paper's plan fits, so there is one
            pass
        else:
            if found.time_ps < problem.time_ps(papers):
                chosen = found.chosen
        self._chosen = chosen
        return self._assigned(menu, chosen, before)

    def _assigned(self, menu: Menu, chosen: NDArray[np.int64], before: NDArray[np.int64] | None) -> Assigned:
        hot, warm = menu.where("gpu")[chosen], menu.where("host")[chosen]
        widths = menu.bits[chosen]
        placement = Placement(hot, warm, np.where(hot, widths, 0))
        bits = BitwidthPlan(np.where(hot, 0, widths))
        if before is None:
            return Assigned(placement, bits, hot, 0)
        return Assigned(placement, bits, hot & (chosen != before), int(menu.moved_bytes[before, chosen].sum()))
