"""When to plan, and carrying it out: gather a prompt's routing, replan between two steps, install, migrate.

Every decision comes from `planning.replanner`; the exact replay calls the same. Runs between two steps, so a step sees
one epoch from its first layer to its last.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from vllm_ndp.integration.batch import RequestTracker, TrackedRequest, slot_mapping
from vllm_ndp.integration.device import DeviceView
from vllm_ndp.integration.hot_experts import HotExperts
from vllm_ndp.integration.routing_sidecar import RoutingSidecar
from vllm_ndp.integration.step import Step
from vllm_ndp.layer.split import Pairs
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import union_of_widths
from vllm_ndp.planning.replanner import PlanChange, Replanner
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.simulation.gpu_timing import StepClock


class PlanRunner:
    def __init__(
        self,
        replanner: Replanner,
        requests: RequestTracker,
        hot: HotExperts,
        device: DeviceView,
        clock: StepClock,
    ) -> None:
        self.replanner = replanner
        self._requests, self._hot = requests, hot
        self._device, self._clock = device, clock
        self._ended: list[TrackedRequest] = []  # their prefill ended in the step before
        self.checksum = 0
        """Checksum of the plans in force, which ranks compare."""
        self._arrives_ps = 0  # when what is copied beside decode is there, simulated
        self.prefills = 0
        self.exchanges = 0
        """Plans that changed while requests decoded."""
        self.migrated_experts = 0
        self.kept_experts = 0

    def start(self) -> None:
        """Fill the slots with the first placement; whatever cannot be read is said at start-up."""
        hot = self.replanner.placement.hot
        self._place()
        self._hot.wait_for_all()
        if (link := self._device.link) is not None and self._device.facts.computes_prompts:
            link.begin_install(self.replanner.epoch, np.zeros(hot.shape, np.uint8), hot)  # prompts come before a plan

    def replan(self) -> dict[str, TrackedRequest]:
        """Make new plans if a prefill has ended whose request is still there, or if decode asks for it. Returns the
        requests that got one.

        Experts are on their way into their slots and to the device when this returns.
        """
        ended, self._ended = self._ended, []
        if not ended:
            return self._follow()
        alive = [request for request in ended if self._requests.requests.get(request.request_id) is request]
        if not alive:
            self._migrate(int(self.replanner.restore().sum()))
            return {}
        running = {name: request for name, request in self._requests.requests.items() if request.score is not None}
        change = self.replanner.replan({name: r.score for name, r in running.items() if r.score is not None})
        self._carry_out(change, running)
        self._migrate(change.num_moved, change.moved_bytes)
        self.prefills += len(alive)
        self.kept_experts += change.num_kept
        return running

    def _follow(self) -> dict[str, TrackedRequest]:
        """Exchange experts that decode asks for, if their copies are due."""
        if not self.replanner.follows:
            return {}
        running = {name: request for name, request in self._requests.requests.items() if request.plan is not None}
        followed = self.replanner.follow({name: r.plan for name, r in running.items() if r.plan is not None})
        if (change := followed.change) is not None:
            self._clock.wait_until(self._arrives_ps)
            for request in running.values():
                request.score = change.score
            self._carry_out(change, running)
            self._place()
            self.migrated_experts += change.num_moved
            self.exchanges += 1
        if followed.begun:
            self._arrives_ps = self._clock.now_ps + self._clock.model.migration_ps(followed.begun)
        return running if change is not None else {}

    def _carry_out(self, change: PlanChange[str], running: Mapping[str, TrackedRequest]) -> None:
        """Give the requests their plans, and say to the device what may be asked for under them."""
        if (link := self._device.link) is not None:
            link.wait_installed()
        for name, plan in change.plans.items():
            running[name].plan = plan
        if (devices := self._device.devices) is not None:
            scores = [score for name in change.plans if (score := running[name].score) is not None]
            self._clock.wait_until(self._clock.now_ps + devices.follow(change.plans.values(), scores))
        widths = union_of_widths((plan.bits for plan in change.plans.values()), change.placement.hot.shape)
        widths[change.placement.warm] = 0  # no decode row of theirs goes to the device
        if (link := self._device.link) is not None:
            link.begin_install(change.epoch, widths, change.placement.hot)
        placement = change.placement
        self.checksum = zlib.crc32(placement.tiers.tobytes(), change.epoch)
        for plan in change.plans.values():
            self.checksum = zlib.crc32(plan.bits.bits.tobytes(), self.checksum)
            if plan.bits.from_weight is not None:
                self.checksum = zlib.crc32(plan.bits.from_weight.tobytes(), self.checksum)

    def _place(self) -> None:
        self._hot.place(self.replanner.placement)

    def _migrate(self, num_experts: int, num_bytes: int | None = None) -> None:
        self._place()
        self._clock.migrate(num_experts, num_bytes)
        self.migrated_experts += num_experts

    def score_ended(self, step: Step) -> None:
        """After a step: score the prompts that ended in it, and note which streamed experts the slots keep. If plans
        follow decode, also note what the step's decode rows chose."""
        if self.replanner.follows and step.started:
            rows, sidecar = step.rows, step.parts.sidecar
            self.replanner.see(sidecar.read_ids(rows.expected_slot_mapping(sidecar.block_size)[rows.decode]))
        for request in step.ending:
            stats = self._stats(request, step.parts.sidecar)
            request.score, request.num_loaded = self.replanner.score(stats), request.prompt_len - stats.num_tokens
            request.prefilled = True
            self._ended.append(request)
        if self._ended:
            self.replanner.keep(self._scores(), step.streamed)

    def slots_to_keep(self, step: Step, layer: int, pairs: Pairs) -> dict[int, int]:
        """Slots for the prefill pairs that are about to be streamed: expert -> slot for those that will be hot."""
        ending = step.ending
        if not (ending and self.replanner.rules.keeps_streamed and self._hot.streamer.keeps):
            return {}
        stats = [self._stats(request, step.parts.sidecar, layer) for request in ending]
        resident = self.replanner.predict_resident(layer, self._scores(), stats, np.unique(pairs.experts).tolist())
        return self._hot.slots_to_keep(layer, self.replanner.placement.hot[layer], resident)

    def _scores(self) -> list[ImportanceScore]:
        """Scores of every request whose prefill has ended."""
        return [request.score for request in self._requests.requests.values() if request.score is not None]

    def _stats(self, request: TrackedRequest, sidecar: RoutingSidecar, layer: int | None = None) -> RoutingStats:
        """The prompt's routing, of one layer if one is named, even where another request wrote it; without tokens
        whose KV came without routing."""
        entries = slot_mapping(request.blocks, np.arange(request.prompt_len), sidecar.block_size)
        if (noted := sidecar.noted(entries)) is not None:
            entries = entries[noted]
        ids, weights = sidecar.read(entries, layer)
        return RoutingStats.from_choices(ids, weights, self.replanner.placement.hot.shape[1])
