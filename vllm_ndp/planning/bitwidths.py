"""How many bits each cold expert keeps: the paper's prefix-structured selector.

Cold experts stand in order of falling importance. The first n4 keep 4 bits, the next n3 keep 3, the next n2 keep 2, the
rest 1. With R increments over 1 bit to spend in a layer, n2 = R - 3 n4 - 2 n3 follows. So every feasible (n4, n3) is
tried and the one with the largest total gain kept. The gain of a prefix is a difference of prefix sums.

    gain "mse"         loss[e, 1] - loss[e, w]                  as published
    gain "importance"  importance[e] * (loss[e, 1] - loss[e, w])   expected over the tokens that will use the expert

The published selector counts the bits that experts keep, and gives every layer the same share. Every device holds all
widths, though: what narrow experts save is time, by bits that are read. `bits_over_layers` counts those, and spends
them where one pair gains most, in any layer. Layers differ in what an error in them does to the answer (layer weights).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import ConfigError
from ndp_device.common.widths import BYTE_BITS, FULL_PRECISION_BITS, WIDTHS
from vllm_ndp.planning.importance import ImportanceScore
from vllm_ndp.planning.plan import BitwidthPlan, Budget, Placement
from vllm_ndp.planning.stats import frozen_array

GAINS = ("importance", "mse")
OVER_LAYERS = "layers"
"""The bit rule that spends one budget over all layers, of bits that are read."""
OF_PAIRS = "pairs"
"""The same for single pairs, by their own router weights."""
BY_BITS_READ = (OVER_LAYERS, OF_PAIRS)
LOSSES = ("relative", "absolute")
"""Kinds of an expert's loss: the error of its output on held-out tokens, relative to the output's mean square, or
absolute. With absolute losses, the few experts with the largest outputs take all bits. Source: docs/log/quality.md."""

LOSS_RATIO_PER_BIT = 4.4
"""Loss falls about 4.4x per bit (source: GPTQ replicas of tiny-mixtral). Used only where nothing is calibrated."""


def powers(base: NDArray[np.float64] | float, most: int) -> NDArray[np.float64]:
    """[..., most + 1]: the powers 0 to most of each base [...], multiplied one factor after the other.

    Plans must not depend on the processor. `+ - * /`, sqrt, cumulative sums and products, and `sum` of one array round
    alike on every IEEE machine. exp, log, power, `@`, einsum, argpartition and unstable sorts do not.
    """
    table = np.ones((*np.shape(base), most + 1))
    table[..., 1:] = np.asarray(base)[..., None]
    return np.asarray(np.cumprod(table, axis=-1), np.float64)


def nominal_loss(bits: int) -> float:
    """Loss at a width in units of the loss of 1 bit; bits >= 1."""
    return 1.0 / float(powers(LOSS_RATIO_PER_BIT, bits - 1)[-1])


LEAST_USEFUL_BITS = 2.0
"""Below this average, answers are of no use: declared, not refused. Single experts at 1 bit are part of good plans."""

_NATS_AT = "1.7 nats a token at 1 bit, 0.5 at 1.5, 0.14 at 2, 0.03 at 3"
"""Rise in negative log-likelihood with every expert cold. Source: docs/log/quality.md, tiny-mixtral."""

MOST_TRUSTED_NATS = 0.3
"""Largest prediction that is trusted. Below it, plans of tiny-mixtral lost .5 to 1.7 times the prediction (median error
23 %); above it, about 1.6 times. Plans of tiny-qwen3-moe mostly lost .7 to 1.9 times, most where they lose less than
.005. Source: docs/measured/predicted_loss.json."""

_ROUNDING = 1e-9
"""Error of sums of shares: 1.9999999 bits are 2."""
_BITS_OF_A_SIZE, _SIZES = 44, 1 << 14
"""Gains are of one size where a float's first 20 bits are equal; sizes within 64 octaves are told apart."""


@dataclass(frozen=True)
class LossTable:
    """Expert-output error of each replica on held-out calibration tokens, as LOSSES says; never rises with bits."""

    mse: NDArray[np.float64]  # [L, E, 4], widths 1..4; at an absent width, that of the next narrower one
    layer_weights: NDArray[np.float64] = field(default=None)  # type: ignore[arg-type]  # [L]
    """Effect of the same loss in each layer on the model's answer, in units of their mean; None: the same in all."""
    nats: float | None = None
    """Nats a token that a loss of 1 in every layer does, to first order; None where it was not measured."""
    at_8: NDArray[np.float64] | None = None  # [L, E]
    """The loss at 8 bits; None where the replicas have none."""
    dealt: tuple[int, ...] = WIDTHS
    """Those of widths 1..4 that the replicas have, rising: plans use no others."""

    def __post_init__(self) -> None:
        weights = np.ones(len(self.mse)) if self.layer_weights is None else self.layer_weights
        for name, values in (("mse", self.mse), ("layer_weights", weights), ("at_8", self.at_8)):
            object.__setattr__(self, name, None if values is None else frozen_array(values, np.float64))
        if not np.isfinite(self.mse).all() or (self.mse < 0).any():
            raise ConfigError("a loss table must hold finite losses >= 0: build the replicas again")

    @classmethod
    def from_measured(
        cls, mse: NDArray[np.floating], layer_weights: NDArray[np.float64] | None = None, nats: float | None = None
    ) -> LossTable:
        """Measured losses are noisy: a width is never credited with more loss than a narrower one.

        mse: [L, E, 4], or [L, E, 5] with that at 8 bits; NaN at widths that the replicas do not have.
        """
        mse = np.asarray(mse, np.float64)
        dealt = tuple(bits for column, bits in enumerate(WIDTHS) if not np.isnan(mse[:, :, column]).all())
        if not dealt:
            raise ConfigError(f"replicas must have one of the widths {list(WIDTHS)}: build them again")
        falling = np.fmin.accumulate(mse, axis=2)
        narrow, at_8 = np.split(falling, [len(WIDTHS)], axis=2)
        narrow[:, :, : dealt[0] - WIDTHS[0]] = narrow[:, :, dealt[0] - WIDTHS[0], None]
        of_8 = None if np.isnan(mse[:, :, len(WIDTHS) :]).all() else at_8[:, :, 0]
        return cls(narrow, layer_weights, nats, of_8, dealt)  # type: ignore[arg-type]

    def of_layers(self, layers: slice | NDArray[np.integer]) -> LossTable:
        """Some layers of it, their weights as they are."""
        at_8 = None if self.at_8 is None else self.at_8[layers]
        return LossTable(self.mse[layers], self.layer_weights[layers], self.nats, at_8, self.dealt)

    def up_to(self, widest: int) -> LossTable:
        """The same where plans use no width of 1..4 above `widest`, if there is another."""
        return replace(self, dealt=tuple(bits for bits in self.dealt if bits <= widest) or self.dealt[:1])

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits that the replicas have."""
        return self.dealt if self.at_8 is None else (*self.dealt, BYTE_BITS)

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """[W - 1]: bits from each width that plans use to the next."""
        return np.diff(self.dealt)

    @cached_property
    def falls(self) -> NDArray[np.float64]:
        """[L, E, W - 1]: how far the loss falls, by a bit of each of these steps."""
        of_dealt = self.mse[:, :, np.array(self.dealt) - WIDTHS[0]]
        return (of_dealt[:, :, :-1] - of_dealt[:, :, 1:]) / self.steps

    @cached_property
    def by_width(self) -> NDArray[np.float64]:
        """[L, E, 17]: 0 at widths that lose nothing or are not known."""
        table = np.zeros((*self.mse.shape[:2], FULL_PRECISION_BITS + 1))
        table[:, :, self.dealt] = self.mse[:, :, np.array(self.dealt) - WIDTHS[0]]
        if self.at_8 is not None:
            table[:, :, BYTE_BITS] = self.at_8
        return table

    def predicted_nats(self, score: ImportanceScore, widths: NDArray[np.uint8]) -> float | None:
        """Rise of the negative log-likelihood of a request, by experts of these widths [L, E]. Or by pairs [L, E, Q],
        with the score's router weights. Other widths than the table's lose nothing. None where it was not measured
        what a loss does."""
        if self.nats is None:
            return None
        strength = score.strength[:, :, None] if widths.ndim == 2 else score.pair_strength
        by_pair = widths.reshape(*score.values.shape, -1).astype(np.int64)
        losses = (np.take_along_axis(self.by_width, by_pair, axis=2) * strength).mean(axis=2)
        lost = (losses * score.values).sum(axis=1)
        return self.nats * float((lost * self.layer_weights).sum())

    @classmethod
    def of_codes(cls, num_layers: int, num_experts: int, bits: int) -> LossTable:
        """Of a checkpoint whose own codes of so many bits are the only width: nothing is lost."""
        none = np.zeros((num_layers, num_experts, len(WIDTHS)))
        return cls(none, nats=0.0, at_8=none[:, :, 0] if bits == BYTE_BITS else None, dealt=(WIDTHS[-1],))

    @classmethod
    def nominal(cls, num_layers: int, num_experts: int) -> LossTable:
        """The same loss for every expert, falling by LOSS_RATIO_PER_BIT: for replicas that were never calibrated."""
        steps = np.array([nominal_loss(bits) for bits in WIDTHS])
        return cls(np.broadcast_to(steps, (num_layers, num_experts, len(WIDTHS))))


def select_bitwidths(
    score: ImportanceScore, placement: Placement, loss: LossTable, budget: Budget, gain: str = "importance"
) -> BitwidthPlan:
    """The widths of largest total gain that spend exactly the budget's increments in each layer, or as many as widths
    that the replicas have can spend.

    Experts that are not cold have 0 bits here, as in `uniform_bitwidths`.
    """
    _require_one_model(score, placement, loss)
    gains = loss.mse[:, :, :1] - loss.mse[:, :, 1:]  # [L, E, 3] for 2, 3, 4 bits
    if gain == "importance":
        gains = gains * score.values[:, :, None]
    num_cold, increments = placement.num_cold, budget.increments(placement.num_cold)
    # Cold experts first, by falling importance, ties to the lower id; the others behind them.
    order = np.argsort(np.where(placement.cold, -score.values, np.inf), axis=1, kind="stable")
    bits = np.zeros(placement.hot.shape, np.uint8)
    for cold, spend in sorted(set(zip(num_cold.tolist(), increments.tolist(), strict=True))):
        if cold == 0:
            continue
        layers = np.flatnonzero((num_cold == cold) & (increments == spend))
        ranked = order[layers, :cold]
        prefix = np.zeros((len(layers), cold + 1, 3))
        np.cumsum(gains[layers[:, None], ranked], axis=1, out=prefix[:, 1:])
        while not len((ways := _ends(cold, spend, loss.dealt))[0]):
            spend -= 1
        ends = np.array([_best_ends(gained, *ways, spend) for gained in prefix])  # [layers, 3]
        bits[layers[:, None], ranked] = 1 + (np.arange(cold) < ends[:, :, None]).sum(axis=1)
    return BitwidthPlan(bits)


def bits_over_layers(score: ImportanceScore, placement: Placement, loss: LossTable, budget: Budget) -> BitwidthPlan:
    """The widths of least loss among all plans whose cold pairs read as many bits on average, over all layers together.

    The gain of a wider expert and its price both grow with how often it is chosen. So a bit is worth what it gains
    for one pair: more, the stronger the router's choices of it are. How often it is chosen decides only how many bits
    the budget pays for. The least concave curve above each expert's gains replaces them, so that its next bit never
    gains more than the one before. Then the best bits of all are the best ones one by one, up to the first that the
    budget does not pay for. Where the curve is not its own, that may be within a stretch of it: for one expert at
    most. Among equal gains the flattest way counts, then the first layer's and the lowest id's.
    """
    _require_one_model(score, placement, loss)
    cold = placement.cold
    worth = score.strength * loss.layer_weights[:, None]
    gains = (loss.falls * worth[:, :, None])[cold].T  # [W - 1, n], by a pair and a bit
    # among equal ones every second bit before any third
    best = np.argsort(-_concave(gains, loss.steps), axis=None, kind="stable")
    step, expert = np.divmod(best, max(gains.shape[1], 1))
    bits_of_step = loss.steps[step]
    gained = gains.ravel()[best] * bits_of_step * score.values[cold][expert]
    narrowest = np.where(cold, loss.dealt[0], 0).astype(np.uint8)
    to_read = budget.avg_bits - loss.dealt[0]
    read = np.cumsum(placement.cold_shares(score.values)[expert] * bits_of_step)
    paid = int(np.searchsorted(read, to_read + _ROUNDING, side="right")) if to_read > 0 else 0
    before = np.cumsum(gained) - gained
    needed = int(np.count_nonzero(before < _to_gain(score, narrowest, loss, budget.max_loss)))
    spent = min(paid, needed)
    bits = np.zeros(cold.shape, np.uint8)
    bits[cold] = np.array(loss.dealt)[np.bincount(expert[:spent], minlength=gains.shape[1])]
    return BitwidthPlan(bits)


def bits_of_pairs(score: ImportanceScore, placement: Placement, loss: LossTable, budget: Budget) -> BitwidthPlan:
    """The router weights from which cold pairs read 2, 3 and 4 bits, for the least loss at so many bits on average.

    An error counts by the square of the pair's router weight w, so a pair's next bit gains w^2 g / m. Here g is how far
    the loss of its expert falls on its least concave curve, times the layer's weight. And m is the layer's mean of w^2.
    The best plan buys each bit that gains more than one price p, from w = sqrt(p m / g) on. The prompt's router weights
    say which price spends the budget. Where single weights are not known, the plan is that of bits_over_layers.
    """
    if score.weights is None:
        return bits_over_layers(score, placement, loss, budget)
    _require_one_model(score, placement, loss)
    cold, num_samples = placement.cold, score.weights.shape[2]
    falls = np.moveaxis(loss.falls, 2, 0)
    falls = (
        _concave(falls.reshape(len(falls), cold.size), loss.steps).reshape(falls.shape) * loss.layer_weights[:, None]
    )
    gains = np.ascontiguousarray(falls[:, cold])[:, :, None] * score.pair_strength[cold]  # [W - 1, n, Q], by a bit
    bits_of_step = loss.steps[:, None, None]
    read = placement.cold_shares(score.values)[:, None] / num_samples * bits_of_step
    gained = gains * bits_of_step * (score.values[cold][:, None] / num_samples)
    narrowest = np.where(cold[:, :, None], loss.dealt[0], np.zeros(num_samples)).astype(np.uint8)
    price = max(
        _price_paid(gains, np.broadcast_to(read, gains.shape), budget.avg_bits - loss.dealt[0]),
        _price_needed(gains, gained, _to_gain(score, narrowest, loss, budget.max_loss)),
    )
    squares = price * score.mean_squares[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):  # what gains nothing is bought where it is free
        of_step = np.nan_to_num(np.sqrt(squares / falls), posinf=np.inf)
    from_weight = np.zeros((len(WIDTHS) - 1, *cold.shape), of_step.dtype)  # below the narrowest: every pair
    for number, (narrow, wide) in enumerate(pairwise(loss.dealt)):
        from_weight[narrow - WIDTHS[0] : wide - WIDTHS[0]] = of_step[number]
    from_weight[loss.dealt[-1] - WIDTHS[0] :] = np.inf
    pairs = BitwidthPlan(cold.astype(np.uint8), np.moveaxis(from_weight, 0, 2))
    usual = np.sqrt(np.square(score.weights, dtype=np.float64).mean(axis=2, keepdims=True)).astype(np.float32)
    return BitwidthPlan(pairs.of_pairs(usual)[:, :, 0], pairs.from_weight)


def _require_one_model(score: ImportanceScore, placement: Placement, loss: LossTable) -> None:
    if loss.mse.shape[:2] != placement.hot.shape or score.values.shape != placement.hot.shape:
        raise ConfigError(
            f"placement {list(placement.hot.shape)}, scores {list(score.values.shape)} and loss table "
            f"{list(loss.mse.shape[:2])} must be of one model"
        )


def _price_paid(gains: NDArray[np.float64], read: NDArray[np.float64], bits: float) -> float:
    """The lowest price at which what gains more adds no more than so many bits. read: what each adds.

    All that gains the same is bought, or none of it.
    """
    if (unpaid := _crossing(gains, read, bits + _ROUNDING)) is None:
        return 0.0
    return (float(gains[gains > unpaid].min(initial=math.inf)) + unpaid) / 2


def _price_needed(gains: NDArray[np.float64], gained: NDArray[np.float64], nats: float) -> float:
    """The highest price at which what gains more gains so many nats in all; 0 where all of it does not."""
    if nats <= 0:
        return math.inf
    if math.isinf(nats) or (last := _crossing(gains, gained, nats)) is None:
        return 0.0
    return (float(gains[gains < last].max(initial=0.0)) + last) / 2


def _crossing(gains: NDArray[np.float64], amounts: NDArray[np.float64], limit: float) -> float | None:
    """The gain at which amounts, added up by falling gain, exceed the limit; None where all of them do not.

    Gains of one size are added up first, and only those where the limit lies are sorted: there may be many.
    """
    gains, amounts = gains.ravel(), amounts.ravel()
    if not gains.size:
        return None
    sizes = gains.view(np.int64) >> _BITS_OF_A_SIZE  # of floats above 0, in their order
    sizes = np.maximum(sizes - sizes.max() + _SIZES, 0)
    up_to = np.cumsum(np.bincount(sizes, amounts, minlength=_SIZES + 1)[::-1])
    place = int(np.searchsorted(up_to, limit, side="right"))
    if place > _SIZES:
        return None
    here = np.flatnonzero(sizes == _SIZES - place)
    here = here[np.argsort(-gains[here], kind="stable")]
    before = up_to[place - 1] if place else 0.0
    last = int(np.searchsorted(before + np.cumsum(amounts[here]), limit, side="right"))
    return float(gains[here[min(last, len(here) - 1)]])


def _to_gain(score: ImportanceScore, narrowest: NDArray[np.uint8], loss: LossTable, max_loss: float | None) -> float:
    """How much wider widths must gain over the narrowest until no more is lost than max_loss nats, in units of loss.
    Without max_loss: all that they can."""
    if max_loss is None:
        return math.inf
    if loss.nats is None:
        raise ConfigError(
            "a budget of max_loss needs replicas that say how much losses matter: `vllm-ndp quantize` with "
            "--calibration measures it"
        )
    at_least = loss.predicted_nats(score, narrowest) or 0.0
    return (at_least - max_loss) / loss.nats if loss.nats else 0.0


def _concave(gains: NDArray[np.float64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """[W - 1, n] gains by a bit of each step to the next width -> those of the least concave curve above their sums.

    The k-th is the least over i <= k of the largest over j >= k of the mean of gains i to j. steps [W - 1]: in bits.
    """
    sums = np.zeros((len(gains) + 1, gains.shape[1]))
    np.cumsum(gains * steps[:, None], axis=0, out=sums[1:])
    places, at = range(len(gains)), [0, *np.cumsum(steps).tolist()]
    curve = [
        np.min(
            [
                np.max([(sums[j + 1] - sums[i]) / (at[j + 1] - at[i]) for j in places if j >= k], axis=0)
                for i in places
                if i <= k
            ],
            axis=0,
        )
        for k in places
    ]
    return np.stack(curve) if curve else gains


def verdict_on(avg_bits: float) -> str:
    """One sentence where an average is too low to be of use, else empty; also of one that whoever asks refuses."""
    if not 1.0 <= avg_bits < LEAST_USEFUL_BITS:
        return ""
    return (
        f"{avg_bits:g} bits on average are too few for useful answers: with every expert cold the bundled model loses "
        f"{_NATS_AT}; use {LEAST_USEFUL_BITS:g} or more, or more hot experts"
    )


def trusted(nats: float | None) -> float | None:
    """A prediction as far as it is to be trusted."""
    return None if nats is None or nats > MOST_TRUSTED_NATS else nats


def verdict_on_loss(nats: float | None) -> str:
    """A prediction from replicas for people, and whether it is to be trusted."""
    if nats is None:
        return "unknown: the replicas do not say (`vllm-ndp quantize --calibration` measures it)"
    said = f"{nats:.2g} nats a token where a prompt uses all experts alike"
    return (
        said
        if nats <= MOST_TRUSTED_NATS
        else f"{said}: above {MOST_TRUSTED_NATS:g}, where plans lose more than predicted"
    )


def uniform_bitwidths(placement: Placement, budget: Budget, widths: tuple[int, ...] = WIDTHS) -> BitwidthPlan:
    """The same bits for every cold expert; what an average between two widths leaves over goes to the lower ids."""
    cold, num_cold = placement.cold, placement.num_cold
    spend = budget.increments(num_cold) + (WIDTHS[0] - widths[0]) * num_cold
    bits, wider = np.where(cold, widths[0], 0), num_cold
    for narrow, wide in pairwise(widths):
        wider = np.clip(spend // (wide - narrow), 0, wider)
        bits[cold & (np.cumsum(cold, axis=1) <= wider[:, None])] = wide
        spend = spend - wider * (wide - narrow)
    return BitwidthPlan(bits.astype(np.uint8))


def full_precision(placement: Placement) -> BitwidthPlan:
    """Every expert in the checkpoint's own precision, hot ones aside: the identity mode, outside any bit budget."""
    return BitwidthPlan(np.where(placement.hot, 0, FULL_PRECISION_BITS))


def in_bytes(placement: Placement, loss: LossTable) -> BitwidthPlan:
    """Every cold expert at 8 bits, beside which nothing is chosen."""
    if loss.at_8 is None:
        raise ConfigError(
            f"{BYTE_BITS} bits on average need replicas of {BYTE_BITS} bits, and these have none: make them with "
            "`vllm-ndp quantize` --bits 1,2,3,4,8, or ask for 1 to 4"
        )
    return BitwidthPlan(np.where(placement.cold, BYTE_BITS, 0))


def _ends(cold: int, spend: int, widths: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every way to spend the increments of one layer: n4 and m = n4 + n3, by rising n4, then m; none if it cannot be
    done exactly. Then n2 = spend - n4 - 2 m. A width that is absent has no expert."""
    if spend < (widths[0] - WIDTHS[0]) * cold:
        raise ConfigError(f"{1 + spend / cold:.3g} bits on average are below the narrowest replicas' {widths[0]}")
    n4, m = np.arange(min(cold, spend // 3) + 1)[:, None], np.arange(cold + 1)
    n3, n2, n1 = m - n4, spend - n4 - 2 * m, cold - spend + n4 + m
    possible = np.ones(n3.shape, np.bool_)
    for bits, count in zip(WIDTHS, np.broadcast_arrays(n1, n2, n3, n4), strict=True):
        possible &= count >= 0 if bits in widths else count == 0
    fours, ends = np.nonzero(possible)
    return fours, ends


def _best_ends(
    prefix: NDArray[np.float64], n4: NDArray[np.int64], m: NDArray[np.int64], spend: int
) -> tuple[int, int, int]:
    """How many of the most important experts have 4, at least 3 and at least 2 bits where the gain is largest. Among
    equal gains the first by n4, then by n3, which is the flattest.

    prefix [cold + 1, 3]: gains of the first experts at 2, 3 and 4 bits. n4 and m: as _ends has them.
    """
    c2, c3, c4 = prefix.T
    gained = c3[m] - c3[n4] + c4[n4] + (c2[spend - n4 - m] - c2[m])
    best = int(gained.argmax())
    return int(n4[best]), int(m[best]), int(spend - n4[best] - m[best])
