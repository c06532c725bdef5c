"""When to plan, and carrying it out: gather a prompt's routing, replan between two steps, install, migrate.

Every decision is `layer/run.py`'s; the exact replay calls the same. Runs between two steps, so a step sees
one epoch from its first layer to its last.
"""

from __future__ import annotations

import math
import zlib

import numpy as np

from vllm_ndp.integration.batch import RequestTracker, TrackedRequest
from vllm_ndp.integration.device_link import DeviceView
from vllm_ndp.integration.hot_experts import HotExperts
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.integration.step import Step
from vllm_ndp.layer.run import Run
from vllm_ndp.layer.split import Pairs
from vllm_ndp.planning.plan import union_of_widths
from vllm_ndp.planning.replanner import PlanChange
from vllm_ndp.planning.stats import RoutingStats


class PlanRunner:
    def __init__(self, run: Run[str], requests: RequestTracker, hot: HotExperts, device: DeviceView) -> None:
        self.run = run
        self._requests, self._hot, self._device = requests, hot, device
        self.checksum = 0
        """Checksum of the plans in force, which ranks compare."""
        self.prefills = 0
        self.migrated_experts = 0
        self.kept_experts = 0

    def start(self) -> None:
        """Fill the slots with the first placement; whatever cannot be read is said at start-up."""
        hot, link, setup = self.run.planner.placement.hot, self._device.link, self._device.setup
        has_prompts = link is not None and setup.splits_prefill
        if link is not None and has_prompts:
            link.begin_install(self.run.planner.epoch, np.zeros(hot.shape, np.uint8), hot)  # prompts come before a plan
        self._hot.place(self.run.planner.placement)
        self._hot.wait_for_all()
        if link is not None and has_prompts and setup.stored_bits:  # the device makes them all, which takes seconds
            link.wait_installed(math.inf)

    def replan(self) -> dict[str, TrackedRequest]:
        """Make new plans if a prefill has ended whose request is still there. Returns the requests that got one.

        Experts are on their way into their slots and to the device when this returns.
        """
        there = self._requests.requests
        replanned = self.run.replan(there)
        if (change := replanned.change) is not None:
            self._announce(change)
        if replanned.moves_slots:
            self._hot.place(self.run.planner.placement)
        self.run.clock.migrate(replanned.num_moved, replanned.moved_bytes)
        self.migrated_experts += replanned.num_moved
        if change is None:
            return {}
        self.prefills += replanned.num_ended
        self.kept_experts += change.num_kept
        return {name: there[name] for name in change.plans}

    def _announce(self, change: PlanChange[str]) -> None:
        """Say to the device what may be asked for under the new plans."""
        widths = union_of_widths((plan.bits for plan in change.plans.values()), change.placement.hot.shape)
        widths[change.placement.warm] = 0  # no decode row of theirs goes to the device
        if (link := self._device.link) is not None:
            link.wait_installed()
            link.begin_install(change.epoch, widths, change.placement.hot)
        self.checksum = zlib.crc32(change.placement.tiers.tobytes(), change.epoch)
        for plan in change.plans.values():
            self.checksum = zlib.crc32(plan.bits.bits.tobytes(), self.checksum)
            if plan.bits.from_weight is not None:
                self.checksum = zlib.crc32(plan.bits.from_weight.tobytes(), self.checksum)

    def score_ended(self, step: Step) -> None:
        """After a step: score the prompts that ended in it, and note which streamed experts the slots keep."""
        ended = [(request.request_id, request, self._stats(request, step.parts.sidecar)) for request in step.ending]
        for _, request, stats in ended:
            request.prefilled, request.num_loaded = True, request.prompt_len - stats.num_tokens
        self.run.end_prefills(ended, self._requests.requests.values)

    def slots_to_keep(self, step: Step, layer: int, pairs: Pairs) -> dict[int, int]:
        """Slots for the prefill pairs that are about to be streamed: expert -> slot for those that will be hot."""
        ending = step.ending
        if not (ending and self.run.planner.rules.keeps_streamed):
            return {}
        stats = [self._stats(request, step.parts.sidecar, layer) for request in ending]
        scores = [request.score for request in self._requests.requests.values() if request.score is not None]
        resident = self.run.planner.predict_resident(layer, scores, stats, np.unique(pairs.experts).tolist())
        return self._hot.slots_to_keep(layer, self.run.planner.placement.hot[layer], resident)

    def _stats(self, request: TrackedRequest, sidecar: RoutingSidecar, layer: int | None = None) -> RoutingStats:
        """The prompt's routing, of one layer if one is named, even where another request wrote it; without tokens
        whose KV came without routing."""
        ids, weights = sidecar.read(sidecar.noted(request.blocks, request.prompt_len)[1], layer)
        return RoutingStats.from_choices(ids, weights, self.run.planner.placement.hot.shape[1])
