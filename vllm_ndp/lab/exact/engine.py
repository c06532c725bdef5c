"""One host run step by step with the very code the plugin runs: its planner, its balancer, StepClock for the GPU side.

Plans come from the plugin's own planner (planning/replanner.py). Rows in the order they are given, one message per
layer with the rows that have a pair there, experts in order of first appearance, as integration/ does it. Slow
and exact, where systems/ are fast and averaged.

What the host asks of its device it yields (Command, Migration), and somebody answers: clients.py, which may have one
host or many. Knows routing by (request, position). Does not know which rows a step has, nor recorded times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ndp_device.errors import TraceError
from ndp_device.model_shape import WholeModel
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import Timing, Work
from ndp_device.widths import FULL_PRECISION_BITS
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.owners import Owners
from vllm_ndp.planning.plan import Plan
from vllm_ndp.planning.replanner import PlannerRules, Replanner
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.simulation.balance import Balancer, LayerLoad
from vllm_ndp.simulation.costs import Costs
from vllm_ndp.simulation.devices import Alive, DeviceRules, Devices, DevicesBalancer, slowest, work_of
from vllm_ndp.simulation.gpu_timing import StepClock, StepTime
from vllm_ndp.simulation.host_cpu import HostCpu
from vllm_ndp.simulation.live_rules import on_hardware
from vllm_ndp.simulation.prefill_split import PrefillSplit
from vllm_ndp.simulation.prices import MeasuredPrices
from vllm_ndp.traces.format import REJECTED, LiveSetup
from vllm_ndp.traces.trace import Trace

R = TypeVar("R")


@dataclass(frozen=True)
class Command:
    """Work for a device; the answer is its Timing."""

    work: Work
    submit_ps: int
    device: int = 0


@dataclass(frozen=True)
class Migration:
    """Weights that leave the device for this host's GPU; the answer is when the last byte has arrived, in ps."""

    num_bytes: int
    submit_ps: int


Asks = Generator[Command | Migration, Any, R]
"""Something that runs until it asks its device, and goes on with the answer."""


@dataclass(frozen=True)
class StepRun:
    """One step: its simulated time, what the device said layer by layer (None: not asked; of several devices what the
    slowest one said), and what moved before it."""

    step: int
    time: StepTime
    device: tuple[Timing | None, ...]
    migrated_experts: int
    migration_ps: int
    decode_only: StepTime | None
    """The step as it would have been without its prefill rows; None where it had none, or nothing else."""
    replanned: bool


@dataclass
class RequestState:
    prompt_len: int
    outputs: int = 0
    prefilled: bool = False
    finished: bool = False
    score: ImportanceScore | None = None
    plan: Plan | None = None


class Engine:
    """The state that the plugin keeps between steps."""

    def __init__(self, trace: Trace, setup: LiveSetup, rules: PlannerRules) -> None:
        hardware = load_hardware(setup.preset, **setup.overrides)
        self.trace, self.setup, self.hardware = trace, setup, hardware
        shape = WholeModel.of_recorded(setup.host_dims, trace.provenance.model)
        costs = Costs(hardware, shape, group_size=setup.group_size, num_gpus=setup.num_gpus, slot_bits=setup.slot_bits)
        self.clock = StepClock(replace(costs.gpu, stage=setup.stage, num_stages=setup.num_stages))
        self.costs = costs
        prices = None if setup.prices is None else MeasuredPrices.of_recorded(setup.prices)
        self.balancer = None
        if setup.spill_bits:
            self.balancer = Balancer(self.costs, setup.spill_bits, setup.device_hosts, prices)
        self.prefill_split = PrefillSplit(self.costs, prices) if setup.splits_prefill else None
        self.devices: Devices | None = None
        if setup.num_devices > 1 or setup.may_join:
            device_rules = DeviceRules(
                setup.num_devices,
                setup.device_copies,
                setup.device_moves,
                rules.full_precision,
                splits_experts=setup.splits_experts,
            )
            self.devices = Devices(self.costs, device_rules, setup.expert_bytes, setup.spill_bits)
        self._alive: Alive = () if self.devices is None else self.devices.all_alive
        rules = on_hardware(rules, costs, setup.joint_tiers, prices)
        self._bytes_of_width = costs.bytes_of_width if setup.joint_tiers else None
        self.planner = Replanner(rules, trace.provenance.num_layers, trace.provenance.num_experts)
        self._cpu = HostCpu.of(self.costs)
        self._idle_device = DeviceModel(hardware)  # for what decode rows alone would have taken there
        self._owners = Owners(setup.num_gpus, *self.hot.shape) if setup.whole_experts else None
        self._own(self.hot)
        self._streamed = np.zeros_like(self.hot)  # by the prefill rows of the running step
        self._ended: list[int] = []
        self._arrives_ps = 0  # when what is copied beside decode is there
        self._timings: list[Timing | None] = []
        self.requests = [RequestState(int(n)) for n in trace.prompt_len]

    @property
    def epoch(self) -> int:
        return self.planner.epoch

    @property
    def hot(self) -> NDArray[np.bool_]:
        """The placement in force, [L, E]."""
        return self.planner.placement.hot

    def join_device(self) -> None:
        """Between two steps: one device more."""
        if self.devices is None:
            raise TraceError("a device joined a run on one device that others could not join: the trace is damaged")
        self.clock.wait_until(self.clock.now_ps + self.devices.join(self.setup.copies_asked))

    def step(self, number: int, rows: NDArray[np.int64], alive: Alive | None = None) -> Asks[StepRun]:
        """Replan if a prefill has ended, then run the step. rows index the trace, in the order of the batch.

        alive: of several devices, those that are up; None = all.
        """
        if self.devices is not None:
            self._alive = self.devices.all_alive if alive is None else alive
        epoch, self._timings = self.epoch, []
        waited_ps = 0 if self._ended else self._follow()
        (moved, num_bytes), before = self._replan() if self._ended else (0, None), self.clock.now_ps
        self._own(self.hot)
        if moved:
            arrived = yield Migration(moved * self.costs.slot_bytes if num_bytes is None else num_bytes, before)
            self.clock.wait_until(arrived)
        migration_ps = self.clock.now_ps - before + waited_ps
        time, decode_only = yield from self._run_rows(rows)
        self._end_prefills()
        timings = tuple(self._timings)
        return StepRun(number, time, timings, moved, migration_ps, decode_only, self.epoch != epoch)

    def finish(self, request: int) -> None:
        """A request has had its last step: from the next one on it is gone."""
        self.requests[request].finished = True

    def _own(self, hot: NDArray[np.bool_]) -> None:
        """These experts [L, E] are in GPU memory from now on: each has one GPU, where GPUs hold whole experts."""
        if self._owners is not None:
            for layer, row in enumerate(hot):
                self._owners.place(layer, row)

    def _replan(self) -> tuple[int, int | None]:
        """For the prefills that ended in the step before, if their requests are still there; experts that move, and
        their bytes where experts have widths of their own."""
        ended, self._ended = self._ended, []
        if all(self.requests[r].finished for r in ended):
            return int(self.planner.restore().sum()), None
        change = self.planner.replan(self._scores())
        for request, plan in change.plans.items():
            self.requests[request].plan = plan
        if self.devices is not None:
            scores = [score for request in change.plans if (score := self.requests[request].score) is not None]
            self.clock.wait_until(self.clock.now_ps + self.devices.follow(change.plans.values(), scores))
        return change.num_moved, change.moved_bytes

    def _follow(self) -> int:
        """Where no prefill ended: exchange experts that decode asks for, if their copies are due. How long they were
        waited for."""
        if not self.planner.follows:
            return 0
        running = {i: r for i, r in enumerate(self.requests) if not r.finished}
        followed = self.planner.follow({i: r.plan for i, r in running.items() if r.plan is not None})
        before = self.clock.now_ps
        if (change := followed.change) is not None:
            self.clock.wait_until(self._arrives_ps)
            for request, plan in change.plans.items():
                self.requests[request].plan, self.requests[request].score = plan, change.score
            if self.devices is not None:
                scores = [change.score] * len(change.plans) if change.score is not None else []
                self.clock.wait_until(self.clock.now_ps + self.devices.follow(change.plans.values(), scores))
        waited_ps = self.clock.now_ps - before
        if followed.begun:
            self._arrives_ps = self.clock.now_ps + self.clock.model.migration_ps(followed.begun)
        return waited_ps

    def _scores(self) -> dict[int, ImportanceScore]:
        """Of requests that are still there and whose prefill has ended."""
        return {i: r.score for i, r in enumerate(self.requests) if r.score is not None and not r.finished}

    def _end_prefills(self) -> None:
        """Score the prompts that ended in this step; of what it streamed, the slots keep what will be hot."""
        for r in self._ended:
            sequence = self.trace.sequences[r]
            stats = RoutingStats.from_choices(sequence.prompt_ids, sequence.prompt_weights, self.hot.shape[1])
            self.requests[r].score = self.planner.score(stats)
        if self._ended:
            self.planner.keep(list(self._scores().values()), self._streamed)
            self._own(self.planner.resident)

    def _run_rows(self, rows: NDArray[np.int64]) -> Asks[tuple[StepTime, StepTime | None]]:
        """The step's time, and what it would have been for its decode rows alone."""
        trace = self.trace
        owner, positions = trace.request[rows].astype(np.int64), trace.position[rows].astype(np.int64)
        ends = {int(r): int(positions[owner == r].max()) + 1 for r in np.unique(owner)}
        prefilled = np.array([request.prefilled for request in self.requests])
        decode = (positions >= trace.prompt_len[owner]) & prefilled[owner]
        self._streamed = np.zeros_like(self.hot)
        spans = {r: (int(positions[owner == r].min()), end) for r, end in ends.items()}
        self.clock.begin_step(len(rows), sum(ends.values()), int(positions.sum()) + len(rows), list(spans.values()))
        alone = None
        if decode.any() and not decode.all():
            kept = [spans[r] for r in ends if decode[owner == r].any()]
            alone = StepClock(self.clock.model, self.clock.now_ps)
            attended = int(positions[decode].sum()) + int(decode.sum())
            alone.begin_step(int(decode.sum()), sum(end for _, end in kept), attended, kept)
        for layer in range(self.hot.shape[0]):
            here = self.hot[layer]
            ids = trace.ids[rows, layer].astype(np.int64)
            if self.balancer is not None and decode.all() and (self.devices is None or any(self._alive)):
                bits = np.stack([self._bits_of(int(r))[layer] for r in owner])
                warm = self.planner.placement.warm[layer]
                warm_rows, columns = np.nonzero(warm[ids])
                host_ps = self._cpu.pairs_ps(self.costs, ids[warm_rows, columns], warm_rows)
                load = LayerLoad.of_arrays(here, ids, trace.weights[rows, layer], bits, warm, host_ps)
                here = here.copy()
                here[list(self._balancer_of(layer).offloaded(load))] = False
            yield from self._run_layer(layer, ids, here, owner, decode, alone)
        rejected = Counter(trace.request[rows[trace.phase[rows] == REJECTED]].tolist())
        yielding = alone_yielding = 0
        for r, end in ends.items():
            request = self.requests[r]
            if (drafts := end - request.prompt_len - request.outputs) >= 0:
                yielding += 1 + drafts
                alone_yielding += (1 + drafts) * request.prefilled
                request.outputs += 1 + drafts - rejected.get(r, 0)
            if not request.prefilled and end >= request.prompt_len:
                request.prefilled = True
                self._ended.append(r)
        if self.planner.follows:
            self.planner.see(trace.ids[rows[decode]].astype(np.int64))
        return self.clock.end_step(yielding), None if alone is None else alone.end_step(alone_yielding)

    def _run_layer(
        self,
        layer: int,
        ids: NDArray[np.int64],
        on_gpu: NDArray[np.bool_],
        owner: NDArray[np.int64],
        decode: NDArray[np.bool_],
        alone: StepClock | None,
    ) -> Asks[None]:
        """ids [T, k]; on_gpu [E]: experts whose pairs run in GPU memory."""
        self.clock.begin_layer()
        here = on_gpu[ids]
        hot_pairs = np.bincount(ids[here], minlength=len(on_gpu))
        warm = self.planner.placement.warm[layer][ids] & decode[:, None]
        warm_rows, warm_columns = np.nonzero(warm)
        host_ps = self._cpu.pairs_ps(self.costs, ids[warm_rows, warm_columns], warm_rows)
        cold_rows, cold_columns = np.nonzero(~(here | warm))
        experts = ids[cold_rows, cold_columns]
        bits = self._bits_of_pairs(layer, cold_rows, experts, owner, decode)
        of_decode = decode[cold_rows]
        to_device = of_decode | self._prompts_on_device(experts, bits, of_decode)
        timing = None
        if to_device.any():
            timing = yield from self._ask(layer, cold_rows[to_device], experts[to_device], bits[to_device])
        device_ps = 0 if timing is None else timing.total_ps
        self._timings.append(timing)
        streamed = experts[~to_device]
        self._streamed[layer, streamed] = True
        if timing is None:  # nothing asked, or an expert without a copy on a device that is up: the host stands in
            streamed = experts
        used = np.flatnonzero(hot_pairs)
        self.clock.end_layer(
            hot_pairs[used].tolist(),
            hot_owners=() if self._owners is None else self._owners.of(layer)[used].tolist(),
            hot_bytes=self._hot_bytes(layer, used),
            device_ps=device_ps,
            streamed_experts=len(np.unique(streamed)),
            streamed_pairs=len(streamed),
            host_ps=host_ps,
        )
        if alone is not None:
            pairs = np.bincount(ids[decode][here[decode]], minlength=len(on_gpu))
            submit_ps = alone.begin_layer()
            if timing is not None and not of_decode[to_device].all():
                device_ps = 0
                if of_decode.any():
                    work = self._work(layer, cold_rows[of_decode], experts[of_decode], bits[of_decode])
                    device_ps = self._idle_device.execute(work, submit_ps).total_ps + timing.queue_ps
            hot_bytes = self._hot_bytes(layer, np.flatnonzero(pairs))
            alone.end_layer(pairs[pairs > 0].tolist(), hot_bytes=hot_bytes, device_ps=device_ps, host_ps=host_ps)

    def _hot_bytes(self, layer: int, used: NDArray[np.int64]) -> int | None:
        """What hot experts take in GPU memory; None where all have the same width."""
        if self._bytes_of_width is None:
            return None
        return int(self._bytes_of_width[self.planner.placement.widths[layer, used]].sum())

    def _prompts_on_device(
        self, experts: NDArray[np.int64], bits: NDArray[np.uint8], of_decode: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Which of the cold pairs [P] of prompt rows the device computes. bits: of decode pairs."""
        if self.prefill_split is None or of_decode.all():
            return np.zeros(len(experts), np.bool_)
        there = self.prefill_split.on_device(experts[~of_decode], experts[of_decode], bits[of_decode])
        chosen: NDArray[np.bool_] = ~of_decode & np.isin(experts, there)
        return chosen

    def _bits_of_pairs(
        self,
        layer: int,
        rows: NDArray[np.int64],
        experts: NDArray[np.int64],
        owner: NDArray[np.int64],
        decode: NDArray[np.bool_],
    ) -> NDArray[np.uint8]:
        """At which width the device computes each pair [P]."""
        bits = np.full(len(rows), FULL_PRECISION_BITS, np.uint8)
        for place in np.flatnonzero(decode[rows]).tolist():
            planned = self._bits_of(int(owner[rows[place]]))[layer, experts[place]]
            bits[place] = planned or self.setup.spill_bits  # 0: a hot expert that was offloaded
        return bits

    def _balancer_of(self, layer: int) -> Balancer | DevicesBalancer:
        assert self.balancer is not None
        if self.devices is None:
            return self.balancer
        return self.devices.balancer(self.balancer, layer, lambda: self._alive)

    def _ask(
        self, layer: int, rows: NDArray[np.int64], experts: NDArray[np.int64], bits: NDArray[np.uint8]
    ) -> Asks[Timing | None]:
        """The layer's command, or one for each of several devices: all at the same time, the slowest one counts.

        None: some pair has no copy on a device that is up, which the host notices when the others have answered.
        """
        if self.devices is None:
            only: Timing = yield Command(self._work(layer, rows, experts, bits), self.clock.now_ps)
            return only
        timings, is_served = [], np.zeros(len(rows), np.bool_)
        for device, own in self.devices.messages(layer, experts, bits, self._alive):
            work = self._work(layer, rows[own], experts[own], bits[own])
            timings.append((yield Command(work, self.clock.now_ps, device)))
            is_served[own] = True
        return slowest(timings) if is_served.all() else None

    def _work(self, layer: int, rows: NDArray[np.int64], experts: NDArray[np.int64], bits: NDArray[np.uint8]) -> Work:
        return work_of(
            self.clock.model.shape,
            layer,
            rows,
            experts.tolist(),
            bits.tolist(),
            expert_bytes=self.setup.expert_bytes,
            group_size=self.setup.group_size,
            activation_bytes=self.setup.activation_bytes,
            num_parts=1 if self.devices is None else self.devices.num_parts,
        )

    def _bits_of(self, request: int) -> NDArray[np.uint8]:
        plan = self.requests[request].plan
        if plan is None:
            raise TraceError(f"request {request} decodes before its prefill has ended: the trace is incomplete")
        return plan.bits.bits
