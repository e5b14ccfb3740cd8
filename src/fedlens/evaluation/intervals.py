"""Intervals of shares of few examples, and of any measure by the bootstrap; p-values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor  # pages have intervals of shares, and need no torch

Interval = tuple[float, float] | None

Z95 = 1.959963984540054  # the normal quantile of a two-sided interval of 95%
FEWEST = 8  # clients; with fewer, bootstrap intervals are too narrow
TIMES = 2000  # resamples of clients


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share among `count` examples; valid for few examples, too.

    It is everything where there are no examples, or where a damaged file has another number.
    """
    if count < 1 or not 0 <= share <= 1:
        return 0.0, 1.0
    z2 = Z95 * Z95
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    within = share * (1 - share) / count + z2 / (4 * count * count)
    half = Z95 * math.sqrt(within) / (1 + z2 / count)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def bootstrap(
    measure: Callable[[Tensor], Mapping[str, float]],
    count: int,
    times: int,
    seed: int,
    watch: Callable[[dict[str, int]], None] | None = None,
) -> dict[str, Interval]:
    """The 95% bootstrap intervals of measures, over `times` resamples of `count` items.

    `measure` receives the indices of a resample, drawn with replacement. An interval lies between
    the 2.5% and 97.5% quantiles of the finite values; None if there are none. `watch` is called
    after each resample with its number (`drawn`) and the number of resamples (`of`).
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for number in range(1, times + 1):
        drawn.append(measure(torch.randint(count, (count,), generator=generator)))
        if watch is not None:
            watch({"drawn": number, "of": times})
    found: dict[str, Interval] = {}
    for name in drawn[0]:
        values = np.array([one[name] for one in drawn])
        finite = values[np.isfinite(values)]
        ends = np.quantile(finite, (0.025, 0.975)).tolist() if len(finite) else None
        found[name] = None if ends is None else (ends[0], ends[1])
    return found


def bootstrap_mean(values: Tensor, seed: int) -> Interval:  # [K]
    """The interval of a mean over clients; None for fewer than `FEWEST`."""
    if len(values) < FEWEST:
        return None
    found = bootstrap(lambda drawn: {"": float(values[drawn].mean())}, len(values), TIMES, seed)
    return found[""]


def p_value(t: float, dof: float) -> float:
    """The probability of |T| >= |t| under Student's distribution."""
    return incomplete_beta(dof / 2, 0.5, dof / (dof + t * t))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # here the series would converge slowly
        return 1 - incomplete_beta(b, a, 1 - x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    term = math.exp(logarithm + a * math.log(x) + b * math.log1p(-x)) / a
    total, n = 0.0, 0
    while term > 1e-17 * total:  # a series of positive terms: small values are exact, too
        total += term
        term *= x * (a + b + n) / (a + 1 + n)
        n += 1
    return total


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for multiple comparisons (Holm 1979); None stays None."""
    order = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    highest = 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        corrected[i] = highest
    return corrected
