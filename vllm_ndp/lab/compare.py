"""Every system and policy on the same trace and the same modelled hardware, as one table.

Popularity priors come from requests that are not replayed: every fourth one, unless a prior is given. No row depends on
another, so a sweep may compute rows in any order in any process. Knows which variants of a system are worth a row of
their own. Does not know how a system works.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError, TraceError
from ndp_device.common.widths import DEFAULT_AVG_BITS
from ndp_device.timing.spec import load_hardware
from vllm_ndp.cost_model.costs import Costs, model_named
from vllm_ndp.lab.bound import Bound, Cells, regretted
from vllm_ndp.lab.capacity import Planned, fitted, with_memory
from vllm_ndp.lab.differences import Difference, paired
from vllm_ndp.lab.systems import SYSTEMS, ReplayOptions, require_options, system_named
from vllm_ndp.lab.vectorised.batches import Batches
from vllm_ndp.lab.vectorised.outcome import Outcome, Summary, against, step_times, summarise
from vllm_ndp.lab.vectorised.prediction import NextLayer
from vllm_ndp.planning.bitwidths import OF_PAIRS, LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import POLICIES, PolicySettings, policies_with
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.traces.format import PREFILL, REJECTED
from vllm_ndp.traces.trace import Trace

ORACLE = "oracle"
ALL_POLICIES = (*POLICIES, ORACLE)
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
PREFETCHES = ("measured", "published")


@dataclass(frozen=True)
class CompareSettings:
    """Systems, policies and batch sizes to compare, and the model and hardware to compare them on."""

    model: str = "mixtral-8x7b"
    hardware: str = "h100-ndp512"
    overrides: dict[str, str | int] = field(default_factory=dict)
    systems: tuple[str, ...] = tuple(SYSTEMS)
    policies: tuple[str, ...] = ALL_POLICIES
    batches: tuple[int, ...] = (1,)
    num_hot: int | None = None
    """None: half of the experts, as the plugin."""
    avg_bits: float = DEFAULT_AVG_BITS
    bits: str = PolicySettings.bit_rule
    batch_rule: str = "sum"
    prior_tokens: float = PolicySettings.prior_tokens
    bits_for: str = ReplayOptions.bits_for
    fit: bool = False
    """Take the most hot experts, at most num_hot, and the widest replicas that the memories hold."""
    prefetch: str = "measured"
    """measured: by a predictor learned from the trace; published: as accurately as each system's source says."""
    regret: bool = False
    """Set each row against the least time at its loss, and the least loss at its time."""
    affinity: bool = False
    """Batch requests whose prompts route alike instead of in trace order."""
    migration: str = "kept"
    migration_budget: int = ReplayOptions.migration_budget
    hysteresis: float = ReplayOptions.hysteresis
    policy_options: dict[str, Any] = field(default_factory=dict)
    """Options by name. Each policy gets the options that it knows; they go before the fields above."""
    options: dict[str, float | str] = field(default_factory=dict)
    """Options of single systems, e.g. h_rounding, cache, spill_bits, frequency, memory_tokens, t1, t2, theta."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.systems:
            system_named(name)
        require_options(self.options, self.systems)
        if self.num_hot is not None and self.num_hot < 0:
            raise ConfigError(f"hot experts per layer must be at least 0, got {self.num_hot}")
        if self.prefetch not in PREFETCHES:
            raise ConfigError(f"prefetch must be one of {', '.join(PREFETCHES)}, got {self.prefetch!r}")
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"batch sizes must be at least 1, got {list(self.batches)}")


@dataclass(frozen=True)
class Combination:
    """Batch size, system, policy and options of one row of the table: the unit of work of a sweep."""

    batch: int
    system: str
    policy: str | None
    """None where the system follows no policy."""
    own: dict[str, float | str]


@dataclass(frozen=True)
class Replayed:
    """One combination done: its row, and what setting rows against each other needs."""

    row: Summary
    decode_ps: NDArray[np.float64]  # [G], decode of each group of requests
    num_decisions: int
    measured_seconds: float
    """Wall time of the replay itself."""


@dataclass(frozen=True)
class Comparison:
    rows: list[Summary]
    replayed: list[Replayed]
    """As the rows."""
    skipped: list[str]
    config_hash: str
    num_requests: int
    outcomes: list[tuple[Outcome, Batches]] = field(default_factory=list)
    """As the rows, with everything behind them; empty where other processes found the rows."""


def split_requests(trace: Trace) -> tuple[Trace, Trace]:
    """(held out for the prior, replayed): every PRIOR_EVERY-th request, which takes some of every domain."""
    every = range(len(trace.prompt_len))
    known = [r for r in every if r % PRIOR_EVERY == 0]
    return trace.select(known), trace.select([r for r in every if r % PRIOR_EVERY])


def popularity(trace: Trace) -> ImportanceScore:
    """Counts of all tokens of a trace, prompt and decode."""
    p = trace.provenance
    merged = RoutingStats.from_choices(trace.ids, trace.weights, p.num_experts)
    return ImportanceScore.from_weights(merged.counts)


class Workload:
    """Input of a replay on any hardware: requests, the popularity known beforehand, groups that decode together.

    Without a prior every PRIOR_EVERY-th request is held out to make one.
    """

    def __init__(self, trace: Trace, *, prior: ImportanceScore | None = None, affinity: bool = False) -> None:
        known: Trace | None = None
        if prior is None:
            if len(trace.prompt_len) < 2:
                raise TraceError("a prior needs requests of its own: record more than one request, or give --prior")
            known, trace = split_requests(trace)
            prior = popularity(known)
        self.trace, self.prior = trace, prior
        self._known = known
        self._affinity = affinity
        self._batches: dict[int, Batches] = {}

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

    def batches(self, batch: int) -> Batches:
        """The trace arranged for one batch size, once."""
        if batch not in self._batches:
            self._batches[batch] = Batches.of(self.trace, batch, affinity=self._affinity)
        return self._batches[batch]


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
        told = {
            "bit_rule": settings.bits,
            "batch_rule": settings.batch_rule,
            "seed": settings.seed,
            "prior": workload.prior,
            "prior_tokens": settings.prior_tokens,
            **settings.policy_options,
        }
        if told["bit_rule"] == OF_PAIRS:
            raise ConfigError(
                f"bit_rule {OF_PAIRS!r} gives single pairs widths of their own, but the systems compared here have one "
                "for each expert: use 'layers', or replay a recorded run"
            )
        names = {"prefill" if name == ORACLE else name for name in settings.policies} | {"prefill"}
        self._policies = policies_with(sorted(names), told)
        self._bounds: dict[tuple[int, int], Bound] = {}
        self.num_requests = len(workload.trace.prompt_len)
        sizes = list(dict.fromkeys(settings.batches))
        self.skipped = [
            f"batch {batch}: only {self.num_requests} requests to replay"
            for batch in sizes
            if batch > self.num_requests
        ]
        combinations = [
            combination
            for batch in sizes
            if batch <= self.num_requests
            for combination in _combinations(settings, batch)
        ]
        if not combinations:
            raise TraceError(self.skipped[0])
        planned = [self._plan(combination) for combination in combinations]
        fits, refused = fitted(planned, self.costs, fit=settings.fit)
        self.skipped += refused
        self._planned = [one for one in fits if one is not None]
        self.combinations = [c for c, one in zip(combinations, fits, strict=True) if one is not None]

    def _plan(self, combination: Combination) -> Planned:
        settings, policy = self._settings, combination.policy
        options = ReplayOptions(
            policy=self._policies["prefill" if policy in (None, ORACLE) else policy],
            budget=self._budget,
            loss=self._loss,
            prior=self._workload.prior,
            clairvoyant=policy == ORACLE,
            migration=settings.migration,
            migration_budget=settings.migration_budget,
            hysteresis=settings.hysteresis,
            bits_for=settings.bits_for,
            predictor=self._workload.predictor if settings.prefetch == "measured" else None,
            own=combination.own,
        )
        return Planned(system_named(combination.system), self._workload.batches(combination.batch), options)

    def arrange(self) -> None:
        """Arrange the trace for every batch size now, so that processes forked from this one share it."""
        for combination in self.combinations:
            self._workload.batches(combination.batch)

    def replay(self, combination: Combination) -> tuple[Replayed, Outcome, Batches]:
        """Find one row, with everything behind it."""
        one = self._planned[self.combinations.index(combination)]
        system, batches, options = one
        started = time.perf_counter()
        outcome = system.replay(batches, self.costs, options)
        seconds = time.perf_counter() - started
        row = with_memory(summarise(outcome, batches, self.costs), one, self.costs)
        row = replace(self._with_regret(row, one, outcome), routing=self._workload.routing)
        decode_ps = np.nansum(step_times(outcome, batches, self.costs), axis=1)
        return Replayed(row, decode_ps, batches.num_decisions, seconds), outcome, batches

    def _with_regret(self, row: Summary, one: Planned, outcome: Outcome) -> Summary:
        if not (self._settings.regret and one.system.is_bounded):
            return row
        batches, num_hot = one.batches, one.options.budget.num_hot
        key = batches.shape[1], num_hot
        if key not in self._bounds:
            self._bounds[key] = Bound(Cells.of(batches, self.costs, self._loss, num_hot))
        return regretted(row, outcome, batches, self.costs, self._bounds[key])

    def compared(
        self, replayed: Sequence[Replayed], outcomes: list[tuple[Outcome, Batches]] | None = None
    ) -> Comparison:
        """The table from its rows, given in the order of `combinations`."""
        rows = side_by_side(replayed)
        config_hash = self.costs.hardware.config_hash
        return Comparison(rows, list(replayed), self.skipped, config_hash, self.num_requests, outcomes or [])


def compare(
    trace: Trace, settings: CompareSettings, *, prior: ImportanceScore | None = None, loss: LossTable | None = None
) -> Comparison:
    """Replay the trace under every combination. Raises ConfigError or TraceError before any replay starts."""
    replays = Replays(Workload(trace, prior=prior, affinity=settings.affinity), settings, loss)
    done = [replays.replay(combination) for combination in replays.combinations]
    return replays.compared([replayed for replayed, _, _ in done], [(outcome, batches) for _, outcome, batches in done])


def side_by_side(replayed: Sequence[Replayed]) -> list[Summary]:
    """The rows, each set against the paper's system and policy at its batch size."""
    paper = {
        done.row.batch: done.decode_ps
        for done in replayed
        if (done.row.system, done.row.policy) == ("context_aware", "prefill")
    }
    return [
        against(done.row, done.decode_ps, paper[done.row.batch]) if done.row.batch in paper else done.row
        for done in replayed
    ]


def beside_fastest(replayed: Sequence[Replayed]) -> list[Difference | None]:
    """Decode time of each row from that of the fastest at its batch size, paired by group; None of a single group."""
    fastest: dict[int, Replayed] = {}
    for done in replayed:
        known = fastest.setdefault(done.row.batch, done)
        if done.decode_ps.sum() < known.decode_ps.sum():
            fastest[done.row.batch] = done
    return [
        paired(done.decode_ps, fastest[done.row.batch].decode_ps) if len(done.decode_ps) > 1 else None
        for done in replayed
    ]


def _combinations(settings: CompareSettings, batch: int) -> Iterator[Combination]:
    for name in settings.systems:
        variants = [{**variant, **settings.options} for variant in VARIANTS.get(name, ({},))]
        distinct = [v for i, v in enumerate(variants) if v not in variants[:i]]
        for policy in settings.policies if system_named(name).follows_policy else (None,):
            for options in distinct:
                yield Combination(batch, name, policy, options)
