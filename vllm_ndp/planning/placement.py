"""Chooses hot experts, the K of highest score in each layer, also for several requests at once. Chooses warm ones too.

A batch rule merges the scores of the running requests into one [L, E] ranking. Ties go to the lower expert id,
so that the same scores always give the same placement. Does not know bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Placement

BatchRule = Callable[[Sequence[ImportanceScore], int], Placement]
"""(scores of the running requests, num_hot) -> placement"""


def top_experts(ranking: NDArray[np.float64], num_hot: int) -> Placement:
    """The num_hot highest of each row of a [L, E] ranking, ties to the lower id."""
    num_experts = ranking.shape[1]
    if not 0 <= num_hot <= num_experts:
        raise ConfigError(
            f"hot_experts must lie in 0..{num_experts} (the experts of this model), got {num_hot}: lower it"
        )
    hot = np.zeros(ranking.shape, np.bool_)
    order = np.argsort(-ranking, axis=1, kind="stable")[:, :num_hot]
    np.put_along_axis(hot, order, True, axis=1)
    return Placement(hot)


def with_warm(placement: Placement, importance: NDArray[np.float64], num_warm: int) -> Placement:
    """The same hot experts, and of each layer's others the num_warm most important ones warm, ties to the lower id.

    `importance` [L, E]: the scores of all requests together, whatever rule made experts hot. So an expert that would
    have become hot and was not allowed to move is warm first.
    """
    return Placement(placement.hot, top_experts(np.where(placement.hot, -np.inf, importance), num_warm).hot)


def by_sum(scores: Sequence[ImportanceScore], num_hot: int) -> Placement:
    """Every request counts the same: top-K of the sum of normalised importances."""
    return top_experts(_stacked(scores).sum(axis=0), num_hot)


def by_max(scores: Sequence[ImportanceScore], num_hot: int) -> Placement:
    """An expert is as important as it is to the request that needs it most."""
    return top_experts(_stacked(scores).max(axis=0), num_hot)


def by_tokens(scores: Sequence[ImportanceScore], num_hot: int) -> Placement:
    """A request counts as much as its prompt is long: top-K of the merged statistics."""
    weights = np.array([max(score.num_tokens, 1) for score in scores], np.float64)
    return top_experts((weights[:, None, None] * _stacked(scores)).sum(axis=0), num_hot)


def by_fairness(scores: Sequence[ImportanceScore], num_hot: int) -> Placement:
    """Greedy proportional fairness: each next hot expert is the one that raises sum(log(coverage)) the most.

    A request that is poorly covered so far pulls harder; with one request this is plain top-K.
    """
    values = _stacked(scores)  # [R, L, E]
    num_layers, num_experts = values.shape[1:]
    if not 0 <= num_hot <= num_experts:
        return top_experts(values[0], num_hot)  # refuses in one sentence
    hot = np.zeros((num_layers, num_experts), np.bool_)
    covered = np.full((len(values), num_layers), 1.0 / num_experts)  # one average expert each: log(0) has no slope
    layers = np.arange(num_layers)
    for _ in range(num_hot):
        gain = _product(1.0 + values / covered[:, :, None])  # ranks as the sum of logarithms does
        gain[hot] = -np.inf
        best = gain.argmax(axis=1)  # argmax takes the first: ties to the lower id
        hot[layers, best] = True
        covered += values[:, layers, best]
    return Placement(hot)


def _product(factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """factors [R, L, E] >= 1, multiplied over R, each layer in a unit of its own that keeps the largest near 1."""
    product = np.ones(factors.shape[1:])
    for each in factors:
        product *= each
        product = np.ldexp(product, -np.frexp(product.max(axis=1, keepdims=True))[1])
    return product


BATCH_RULES: dict[str, BatchRule] = {"sum": by_sum, "max": by_max, "tokens": by_tokens, "fairness": by_fairness}


def _stacked(scores: Sequence[ImportanceScore]) -> NDArray[np.float64]:
    if not scores:
        raise ValueError("a placement needs the score of at least one request")
    return np.stack([score.values for score in scores])
