"""How much each expert matters for decode, judged from routing statistics.

    S[l, e] = alpha * Norm(counts[l])[e] + (1 - alpha) * Norm(scores[l])[e]

The paper (arXiv 2512.04476) gives the formula and alpha = 0.5 but not Norm; we divide by the layer's sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.stats import RoutingStats, frozen_array

PAPER_ALPHA = 0.5
BITS_FOR = ("request", "batch", "auto")
_SIZES, _GUESSES = 16, 8
"""Sizes of guesses that are told apart at most, and guesses of one size at least."""
AUTO_SHARES_FROM, AUTO_MORE_BITS = 4, 0.5
"""Number of running requests from which `auto` gives them common bits, and the bits that it adds on average. From there
on common bits are as fast as own bits or faster, and lose less. Source: docs/systems.md, "Own or common bits"."""


@dataclass(frozen=True)
class ImportanceScore:
    """Non-negative, each layer sums to 1; num_tokens says how many tokens it was judged from (0 = a prior)."""

    values: NDArray[np.float64]  # [L, E]
    num_tokens: int = 0
    strength: NDArray[np.float64] = field(default=None)  # type: ignore[arg-type]  # [L, E]
    """Square of the router weight that an expert has where it is chosen, by the layer's mean: errors enter the answer
    so. None: the same in all."""
    weights: NDArray[np.float32] | None = None
    """[L, E, Q], router weights of its choices, as RoutingStats has them; None where single ones are not known."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", frozen_array(self.values, np.float64))
        strength = np.ones(self.values.shape) if self.strength is None else self.strength
        object.__setattr__(self, "strength", frozen_array(strength, np.float64))
        if self.weights is not None:
            object.__setattr__(self, "weights", frozen_array(self.weights, np.float32))
        if self.values.ndim != 2 or self.values.size == 0:
            raise ValueError(f"an importance score must be [L, E], got {list(self.values.shape)}")
        if not (self.values >= 0).all():  # also catches NaN
            raise ValueError("importance must be >= 0 and not NaN")
        sums = self.values.sum(axis=1)
        if not (abs(sums - 1.0) < 1e-9).all():
            raise ValueError(f"each layer's importance must sum to 1, got {sums.tolist()}")

    @classmethod
    def from_weights(cls, weights: NDArray[np.floating | np.integer], num_tokens: int = 0) -> ImportanceScore:
        """Normalise any non-negative [L, E] array (a popularity count, for one); an all-zero layer becomes uniform."""
        if np.ndim(weights) != 2 or not np.isfinite(weights).all() or (np.asarray(weights) < 0).any():
            raise ConfigError(
                f"expert weights must be a finite, non-negative [layers, experts] array, got shape {np.shape(weights)}"
            )
        return cls(_normalised(np.asarray(weights, np.float64)), num_tokens)

    def layer(self, layer: int) -> ImportanceScore:
        """The score of one layer [1, E], as if the model had only this layer."""
        one = slice(layer, layer + 1)
        weights = None if self.weights is None else self.weights[one]
        return ImportanceScore(self.values[one], self.num_tokens, self.strength[one], weights)

    @property
    def pair_strength(self) -> NDArray[np.float64]:
        """Square of the router weight by the layer's mean, of each pair [L, E, Q]. Where single weights are not
        known, of each expert [L, E, 1]."""
        if self.weights is None:
            return self.strength[:, :, None]
        square = np.square(self.weights, dtype=np.float64)
        return square / self.mean_squares[:, None, None]

    @property
    def mean_squares(self) -> NDArray[np.float64]:
        """[L], of router weights, over the choices that decode is expected to make."""
        assert self.weights is not None, "router weights of single choices must be known"
        mean = (np.square(self.weights, dtype=np.float64).mean(axis=2) * self.values).sum(axis=1)
        return np.where(mean > 0, mean, 1.0)

    def require_shape(self, model: tuple[int, ...]) -> None:
        """Raises ConfigError where this prior is not of a model [layers, experts]."""
        if self.values.shape != model:
            raise ConfigError(
                f"the prior is for a model of [layers, experts] {list(self.values.shape)}, "
                f"this one has {list(model)}: give a prior recorded on this model"
            )

    def mixed_with(self, prior: ImportanceScore, weight: float) -> ImportanceScore:
        """weight * self + (1 - weight) * prior."""
        prior.require_shape(self.values.shape)
        return replace(self, values=_normalised(weight * self.values + (1 - weight) * prior.values))

    def shrunk_to(self, prior: ImportanceScore, prior_tokens: float) -> ImportanceScore:
        """(n * self + n0 * prior) / (n + n0): the shorter the prompt, the more the prior counts."""
        prior.require_shape(self.values.shape)
        total = self.num_tokens + prior_tokens
        if total == 0:
            return prior
        mixed = (self.num_tokens * self.values + prior_tokens * prior.values) / total
        return replace(self, values=_normalised(mixed))


def repeats(stats: RoutingStats, prior: ImportanceScore) -> float | None:
    """0..1, how much of what sets a prompt apart from the prior is there again in its later half.

    Let a and b be what the halves choose more than the prior does. Chance is independent in both, so a.b is the
    prompt's own, and |a - b|^2 / 4 the error of the mean of both. The share of the first in the sum is the weight of
    the prompt that predicts best. None: of one token, or tokens whose order is not known, there are no halves.
    """
    if (halves := _halves(stats)) is None:
        return None
    first, second = (half - prior.values for half in halves)
    own = max(float((first * second).sum()), 0.0)
    error = float(((first - second) ** 2).sum()) / 4
    return own / (own + error) if own else 0.0


def calibrated(score: ImportanceScore, stats: RoutingStats, prior: ImportanceScore, weight: float) -> ImportanceScore:
    """A score mixed with the prior by `weight` (see repeats), as shares that decode will have on average.

    A straight line to the prior is right for experts that are used much. Experts that a prompt hardly used come 1.2 to
    3.5 times as often as it says, and they get the fewest bits. Plans lost up to 1.5 times their promise. So the
    halves of the prompt guess each other's shares. The mean share behind guesses of each size corrects the score.
    """
    if (halves := _halves(stats)) is None:
        return score
    half_weight = weight / (2 - weight)  # half the tokens, twice the error
    guesses = np.concatenate([(half_weight * half + (1 - half_weight) * prior.values).ravel() for half in halves])
    shares = np.concatenate([half.ravel() for half in reversed(halves)])
    sizes = np.array_split(np.argsort(guesses, kind="stable"), max(min(_SIZES, len(guesses) // _GUESSES), 1))
    guessed = np.array([guesses[size].mean() for size in sizes])
    came = _rising([float(shares[size].mean()) for size in sizes])
    values = np.interp(score.values, guessed, came)
    largest = score.values > guessed[-1]
    values[largest] = score.values[largest] * (came[-1] / guessed[-1])
    return replace(score, values=_normalised(values))


def _halves(stats: RoutingStats) -> list[NDArray[np.float64]] | None:
    """Shares [L, E] of the choices in the first and in the later half of a prompt; None where it has no halves."""
    if stats.late_counts is None or stats.num_tokens < 2:
        return None
    late = stats.late_counts.astype(np.float64)
    return [_normalised(half) for half in (stats.counts - late, late)]


def _rising(values: list[float]) -> NDArray[np.float64]:
    """The nearest values that never fall: neighbours that do are pooled. Source: Ayer et al., Annals of Mathematical
    Statistics 26 (1955)."""
    pools: list[tuple[float, int]] = []  # (mean, how many)
    for value in values:
        mean, many = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, many = (before * count + mean * many) / (count + many), count + many
        pools.append((mean, many))
    return np.repeat([mean for mean, _ in pools], [many for _, many in pools])


def has_common_bits(bits_for: str, running: int) -> bool:
    """Whether so many running requests share one assignment of bits."""
    if bits_for not in BITS_FOR:
        raise ConfigError(f"bits_for must be one of {', '.join(BITS_FOR)}, got {bits_for!r}")
    return running >= {"request": running + 1, "batch": 1, "auto": AUTO_SHARES_FROM}[bits_for]


def scores_for_bits(scores: Sequence[ImportanceScore], bits_for: str) -> list[ImportanceScore]:
    """Scores that the bits of each running request are assigned from: its own score, or one for the whole batch.

    Requests that want one expert at different widths read it once per width; with one score they never do. It has no
    weights of single pairs, which would make widths differ again. `auto` decides by how many run.
    """
    if not has_common_bits(bits_for, len(scores)):
        return list(scores)
    used = np.sum([score.values for score in scores], axis=0)
    strength = np.sum([score.values * score.strength for score in scores], axis=0) / np.where(used > 0, used, 1.0)
    together = replace(ImportanceScore.from_weights(used), strength=np.where(used > 0, strength, 1.0))
    return [together] * len(scores)


def importance(stats: RoutingStats, alpha: float = PAPER_ALPHA) -> ImportanceScore:
    """The paper's score; alpha weighs how often an expert was chosen against how strongly."""
    mixed = alpha * _normalised(stats.counts.astype(np.float64)) + (1 - alpha) * _normalised(stats.scores)
    return ImportanceScore(_normalised(mixed), stats.num_tokens, _strength(stats))


def _strength(stats: RoutingStats) -> NDArray[np.float64]:
    """[L, E], 1 where an expert was not chosen."""
    square = (stats.scores / np.maximum(stats.counts, 1)) ** 2
    mean = (square * stats.counts).sum(axis=1, keepdims=True) / max(stats.num_tokens * stats.top_k, 1)
    known = (stats.counts > 0) & (mean > 0)
    return np.where(known, square / np.where(mean > 0, mean, 1.0), 1.0)


def _normalised(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows divided by their sum; a row without any weight knows nothing, so it becomes uniform."""
    sums = weights.sum(axis=1, keepdims=True)
    return np.where(sums > 0, weights / np.where(sums > 0, sums, 1.0), 1.0 / weights.shape[1])
