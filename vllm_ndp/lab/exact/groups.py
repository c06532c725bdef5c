"""Groups of requests on the plugin's own `Run`: prompts one after the other, then all decode in step; then the next.

A trace with fewer layers than the model runs with its own ones, whose times stand for those of the whole model: times
of prompts and moves here, those of decode steps in lab/vectorised/outcome.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.model_shape import WholeModel
from ndp_device.timing.model import DeviceModel
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.gpu_timing import LayerTime
from vllm_ndp.lab.exact.engine import Engine, StepRun, alone, modelled_host
from vllm_ndp.layer.split import Split
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement, top_experts
from vllm_ndp.planning.replanner import PlannerRules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ndp.lab.vectorised.batches import Batches
    from vllm_ndp.planning.bitwidths import LossTable
    from vllm_ndp.planning.importance import ImportanceScore
    from vllm_ndp.planning.policies import Policy
    from vllm_ndp.planning.stats import RoutingStats


class Groups:
    """The groups of `batches`, one after the other on one host: each finds what the one before has left."""

    def __init__(
        self,
        batches: Batches,
        costs: Costs,
        rules: PlannerRules,
        *,
        offload_bits: int = 0,
        splits_prefill: bool = False,
    ) -> None:
        g, b, d, layers, k = batches.shape
        self._batches, self._costs = batches, costs
        self._factor = costs.shape.num_layers / layers
        own = costs if layers == costs.shape.num_layers else replace(costs, shape=_of_layers(costs.shape, layers))
        setup = modelled_host(own, rules, offload_bits=offload_bits, splits_prefill=splits_prefill)
        self.engine = Engine(batches.trace, setup, rules, own)
        self._device = DeviceModel(own.hardware)
        self._steps = 0
        self._at: NDArray[np.uint8] = np.zeros((layers, b, batches.num_experts), np.uint8)  # bits on the device
        self.widths: NDArray[np.uint8] = np.zeros((g, b, d, layers, k), np.uint8)
        """Where decode pairs ran: 0 on the GPU, else the bits on the device."""
        self.moe_ps, self.device_ps, self.gpu_ps = np.zeros((3, g, d, layers))
        self.prefill_ps: NDArray[np.float64] = np.zeros((g, b))
        """Of the whole model, with what moved before the prompt."""
        self.migration_ps: NDArray[np.float64] = np.zeros(g)
        """Of the whole model, before the first decode step."""
        self.moved = 0.0
        """Experts of the whole model that plans moved to the GPU."""

    def run(self) -> None:
        for group in range(len(self._batches.requests)):
            self.prompts(group)
            self.decode(group)

    def prompts(self, group: int) -> None:
        """Each prompt in a step of its own."""
        order, ends, splits = self._batches.trace.executed
        gpu, layers = self._costs.gpu, self._costs.shape.num_layers
        for place, request in enumerate(self._batches.requests[group].tolist()):
            rows = order[ends[request] : splits[request]]
            run = self._step(rows)
            positions = self._batches.trace.position[rows].astype(np.int64)
            start, end = int(positions[0]), int(positions[-1]) + 1
            attended = int(positions.sum()) + len(rows)
            before = sum(gpu.before_experts_ps(len(rows), end, attended, [(start, end)])) + gpu.head_ps(1)
            beside = self._factor * sum(map(_experts_ps, run.time.layers)) + layers * self._costs.overhead_ps
            self.prefill_ps[group, place] = before + beside + self._moved_ps(run.migrated_experts)

    def decode(self, group: int) -> None:
        """All requests of the group, until the longest is done."""
        batches, engine, requests = self._batches, self.engine, self._batches.requests[group].tolist()
        order, _, splits = batches.trace.executed
        valid, layers = batches.valid[group], np.arange(batches.shape[3])[:, None]
        lengths = valid.sum(axis=1).tolist()
        engine.watch = self._note
        for step in range(max(lengths)):
            running = np.flatnonzero(valid[:, step])
            for place, length in enumerate(lengths):
                if length == step:
                    engine.finish(requests[place])
            run = self._step(np.array([order[splits[requests[place]] + step] for place in running.tolist()]))
            if not step:
                self.migration_ps[group] = self._moved_ps(run.migrated_experts)
            times = run.time.layers
            self.moe_ps[group, step] = [_experts_ps(time) for time in times]
            self.device_ps[group, step] = [time.device_ps for time in times]
            self.gpu_ps[group, step] = [time.shared_ps + time.hot_ps for time in times]
            ids = batches.ids[group, running, step]  # [R, L, k]
            place_of = np.arange(len(running))[:, None, None]
            widths = self._at[layers, place_of, ids]
            self.widths[group, running, step] = widths
            self._at[:] = 0
        engine.watch = None
        for request in requests:  # the longest ones
            engine.finish(request)

    def _step(self, rows: NDArray[np.int64]) -> StepRun:
        run = alone(self.engine.step(self._steps, rows), self._device)
        self._steps += 1
        return run

    def _note(self, layer: int, split: Split) -> None:
        if pairs := split.device:
            self._at[layer, pairs.rows, pairs.experts] = pairs.bits

    def _moved_ps(self, experts: int) -> int:
        moved = self._factor * experts
        self.moved += moved
        return self._costs.gpu.migration_ps(round(moved))


def _experts_ps(time: LayerTime) -> int:
    """What the experts of a layer take, wherever they run."""
    return time.total_ps - time.attention_ps - time.overhead_ps


def _of_layers(shape: WholeModel, num_layers: int) -> WholeModel:
    """The model with so many of its layers of experts."""
    layers = [layer for layer in shape.decoder if layer.has_experts]
    kept = (layers[index * len(layers) // num_layers] for index in range(num_layers))
    return replace(shape, num_layers=num_layers, decoder=tuple(kept))


@dataclass
class Clairvoyant:
    """A policy that knows the decode of each prompt, asked in the order of `decodes`. No fixed placement covers more of
    a group's decode."""

    policy: Policy
    decodes: Sequence[RoutingStats]
    _counts: dict[int, tuple[ImportanceScore, NDArray[np.float64]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "oracle"

    def score(self, stats: RoutingStats) -> ImportanceScore:
        known = self.decodes[len(self._counts)]
        score = self.policy.score(known)
        self._counts[id(score)] = score, known.counts.astype(np.float64)
        return score

    def place(self, scores: Sequence[ImportanceScore], current: Placement | None, budget: Budget) -> Placement:
        known = [self._counts.get(id(score), (score, score.values))[1] for score in scores]
        return top_experts(np.sum(known, axis=0), budget.num_hot)

    def assign(self, score: ImportanceScore, placement: Placement, loss: LossTable, budget: Budget) -> BitwidthPlan:
        return self.policy.assign(score, placement, loss, budget)
