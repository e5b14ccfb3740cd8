"""Confidence intervals of measures by the bootstrap: examples or clients are resampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

Interval = tuple[float, float] | None

FEWEST = 8  # clients; with fewer, bootstrap intervals are too narrow
TIMES = 2000  # resamples of clients


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
