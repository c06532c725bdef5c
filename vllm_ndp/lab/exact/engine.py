"""One host, step by step, by the plugin's own `Run` (layer/run.py), which decides everything.

Only who computes is another: a slot is named, and what a device would say of its message is asked of somebody. Slow and
exact, where systems/ are fast and averaged.

The host yields its questions to the device (Command, Migration); `alone` answers for one host, `together` for many.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from ndp_device.common.model_shape import WholeModel
from ndp_device.common.widths import FULL_PRECISION_BITS
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import Timing, Work
from vllm_ndp.cost_model.costs import Costs
from vllm_ndp.cost_model.gpu_timing import StepClock, StepTime
from vllm_ndp.layer.devices import Alive, of_part, slowest, work_of
from vllm_ndp.layer.run import Run, end_layer
from vllm_ndp.layer.setup import Setup
from vllm_ndp.layer.split import Split
from vllm_ndp.layer.tiers import Owners, Tiers
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import BitwidthPlan, Plan
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.format import REJECTED

R = TypeVar("R")


@dataclass(frozen=True)
class ReplayedCommand:
    """Work for a device; the answer is its Timing."""

    work: Work
    submit_ps: int
    device: int = 0


@dataclass(frozen=True)
class ReplayedMigration:
    """Weights that leave the device for this host's GPU; the answer is when the last byte has arrived, in ps."""

    num_bytes: int
    submit_ps: int


Asks = Generator[ReplayedCommand | ReplayedMigration, Any, R]
"""Something that runs until it asks its device, and goes on with the answer."""


@dataclass(frozen=True)
class StepRun:
    """One step: its simulated time, the device's timing of each layer, and the experts that moved before the step.

    A timing is None where the host did not ask; with several devices it is the slowest one's.
    """

    time: StepTime
    device: tuple[Timing | None, ...]
    migrated_experts: int
    migration_ps: int
    decode_only: StepTime | None
    """The step as it would have been without its prefill rows; None where it had none, or nothing else."""
    replanned: bool


Routed = Any
"""A Trace, or what has its provenance, requests by number and columns by row (lab/load/workload.py)."""


@dataclass
class RequestState:
    prompt_len: int
    outputs: int = 0
    prefilled: bool = False
    score: ImportanceScore | None = None
    plan: Plan | None = None


def modelled_host(
    costs: Costs,
    rules: PlannerRules,
    *,
    offload_bits: int = 0,
    device_hosts: int = 1,
    splits_prefill: bool = False,
    num_devices: int = 1,
    device_copies: int = 1,
    splits_experts: bool = False,
) -> Setup:
    """The Setup that a live run with these rules writes into its trace."""
    own = of_part(costs, num_devices if splits_experts else 1)
    usual = load_hardware(costs.hardware.preset).values()
    return Setup(
        preset=costs.hardware.preset,
        overrides={name: value for name, value in costs.hardware.values().items() if value != usual[name]},
        host_dims=costs.shape.recorded(),
        expert_bytes={bits: own.replica_bytes(bits) for bits in (*rules.loss.widths, FULL_PRECISION_BITS)},
        group_size=costs.group_size,
        activation_bytes=costs.shape.dtype_bytes,
        spill_bits=offload_bits,
        device_hosts=device_hosts,
        splits_prefill=splits_prefill,
        num_gpus=costs.num_gpus,
        num_devices=num_devices,
        device_copies=device_copies,
        splits_experts=splits_experts,
    )


class Engine:
    """The state that the plugin keeps between steps."""

    def __init__(self, trace: Routed, setup: Setup, rules: PlannerRules, costs: Costs | None = None) -> None:
        """costs: the setup's, where they are known already."""
        if costs is None:
            costs = setup.costs_of(WholeModel.of_recorded(setup.host_dims, trace.provenance.model))
        self.trace, self.setup, self.hardware, self.costs = trace, setup, costs.hardware, costs
        self.devices = setup.devices_of(costs, full_precision=rules.full_precision)
        self._on_device = of_part(costs, 1 if self.devices is None else self.devices.num_parts).shape
        self._alive: Alive = () if self.devices is None else self.devices.all_alive
        shape = trace.provenance.num_layers, trace.provenance.num_experts
        self._owners = Owners(setup.num_gpus, *shape) if setup.whole_experts and setup.num_gpus else None
        self._tiers, top_k = Tiers(*shape, owners=self._owners), trace.provenance.top_k
        self.run = Run[int](setup, rules, costs, self.devices, self._tiers, top_k, self._counted_on)
        self.clock, self.planner = self.run.clock, self.run.planner
        self._idle_device = DeviceModel(self.hardware)  # for what decode rows alone would have taken there
        self._decode_splitter = self.run.make_splitter(top_k)  # of decode rows alone
        self._activate()
        self._rejects = bool((trace.phase == REJECTED).any())
        self._ending: list[int] = []  # their prefill ended in the running step
        self._timings: list[Timing | None] = []
        self.requests = [RequestState(int(n)) for n in trace.prompt_len]
        self._there = dict(enumerate(self.requests))  # that have not finished
        self.watch: Callable[[int, Split], None] | None = None
        """Sees the split of each layer, before anything runs."""

    def _counted_on(self) -> Alive:
        """[D], which devices this step's experts may run on, for a choice that is made by it."""
        return self.devices.all_alive if self.devices is not None and self.setup.same_without else self._alive

    def step(self, rows: NDArray[np.int64], alive: Alive | None = None) -> Asks[StepRun]:
        """Replan if a prefill has ended, then run the step. rows index the trace, in the order of the batch.

        alive: of several devices, those that are up; None = all.
        """
        if self.devices is not None:
            self._alive = self.devices.all_alive if alive is None else alive
        epoch, before_ps, self._timings = self.planner.epoch, self.clock.now_ps, []
        replanned = self.run.replan(self._there)
        if replanned.moves_slots:
            self._activate()
        if moved := replanned.num_moved:
            whole = moved * self.costs.slot_bytes
            num_bytes = whole if replanned.moved_bytes is None else replanned.moved_bytes
            self.clock.wait_until((yield ReplayedMigration(num_bytes, self.clock.now_ps)))
        migration_ps = self.clock.now_ps - before_ps
        time, decode_only = yield from self._run_rows(rows)
        self._end_prefills()
        timings = tuple(self._timings)
        return StepRun(time, timings, moved, migration_ps, decode_only, self.planner.epoch != epoch)

    def finish(self, request: int) -> None:
        """A request has had its last step: from the next one on it is gone."""
        self._there.pop(request, None)

    def _activate(self) -> None:
        """The placement in force takes effect."""
        placement = self.planner.placement
        self._tiers.activate(placement.hot, placement.warm, placement.widths)
        self._tiers.name_all()

    def _end_prefills(self) -> None:
        choices = [self.trace.sequences[number] for number in self._ending]
        experts = self.trace.provenance.num_experts
        stats = [RoutingStats.from_choices(c.prompt_ids, c.prompt_weights, experts) for c in choices]
        ended = [(number, self.requests[number], found) for number, found in zip(self._ending, stats, strict=True)]
        self._ending = []
        self.run.end_prefills(ended, self._there.values)
        if ended and self._owners is not None:  # who stays keeps its GPU
            for layer, row in enumerate(self.planner.resident):
                self._owners.place(layer, row)

    def _run_rows(self, rows: NDArray[np.int64]) -> Asks[tuple[StepTime, StepTime | None]]:
        """The step's time, and what it would have been for its decode rows alone."""
        trace = self.trace
        owner, positions = trace.request[rows].astype(np.int64), trace.position[rows].astype(np.int64)
        owners = owner.tolist()
        found: dict[int, tuple[int, int]] = {}
        for r, at in zip(owners, positions.tolist(), strict=True):  # numpy takes longer for the few rows of decode
            start, end = found.get(r, (at, 0))
            found[r] = min(start, at), max(end, at + 1)
        spans = dict(sorted(found.items()))
        numbers = {r: place for place, r in enumerate(spans)}
        request_of = np.array([numbers[r] for r in owners], np.int32)
        ends = {r: end for r, (_, end) in spans.items()}
        prefilled = np.array([self.requests[r].prefilled for r in ends])
        decode = (positions >= trace.prompt_len[owner]) & prefilled[request_of]
        decodes = np.zeros(len(numbers), np.bool_)
        decodes[request_of[decode]] = True
        plans = [self._bits_of(r) if has else None for r, has in zip(ends, decodes.tolist(), strict=True)]
        of_requests = list(spans.values())
        self.run.begin_step(request_of, decode, plans, of_requests)
        alone = None
        if decode.any() and not decode.all():
            kept = [span for span, has in zip(of_requests, decodes.tolist(), strict=True) if has]
            alone = StepClock(self.clock.model, self.clock.now_ps)
            attended = int(positions[decode].sum()) + int(decode.sum())
            alone.begin_step(int(decode.sum()), sum(end for _, end in kept), attended, kept)
            self._decode_splitter.begin_step(request_of[decode], decode[decode], plans)
        with_device = self.devices is None or any(self._counted_on())
        every_ids = np.ascontiguousarray(trace.ids[rows].swapaxes(0, 1), np.int32)
        every_weight = np.ascontiguousarray(trace.weights[rows].swapaxes(0, 1), np.float32)
        if alone is not None:
            own_ids, own_weight = (
                np.ascontiguousarray(every_ids[:, decode]),
                np.ascontiguousarray(every_weight[:, decode]),
            )
            addresses_alone = _of_layers(own_ids, own_weight)
        for layer, addresses in enumerate(_of_layers(every_ids, every_weight)):
            split = self.run.splitter.split(layer, *addresses, with_device=with_device)
            if self.watch is not None:
                self.watch(layer, split)
            self.clock.begin_layer()
            timing, pairs = None, split.device
            if pairs:
                timing = yield from self._ask(layer, pairs.rows, pairs.experts, pairs.bits)
            self._timings.append(timing)
            # None: the host stands in
            self.run.end_layer(layer, split, 0 if not pairs else None if timing is None else timing.total_ps)
            if alone is not None:
                here = self._decode_splitter.split(layer, *addresses_alone[layer], with_device=True)
                self._end_alone(alone, here, timing, with_prompts=not decode[pairs.rows].all())
        rejected = Counter(trace.request[rows[trace.phase[rows] == REJECTED]].tolist()) if self._rejects else Counter()
        yielding = alone_yielding = 0  # rows whose end makes a token: of all, and of decode rows
        for r, end in ends.items():
            request = self.requests[r]
            if (drafts := end - request.prompt_len - request.outputs) >= 0:
                yielding += 1 + drafts
                alone_yielding += (1 + drafts) * request.prefilled
                request.outputs += 1 + drafts - rejected.get(r, 0)
            if not request.prefilled and end >= request.prompt_len:
                request.prefilled = True
                self._ending.append(r)
        return self.clock.end_step(yielding), None if alone is None else alone.end_step(alone_yielding)

    def _end_alone(self, alone: StepClock, split: Split, timing: Timing | None, *, with_prompts: bool) -> None:
        """The same layer for its decode rows alone. with_prompts: whether the device's message had pairs of others."""
        submit_ps, pairs = alone.begin_layer(), split.device
        device_ps = 0 if timing is None else timing.total_ps
        if timing is not None and with_prompts:
            device_ps = 0
            if pairs:
                work = self._work(pairs.rows, pairs.experts, pairs.bits)
                device_ps = self._idle_device.execute(work, submit_ps).total_ps + timing.queue_ps
        end_layer(alone, self._decode_splitter, split, device_ps)

    def _ask(
        self, layer: int, rows: NDArray[np.int64], experts: NDArray[np.integer], bits: NDArray[np.uint8]
    ) -> Asks[Timing | None]:
        """The layer's command, or one for each of several devices: all at the same time, the slowest one counts.

        None: some pair has no copy on a device that is up, which the host notices when the others have answered.
        """
        if self.devices is None:
            only: Timing = yield ReplayedCommand(self._work(rows, experts, bits), self.clock.now_ps)
            return only
        timings, is_served = [], np.zeros(len(rows), np.bool_)
        for device, own in self.devices.messages(layer, experts, bits, self._alive):
            work = self._work(rows[own], experts[own], bits[own])
            timings.append((yield ReplayedCommand(work, self.clock.now_ps, device)))
            is_served[own] = True
        return slowest(timings) if is_served.all() else None

    def _work(self, rows: NDArray[np.int64], experts: NDArray[np.integer], bits: NDArray[np.uint8]) -> Work:
        held = self.setup.expert_bytes, self.setup.activation_bytes
        return work_of(self._on_device, *held, rows, experts, bits)

    def _bits_of(self, request: int) -> BitwidthPlan:
        plan = self.requests[request].plan
        if plan is None:
            raise TraceError(f"request {request} decodes before its prefill has ended: the trace is incomplete")
        return plan.bits


def _of_layers(ids: NDArray[np.int32], weights: NDArray[np.float32]) -> list[tuple[int, int]]:
    """[L], addresses of each layer's choices in ids and weights [L, T, k], contiguous, which the caller keeps."""
    first, second, step = ids.ctypes.data, weights.ctypes.data, ids.strides[0]
    return [(first + layer * step, second + layer * step) for layer in range(len(ids))]


def alone(host: Asks[R], *devices: DeviceModel) -> R:
    """Run one host to its end."""
    return together([host], *devices)[0]


def together(hosts: Sequence[Asks[R]], *devices: DeviceModel) -> list[R]:
    """Run hosts to their ends; their results in order.

    Hosts run side by side and meet only in the devices. Always the one with the smallest next submit time goes on, of
    equal ones the first, so each device's clock is one (docs/timing.md, "Several clients"). A migration to a GPU takes
    that GPU's own link, and counts on the first device.
    """
    results: dict[int, R] = {}
    first = devices[0]
    queue: list[tuple[int, int]] = []  # when a host asks or its migration ends, and which
    asked: dict[int, Any] = {}
    moving: dict[int, int] = {}  # host -> its migration under way

    def go_on(host: int, answer: Any) -> None:
        try:
            asked[host] = hosts[host].send(answer)
        except StopIteration as end:
            results[host] = end.value
        else:
            heapq.heappush(queue, (asked[host].submit_ps, host))

    for host in range(len(hosts)):
        go_on(host, None)
    while queue:
        at_ps, host = heapq.heappop(queue)
        if host in moving:
            ends_ps = first.migration_end_ps(moving[host])
            if ends_ps > at_ps:  # others' activations have passed it meanwhile
                heapq.heappush(queue, (ends_ps, host))
            else:
                del moving[host]
                go_on(host, at_ps)
        elif isinstance(ask := asked[host], ReplayedCommand):
            go_on(host, devices[ask.device].execute(ask.work, at_ps))
        else:
            moving[host] = first.begin_migration(ask.num_bytes, at_ps)
            heapq.heappush(queue, (first.migration_end_ps(moving[host]), host))
    return [results[host] for host in range(len(hosts))]
