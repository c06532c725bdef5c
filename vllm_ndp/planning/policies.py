"""A policy turns routing statistics into a plan: score each request, place the hot set, assign each request's bits.

Same in, same out. Policies of other packages register a maker under the entry point group `vllm_ndp.policies`:
    my_policy = "my_package:make"        # make(settings: PolicySettings, *, own: float = 1.0) -> Policy
The keyword parameters of a maker are the policy's own options. docs/extend.md shows one.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ndp_device.common.errors import ConfigError, nearest
from ndp_device.common.model_shape import MAX_EXPERTS_IN_ALL
from ndp_device.common.strict_files import Refused, decode_array, read_bytes
from ndp_device.common.widths import BYTE_BITS
from vllm_ndp.planning.bitwidths import (
    GAINS,
    LOSSES,
    OF_PAIRS,
    OVER_LAYERS,
    LossTable,
    bits_of_pairs,
    bits_over_layers,
    in_bytes,
    select_bitwidths,
    uniform_bitwidths,
)
from vllm_ndp.planning.importance import PAPER_ALPHA, ImportanceScore, calibrated, importance, repeats
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement, top_experts
from vllm_ndp.planning.stats import RoutingStats

_MOST_PRIOR_TOKENS = 1 << 32
_MAX_PRIOR_BYTES = 8 * MAX_EXPERTS_IN_ALL + 4096
ENTRY_POINT_GROUP = "vllm_ndp.policies"
BIT_RULES = (*GAINS, OVER_LAYERS, OF_PAIRS, "uniform")


class Policy(Protocol):
    """Methods that the planner (replanner.py) calls. Arrays are [L, E], whole models and single layers alike.

    While a prompt still runs, the planner asks about one layer: L is 1 then, and `stats.layer` says which one it is.
    """

    @property
    def name(self) -> str: ...

    def score(self, stats: RoutingStats) -> ImportanceScore:
        """Once per request, when its prefill ends."""
        ...

    def place(self, scores: Sequence[ImportanceScore], current: Placement | None, budget: Budget) -> Placement:
        """Once per end of a prefill, from the scores of every running request (at least one). current: in force."""
        ...

    def assign(self, score: ImportanceScore, placement: Placement, loss: LossTable, budget: Budget) -> BitwidthPlan:
        """One request's bits under the common placement."""
        ...


@dataclass(frozen=True)
class PolicySettings:
    """Everything any policy can be told; a policy ignores what it has no use for."""

    alpha: float = PAPER_ALPHA
    """Weight of counts against router scores in the importance."""
    bit_rule: str = OVER_LAYERS
    """Rule that deals bits. `layers`: the largest reduction of loss for the bits that pairs read, over all layers
    together. `pairs`: the same for single pairs, by their own router weights. Two rules count the bits that experts
    keep, with an equal budget for each layer: `importance` weights the reduction by importance, `mse` is as published.
    `uniform`: no choice. The plugin names `pairs` where requests have bits of their own (config.py)."""
    losses: str = "relative"
    """Losses of replicas that bits are chosen by: `relative` to the expert's own output, or `absolute`."""
    seed: int = 0
    """Seed of the policy `random`."""
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
        _known("losses", self.losses, LOSSES)

    def prior_for(self, stats: RoutingStats) -> ImportanceScore:
        """The prior, which there must be, of the layers that the statistics are about."""
        assert self.prior is not None
        return self.prior if stats.layer is None else self.prior.layer(stats.layer)


def usual_bit_rule(bits_for: str) -> str:
    """The rule of the plugin where none is named: the one that loses least at equal time, for single pairs where a
    request may have bits of its own. Source: docs/log/quality.md."""
    return OVER_LAYERS if bits_for == "batch" else OF_PAIRS


Scorer = Callable[[RoutingStats, PolicySettings], ImportanceScore]


@dataclass(frozen=True)
class ScoredPolicy:
    """A policy that is a way of scoring plus the common rules for hot sets and bits."""

    name: str
    scorer: Scorer
    settings: PolicySettings

    def score(self, stats: RoutingStats) -> ImportanceScore:
        score, deals_bits = self.scorer(stats, self.settings), stats.layer is None
        return replace(score, weights=stats.weights) if deals_bits and self.settings.bit_rule == OF_PAIRS else score

    def place(self, scores: Sequence[ImportanceScore], current: Placement | None, budget: Budget) -> Placement:
        """Every request counts the same."""
        return top_experts(np.sum([score.values for score in scores], axis=0), budget.num_hot)

    def assign(self, score: ImportanceScore, placement: Placement, loss: LossTable, budget: Budget) -> BitwidthPlan:
        if budget.avg_bits == BYTE_BITS:
            return in_bytes(placement, loss)
        if self.settings.bit_rule == "uniform":
            return uniform_bitwidths(placement, budget, loss.dealt)
        if self.settings.bit_rule == OVER_LAYERS:
            return bits_over_layers(score, placement, loss, budget)
        if self.settings.bit_rule == OF_PAIRS:
            return bits_of_pairs(score, placement, loss, budget)
        return select_bitwidths(score, placement, loss, budget, self.settings.bit_rule)


def prefill(settings: PolicySettings) -> Policy:
    """The paper's: what the prompt used is what its decode will use."""
    return ScoredPolicy("prefill", lambda stats, told: importance(stats, told.alpha), settings)


def static(settings: PolicySettings) -> Policy:
    """Popularity measured beforehand, the same for every request."""
    return ScoredPolicy("static", lambda stats, told: told.prior_for(stats), _with_prior("static", settings))


def prefill_prior(settings: PolicySettings) -> Policy:
    """Prefill shrunk to a popularity prior: a short prompt says little about hundreds of experts."""

    def score(stats: RoutingStats, told: PolicySettings) -> ImportanceScore:
        return importance(stats, told.alpha).shrunk_to(told.prior_for(stats), told.prior_tokens)

    return ScoredPolicy("prefill_prior", score, _with_prior("prefill_prior", settings))


def prefill_shrunk(settings: PolicySettings, *, calibrate: bool = False) -> Policy:
    """Prefill shrunk to a popularity prior as far as the prompt's halves disagree. A subject that changes within the
    prompt, or routing without a subject, says little about what comes. With `calibrate` rare experts, too, are expected
    as often as they come. A plan then loses what it promises."""

    def score(stats: RoutingStats, told: PolicySettings) -> ImportanceScore:
        prior = told.prior_for(stats)
        own, weight = importance(stats, told.alpha), repeats(stats, prior)
        if weight is None:
            return own.shrunk_to(prior, told.prior_tokens)
        mixed = own.mixed_with(prior, weight)
        return calibrated(mixed, stats, prior, weight) if calibrate else mixed

    return ScoredPolicy("prefill_shrunk", score, _with_prior("prefill_shrunk", settings))


def random(settings: PolicySettings) -> Policy:
    """The null: importance drawn by lot, another lot for every prompt, the same lot for the same prompt and seed."""

    def lot(stats: RoutingStats, told: PolicySettings) -> ImportanceScore:
        generator = np.random.default_rng([told.seed, zlib.crc32(stats.counts.tobytes())])
        return ImportanceScore.from_weights(generator.random(stats.counts.shape), stats.num_tokens)

    return ScoredPolicy("random", lot, settings)


PolicyMaker = Callable[..., Policy]
"""make(settings: PolicySettings, *, own options with their defaults)"""
POLICIES: dict[str, PolicyMaker] = {
    "prefill": prefill,
    "prefill_prior": prefill_prior,
    "prefill_shrunk": prefill_shrunk,
    "static": static,
    "random": random,
}


def load_policy(name: str, settings: PolicySettings | None = None, own: Mapping[str, Any] | None = None) -> Policy:
    """A policy of ours or of another package, by name. own: options that only this policy has."""
    make = _maker(name)
    try:
        policy = make(settings or PolicySettings(), **(own or {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy {name!r} cannot be made with the options {dict(own or {})}: {error}") from None
    if absent := [method for method in ("score", "place", "assign") if not hasattr(policy, method)]:
        raise ConfigError(f'policy {name!r} has no method {absent[0]!r}: see docs/extend.md, "A policy"')
    return policy


def own_options(name: str) -> tuple[str, ...]:
    """Options that only this policy has: the keyword parameters of its maker."""
    parameters = inspect.signature(_maker(name)).parameters.values()
    return tuple(one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY)


COMMON_OPTIONS = tuple(one.name for one in fields(PolicySettings))


def policy_with(name: str, options: Mapping[str, Any]) -> tuple[Policy, PolicySettings]:
    """A policy by name with options by name, common ones and its own; and the common ones, checked."""
    _refuse_unknown(name, options, (*COMMON_OPTIONS, *own_options(name)))
    common = {key: value for key, value in options.items() if key in COMMON_OPTIONS}
    if isinstance(common.get("prior"), str):
        common["prior"] = read_prior(Path(common["prior"]))
    settings = PolicySettings(**common)
    own = {key: value for key, value in options.items() if key not in COMMON_OPTIONS}
    return load_policy(name, settings, own), settings


def policies_with(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Policy]:
    """Several policies by name, each with the options that it knows. Raises ConfigError for an unknown option."""
    known = {name: (*COMMON_OPTIONS, *own_options(name)) for name in names}
    _refuse_unknown(", ".join(names), options, {option for own in known.values() for option in own})
    return {
        name: policy_with(name, {key: value for key, value in options.items() if key in own})[0]
        for name, own in known.items()
    }


def _refuse_unknown(name: str, options: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError(
            f"policy {name!r} has no option {unknown[0]!r}: known are {', '.join(sorted(known)) or 'none'}"
        )


def _maker(name: str) -> PolicyMaker:
    if name in (*POLICIES,):
        return POLICIES[name]
    require_known(name)
    maker: PolicyMaker = _foreign()[name].load()
    return maker


def require_known(name: str, *others: str) -> None:
    """others: what the asker takes beside policies."""
    _known("policy", name, (*POLICIES, *_foreign(), *others))


def _foreign() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def read_prior(path: Path) -> ImportanceScore:
    """A popularity prior from a .npy file of counts, scores or shares [layers, experts]."""
    try:
        array = decode_array(read_bytes(path, _MAX_PRIOR_BYTES))
    except (OSError, Refused) as error:
        raise ConfigError(f"the prior {path} must be a .npy array [layers, experts]: {error}") from None
    if array.dtype.kind not in "iuf" or not array.size:
        raise ConfigError(f"the prior {path} must be one .npy array of numbers [layers, experts]")
    return ImportanceScore.from_weights(array)


def _with_prior(name: str, settings: PolicySettings) -> PolicySettings:
    if settings.prior is None:  # refuse now, not at the first prompt
        raise ConfigError(
            f"policy {name!r} needs a popularity prior: give one recorded on this model, or use policy 'prefill'"
        )
    return settings


def _known(what: str, value: str, allowed: Collection[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        near = nearest(value, allowed) if isinstance(value, str) else ""
        raise ConfigError(f"{what} must be one of {', '.join(sorted(allowed))}, got {value!r}{near}")
