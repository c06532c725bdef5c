"""Whether two samples differ, and whether they may be called equal: what the field prints beside two means.

    interval    95 % bootstrap interval of the difference of means; paired where both samples are of the same requests
    equal       two one-sided tests (TOST) at 5 %: the 90 % interval lies within the margin on both sides
    KS          the largest distance of the two distributions, and how likely one as large is where they are the same
                (Kolmogorov's limit, with Stephens' correction for few values)

That two means do not differ significantly shows no equality: TOST does. Knows numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ndp_device.common.errors import TraceError

DRAWS = 1000
MARGIN = 0.05


@dataclass(frozen=True)
class Difference:
    """Difference of one sample's mean from another's, in the margin's unit."""

    mean: float
    low: float
    high: float
    margin: float
    equal: bool
    ks: float
    ks_p: float


def bootstrap_means(values: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """[DRAWS], of as many values, drawn with replacement."""
    draws = np.random.default_rng(seed).integers(0, len(values), (DRAWS, len(values)))
    return np.asarray(values[draws].mean(axis=1))


def paired(own: NDArray[np.float64], other: NDArray[np.float64], margin: float = MARGIN) -> Difference:
    """own - other of the same requests, as a share of the other's mean; margin: the share that is called equal."""
    _require(own, other)
    if len(own) != len(other):
        raise TraceError(f"paired samples must be of the same requests, got {len(own)} and {len(other)} values")
    difference = (own - other) / other.mean()
    return _judged(float(difference.mean()), bootstrap_means(difference), margin, own, other)


def unpaired(own: NDArray[np.float64], other: NDArray[np.float64], margin: float = MARGIN) -> Difference:
    """own - other of different requests, in their own units."""
    _require(own, other)
    draws = bootstrap_means(own) - bootstrap_means(other, seed=1)
    return _judged(float(own.mean() - other.mean()), draws, margin, own, other)


def _require(*samples: NDArray[np.float64]) -> None:
    if min(len(values) for values in samples) < 2:
        raise TraceError("a comparison needs at least 2 requests on both sides")


def _judged(
    mean: float, draws: NDArray[np.float64], margin: float, own: NDArray[np.float64], other: NDArray[np.float64]
) -> Difference:
    low, at_least, at_most, high = np.percentile(draws, [2.5, 5, 95, 97.5]).tolist()
    return Difference(mean, low, high, margin, bool(-margin < at_least and at_most < margin), *ks(own, other))


def ks(own: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float]:
    """(D, p) of Kolmogorov and Smirnov's test of two samples. Stephens (1970), J. R. Stat. Soc. B 32."""
    both = np.sort(np.concatenate([own, other]))
    below = [np.searchsorted(np.sort(sample), both, side="right") / len(sample) for sample in (own, other)]
    distance = float(np.abs(below[0] - below[1]).max())
    root = np.sqrt(len(own) * len(other) / (len(own) + len(other)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    terms = np.arange(1, 101)
    tail = 2 * np.sum((-1.0) ** (terms - 1) * np.exp(-2 * terms**2 * scaled**2))
    return distance, float(np.clip(tail, 0, 1)) if scaled > 0.2 else 1.0
