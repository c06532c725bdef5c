"""The paper's system and ours: the plugin's own `Run` (layer/run.py) on the groups of a trace, each a few settings.

    context_aware   `execution` 'paper' (arXiv 2512.04476): hot experts on the GPU in fp16, cold ones on the device
    balanced        the default: hot experts of least router weight run on the device where that shortens a layer

A trace with fewer layers than the model runs with its own ones, whose times stand for those of the whole model: times
of prompts and moves here, those of decode steps in lab/vectorised/outcome.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.model_shape import WholeModel
from ndp_device.common.widths import WIDTHS
from ndp_device.timing.model import DeviceModel
from vllm_ndp.config import DEFAULT_OFFLOAD_BITS, NdpSettings
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.gpu_timing import LayerTime
from vllm_ndp.cost_model.memory import Memory, beside_device_memory
from vllm_ndp.lab.exact.engine import Engine, alone, modelled_host
from vllm_ndp.lab.systems.system import ReplayOptions, System
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.execution import cold_at, run_pairs
from vllm_ndp.lab.vectorised.outcome import Cold, Outcome, Traffic
from vllm_ndp.layer.split import Split
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement, top_experts
from vllm_ndp.planning.policies import Policy
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.planning.stats import RoutingStats

PREFILLS = ("streamed", "split")
"""The option `prefill`: as published, or as the plugin does where it can (layer/prefill_split.py)."""


class Groups:
    """The groups of `batches`, one after the other on one host: each finds what the one before has left."""

    def __init__(self, batches: Batches, costs: Costs, options: ReplayOptions, offload_bits: int = 0) -> None:
        g, b, d, layers, k = batches.shape
        self._batches, self._costs, self._options = batches, costs, options
        self._factor = costs.shape.num_layers / layers
        own = costs if layers == costs.shape.num_layers else replace(costs, shape=_of_layers(costs.shape, layers))
        policy: Policy = options.policy
        if options.clairvoyant:
            policy = Clairvoyant(policy, [stats for group in batches.decodes for stats in group])
        loss = options.loss.up_to(options.widest)
        rules = PlannerRules(policy, options.budget, loss, bits_for=NdpSettings.bits_for)
        setup = modelled_host(
            own,
            rules,
            offload_bits=offload_bits if 0 < options.budget.num_hot < batches.num_experts else 0,
            splits_prefill=options.choice("prefill", PREFILLS) == "split",
        )
        self.engine = Engine(batches.trace, setup, rules, own)
        self._device = DeviceModel(own.hardware)
        self._at: NDArray[np.uint8] = np.zeros((layers, b, batches.num_experts), np.uint8)  # bits on the device
        self.widths: NDArray[np.uint8] = np.zeros((g, b, d, layers, k), np.uint8)
        """Where decode pairs ran: 0 on the GPU, else the bits on the device."""
        moe_ps, device_ps = np.zeros((2, g, d, layers))
        self._found = Outcome(
            options.policy_name, moe_ps, device_ps, np.zeros((g, b)), 0, Cold(), Traffic(), 0.0, np.zeros(g)
        )
        """Prompts' times include what moved before them."""

    def run(self) -> Outcome:
        batches, found = self._batches, self._found
        for group in range(len(batches.requests)):
            self._prompts(group)
            self._decode(group)
        found.hot_pairs = int((batches.pairs & (self.widths == 0)).sum())
        found.cold = cold_at(batches, self.widths, self._options.loss)
        found.traffic = run_pairs(batches, self.widths, self._costs)[2]
        return found

    def _prompts(self, group: int) -> None:
        """Each prompt in a step of its own."""
        order, ends, splits = self._batches.trace.executed
        gpu, layers = self._costs.gpu, self._costs.shape.num_layers
        for place, request in enumerate(self._batches.requests[group].tolist()):
            rows = order[ends[request] : splits[request]]
            run = alone(self.engine.step(rows), self._device)
            positions = self._batches.trace.position[rows].astype(np.int64)
            start, end = int(positions[0]), int(positions[-1]) + 1
            attended = int(positions.sum()) + len(rows)
            before = sum(gpu.before_experts_ps(len(rows), end, attended, [(start, end)])) + gpu.head_ps(1)
            beside = self._factor * sum(map(_experts_ps, run.time.layers)) + layers * self._costs.overhead_ps
            self._found.prefill_ps[group, place] = before + beside + self._moved_ps(run.migrated_experts)

    def _decode(self, group: int) -> None:
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
            rows = np.array([order[splits[requests[place]] + step] for place in running.tolist()])
            run = alone(self.engine.step(rows), self._device)
            if not step:
                self._found.migration_ps[group] = self._moved_ps(run.migrated_experts)
            times = run.time.layers
            self._found.moe_ps[group, step] = [_experts_ps(time) for time in times]
            self._found.device_ps[group, step] = [time.device_ps for time in times]
            ids = batches.ids[group, running, step]  # [R, L, k]
            self.widths[group, running, step] = self._at[layers, np.arange(len(running))[:, None, None], ids]
            self._at[:] = 0
        engine.watch = None
        for request in requests:  # the longest ones
            engine.finish(request)

    def _note(self, layer: int, split: Split) -> None:
        if pairs := split.device:
            self._at[layer, pairs.rows, pairs.experts] = pairs.bits

    def _moved_ps(self, experts: int) -> int:
        moved = self._factor * experts
        self._found.migrated_bytes += moved * self._costs.shape.expert_bytes
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


def memory(costs: Costs, options: ReplayOptions) -> Memory:
    return beside_device_memory(costs, options.budget.num_hot, options.widest)


def plugins(batches: Batches, costs: Costs, options: ReplayOptions) -> Outcome:
    bits = min(options.choice("spill_bits", WIDTHS, DEFAULT_OFFLOAD_BITS), options.widest)
    outcome = Groups(batches, costs, options, bits).run()
    outcome.policy += f", spill {bits}"
    return outcome


CONTEXT_AWARE = System(
    "context_aware",
    (
        "placement and bits fixed after prefill; one placement for a group (sum of importances)",
        "prompts run one after the other, and a new plan is made after each; the slots keep what it streamed",
        "GPU and device overlap within a layer, experts of one side run one after the other",
        "prompts run in full precision: resident experts on the GPU, the others streamed over the link; with prefill "
        "'split' the device computes some of these, so that both end together",
    ),
    lambda batches, costs, options: Groups(batches, costs, options).run(),
    memory,
    follows_policy=True,
    options=("prefill",),
)
BALANCED = System(
    "balanced",
    (
        "the plugin's own run: the device holds replicas of hot experts too; where a hot expert runs is chosen per "
        "layer from the router's output alone",
        "hot experts of least gate weight go first, at 3 bits unless told otherwise",
    ),
    plugins,
    memory,
    follows_policy=True,
    options=("spill_bits", "prefill"),
)
