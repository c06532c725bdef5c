"""How many bits each cold expert keeps: the paper's prefix-structured selector.

Cold experts stand in order of falling importance. The first n4 keep 4 bits, the next n3 keep 3, the next n2 keep 2,
the rest 1. With R increments over 1 bit to spend in a layer, n2 = R - 3 n4 - 2 n3 follows, so every feasible (n4, n3)
is tried and the one with the largest total gain kept; the gain of a prefix is a difference of prefix sums.

    gain "mse"         loss[e, 1] - loss[e, w]                  as published
    gain "importance"  importance[e] * (loss[e, 1] - loss[e, w])   expected over the tokens that will use the expert

Does not know requests, policies or where the loss table comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ndp_device.errors import ConfigError
from ndp_device.widths import FULL_PRECISION_BITS, WIDTHS
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement
from vllm_ndp.planning.stats import frozen_array

GAINS = ("importance", "mse")

LOSS_RATIO_PER_BIT = 4.4
"""Loss falls about 4.4x per bit (source: GPTQ replicas of tiny-mixtral). Used only where nothing is calibrated."""

_MAX_GAINS_AT_ONCE = 1 << 20
"""Layers are tried together while their gains fit in 8 MiB."""


@dataclass(frozen=True)
class LossTable:
    """Expert-output MSE of each replica on held-out calibration tokens; never rises with bits."""

    mse: NDArray[np.float64]  # [L, E, 4], widths 1..4

    def __post_init__(self) -> None:
        object.__setattr__(self, "mse", frozen_array(self.mse, np.float64))
        if self.mse.ndim != 3 or self.mse.shape[2] != len(WIDTHS):
            raise ConfigError(
                f"a loss table must be [layers, experts, {len(WIDTHS)}] for widths {list(WIDTHS)}, "
                f"got {list(self.mse.shape)}"
            )
        if not np.isfinite(self.mse).all() or (self.mse < 0).any():
            raise ConfigError("a loss table must hold finite losses >= 0: build the replicas again")
        if (np.diff(self.mse, axis=2) > 0).any():
            layer, expert, width = (int(i) for i in np.argwhere(np.diff(self.mse, axis=2) > 0)[0])
            raise ConfigError(
                f"losses must not rise with bits, but layer {layer} expert {expert} loses more at "
                f"{width + 2} bits than at {width + 1}: calibrate on more text or use LossTable.from_measured"
            )

    @classmethod
    def from_measured(cls, mse: NDArray[np.floating]) -> LossTable:
        """Measured losses are noisy: a width is never credited with more loss than a narrower one."""
        return cls(np.minimum.accumulate(np.asarray(mse, np.float64), axis=2))

    @classmethod
    def nominal(cls, num_layers: int, num_experts: int) -> LossTable:
        """The same loss for every expert, falling by LOSS_RATIO_PER_BIT: for replicas that were never calibrated."""
        steps = LOSS_RATIO_PER_BIT ** -np.arange(len(WIDTHS), dtype=np.float64)
        return cls(np.broadcast_to(steps, (num_layers, num_experts, len(WIDTHS))))


def select_bitwidths(
    score: ImportanceScore, placement: Placement, loss: LossTable, budget: Budget, gain: str = "importance"
) -> BitwidthPlan:
    """The widths of largest total gain that spend exactly the budget's increments in each layer."""
    if gain not in GAINS:
        raise ConfigError(f"bits must be chosen by one of {list(GAINS)}, got {gain!r}")
    hot = placement.hot
    if loss.mse.shape[:2] != hot.shape or score.values.shape != hot.shape:
        raise ConfigError(
            f"placement {list(hot.shape)}, scores {list(score.values.shape)} and loss table "
            f"{list(loss.mse.shape[:2])} must be of one model"
        )
    gains = loss.mse[:, :, :1] - loss.mse[:, :, 1:]  # [L, E, 3] for 2, 3, 4 bits
    if gain == "importance":
        gains = gains * score.values[:, :, None]
    num_cold, increments = placement.num_cold, budget.increments(placement.num_cold)
    # Cold experts first, by falling importance, ties to the lower id; hot ones behind them.
    order = np.argsort(np.where(hot, np.inf, -score.values), axis=1, kind="stable")
    bits = np.zeros(hot.shape, np.uint8)
    for cold, spend in sorted(set(zip(num_cold.tolist(), increments.tolist(), strict=True))):
        if cold == 0:
            continue
        layers = np.flatnonzero((num_cold == cold) & (increments == spend))
        ranked = order[layers, :cold]
        prefix = np.zeros((len(layers), cold + 1, 3))
        np.cumsum(gains[layers[:, None], ranked], axis=1, out=prefix[:, 1:])
        n4, n3, n2 = _feasible_counts(cold, spend)
        best = _largest_gain(prefix, n4, n3, n2)
        ranks = np.arange(cold)
        ends = np.stack([n4, n4 + n3, n4 + n3 + n2])[:, best, None]  # [3, layers, 1]
        bits[layers[:, None], ranked] = 1 + (ranks < ends).sum(axis=0)
    return BitwidthPlan(bits)


def uniform_bitwidths(placement: Placement, budget: Budget) -> BitwidthPlan:
    """The same bits for every cold expert; what a fractional average leaves over goes to the lower expert ids."""
    cold = ~placement.hot
    num_cold = placement.num_cold
    base, extra = np.divmod(budget.increments(num_cold), np.maximum(num_cold, 1))
    bits = 1 + base[:, None] + (np.cumsum(cold, axis=1) <= extra[:, None])
    return BitwidthPlan(np.where(cold, bits, 0))


def full_precision(placement: Placement) -> BitwidthPlan:
    """Every cold expert in the checkpoint's own precision: the identity mode, outside any bit budget."""
    return BitwidthPlan(np.where(placement.hot, 0, FULL_PRECISION_BITS))


@lru_cache(maxsize=256)
def _feasible_counts(cold: int, spend: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Every (n4, n3) with n2 = spend - 3 n4 - 2 n3 >= 0 and n4 + n3 + n2 <= cold; n4 rises first, then n3."""
    n4, n3 = np.divmod(np.arange((cold + 1) ** 2), cold + 1)
    n2 = spend - 3 * n4 - 2 * n3
    feasible = (n2 >= 0) & (n4 + n3 + n2 <= cold)
    counts = n4[feasible], n3[feasible], n2[feasible]
    for array in counts:
        array.flags.writeable = False
    return counts


def _largest_gain(
    prefix: NDArray[np.float64], n4: NDArray[np.int64], n3: NDArray[np.int64], n2: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[layers], index into the feasible counts; the first of equal gains, which is the flattest."""
    end4, end3, end2 = n4, n4 + n3, n4 + n3 + n2
    at_once = max(_MAX_GAINS_AT_ONCE // len(n4), 1)
    best = np.empty(len(prefix), np.int64)
    for start in range(0, len(prefix), at_once):
        c2, c3, c4 = np.moveaxis(prefix[start : start + at_once], 2, 0)
        total = c4[:, end4] + (c3[:, end3] - c3[:, end4]) + (c2[:, end2] - c2[:, end3])
        best[start : start + at_once] = total.argmax(axis=1)
    return best
