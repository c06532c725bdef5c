"""Every system and policy on the same trace and the same modelled hardware, as one table.

Popularity priors come from requests that are not replayed: every fourth one, unless a prior is given. Knows which
variants of a system are worth a row of their own. Does not know how a system works.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ndp_device.errors import ConfigError, TraceError
from ndp_device.timing.spec import load_hardware
from vllm_ndp.planning.bitwidths import LossTable
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Budget
from vllm_ndp.planning.policies import POLICIES, PolicySettings, load_policy
from vllm_ndp.planning.stats import RoutingStats
from vllm_ndp.replay.systems import SYSTEMS, ReplayOptions, System, require_options, system_named
from vllm_ndp.replay.vectorised.batches import Batches
from vllm_ndp.replay.vectorised.outcome import Outcome, Summary, against, step_times, summarise
from vllm_ndp.simulation.costs import Costs, model_named
from vllm_ndp.traces.trace import Trace

ORACLE = "oracle"
ALL_POLICIES = (*POLICIES, ORACLE)
VARIANTS: dict[str, tuple[dict[str, float | str], ...]] = {
    "balanced": ({"spill_bits": 3}, {"spill_bits": 2}),
    "monde": ({"h_rounding": "floor"}, {"h_rounding": "ceil"}, {"h_rounding": "cost"}),
    "gpu_on_demand": ({"cache": "none"}, {"cache": "lru"}, {"cache": "lfu"}),
}
PRIOR_EVERY = 4


@dataclass(frozen=True)
class CompareSettings:
    """What to compare on what."""

    model: str = "mixtral-8x7b"
    hardware: str = "h100-ndp512"
    overrides: dict[str, str | int] = field(default_factory=dict)
    systems: tuple[str, ...] = tuple(SYSTEMS)
    policies: tuple[str, ...] = ALL_POLICIES
    batches: tuple[int, ...] = (1,)
    num_hot: int | None = None
    """None: half of the experts, as the plugin."""
    avg_bits: float = 2.0
    bits: str = "importance"
    batch_rule: str = "sum"
    prior_tokens: float = PolicySettings.prior_tokens
    bits_for: str = ReplayOptions.bits_for
    affinity: bool = False
    """Batch requests whose prompts route alike instead of in trace order."""
    migration: str = "kept"
    migration_budget: int = ReplayOptions.migration_budget
    hysteresis: float = ReplayOptions.hysteresis
    options: dict[str, float | str] = field(default_factory=dict)
    """Of single systems, e.g. h_rounding, cache, spill_bits, frequency, memory_tokens, t1, t2, theta."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.systems:
            system_named(name)
        require_options(self.options, self.systems)
        if not self.batches or min(self.batches) < 1:
            raise ConfigError(f"batch sizes must be at least 1, got {list(self.batches)}")


@dataclass(frozen=True)
class Comparison:
    rows: list[Summary]
    outcomes: list[tuple[Outcome, Batches]]
    """As the rows, with everything behind them."""
    measured_seconds: list[float]
    """As the rows: wall time of the replay itself."""
    skipped: list[str]
    config_hash: str
    num_requests: int


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


def compare(
    trace: Trace, settings: CompareSettings, *, prior: ImportanceScore | None = None, loss: LossTable | None = None
) -> Comparison:
    """Replay the trace under every combination. Raises ConfigError or TraceError before any replay starts."""
    p = trace.provenance
    costs = Costs(load_hardware(settings.hardware, **settings.overrides), model_named(settings.model))
    costs.require(p.num_experts, p.top_k)
    if prior is None:
        if len(trace.prompt_len) < 2:
            raise TraceError("a prior needs requests of its own: record more than one request, or give --prior")
        known, trace = split_requests(trace)
        prior = popularity(known)
    loss = loss or LossTable.nominal(p.num_layers, p.num_experts)
    budget = Budget(p.num_experts // 2 if settings.num_hot is None else settings.num_hot, settings.avg_bits)
    policy_settings = PolicySettings(
        bit_rule=settings.bits,
        batch_rule=settings.batch_rule,
        seed=settings.seed,
        prior=prior,
        prior_tokens=settings.prior_tokens,
    )
    policies = {name: load_policy("prefill" if name == ORACLE else name, policy_settings) for name in settings.policies}
    rows, outcomes, skipped, seconds = [], [], [], []
    for batch in dict.fromkeys(settings.batches):
        if batch > len(trace.prompt_len):
            skipped.append(f"batch {batch}: only {len(trace.prompt_len)} requests to replay")
            continue
        batches = Batches.of(trace, batch, affinity=settings.affinity)
        for system, policy, own in _combinations(settings):
            name = policy or "prefill"
            options = ReplayOptions(
                policy=policies.get(name) or load_policy("prefill", policy_settings),
                budget=budget,
                loss=loss,
                prior=prior,
                clairvoyant=policy == ORACLE,
                migration=settings.migration,
                migration_budget=settings.migration_budget,
                hysteresis=settings.hysteresis,
                bits_for=settings.bits_for,
                own=own,
            )
            started = time.perf_counter()
            outcome = system.replay(batches, costs, options)
            seconds.append(time.perf_counter() - started)
            rows.append(summarise(outcome, batches, costs))
            outcomes.append((outcome, batches))
    if not rows:
        raise TraceError(skipped[0])
    decode_ps = [np.nansum(step_times(outcome, batches, costs), axis=1) for outcome, batches in outcomes]
    paper = {
        row.batch: times
        for row, times in zip(rows, decode_ps, strict=True)
        if (row.system, row.policy) == ("context_aware", "prefill")
    }
    rows = [
        against(row, times, paper[row.batch]) if row.batch in paper else row
        for row, times in zip(rows, decode_ps, strict=True)
    ]
    return Comparison(rows, outcomes, seconds, skipped, costs.hardware.config_hash, len(trace.prompt_len))


def _combinations(
    settings: CompareSettings,
) -> Iterator[tuple[System, str | None, dict[str, float | str]]]:
    for name in settings.systems:
        system = system_named(name)
        variants = [{**variant, **settings.options} for variant in VARIANTS.get(name, ({},))]
        distinct = [v for i, v in enumerate(variants) if v not in variants[:i]]
        for policy in settings.policies if system.follows_policy else (None,):
            for options in distinct:
                yield system, policy, options
