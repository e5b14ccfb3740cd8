"""Student's t-test and confidence intervals for a few paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval, and the p-value of the hypothesis that it is 0."""

    n: int
    mean: float
    std: float | None  # of the sample; this and the three fields below are None if n is 1
    low: float | None = None
    high: float | None = None
    p: float | None = None  # two-sided; None also if all values are equal


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Estimate the mean of `values`, assuming draws from a normal distribution."""
    n, mean = len(values), fmean(values)
    if n == 1:
        return Estimate(1, mean, None)
    std = stdev(values)
    half = quantile(confidence, n - 1) * std / math.sqrt(n)
    p = p_value(mean / (std / math.sqrt(n)), n - 1) if std else None
    return Estimate(n, mean, std, mean - half, mean + half, p)


def p_value(t: float, dof: float) -> float:
    """The probability of |T| >= |t| under Student's distribution."""
    return incomplete_beta(dof / 2, 0.5, dof / (dof + t * t))


@cache  # called for every round of a curve
def quantile(confidence: float, dof: float) -> float:
    """The t such that a share `confidence` of Student's distribution lies within ± t."""
    low, high = 0.0, 1.0
    while 1 - p_value(high, dof) < confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - p_value(middle, dof) < confidence else (low, middle)
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # here the continued fraction would converge slowly
        return 1 - incomplete_beta(b, a, 1 - x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(logarithm + a * math.log(x) + b * math.log1p(-x)) / a
    return front / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction 1 + d1 / (1 + d2 / (1 + ...)) of I_x(a, b), by Lentz's method."""
    value, c, d = 1.0, 1.0, 0.0
    for k in range(1, 1000):
        m = k // 2
        if k % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + term * d)
        c = 1 + term / c
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for multiple comparisons (Holm 1979); None stays None."""
    order = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    highest = 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        corrected[i] = highest
    return corrected
