"""A recorded run again, step by step, with the very code the plugin ran: the simulated times must come out the same.

Works on traces whose Provenance holds a LiveSetup. Plans are made anew by the policy from the recorded routing (and
compared with the recorded ones), every step is timed by StepClock and DeviceModel exactly as integration/ does it:
rows in recorded order, one message per layer with the decode rows that have a cold pair, experts in order of first
appearance. Steps in which the device fell back are replayed as if it had answered, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ndp_device.errors import TraceError
from ndp_device.protocol.messages import execute_bytes
from ndp_device.timing.model import DeviceModel
from ndp_device.timing.spec import Hardware, load_hardware
from ndp_device.timing.work import ExpertWork, Work
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget, Placement
from vllm_ndp.planning.policies import Policy, PolicySettings, load_policy, read_prior
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.replay.host_timing import HostDims, HostModel, StepClock
from vllm_ndp.traces.format import ALL_REQUESTS, CACHED, LiveSetup
from vllm_ndp.traces.trace import Trace


@dataclass(frozen=True)
class LiveReplay:
    """Simulated picoseconds of every step, beside what the live run said."""

    steps: NDArray[np.int64]
    start_ps: NDArray[np.int64]
    step_ps: NDArray[np.int64]
    recorded_start_ps: NDArray[np.int64]
    recorded_step_ps: NDArray[np.int64]
    plan_mismatches: int
    fallback_steps: int

    @property
    def identical(self) -> bool:
        """Every step to the picosecond, and every plan to the bit."""
        return (
            self.plan_mismatches == 0
            and np.array_equal(self.start_ps, self.recorded_start_ps)
            and np.array_equal(self.step_ps, self.recorded_step_ps)
        )


@dataclass
class _Request:
    prompt_len: int
    last_step: int
    outputs: int = 0
    prefilled: bool = False
    score: ImportanceScore | None = None
    bits: NDArray[np.uint8] | None = None


@dataclass
class _Engine:
    """The state that the plugin keeps between steps."""

    trace: Trace
    setup: LiveSetup
    policy: Policy
    loss: LossTable
    budget: Budget
    hardware: Hardware
    clock: StepClock
    device: DeviceModel
    requests: list[_Request]
    hot: NDArray[np.bool_]
    epoch: int = 0
    ended: list[int] = field(default_factory=list)

    def replan(self, step: int) -> None:
        """For the prefills that ended in the step before, if their requests are still there."""
        alive = [r for r in self.ended if self.requests[r].last_step >= step]
        self.ended = []
        if not alive:
            return
        for r in alive:
            sequence = self.trace.sequences[r]
            stats = RoutingStats.from_choices(sequence.prompt_ids, sequence.prompt_weights, self.hot.shape[1])
            self.requests[r].score = self.policy.score(stats)
        running = [r for r in self.requests if r.score is not None and r.last_step >= step]
        scores = [r.score for r in running if r.score is not None]
        placement = self.policy.place(scores, Placement(self.hot), self.budget)
        self.clock.migrate(int(placement.moves_from(Placement(self.hot)).sum()))
        self.hot = placement.hot
        self.epoch += 1
        for request, score in zip(running, scores, strict=True):
            request.bits = self.policy.assign(score, placement, self.loss, self.budget).bits

    def run(self, rows: NDArray[np.int64]) -> tuple[int, int]:
        """(start, duration) of one step; rows index the trace in recorded order."""
        trace = self.trace
        owner, positions = trace.request[rows].astype(np.int64), trace.position[rows].astype(np.int64)
        ends = {int(r): int(positions[owner == r].max()) + 1 for r in np.unique(owner)}
        decode = positions >= trace.prompt_len[owner]
        self.clock.begin_step(len(rows), sum(ends.values()), int(positions.sum()) + len(rows))
        for layer in range(self.hot.shape[0]):
            self._run_layer(layer, trace.ids[rows, layer].astype(np.int64), owner, decode)
        yielding = 0
        for r, end in ends.items():
            request = self.requests[r]
            if end >= request.prompt_len + request.outputs:
                yielding += 1
                request.outputs += 1
            if not request.prefilled and end >= request.prompt_len:
                request.prefilled = True
        time = self.clock.end_step(yielding)
        return time.start_ps, time.total_ps

    def _run_layer(
        self, layer: int, ids: NDArray[np.int64], owner: NDArray[np.int64], decode: NDArray[np.bool_]
    ) -> None:
        self.clock.begin_layer()
        here = self.hot[layer][ids]
        hot_pairs = np.bincount(ids[here], minlength=self.hot.shape[1])
        cold_rows, cold_columns = np.nonzero(~here)
        experts = ids[cold_rows, cold_columns]
        to_device = decode[cold_rows]
        device_ps = 0
        if to_device.any():
            device_ps = self._execute(layer, cold_rows[to_device], experts[to_device], owner)
        streamed = experts[~to_device]
        self.clock.end_layer(
            hot_pairs[hot_pairs > 0].tolist(),
            device_ps=device_ps,
            streamed_experts=len(np.unique(streamed)),
            streamed_pairs=len(streamed),
        )

    def _execute(
        self, layer: int, rows: NDArray[np.int64], experts: NDArray[np.int64], owner: NDArray[np.int64]
    ) -> int:
        bits = [self._bits_of(int(owner[row]))[layer, expert] for row, expert in zip(rows, experts, strict=True)]
        tokens: dict[tuple[int, int], int] = {}
        for expert, width in zip(experts.tolist(), map(int, bits), strict=True):
            tokens[expert, width] = tokens.get((expert, width), 0) + 1
        num_rows, dims = len(np.unique(rows)), self.setup.host_dims
        bytes_in, bytes_out = execute_bytes(num_rows, len(rows), dims["hidden"], self.setup.activation_bytes)
        work = Work(
            hidden_size=dims["hidden"],
            intermediate_size=dims["intermediate"],
            group_size=self.setup.group_size,
            tokens=num_rows,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            experts=tuple(
                ExpertWork(layer, expert, width, count, self.setup.expert_bytes[width])
                for (expert, width), count in tokens.items()
            ),
        )
        return self.device.execute(work, self.clock.now_ps).total_ps

    def _bits_of(self, request: int) -> NDArray[np.uint8]:
        bits = self.requests[request].bits
        if bits is None:
            raise TraceError(f"request {request} decodes before its prefill has ended: the trace is incomplete")
        return bits


def recorded_policy(trace: Trace) -> tuple[Policy, Budget]:
    """The policy and budget of the recorded run, from the plugin's settings in its provenance."""
    setup, settings = trace.provenance.live, trace.provenance.settings
    if setup is None:
        raise TraceError("the trace does not hold a live run: record one with the plugin's 'record' setting")
    options = dict(settings.get("policy_options", {}))
    if isinstance(options.get("prior"), str):
        options["prior"] = read_prior(Path(options["prior"]))
    bits = "full" if settings["cold_precision"] == "full" else settings["gain"]
    policy = load_policy(settings["policy"], PolicySettings(**{"alpha": settings["alpha"], "bits": bits, **options}))
    return policy, Budget(setup.hot_experts, settings["avg_bits"])


def replay_live(trace: Trace, loss: LossTable) -> LiveReplay:
    """Replay a recorded run under the policy it ran with. Raises TraceError when the trace is not of a live run.

    loss: of the replicas the run used; ReplicaFiles know it.
    """
    policy, budget = recorded_policy(trace)
    setup, p = trace.provenance.live, trace.provenance
    if setup is None or not len(trace.events.get("step", ())):
        raise TraceError("the trace holds no steps of a live run: record one with the plugin's 'record' setting")
    hardware = load_hardware(setup.preset, **setup.overrides)
    hot = np.zeros((p.num_layers, p.num_experts), np.bool_)
    hot[:, : setup.hot_experts] = True  # as the plugin starts, before any prompt
    executed = np.flatnonzero(trace.phase != CACHED)
    last = np.full(len(trace.prompt_len), -1, np.int64)
    np.maximum.at(last, trace.request[executed], trace.step[executed])
    engine = _Engine(
        trace=trace,
        setup=setup,
        policy=policy,
        loss=loss,
        budget=budget,
        hardware=hardware,
        clock=StepClock(HostModel(hardware, HostDims(**setup.host_dims))),
        device=DeviceModel(hardware),
        requests=[_Request(int(n), int(s)) for n, s in zip(trace.prompt_len, last, strict=True)],
        hot=hot,
    )
    steps = np.unique(trace.step[executed])
    rows_of = np.split(executed[np.argsort(trace.step[executed], kind="stable")], _bounds(trace.step[executed]))
    recorded = {int(s): i for i, s in enumerate(trace.events["step"])}
    plans = _recorded_plans(trace)
    mismatches = 0
    times = np.zeros((2, len(steps)), np.int64)
    for index, (step, rows) in enumerate(zip(steps.tolist(), rows_of, strict=True)):
        before = engine.epoch
        engine.replan(step)
        if engine.epoch != before:
            mismatches += _differs(engine, plans.get(engine.epoch))
        unfinished = [r for r in np.unique(trace.request[rows]).tolist() if not engine.requests[r].prefilled]
        times[:, index] = engine.run(rows)
        engine.ended += [r for r in unfinished if engine.requests[r].prefilled]
    order = [recorded[int(step)] for step in steps if int(step) in recorded]
    if len(order) != len(steps):
        raise TraceError(
            f"the trace has {len(steps)} steps of rows but times for {len(order)} of them: it is incomplete"
        )
    return LiveReplay(
        steps=steps.astype(np.int64),
        start_ps=times[0],
        step_ps=times[1],
        recorded_start_ps=trace.events["simulated_start_ps"][order],
        recorded_step_ps=trace.events["simulated_step_ps"][order],
        plan_mismatches=mismatches,
        fallback_steps=int((trace.events["fallback_pairs"][order] > 0).sum()),
    )


def _bounds(steps: NDArray[np.int32]) -> Sequence[int]:
    bounds: list[int] = (np.flatnonzero(np.diff(np.sort(steps))) + 1).tolist()
    return bounds


def _recorded_plans(trace: Trace) -> dict[int, dict[int, NDArray[np.uint8]]]:
    """epoch -> {-1: hot, request: bits}."""
    out: dict[int, dict[int, NDArray[np.uint8]]] = {}
    if trace.plans:
        columns = (trace.plans[name] for name in ("epoch", "request", "cells"))
        for epoch, request, cells in zip(*columns, strict=True):
            out.setdefault(int(epoch), {})[int(request)] = cells
    return out


def _differs(engine: _Engine, plan: dict[int, NDArray[np.uint8]] | None) -> int:
    """1 where a recorded plan of this epoch exists and is not the one just made."""
    if plan is None:
        return 0
    same = np.array_equal(plan[ALL_REQUESTS].astype(np.bool_), engine.hot)
    for request, cells in plan.items():
        if request != ALL_REQUESTS:
            ours = engine.requests[request].bits
            same = same and ours is not None and np.array_equal(cells, ours)
    return int(not same)
