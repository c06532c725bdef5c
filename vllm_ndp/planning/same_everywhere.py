"""Arithmetic whose results do not depend on the processor: plans are decided by these and not by numpy's or libm's.

`+ - * /`, sqrt, cumulative sums and products, and `sum` of one array round alike on every IEEE machine, in numpy's one
order. These do not: exp, log and power, where numpy picks a vector library by processor, libm a variant with fused
multiply-add. Nor do `@` and einsum (BLAS picks the order of the sum), argpartition and unstable sorts (the order of
equal values). Held by tests/vllm_ndp/planning/test_same_everywhere.py. Knows numbers only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LOG_2, _HALF_ROOT = 0.6931471805599453, 0.7071067811865476


def log(x: float) -> float:
    """Natural logarithm, within 4e-16 of its size or so. x > 0. Source: 2 artanh((m - 1) / (m + 1)), its series."""
    mantissa, exponent = math.frexp(x)
    if mantissa < _HALF_ROOT:
        mantissa, exponent = 2 * mantissa, exponent - 1
    ratio = (mantissa - 1) / (mantissa + 1)
    square, series = ratio * ratio, 0.0
    for odd in range(23, 0, -2):
        series = series * square + 1 / odd
    return exponent * _LOG_2 + 2 * ratio * series


def exp(x: float) -> float:
    """e ** x, within 4e-16 of it or so where |x| < 1. Source: Taylor's series on what is left of multiples of log 2."""
    whole = round(x / _LOG_2)
    rest, series = x - whole * _LOG_2, 1.0
    for factor in range(18, 0, -1):
        series = 1 + series * rest / factor
    return math.ldexp(series, whole)


def power(base: float, exponent: int) -> float:
    """base ** exponent, multiplied one factor after the other. exponent >= 0."""
    product = 1.0
    for _ in range(exponent):
        product *= base
    return product


def powers(base: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """[..., most + 1]: the powers 0 to most of each base [...]."""
    table = np.ones((*base.shape, most + 1))
    table[..., 1:] = base[..., None]
    return np.asarray(np.cumprod(table, axis=-1), np.float64)


def weighted(weights: NDArray[Any], values: NDArray[np.float64]) -> float:
    """The sum of weights * values, both [N]."""
    return float((weights * values).sum())


def smallest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """[count], where the smallest of values [N] are, in order of place; of equal ones the first. 1 <= count <= N."""
    last = np.partition(values, count - 1)[count - 1]
    below = np.flatnonzero(values < last)
    equal = np.flatnonzero(values == last)[: count - len(below)]
    return np.sort(np.concatenate([below, equal]))
