"""When a prefill ends: score the prompt, choose the common hot set, give each request its bits, migrate once.

Every decision comes from `vllm_ndp.planning`; this file only feeds it and carries out what it says.
Runs between two steps, so a step sees one epoch from its first layer to its last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ndp_device.errors import DeviceError, DeviceUnavailable
from vllm_ndp.integration.batch import TrackedRequest
from vllm_ndp.planning.bitwidths import LossTable, full_precision
from vllm_ndp.planning.plan import Budget, Placement, Plan, mask_of_bits, union_of_widths
from vllm_ndp.planning.policies import Policy
from vllm_ndp.planning.stats import RoutingStats

if TYPE_CHECKING:
    from vllm_ndp.integration.controller import NdpController


@dataclass(frozen=True)
class Replanned:
    """What one change of plan did."""

    epoch: int
    migrated_experts: int


class Planner:
    def __init__(
        self, controller: NdpController, policy: Policy, budget: Budget, loss: LossTable, *, identity: bool
    ) -> None:
        self._controller = controller
        self.policy = policy
        self.budget = budget
        self.loss = loss
        self._identity = identity
        self.epoch = 0
        self.placement: Placement | None = None

    def start(self) -> None:
        """Before the first prompt nothing is known: the lowest ids are hot, as good as any."""
        layers, experts = self._controller.pool_shape
        hot = np.zeros((layers, experts), dtype=np.bool_)
        hot[:, : self.budget.num_hot] = True
        self._migrate(Placement(hot))

    def score(self, request: TrackedRequest) -> None:
        """Gather the prompt's routing from the sidecar, whoever wrote it, and score it once."""
        sidecar = self._controller.sidecar
        slots = sidecar.slots(request.blocks, np.arange(request.prompt_len))
        ids, weights = sidecar.read(slots)
        stats = RoutingStats.from_choices(ids, weights, self._controller.pool_shape[1])
        request.score = self.policy.score(stats)

    def replan(self, running: Sequence[TrackedRequest]) -> Replanned:
        """One placement for all running requests, one plan each, installed and activated under a new epoch."""
        scored = [(request, request.score) for request in running if request.score is not None]
        placement = self.policy.place([score for _, score in scored], self.placement, self.budget)
        migrated = self._migrate(placement)
        self.epoch += 1
        for request, score in scored:
            bits = (
                full_precision(placement)
                if self._identity
                else self.policy.assign(score, placement, self.loss, self.budget)
            )
            request.bits = Plan(self.epoch, placement, bits).bits
        self._install([request for request, _ in scored])
        return Replanned(self.epoch, migrated)

    def _migrate(self, placement: Placement) -> int:
        """Copy experts that became hot into the slots of those that no longer are; returns how many moved."""
        moved = 0
        for layer in range(placement.hot.shape[0]):
            slots = self._controller.slots(layer)
            wanted = set(np.flatnonzero(placement.hot[layer]).tolist())
            free = [slot for slot, expert in enumerate(slots.expert_in) if expert not in wanted]
            for slot, expert in zip(free, sorted(wanted - set(slots.expert_in)), strict=False):
                slots.migrate(slot, expert, partial(self._controller.streamer.fill, layer, expert))
                moved += 1
        self.placement = placement
        return moved

    def _install(self, running: Sequence[TrackedRequest]) -> None:
        plans = [request.bits for request in running if request.bits is not None]
        widths = union_of_widths(plans, self._controller.pool_shape)
        if self._controller.balancer is not None and self.placement is not None:
            widths[self.placement.hot] |= mask_of_bits(self._controller.balancer.spill_bits)
        client = self._controller.device.client
        with contextlib.suppress(DeviceUnavailable, DeviceError):  # the client installs it when the device is back
            client.install_plan(self.epoch, widths)
        client.activate_plan(self.epoch)
        if client.missing:
            layer, expert, bits = client.missing[0]
            raise RuntimeError(
                f"the device cannot serve expert {expert} of layer {layer} at {bits} bits "
                f"({len(client.missing)} missing): rebuild the replicas with `vllm-ndp quantize`"
            )
