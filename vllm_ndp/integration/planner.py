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
from numpy.typing import NDArray

from ndp_device.errors import DeviceError, DeviceUnavailable
from ndp_device.widths import FLAG_OF_BITS
from vllm_ndp.integration.batch import TrackedRequest
from vllm_ndp.planning.bitwidths import LossTable, full_precision
from vllm_ndp.planning.importance import scores_for_bits
from vllm_ndp.planning.plan import Budget, Placement, Plan, keep_streamed, union_of_widths
from vllm_ndp.planning.policies import Policy
from vllm_ndp.planning.stats import RoutingStats

if TYPE_CHECKING:
    from vllm_ndp.integration.controller import NdpController


@dataclass(frozen=True)
class Replanned:
    """What one change of plan did: experts that became hot, and were moved for it or kept from a prefill's stream."""

    epoch: int
    migrated_experts: int
    kept_experts: int


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
        self._held: NDArray[np.bool_] | None = None  # by the slots, if a prefill that has just ended kept something
        self._is_settled = True

    def start(self) -> None:
        """Before the first prompt nothing is known: the lowest ids are hot, as good as any."""
        layers, experts = self._controller.pool_shape
        hot = np.zeros((layers, experts), dtype=np.bool_)
        hot[:, : self.budget.num_hot] = True
        self._migrate(Placement(hot))
        self._controller.migrator.wait_for_all()  # whatever cannot be read is said at start-up

    def score(self, request: TrackedRequest) -> None:
        """Once, when its prefill has ended."""
        request.score = self.policy.score(self.stats(request))

    def stats(self, request: TrackedRequest) -> RoutingStats:
        """The prompt's routing, gathered from the sidecar, whoever wrote it."""
        sidecar = self._controller.sidecar
        slots = sidecar.slots(request.blocks, np.arange(request.prompt_len))
        ids, weights = sidecar.read(slots)
        return RoutingStats.from_choices(ids, weights, self._controller.pool_shape[1])

    def replan(self, running: Sequence[TrackedRequest]) -> Replanned:
        """One placement for all running requests, one plan each, under a new epoch.

        Experts are on their way into their slots and to the device when this returns: see Migrator and `settle`.
        """
        self.settle()
        scored = [(request, request.score) for request in running if request.score is not None]
        scores = scores_for_bits([score for _, score in scored], self._controller.settings.bits_for)
        placement = self._place(running)
        became_hot, moved = placement.moves_from(self.placement), placement.hot
        moved = moved & ~(self._held if self._held is not None else self._hot)
        self._held = None
        self.epoch += 1
        for (request, _), score in zip(scored, scores, strict=True):
            bits = (
                full_precision(placement)
                if self._identity
                else self.policy.assign(score, placement, self.loss, self.budget)
            )
            request.bits = Plan(self.epoch, placement, bits).bits
        self._begin_install([request for request, _ in scored], placement)
        self._migrate(placement)
        return Replanned(self.epoch, int(moved.sum()), int((became_hot & ~moved).sum()))

    @property
    def _hot(self) -> NDArray[np.bool_]:
        assert self.placement is not None
        return self.placement.hot

    def _place(self, requests: Sequence[TrackedRequest]) -> Placement:
        scores = [request.score for request in requests if request.score is not None]
        return self.policy.place(scores, self.placement, self.budget)

    # -- what a prefill streamed and will be hot stays ------------------------------------------------------------

    def note_streamed(self, running: Sequence[TrackedRequest], streamed: NDArray[np.bool_]) -> None:
        """A step ended that ended a prefill: fix what the slots hold now. streamed [L, E]: by its prefill rows."""
        self._held = keep_streamed(self._hot, self._place(running), streamed, self.budget.num_hot)

    def foresee(
        self, layer: int, running: Sequence[TrackedRequest], ending: Sequence[TrackedRequest], streamed: Sequence[int]
    ) -> dict[int, int]:
        """Within the step: expert -> slot for those of `streamed` that will be hot, from this layer's routing alone.

        Right for every policy that looks at one layer at a time; what another one wants otherwise moves afterwards.
        """
        scores = [request.score for request in running if request.score is not None]
        scores += [self.policy.score(self._stats_of_layer(layer, request)) for request in ending]
        wanted = self.policy.place(scores, self.placement, self.budget)
        passing = np.zeros_like(self._hot)
        passing[layer, list(streamed)] = True
        held = keep_streamed(self._hot, wanted, passing, self.budget.num_hot)[layer]
        expert_in = self._controller.slots(layer).expert_in
        free = sorted((e, slot) for slot, e in enumerate(expert_in) if e < 0 or not held[e])
        return {int(e): slot for e, (_, slot) in zip(np.flatnonzero(held & ~self._hot[layer]), free, strict=False)}

    def _stats_of_layer(self, layer: int, request: TrackedRequest) -> RoutingStats:
        """The prompt's routing in one layer, as if every layer had routed like that."""
        sidecar = self._controller.sidecar
        ids, weights = sidecar.read(sidecar.slots(request.blocks, np.arange(request.prompt_len)), layer)
        layers, experts = self._controller.pool_shape
        one = RoutingStats.from_choices(ids, weights, experts)
        return RoutingStats(one.counts.repeat(layers, 0), one.scores.repeat(layers, 0), one.num_tokens, one.top_k)

    def restore(self) -> int:
        """The prompts that were about to change the plan are gone: slots hold the placement again. Experts moved."""
        moved = 0 if self._held is None else int((self._hot & ~self._held).sum())
        self._held = None
        self._migrate(Placement(self._hot))
        return moved

    def _migrate(self, placement: Placement) -> None:
        """Copy experts that became hot into the slots of those that no longer are, beside the step to come."""
        migrator = self._controller.migrator
        migrator.wait_for_all()
        for layer in range(placement.hot.shape[0]):
            slots = self._controller.slots(layer)
            wanted = set(np.flatnonzero(placement.hot[layer]).tolist())
            free = [slot for slot, expert in enumerate(slots.expert_in) if expert not in wanted]
            coming = zip(free, sorted(wanted - set(slots.expert_in)), strict=False)
            fill = self._controller.streamer.fill
            migrator.begin(
                layer, [partial(slots.migrate, slot, expert, partial(fill, layer, expert)) for slot, expert in coming]
            )
        self.placement = placement

    def _begin_install(self, running: Sequence[TrackedRequest], placement: Placement) -> None:
        plans = [request.bits for request in running if request.bits is not None]
        widths = union_of_widths(plans, self._controller.pool_shape)
        if self._controller.balancer is not None:
            widths[placement.hot] |= FLAG_OF_BITS[self._controller.balancer.offload_bits]
        self._is_settled = False
        with contextlib.suppress(DeviceUnavailable, DeviceError):  # the client installs it when the device is back
            self._controller.device.client.begin_install_plan(self.epoch, widths)

    def settle(self) -> None:
        """Before the first message under a plan: wait until the device has prepared what the plan names."""
        if self._is_settled:
            return
        self._is_settled = True
        client = self._controller.device.client
        with contextlib.suppress(DeviceUnavailable, DeviceError):
            client.finish_install_plan()
        client.activate_plan(self.epoch)
        if client.missing:
            layer, expert, bits = client.missing[0]
            raise RuntimeError(
                f"the device cannot serve expert {expert} of layer {layer} at {bits} bits "
                f"({len(client.missing)} missing): rebuild the replicas with `vllm-ndp quantize`"
            )
