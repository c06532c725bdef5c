"""Every system and policy on the same trace and the same modelled hardware, as one table.

Popularity priors come from requests that are not replayed: every fourth one, unless a prior is given.

Of a grid, a refusal of one system at one point (a budget that fits nothing, say) is a result, not the end. A model is
replayed on the first trace of its routing shape. No row depends on another, so any number of processes finds the same
to the digit.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError, NdpError, TraceError
from ndp_device.common.widths import WIDTHS
from ndp_device.timing.spec import load_hardware
from vllm_ndp.config import NdpSettings
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.cost_model.memory import DoesNotFit, Footprint
from vllm_ndp.lab.options import CAPACITY, GB, ORACLE, CompareSettings
from vllm_ndp.lab.systems import SYSTEMS, ReplayOptions, System, TooFewPlaces, system_named
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.cache import NextLayer
from vllm_ndp.lab.vectorised.outcome import Summary, against, step_times, summarise
from vllm_ndp.planning.bitwidths import LossTable, nominal_loss
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import policies_with, usual_bit_rule
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.format import PREFILL, REJECTED
from vllm_ndp.traces.trace import Trace

VARIANTS: dict[str, tuple[dict[str, float | str], ...]] = {
    "balanced": ({"spill_bits": 3}, {"spill_bits": 2}),
    "monde": ({"h_rounding": "floor"}, {"h_rounding": "ceil"}, {"h_rounding": "cost"}),
    "quantized": ({"weight_bits": 16}, {"weight_bits": 8}, {"weight_bits": 4}, {"weight_bits": 3}, {"weight_bits": 2}),
    "vllm_offload": ({"offload_backend": "uva"}, {"offload_backend": "prefetch"}),
    "llama_cpp": ({"gguf_bits": 16}, {"gguf_bits": 4}),
    "ktransformers": ({"cpu_bits": 16}, {"cpu_bits": 4}, {"cpu_bits": 4, "gpu_bits": 4}),
    "expert_cache": (
        {"cache_bits": 16},
        {"cache_bits": 4},
        {"cache_bits": 3},
        {"cache_bits": 4, "misses_by": "host", "scope": "layer"},
    ),
    "gpu_on_demand": ({"cache": "none"}, {"cache": "lru"}, {"cache": "lfu"}),
}
PRIOR_EVERY = 4
DRAWS = 1000
MARGIN = 0.05
"""The share of a mean within which another is called equal."""


@dataclass(frozen=True)
class Replayed:
    """One row done: its columns, and what setting rows against each other needs."""

    row: Summary
    decode_ps: NDArray[np.float64]  # [G], decode of each group of requests
    over_least: float
    """Of the last joint plan: how much longer it takes than what no plan can be below."""


@dataclass(frozen=True)
class Comparison:
    replayed: list[Replayed]
    skipped: list[str]
    config_hash: str
    num_requests: int

    @property
    def rows(self) -> list[Summary]:
        return [done.row for done in self.replayed]


def split_requests(trace: Trace) -> tuple[Trace, Trace]:
    """(held out for the prior, replayed): every PRIOR_EVERY-th request, which takes some of every domain."""
    every = range(len(trace.prompt_len))
    return trace.select(every[::PRIOR_EVERY]), trace.select([r for r in every if r % PRIOR_EVERY])


def popularity(trace: Trace) -> ImportanceScore:
    """Counts of all tokens of a trace, prompt and decode."""
    p = trace.provenance
    merged = RoutingStats.from_choices(trace.ids, trace.weights, p.num_experts)
    return ImportanceScore.from_weights(merged.counts)


class Workload:
    """Input of a replay on any hardware: requests, the popularity known beforehand, groups that decode together.

    Without a prior every PRIOR_EVERY-th request is held out to make one.
    """

    def __init__(self, trace: Trace, *, prior: ImportanceScore | None = None) -> None:
        known: Trace | None = None
        if prior is None:
            if len(trace.prompt_len) < 2:
                raise TraceError("a prior needs requests of its own: record more than one request, or give --prior")
            known, trace = split_requests(trace)
            prior = popularity(known)
        self.trace, self.prior = trace, prior
        self._known = known
        self.batches = cache(partial(Batches.of, trace))
        """The trace arranged for one batch size, once."""

    @cached_property
    def predictor(self) -> NextLayer:
        """Learned from the requests that are held out; where none are, from all prompts."""
        if self._known is not None:
            return NextLayer.learned(self._known, self._known.phase != REJECTED)
        return NextLayer.learned(self.trace, self.trace.phase == PREFILL)

    @property
    def routing(self) -> str:
        """Name of the routing that a synthetic trace resembles; empty for other traces."""
        known = self.trace.provenance
        return str(known.settings.get("routing", "fitted to nothing")) if known.source == "synthetic" else ""


@lru_cache(maxsize=1)
def _costs(hardware: str, overrides: tuple[tuple[str, str | int], ...], model: str, has_bytes: bool) -> Costs:
    """Comparisons that follow each other on one machine share what is computed of it once."""
    return Costs(load_hardware(hardware, **dict(overrides)), model_named(model), has_bytes=has_bytes)


class Replays:
    """One workload under one CompareSettings. Everything that can be refused is refused by the constructor."""

    def __init__(self, workload: Workload, settings: CompareSettings, loss: LossTable | None = None) -> None:
        p = workload.trace.provenance
        has_bytes = loss is not None and loss.at_8 is not None
        self.costs = _costs(settings.hardware, tuple(settings.overrides.items()), settings.model, has_bytes)
        self.costs.require(p.num_experts, p.top_k)
        self._workload, self._settings = workload, settings
        self._loss = loss or LossTable.nominal(p.num_layers, p.num_experts)
        num_hot = p.num_experts // 2 if settings.num_hot is None else settings.num_hot
        if num_hot > p.num_experts:
            raise ConfigError(f"hot experts per layer must lie in 0..{p.num_experts}, got {num_hot}")
        if settings.fit and settings.num_hot is None:
            num_hot = p.num_experts
        self._budget = Budget(num_hot, settings.avg_bits)
        told = {"bit_rule": usual_bit_rule(NdpSettings.bits_for), "prior": workload.prior} | settings.policy_options
        names = {"prefill" if name == ORACLE else name for name in settings.policies} | {"prefill"}
        self._policies = policies_with(sorted(names), told)
        self.num_requests = len(workload.trace.prompt_len)
        sizes, most = list(dict.fromkeys(settings.batches)), self.num_requests
        self.skipped = [f"batch {batch}: only {most} requests to replay" for batch in sizes if batch > most]
        planned = [one for batch in sizes if batch <= most for one in self._plans(batch)]
        if not planned:
            raise TraceError(self.skipped[0])
        self.planned, refused = fitted(planned, self.costs, fit=settings.fit)
        self.skipped += refused

    def _plans(self, batch: int) -> Iterator[Planned]:
        settings = self._settings
        for system in map(system_named, settings.systems):
            variants = [{**variant, **settings.options} for variant in VARIANTS.get(system.name, ({},))]
            distinct = [v for i, v in enumerate(variants) if v not in variants[:i]]
            for policy, own in product(settings.policies if system.follows_policy else ("prefill",), distinct):
                options = ReplayOptions(
                    policy=self._policies["prefill" if policy == ORACLE else policy],
                    budget=self._budget,
                    loss=self._loss,
                    prior=self._workload.prior,
                    clairvoyant=policy == ORACLE,
                    predictor=self._workload.predictor if settings.prefetch == "measured" else None,
                    own=own,
                )
                yield Planned(system, self._workload.batches(batch), options)

    def replay(self, one: Planned) -> Replayed:
        """Find one row."""
        system, batches, options = one
        outcome = system.replay(batches, self.costs, options)
        row = with_memory(summarise(system.name, outcome, batches, self.costs), one, self.costs)
        row = replace(row, routing=self._workload.routing)
        decode_ps = np.nansum(step_times(outcome, batches, self.costs), axis=1)
        return Replayed(row, decode_ps, outcome.over_least)


def side_by_side(replayed: Sequence[Replayed]) -> list[Replayed]:
    """The same, each row set against the paper's system and policy at its batch size."""
    paper = {
        done.row.batch: done.decode_ps
        for done in replayed
        if (done.row.system, done.row.policy) == ("context_aware", "prefill")
    }
    return [
        replace(done, row=against(done.row, done.decode_ps, paper[done.row.batch])) if done.row.batch in paper else done
        for done in replayed
    ]


@dataclass(frozen=True)
class Difference:
    """Difference of one sample's mean from another's, as a share of the other's, with its 95 % bootstrap interval.

    `equal` by two one-sided tests (TOST) at 5 %: the 90 % interval lies within the margin on both sides. That two means
    do not differ significantly shows no equality.
    """

    mean: float
    low: float
    high: float
    equal: bool


def bootstrap_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[DRAWS], of as many values, drawn with replacement."""
    draws = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    return np.asarray(values[draws].mean(axis=1))


def paired(own: NDArray[np.float64], other: NDArray[np.float64]) -> Difference:
    """own - other of the same requests, at least two."""
    difference = (own - other) / other.mean()
    low, at_least, at_most, high = np.percentile(bootstrap_means(difference), [2.5, 5, 95, 97.5]).tolist()
    equal = bool(at_least > -MARGIN and at_most < MARGIN)
    return Difference(float(difference.mean()), low, high, equal)


def beside_fastest(replayed: Sequence[Replayed]) -> list[Difference | None]:
    """Decode time of each row from that of the fastest at its batch size, paired by group; None of a single group."""
    found: list[Difference | None] = []
    for done in replayed:
        alike = [other.decode_ps for other in replayed if other.row.batch == done.row.batch]
        fastest = min(alike, key=np.sum)
        found.append(paired(done.decode_ps, fastest) if len(fastest) > 1 else None)
    return found


# -- what fits into the modelled memories ------------------------------------------------------------------------------


class Planned(NamedTuple):
    """One row to be: a system, the requests it serves, and what it is told."""

    system: System
    batches: Batches
    options: ReplayOptions


def fitted(planned: list[Planned], costs: Costs, *, fit: bool) -> tuple[list[Planned], list[str]]:
    """(those that fit into the memories, why others do not), before anything is replayed.

    Raises DoesNotFit for a system of which no variant fits at some batch size; with `fit` only if nothing at all does.
    A system that K places cannot hold, TooFewPlaces, does not stop the others: more memory would not help it.
    """
    running: list[Planned] = []
    refused: list[tuple[Planned, DoesNotFit]] = []
    for one in planned:
        try:
            running.append(_largest(one, costs) if fit else _require(one, costs, "give fewer --hot-experts, or --fit"))
        except DoesNotFit as refusal:
            refused.append((one, refusal))
    for one, reason in sorted(refused, key=lambda refusal: isinstance(refusal[1], TooFewPlaces)):
        others = any(other.system is one.system and other.batches is one.batches for other in running)
        if not (others or ((fit or isinstance(reason, TooFewPlaces)) and running)):
            raise reason
    return running, list(dict.fromkeys(str(reason) for _, reason in refused))


def _require(one: Planned, costs: Costs, advice: str) -> Planned:
    own = "".join(f", {name} {value}" for name, value in one.options.own.items())
    who = f"{one.system.name} with K {one.options.budget.num_hot} at batch {one.batches.shape[1]}{own}"
    _footprint(one, costs).require(costs.hardware, who, advice)
    return one


def _footprint(one: Planned, costs: Costs) -> Footprint:
    experts, batches = one.system.memory(costs, one.options), one.batches
    return Footprint.of(experts, costs.shape, int(batches.kv_tokens.max()), batches.shape[1])


def with_memory(row: Summary, one: Planned, costs: Costs) -> Summary:
    """The row with what it holds in each memory; K is 0 where no place on the GPU is kept for an expert."""
    held = _footprint(one, costs)
    without = replace(one.options, budget=replace(one.options.budget, num_hot=0))
    try:
        uses_places = one.system.memory(costs, without).gpu != held.experts.gpu
    except TooFewPlaces:
        uses_places = False  # its own experts in the memory that the places of others take
    return replace(
        row,
        num_hot=one.options.budget.num_hot if uses_places else 0,
        gpu_gb=held.gpu / 1e9,
        device_gb=held.experts.device / 1e9,
        host_gb=held.experts.host / 1e9,
        expander_gb=held.experts.expander / 1e9,
    )


def _largest(one: Planned, costs: Costs) -> Planned:
    """The same with the widest replicas and the most hot experts that fit, tried from the largest down.

    A system that can use any number of bytes gets the remaining bytes too.
    """
    wanted = one.options
    smallest: DoesNotFit | None = None
    most = min(wanted.budget.num_hot, costs.shape.num_experts)
    for widest, num_hot in product(reversed(WIDTHS), range(most, -1, -1)):
        budget = Budget(num_hot, min(wanted.budget.avg_bits, widest))
        options = replace(wanted, budget=budget, widest=widest)
        try:
            found = _require(one._replace(options=options), costs, "nothing of it fits, take another hardware")
        except DoesNotFit as reason:
            smallest = reason
            continue
        if not one.system.fills_memory:
            return found
        held = _footprint(found, costs)
        free = costs.hardware.gpu.hbm_capacity_bytes - (held.gpu - held.experts.gpu)
        return found._replace(options=replace(options, gpu_bytes=free))
    assert smallest is not None
    raise smallest


# -- every point of a grid, shared out over processes ------------------------------------------------------------------

_SAME = 1e-6
"""Sums of the same losses differ by their order."""


@dataclass(frozen=True)
class Compared:
    """Points of a grid with their comparisons, and what was refused where."""

    points: list[tuple[CompareSettings, Comparison]]
    refused: list[tuple[CompareSettings, str]]
    loss: LossTable | None

    @property
    def skipped(self) -> list[str]:
        """Rows that are missing and why; with their point where not every point lacks them."""
        notes = [(at, note) for at, comparison in self.points for note in comparison.skipped]
        everywhere = set.intersection(*(set(comparison.skipped) for _, comparison in self.points))
        common = [note for note in self.points[0][1].skipped if note in everywhere]
        return common + [f"{named(at)}: {note}" for at, note in notes if note not in everywhere]

    def rows(self) -> list[dict[str, Any]]:
        """Every row, with its point in the first columns."""
        return [columns(at) | row.as_dict() for at, comparison in self.points for row in comparison.rows]

    def winners(self) -> Iterator[tuple[CompareSettings, int, Summary, Summary | None]]:
        """Per point and batch size: the fastest row, and the fastest of all other systems, of those that lose no more
        than every expert at the point's bits does. If none does, of all. Oracles do not take part."""
        for at, comparison in self.points:
            for batch in dict.fromkeys(row.batch for row in comparison.rows):
                rows = [row for row in comparison.rows if row.batch == batch and not row.policy.startswith(ORACLE)]
                most = self._loss_at(int(at.avg_bits), rows)
                within = [row for row in rows if row.loss <= most] or rows
                ranked = sorted(within, key=lambda row: -row.decode_tokens_per_s)
                if ranked:
                    other = next((row for row in ranked if row.system != ranked[0].system), None)
                    yield at, batch, ranked[0], other

    def _loss_at(self, bits: int, rows: Sequence[Summary]) -> float:
        """Of every expert at so many bits: as a row has it, or else by the table."""
        known = [row.loss for row in rows if (row.system, row.policy) == ("quantized", f"{bits} bits")]
        by_table = (
            nominal_loss(bits) if self.loss is None else float(self.loss.mse[:, :, min(bits, WIDTHS[-1]) - 1].mean())
        )
        return (known or [by_table])[0] * (1 + _SAME)


def columns(at: CompareSettings) -> dict[str, Any]:
    """First columns of a point's rows. memory_gb None: as the hardware has it."""
    capacity = at.overrides.get(CAPACITY)
    memory = None if capacity is None else int(capacity) / GB
    return {"model": at.model, "hardware": at.hardware, "memory_gb": memory, "asked_bits": at.avg_bits}


def processes(text: str) -> int:
    """Read a number of processes, or `all`: one for each core this process may use."""
    if text == "all":
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--jobs must be a number of processes, or all, got {text!r}")
    return int(text)


def compare_all(
    traces: Sequence[Trace],
    points: Sequence[CompareSettings],
    *,
    prior: ImportanceScore | None = None,
    loss: LossTable | None = None,
    jobs: int = 1,
) -> Compared:
    """Raises ConfigError where a trace has no model, a model no trace, or nothing can be replayed anywhere; at a single
    point whatever `Replays` refuses."""
    numbers = [_trace_of(at.model, traces) for at in points]
    if unused := set(range(len(traces))) - set(numbers):
        p = traces[min(unused)].provenance
        raise ConfigError(
            f"trace {min(unused) + 1} (of {p.model}, {p.num_experts} experts top-{p.top_k}) is for no model of the "
            "grid: none has its routing shape, or a trace before it has the same; leave it out or name a model for it"
        )
    workloads = [Workload(trace, prior=prior) for trace in traces]
    refused: dict[tuple[int, str], None] = {}
    prepared: list[list[Replays]] = [[] for _ in points]
    for place, (number, at) in enumerate(zip(numbers, points, strict=True)):
        for part in [at] if len(points) == 1 else [_of_system(at, name) for name in at.systems]:
            try:
                prepared[place].append(Replays(workloads[number], part, loss))
            except NdpError as error:
                if len(points) == 1:
                    raise
                refused[place, str(error)] = None
    rows = [(place, of, one) for place, every in enumerate(prepared) for of in every for one in of.planned]
    done: list[list[Replayed]] = [[] for _ in points]
    for (place, _, _), found in zip(rows, _run(rows, min(jobs, len(rows))), strict=True):
        if isinstance(found, str):
            refused[place, found] = None
        else:
            done[place].append(found)
    if not any(done):
        raise ConfigError(next(why for _, why in refused))
    there = [(at, _comparison(own, every)) for at, own, every in zip(points, done, prepared, strict=True) if own]
    return Compared(there, [(points[place], why) for place, why in refused], loss)


def compare(trace: Trace, settings: CompareSettings) -> Comparison:
    """Replay the trace under every combination. Raises ConfigError or TraceError before any replay starts."""
    return compare_all([trace], [settings]).points[0][1]


Task = tuple[int, Replays, Planned]
"""A row to be found: its point, and by whom."""
_shared: list[Sequence[Task]] = []
"""What processes replay: they are forked, so they read the traces without a copy."""


def _replayed(number: int) -> Replayed | str:
    _, replays, one = _shared[0][number]
    try:
        return replays.replay(one)
    except NdpError as error:
        return str(error)


def _run(tasks: Sequence[Task], jobs: int) -> Iterator[Replayed | str]:
    """In the order of the tasks."""
    _shared[:] = [tasks]
    if jobs <= 1:
        yield from map(_replayed, range(len(tasks)))
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        try:
            yield from pool.map(_replayed, range(len(tasks)))
        except BrokenProcessPool:
            raise NdpError(
                "a worker process ended without an answer, perhaps because memory ran out: try with fewer --jobs"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _of_system(at: CompareSettings, name: str) -> CompareSettings:
    own = {option: value for option, value in at.options.items() if option in SYSTEMS[name].options}
    return replace(at, systems=(name,), options=own)


def _comparison(rows: Sequence[Replayed], prepared: Sequence[Replays]) -> Comparison:
    """Of a point, from the rows of its systems: by batch size, then by system."""
    skipped = list(dict.fromkeys(note for of in prepared for note in of.skipped))
    in_order = side_by_side(sorted(rows, key=lambda done: done.row.batch))
    return Comparison(in_order, skipped, prepared[0].costs.hardware.config_hash, prepared[0].num_requests)


def named(at: CompareSettings) -> str:
    return ", ".join(str(value) for value in columns(at).values() if value is not None)


def _trace_of(model: str, traces: Sequence[Trace]) -> int:
    """The first trace of the model's routing shape; the only one is held to it by its replay."""
    if len(traces) == 1:
        return 0
    shape = model_named(model)
    for number, trace in enumerate(traces):
        if (trace.provenance.num_experts, trace.provenance.top_k) == (shape.num_experts, shape.top_k):
            return number
    given = ", ".join(f"{t.provenance.num_experts} top-{t.provenance.top_k}" for t in traces)
    raise ConfigError(
        f"{model} has {shape.num_experts} experts top-{shape.top_k}, the traces have {given}: "
        "add a trace of its routing shape"
    )
