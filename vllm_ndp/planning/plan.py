"""Where every expert lives and how many bits it keeps. Values are checked once, where they are made.

    Budget (what we may spend) -> Placement (who is hot) + BitwidthPlan (bits of the cold) -> Plan (both, with an epoch)

The K experts of highest score in each layer are hot, also for several requests at once. Ties go to the lower expert id,
so that the same scores always give the same placement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import BYTE_BITS, FLAG_OF_BITS, FULL_PRECISION_BITS, PLAN_BITS, WIDTHS
from vllm_ndp.planning.stats import frozen_array

_ALLOWED_BITS = (0, *PLAN_BITS)
_IS_ALLOWED = np.isin(np.arange(256), _ALLOWED_BITS)
_FLAG_OF_BITS = np.frombuffer(FLAG_OF_BITS, np.uint8)


@dataclass(frozen=True)
class Budget:
    """num_hot experts per layer stay on the GPU and num_warm on the host's CPU; the cold ones have avg_bits on average.

    The average is over the pairs that a prompt lets expect, or over experts, as the bit rule says (bitwidths.py); 8 is
    8 for each of them. With max_loss, they have as many fewer as are predicted to lose that many nats a token.
    """

    num_hot: int
    avg_bits: float
    num_warm: int = 0
    max_loss: float | None = None

    def __post_init__(self) -> None:
        if min(self.num_hot, self.num_warm) < 0:
            raise ConfigError(f"num_hot and num_warm must be at least 0, got {self.num_hot} and {self.num_warm}")
        if not (WIDTHS[0] <= self.avg_bits <= WIDTHS[-1] or self.avg_bits == BYTE_BITS):
            raise ConfigError(f"avg_bits must lie in {WIDTHS[0]}..{WIDTHS[-1]} or be {BYTE_BITS}, got {self.avg_bits}")
        if self.max_loss is not None and not 0 < self.max_loss < math.inf:
            raise ConfigError(f"max_loss must be a number of nats above 0, got {self.max_loss}")

    def with_more_bits(self, more: float) -> Budget:
        """The same with a higher average, at most that of the widest nested replica."""
        return replace(self, avg_bits=max(self.avg_bits, min(self.avg_bits + more, float(WIDTHS[-1]))))

    def increments(self, num_cold: NDArray[np.integer]) -> NDArray[np.int64]:
        """Bits above 1 that each layer may spend, from its number of cold experts [L].

        A layer's share num_cold * (avg_bits - 1) need not be an integer, so the model's running total is rounded down.
        Each layer gets what the total grew by: never over the budget, under it by less than one bit in all.
        """
        shares = np.asarray(num_cold, np.float64) * (self.avg_bits - 1.0)
        totals = np.floor(np.cumsum(shares) + 1e-9).astype(np.int64)  # 1e-9: 2.9999999 of a bit is 3
        return np.diff(totals, prepend=0)


@dataclass(frozen=True)
class Placement:
    """Which experts are hot: in GPU memory, in full precision; and which are warm: computed by the host's CPU, in full
    precision too. The others are cold."""

    hot: NDArray[np.bool_]  # [L, E]
    warm: NDArray[np.bool_] = field(default=None)  # type: ignore[arg-type]  # [L, E]; None: no expert is
    widths: NDArray[np.uint8] = field(default=None)  # type: ignore[arg-type]  # [L, E]
    """Bits of each hot expert where a joint plan gives it its own, 0 elsewhere; None: all have the slots' own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hot", frozen_array(self.hot, np.bool_))
        warm = np.zeros_like(self.hot) if self.warm is None else self.warm
        object.__setattr__(self, "warm", frozen_array(warm, np.bool_))
        widths = np.zeros(self.hot.shape, np.uint8) if self.widths is None else self.widths
        object.__setattr__(self, "widths", frozen_array(widths, np.uint8))
        if self.hot.ndim != 2 or self.hot.size == 0:
            raise ValueError(f"a placement must be [L, E], got {list(self.hot.shape)}")
        if self.warm.shape != self.hot.shape or (self.warm & self.hot).any():
            raise ValueError("an expert is hot, warm or cold: warm must be [L, E] and name no hot one")
        if self.widths.any() and not np.array_equal(self.widths > 0, self.hot):
            raise ValueError("widths must be above 0 exactly where an expert is hot")

    @property
    def cold(self) -> NDArray[np.bool_]:
        """[L, E], the experts of the device."""
        cold: NDArray[np.bool_] = ~(self.hot | self.warm)
        return cold

    @property
    def tiers(self) -> NDArray[np.uint8]:
        """[L, E]: 0 = cold, 1 = hot, 2 = warm, 32 + b = hot at its own b bits, as a trace records it."""
        own = self.widths > 0
        return np.where(own, np.uint8(32) + self.widths, self.hot.astype(np.uint8) + np.uint8(2) * self.warm)

    @property
    def num_cold(self) -> NDArray[np.int64]:
        """Cold experts of each layer, [L]."""
        num_cold: NDArray[np.int64] = self.cold.sum(axis=1, dtype=np.int64)
        return num_cold

    def cold_shares(self, importance: NDArray[np.float64]) -> NDArray[np.float64]:
        """How much of all choices of cold experts each one is, [cold], from the choices [L, E]; equal without any."""
        chosen = importance[self.cold]
        return chosen / chosen.sum() if chosen.any() else np.full(len(chosen), 1.0 / max(len(chosen), 1))


def keep_streamed(
    held: NDArray[np.bool_], wanted: Placement, streamed: NDArray[np.bool_], num_slots: int
) -> NDArray[np.bool_]:
    """Return what the slots of each layer hold [L, E] when a prefill kept the streamed experts that will be hot.

    held [L, E]: before. streamed [L, E]: experts that passed through the GPU. Each kept expert takes a free slot, or
    that of an expert that will not be hot, lower ids first.
    """
    kept = wanted.hot & ~held & streamed
    leaving = held & ~wanted.hot
    num_evicted = held.sum(axis=1) + kept.sum(axis=1) - num_slots
    evicted = leaving & (np.cumsum(leaving, axis=1) <= num_evicted[:, None])
    after: NDArray[np.bool_] = (held & ~evicted) | kept
    return after


@dataclass(frozen=True)
class BitwidthPlan:
    """Bits of each expert that is not hot, 0 exactly where hot; 16 means the checkpoint's own weights.

    Where pairs have widths of their own, a cold pair reads the bits that its own router weight pays for. Then `bits`
    is what one of usual weight reads."""

    bits: NDArray[np.uint8]  # [L, E]
    from_weight: NDArray[np.float32] | None = None  # [L, E, 3]
    """Router weight from which a pair of a cold expert reads 2, 3 and 4 bits; None: all its pairs read the same."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", frozen_array(self.bits, np.uint8))
        if self.bits.ndim != 2 or self.bits.size == 0:
            raise ValueError(f"a bitwidth plan must be [L, E], got {list(self.bits.shape)}")
        if not _IS_ALLOWED[self.bits].all():
            raise ValueError(f"bits must be one of {list(_ALLOWED_BITS)}, got {np.unique(self.bits).tolist()}")
        if self.from_weight is not None:
            object.__setattr__(self, "from_weight", frozen_array(self.from_weight, np.float32))
            if self.from_weight.shape != (*self.bits.shape, len(WIDTHS) - 1):
                raise ValueError(f"weights of wider pairs must be [L, E, 3], got {list(self.from_weight.shape)}")
            if not (self.from_weight[..., 1:] >= self.from_weight[..., :-1]).all():  # also catches NaN
                raise ValueError("weights from which pairs are wider must not fall with bits")

    @property
    def _is_nested(self) -> NDArray[np.bool_]:
        """[L, E], where pairs may have widths of their own."""
        found: NDArray[np.bool_] = (self.bits >= WIDTHS[0]) & (self.bits <= WIDTHS[-1])
        return found

    def of_pairs(self, weights: NDArray[np.float32] | None) -> NDArray[np.uint8]:
        """[L, E, Q], bits of pairs with these router weights [L, E, Q]; [L, E, 1] where they are not known."""
        if self.from_weight is None or weights is None:
            return self.bits[:, :, None]
        wider = (weights[..., None] >= self.from_weight[:, :, None, :]).sum(axis=3, dtype=np.uint8)
        return np.where(self._is_nested[:, :, None], WIDTHS[0] + wider, self.bits[:, :, None]).astype(np.uint8)

    def width_mask(self) -> NDArray[np.uint8]:
        """[L, E]: the flags of the widths at which pairs of an expert may run (ndp_device/common/widths.py)."""
        mask: NDArray[np.uint8] = _FLAG_OF_BITS[self.bits]
        if self.from_weight is None:
            return mask
        ends = np.pad(self.from_weight, ((0, 0), (0, 0), (1, 1)), constant_values=(0, np.inf))
        some = (ends[..., 1:] > ends[..., :-1]) & self._is_nested[..., None]  # a width between equal ends has no pairs
        mask |= np.where(some, _FLAG_OF_BITS[list(WIDTHS)], 0).sum(axis=2, dtype=np.uint8)
        return mask


def union_of_widths(plans: Iterable[BitwidthPlan], shape: tuple[int, int]) -> NDArray[np.uint8]:
    """[L, E] mask of every width that any of the plans uses: what the device must be able to serve."""
    mask = np.zeros(shape, np.uint8)
    for plan in plans:
        mask |= plan.width_mask()
    return mask


@dataclass(frozen=True)
class Plan:
    """One request's view of the model: the shared placement and its own bits, under the epoch that activates both."""

    epoch: int
    placement: Placement
    bits: BitwidthPlan

    def __post_init__(self) -> None:
        if ((self.bits.bits == 0) != self.placement.hot).any():
            raise ValueError("bits must be 0 exactly where an expert is hot")
        if (self.bits.bits[self.placement.warm] != FULL_PRECISION_BITS).any():
            raise ValueError(f"bits must be {FULL_PRECISION_BITS} where an expert is warm")

    def bits_read(self, importance: NDArray[np.float64], weights: NDArray[np.float32] | None = None) -> float:
        """By a cold pair on average, where experts are chosen so often [L, E] with these router weights [L, E, Q].
        NaN where none is cold."""
        cold = self.bits.of_pairs(weights)[self.placement.cold].mean(axis=1)
        return float((cold * self.placement.cold_shares(importance)).sum()) if cold.size else math.nan


def top_experts(ranking: NDArray[np.float64], num_hot: int) -> Placement:
    """The num_hot highest of each row of a [L, E] ranking, ties to the lower id."""
    return Placement(highest(ranking, num_hot))


def highest(ranking: NDArray[np.float64], num_hot: int) -> NDArray[np.bool_]:
    """[..., E], the same of any number of rankings."""
    num_experts = ranking.shape[-1]
    if not 0 <= num_hot <= num_experts:
        raise ConfigError(
            f"hot_experts must lie in 0..{num_experts} (the experts of this model), got {num_hot}: give one of these"
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
