"""A policy turns routing statistics into a plan: score each request, place the hot set, assign each request's bits.

Same in, same out. Policies of other packages register a factory under the entry point group `vllm_ndp.policies`:
    my_policy = "my_package:make"        # make(settings: PolicySettings) -> Policy
Does not know vLLM, devices or files other than a prior's array.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

import numpy as np

from ndp_device.errors import ConfigError
from ndp_device.model_shape import MAX_EXPERTS_IN_ALL
from ndp_device.strict_arrays import read_array
from ndp_device.strict_files import Refused
from vllm_ndp.planning.bitwidths import (
    GAINS,
    OVER_LAYERS,
    LossTable,
    bits_over_layers,
    full_precision,
    select_bitwidths,
    uniform_bitwidths,
)
from vllm_ndp.planning.importance import PAPER_ALPHA, ImportanceScore, importance, repeats
from vllm_ndp.planning.placement import BATCH_RULES
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement
from vllm_ndp.planning.stats import RoutingStats

_MOST_PRIOR_TOKENS = 1 << 32
_MAX_PRIOR_BYTES = 8 * MAX_EXPERTS_IN_ALL + 4096
ENTRY_POINT_GROUP = "vllm_ndp.policies"
BIT_RULES = (*GAINS, OVER_LAYERS, "uniform", "full")


class Policy(Protocol):
    """What the planner (replanner.py) asks of a policy."""

    @property
    def name(self) -> str: ...

    def score(self, stats: RoutingStats) -> ImportanceScore:
        """Once per request, when its prefill ends."""
        ...

    def place(self, scores: Sequence[ImportanceScore], current: Placement | None, budget: Budget) -> Placement:
        """Once per end of a prefill, from the scores of every running request (at least one)."""
        ...

    def assign(self, score: ImportanceScore, placement: Placement, loss: LossTable, budget: Budget) -> BitwidthPlan:
        """One request's bits under the common placement."""
        ...

    def at_layer(self, layer: int) -> Policy:
        """The same policy for a model that consists of one layer of this one: its scores and placements are [1, E]."""
        ...


@dataclass(frozen=True)
class PolicySettings:
    """Everything a policy of ours can be told; a policy ignores what it has no use for."""

    alpha: float = PAPER_ALPHA
    bit_rule: str = "importance"
    batch_rule: str = "sum"
    seed: int = 0
    prior: ImportanceScore | None = field(default=None, repr=False)
    prior_tokens: float = 16.0
    """n0 of prefill_prior: how many prompt tokens the prior is worth. Source: docs/log/planning.md, "prior"."""

    def __post_init__(self) -> None:
        for name in ("alpha", "prior_tokens", "seed"):  # settings of a policy come from the user as they are
            value, whole = getattr(self, name), name == "seed"
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ConfigError(f"{name} must be a {'whole ' if whole else ''}number, got {value!r}")
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"alpha must lie in 0..1, got {self.alpha}")
        if not 0 <= self.prior_tokens <= _MOST_PRIOR_TOKENS:
            raise ConfigError(f"prior_tokens must lie in 0..{_MOST_PRIOR_TOKENS}, got {self.prior_tokens}")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed must be at least 0 and below 2^64, got {self.seed}")
        if not isinstance(self.prior, ImportanceScore | None):
            raise ConfigError(f"prior must be the path of a .npy file, got {self.prior!r}")
        _known("bit_rule", self.bit_rule, BIT_RULES)
        _known("batch_rule", self.batch_rule, BATCH_RULES)


Scorer = Callable[[RoutingStats, PolicySettings], ImportanceScore]


@dataclass(frozen=True)
class ScoredPolicy:
    """A policy that is a way of scoring plus the common rules for hot sets and bits."""

    name: str
    scorer: Scorer
    settings: PolicySettings

    def score(self, stats: RoutingStats) -> ImportanceScore:
        return self.scorer(stats, self.settings)

    def place(self, scores: Sequence[ImportanceScore], current: Placement | None, budget: Budget) -> Placement:
        return BATCH_RULES[self.settings.batch_rule](scores, budget.num_hot)

    def assign(self, score: ImportanceScore, placement: Placement, loss: LossTable, budget: Budget) -> BitwidthPlan:
        if self.settings.bit_rule == "full":
            return full_precision(placement)
        if self.settings.bit_rule == "uniform":
            return uniform_bitwidths(placement, budget)
        if self.settings.bit_rule == OVER_LAYERS:
            return bits_over_layers(score, placement, loss, budget)
        return select_bitwidths(score, placement, loss, budget, self.settings.bit_rule)

    def at_layer(self, layer: int) -> ScoredPolicy:
        prior = self.settings.prior
        return self if prior is None else replace(self, settings=replace(self.settings, prior=prior.layer(layer)))


def prefill(settings: PolicySettings) -> Policy:
    """The paper's: what the prompt used is what its decode will use."""
    return ScoredPolicy("prefill", lambda stats, told: importance(stats, told.alpha), settings)


def static(settings: PolicySettings) -> Policy:
    """Popularity measured beforehand, the same for every request."""
    return ScoredPolicy("static", lambda stats, told: _prior_of("static", told), _with_prior("static", settings))


def prefill_prior(settings: PolicySettings) -> Policy:
    """Prefill shrunk to a popularity prior: a short prompt says little about hundreds of experts."""

    def score(stats: RoutingStats, told: PolicySettings) -> ImportanceScore:
        return importance(stats, told.alpha).shrunk_to(_prior_of("prefill_prior", told), told.prior_tokens)

    return ScoredPolicy("prefill_prior", score, _with_prior("prefill_prior", settings))


def prefill_shrunk(settings: PolicySettings) -> Policy:
    """Prefill shrunk to a popularity prior as far as the prompt's halves disagree: a subject that changes within the
    prompt, or routing without a subject, says little about what comes."""

    def score(stats: RoutingStats, told: PolicySettings) -> ImportanceScore:
        prior = _prior_of("prefill_shrunk", told)
        own, weight = importance(stats, told.alpha), repeats(stats, prior)
        return own.shrunk_to(prior, told.prior_tokens) if weight is None else own.mixed_with(prior, weight)

    return ScoredPolicy("prefill_shrunk", score, _with_prior("prefill_shrunk", settings))


def random(settings: PolicySettings) -> Policy:
    """The null: importance drawn by lot, another lot for every prompt, the same lot for the same prompt and seed."""

    def lot(stats: RoutingStats, told: PolicySettings) -> ImportanceScore:
        generator = np.random.default_rng([told.seed, zlib.crc32(stats.counts.tobytes())])
        return ImportanceScore.from_weights(generator.random(stats.counts.shape), stats.num_tokens)

    return ScoredPolicy("random", lot, settings)


PolicyFactory = Callable[[PolicySettings], Policy]
POLICIES: dict[str, PolicyFactory] = {
    "prefill": prefill,
    "prefill_prior": prefill_prior,
    "prefill_shrunk": prefill_shrunk,
    "static": static,
    "random": random,
}


def load_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """A policy of ours or of another package, by name."""
    foreign = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    _known("policy", name, (*POLICIES, *foreign))
    factory: PolicyFactory = POLICIES[name] if name in POLICIES else foreign[name].load()
    policy = factory(settings or PolicySettings())
    if absent := [method for method in ("score", "place", "assign", "at_layer") if not hasattr(policy, method)]:
        raise ConfigError(f"policy {name!r} has no method {absent[0]!r}: see vllm_ndp.planning.policies.Policy")
    return policy


def read_prior(path: Path) -> ImportanceScore:
    """A popularity prior from a .npy file of counts, scores or shares [layers, experts]."""
    try:
        array = read_array(path, _MAX_PRIOR_BYTES)
    except (OSError, Refused) as error:
        raise ConfigError(f"the prior {path} must be a .npy array [layers, experts]: {error}") from None
    if array.dtype.kind not in "iuf" or not array.size:
        raise ConfigError(f"the prior {path} must be one .npy array of numbers [layers, experts]")
    return ImportanceScore.from_weights(array)


def _with_prior(name: str, settings: PolicySettings) -> PolicySettings:
    _prior_of(name, settings)  # refuse now, not at the first prompt
    return settings


def _prior_of(name: str, settings: PolicySettings) -> ImportanceScore:
    if settings.prior is None:
        raise ConfigError(
            f"policy {name!r} needs a popularity prior: give one recorded on this model, or use policy 'prefill'"
        )
    return settings.prior


def _known(what: str, value: str, allowed: Collection[str]) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{what} must be one of {sorted(allowed)}, got {value!r}")
    if value in allowed:
        return
    nearest = difflib.get_close_matches(value, list(allowed), n=1, cutoff=0.0)[0]
    raise ConfigError(f"{what} must be one of {sorted(allowed)}, got {value!r}: did you mean {nearest!r}?")
