"""Whether two samples differ, and whether they may be called equal: what the field prints beside two means.

    interval    95 % bootstrap interval of the mean difference, paired by request
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


def bootstrap_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[DRAWS], of as many values, drawn with replacement."""
    draws = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    return np.asarray(values[draws].mean(axis=1))


def paired(own: NDArray[np.float64], other: NDArray[np.float64], margin: float = MARGIN) -> Difference:
    """own - other of the same requests, as a share of the other's mean; margin: the share that is called equal."""
    if min(len(own), len(other)) < 2:
        raise TraceError("a comparison needs at least 2 requests on both sides")
    if len(own) != len(other):
        raise TraceError(f"paired samples must be of the same requests, got {len(own)} and {len(other)} values")
    difference = (own - other) / other.mean()
    low, at_least, at_most, high = np.percentile(bootstrap_means(difference), [2.5, 5, 95, 97.5]).tolist()
    equal = bool(-margin < at_least and at_most < margin)
    return Difference(float(difference.mean()), low, high, margin, equal, *ks(own, other))


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
