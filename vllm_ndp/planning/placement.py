"""Chooses hot experts, the K of highest score in each layer, also for several requests at once. Chooses warm ones too.

Ties go to the lower expert id, so that the same scores always give the same placement. Does not know bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import Placement


def top_experts(ranking: NDArray[np.float64], num_hot: int) -> Placement:
    """The num_hot highest of each row of a [L, E] ranking, ties to the lower id."""
    return Placement(highest(ranking, num_hot))


def highest(ranking: NDArray[np.float64], num_hot: int) -> NDArray[np.bool_]:
    """[..., E], the same of any number of rankings."""
    num_experts = ranking.shape[-1]
    if not 0 <= num_hot <= num_experts:
        raise ConfigError(
            f"hot_experts must lie in 0..{num_experts} (the experts of this model), got {num_hot}: lower it"
        )
    hot = np.zeros(ranking.shape, np.bool_)
    order = np.argsort(-ranking, axis=-1, kind="stable")[..., :num_hot]
    np.put_along_axis(hot, order, True, axis=-1)
    return hot


def with_warm(placement: Placement, importance: NDArray[np.float64], num_warm: int) -> Placement:
    """The same hot experts, and of each layer's others the num_warm most important ones warm, ties to the lower id.

    `importance` [L, E]: the scores of all requests together, whatever rule made experts hot. So an expert that would
    have become hot and was not allowed to move is warm first.
    """
    return Placement(placement.hot, top_experts(np.where(placement.hot, -np.inf, importance), num_warm).hot)


def by_sum(scores: Sequence[ImportanceScore], num_hot: int) -> Placement:
    """Every request counts the same: top-K of the sum of normalised importances."""
    if not scores:
        raise ValueError("a placement needs the score of at least one request")
    return top_experts(np.sum([score.values for score in scores], axis=0), num_hot)
