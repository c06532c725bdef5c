"""Traces as hosts that share devices: requests drawn or recorded, one simulation.

A host serves requests as they arrive: the exact engine, with steps from the scheduler instead of a recording. Routing
comes from the trace by (request, position); how the requests meet in steps is new. A request ends where the trace's
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError
from ndp_device.experts.expert import Part
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import load_hardware
from ndp_device.timing.work import PS_PER_S
from vllm_ndp.config import DEFAULT_OFFLOAD_BITS, NdpSettings
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.cost_model.memory import CAPACITY_OF, Footprint, beside_device_memory
from vllm_ndp.lab.exact.engine import Asks, Engine, StepRun, alone, modelled_host, together
from vllm_ndp.lab.exact.live import recorded_rules
from vllm_ndp.lab.load.scheduler import Request, ScheduledSpan, Scheduler
from vllm_ndp.lab.load.workload import Workload, read_mooncake
from vllm_ndp.lab.options import LoadSettings
from vllm_ndp.layer.devices import copies_that_fit
from vllm_ndp.layer.setup import Scheduling, Setup
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import policy_with, usual_bit_rule
from vllm_ndp.planning.replanner import PlannerRules
from vllm_ndp.traces.format import CACHED
from vllm_ndp.traces.trace import Trace


@dataclass(frozen=True)
class ServedStep:
    """One step as it ran. It was decided at decided_ps; what moved before it lies between that and its start."""

    decided_ps: int
    spans: tuple[ScheduledSpan, ...]
    run: StepRun
    yielded: tuple[int, ...]
    """Requests that got a token at its end."""

    @property
    def start_ps(self) -> int:
        return self.decided_ps + self.run.migration_ps

    @property
    def end_ps(self) -> int:
        return self.start_ps + self.run.time.total_ps


@dataclass(frozen=True)
class ServedRequest:
    """A whole run of one host."""

    arrivals_ps: NDArray[np.int64]  # [R]
    prompt_lens: NDArray[np.int64]  # [R]
    steps: list[ServedStep]
    preemptions: int


class Host:
    def __init__(
        self,
        trace: Trace | Workload,
        setup: Setup,
        rules: PlannerRules,
        arrivals_ps: NDArray[np.int64],
        scheduling: Scheduling,
    ) -> None:
        """arrivals_ps: of each request of the trace."""
        self.engine = Engine(trace, setup, rules)
        self._rows = _Rows(trace) if isinstance(trace, Trace) else trace
        self._arrivals_ps, self._scheduler = arrivals_ps, Scheduler(scheduling)
        self._requests = [
            Request(number, int(prompt), rows, cached)
            for number, (prompt, rows, cached) in enumerate(
                zip(trace.prompt_len, map(int, self._rows.num_rows), map(int, self._rows.cached), strict=True)
            )
        ]

    def whole(self) -> Asks[ServedRequest]:
        """Serve every request; for `alone` or `together`."""
        clock, scheduler = self.engine.clock, self._scheduler
        order = np.argsort(self._arrivals_ps, kind="stable").tolist()
        steps: list[ServedStep] = []
        arrived = 0
        while arrived < len(order) or scheduler.busy:
            if not scheduler.busy:
                clock.wait_until(int(self._arrivals_ps[order[arrived]]))
            while arrived < len(order) and self._arrivals_ps[order[arrived]] <= clock.now_ps:
                scheduler.add(self._requests[order[arrived]])
                arrived += 1
            decided_ps, spans = clock.now_ps, scheduler.schedule()
            run = yield from self.engine.step(self._rows.of(spans))
            yielded, done = scheduler.end_step()
            for request in done:
                self.engine.finish(request)
            steps.append(ServedStep(decided_ps, tuple(spans), run, tuple(yielded)))
        prompt_lens = self.engine.trace.prompt_len.astype(np.int64)
        return ServedRequest(self._arrivals_ps, prompt_lens, steps, scheduler.preemptions)


class _Rows:
    """Rows of a trace by request and position; a position that ran n times gives its rows one after the other."""

    def __init__(self, trace: Trace) -> None:
        ran = np.flatnonzero(trace.phase != CACHED)
        order = ran[np.lexsort((np.arange(len(ran)), trace.position[ran], trace.request[ran]))]
        request, position = trace.request[order].astype(np.int64), trace.position[order].astype(np.int64)
        new = np.ones(len(order), np.bool_)
        new[1:] = (np.diff(request) != 0) | (np.diff(position) != 0)
        starts = np.flatnonzero(new)
        self._order, self._starts = order, starts
        self._counts = np.diff(np.append(starts, len(order)))
        self._times = np.zeros(len(starts), np.int64)
        self._begin = np.searchsorted(request[starts], np.arange(len(trace.prompt_len) + 1))
        at = position[starts]
        self.cached: list[int] = []
        self.num_rows: list[int] = []
        for number, prompt_len in enumerate(trace.prompt_len.tolist()):
            here = slice(int(self._begin[number]), int(self._begin[number + 1]))
            low, high = int(at[here].min(initial=prompt_len)), int(at[here].max(initial=-1)) + 1
            if high - low != here.stop - here.start or high < prompt_len or prompt_len < 1:
                raise TraceError(
                    f"request {number} has rows for {here.stop - here.start} of its positions "
                    f"{low}..{max(high, prompt_len) - 1}: the recording is incomplete, select other requests"
                )
            self.cached.append(low)
            self.num_rows.append(high)

    def of(self, spans: Sequence[ScheduledSpan]) -> NDArray[np.int64]:
        """Rows of a step in the order of its spans; each is used up."""
        cells = np.concatenate(
            [
                np.arange(span.num_tokens) + int(self._begin[span.request]) + span.start - self.cached[span.request]
                for span in spans
            ]
        )
        times = np.minimum(self._times[cells], self._counts[cells] - 1)
        self._times[cells] += 1
        rows: NDArray[np.int64] = self._order[self._starts[cells] + times]
        return rows


# -- hosts for what a user asks ----------------------------------------------------------------------------------------


def serve(traces: Sequence[Trace], settings: LoadSettings, *, loss: LossTable | None = None) -> list[ServedRequest]:
    """Serve each trace on a host of its own; all hosts share the devices. Raises before anything is simulated."""
    hosts = [_host(trace, settings, number, loss, len(traces)) for number, trace in enumerate(traces)]
    hardware = load_hardware(settings.hardware, **settings.overrides)
    return together([host.whole() for host in hosts], *(DeviceModel(hardware) for _ in range(settings.devices)))


def serve_again(trace: Trace, loss: LossTable) -> ServedRequest:
    """A recorded live run, as it was: its own hardware, plans and scheduler, requests arriving with its steps."""
    setup, at_ps = trace.provenance.live, of_steps(trace)
    if setup is None or setup.scheduling is None:
        raise TraceError("the trace does not say how its requests were scheduled: record it with this version")
    host = Host(trace, setup, recorded_rules(trace, loss), at_ps, setup.scheduling)
    return alone(host.whole(), *(DeviceModel(host.engine.hardware) for _ in range(setup.num_devices)))


def _host(trace: Trace, settings: LoadSettings, number: int, loss: LossTable | None, device_hosts: int) -> Host:
    told = read_mooncake(settings.file, settings.requests, settings.speed) if settings.file else None
    count = len(trace.prompt_len) if settings.requests is None else settings.requests
    if told is None and count < len(trace.prompt_len):
        trace = trace.select(range(count))
    at_ps = _arrivals(trace, settings, number, count) if told is None else told.arrivals_ps
    p = trace.provenance
    hardware, shape = load_hardware(settings.hardware, **settings.overrides), model_named(settings.model)
    costs = Costs(hardware, shape, num_gpus=settings.gpus)
    costs.require(p.num_experts, p.top_k)
    trace, loss = with_layers(trace, loss or LossTable.nominal(p.num_layers, p.num_experts), costs.shape.num_layers)
    num_hot = p.num_experts // 2 if settings.num_hot is None else settings.num_hot
    rules = PlannerRules(
        policy_with(NdpSettings.policy, {"bit_rule": usual_bit_rule(NdpSettings.bits_for)})[0],
        Budget(num_hot, settings.avg_bits),
        loss,
        bits_for=NdpSettings.bits_for,
    )
    setup = modelled_host(
        costs,
        rules,
        offload_bits=DEFAULT_OFFLOAD_BITS if settings.execution == "balanced" and num_hot else 0,
        device_hosts=device_hosts,
        num_devices=settings.devices,
        device_copies=_copies(costs, settings),
        splits_experts=settings.split,
    )
    kv_tokens = settings.kv_tokens
    if kv_tokens is None:
        kv_tokens = kv_room(costs, num_hot, min(settings.max_num_seqs, len(at_ps)), settings.devices)
    scheduling = Scheduling(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        block_size=settings.block_size,
        kv_blocks=kv_tokens // max(settings.block_size, 1),
    )
    requests: Trace | Workload = trace
    if told is not None:
        requests = Workload(trace, told.prompt_lens, told.output_lens, told.cached(kv_tokens))
    elif count > len(trace.prompt_len):
        requests = Workload.repeated(trace, count)
    return Host(requests, setup, rules, at_ps, scheduling)


def _copies(costs: Costs, settings: LoadSettings) -> int:
    """Of each expert on several devices. Raises ConfigError where they cannot have parts of it."""
    if settings.devices == 1:
        return 1
    if settings.split:
        Part(0, settings.devices).check(costs.shape.intermediate_size, costs.group_size)
    return copies_that_fit(costs, settings.devices, None, full_precision=False, splits_experts=settings.split)


def with_layers(trace: Trace, loss: LossTable, num_layers: int) -> tuple[Trace, LossTable]:
    """The trace of a model with so many layers: each layer of the recording stands for as many as it must."""
    recorded = trace.provenance.num_layers
    if recorded == num_layers:
        return trace, loss
    layers = np.arange(num_layers) * recorded // num_layers
    longer = replace(
        trace,
        provenance=msgspec.structs.replace(trace.provenance, num_layers=num_layers, live=None),
        ids=trace.ids[:, layers],
        weights=trace.weights[:, layers],
        events={},
        plans={},
    )
    return longer, loss.of_layers(layers)


def kv_room(costs: Costs, num_hot: int, requests: int, num_devices: int = 1) -> int:
    """Tokens of KV cache that the GPUs' memory holds beside the weights and the states of so many requests.

    Raises DoesNotFit where it does not hold one.
    """
    experts = beside_device_memory(costs, num_hot)
    one = Footprint.of(experts, costs.shape, 1, requests)
    known, (gpu, device) = costs.hardware.values(), (CAPACITY_OF[place] for place in ("gpu", "device"))
    capacity = {gpu: int(known[gpu]) * costs.num_gpus, device: int(known[device]) * num_devices}
    hardware = load_hardware(costs.hardware.preset, **known | capacity)
    one.require(hardware, f"{costs.shape.name} with K {num_hot}", "give fewer --hot-experts")
    held = Footprint.of(experts, costs.shape, 0, requests)
    return (capacity[gpu] - held.gpu) // (one.gpu - held.gpu)


def _arrivals(trace: Trace, settings: LoadSettings, number: int, count: int) -> NDArray[np.int64]:
    if settings.process == "recorded":
        return recorded(trace, settings.speed)
    if settings.process == "together":
        return np.zeros(count, np.int64)
    burstiness = settings.burstiness if settings.process == "bursty" else 1.0
    return drawn(count, settings.rate, settings.seed + number, burstiness)


# Arrivals are inputs, and not results of either clock: only here a measured time becomes a simulated one.


def drawn(count: int, rate_per_s: float, seed: int, burstiness: float = 1.0) -> NDArray[np.int64]:
    """Arrivals with gamma-distributed gaps of mean 1 / rate, as `vllm bench serve` draws them.

    burstiness is the gamma's shape: 1 is a Poisson process, less comes in bursts, more comes evenly.
    """
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate_per_s * burstiness), size=count)
    at: NDArray[np.int64] = np.round(np.cumsum(gaps) * PS_PER_S).astype(np.int64)
    return at


def recorded(trace: Trace, speed: float = 1.0) -> NDArray[np.int64]:
    """arrival_s of the trace's requests, `speed` times as fast. Raises TraceError where absent or out of order."""
    seconds = trace.arrival_s
    if len(seconds) > 1 and not seconds.any():
        raise TraceError("the trace does not tell when its requests came: take another --process, such as poisson")
    late = np.flatnonzero(np.diff(seconds) < 0)
    if len(late):
        first = int(late[0])
        raise TraceError(
            f"arrivals are out of order: request {first + 1} comes at {seconds[first + 1]:g} s, after request {first} "
            f"at {seconds[first]:g} s; number requests as they arrive"
        )
    at: NDArray[np.int64] = np.round(seconds / speed * PS_PER_S).astype(np.int64)
    return at


def of_steps(trace: Trace) -> NDArray[np.int64]:
    """End of the step before each request's first one, in picoseconds.

    Where a live run took requests as soon as they came, these are the arrivals. Raises TraceError where the trace is
    not of a live run.
    """
    start_ps, step_ps = trace.simulated_steps()
    steps, ends = trace.events["step"], np.concatenate([[0], start_ps + step_ps])
    ran = trace.phase != CACHED
    first = np.full(len(trace.prompt_len), np.iinfo(np.int64).max)
    np.minimum.at(first, trace.request[ran], trace.step[ran])
    at: NDArray[np.int64] = ends[np.searchsorted(steps, first)].astype(np.int64)
    return at
