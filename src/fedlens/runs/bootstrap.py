"""How sure measures are: intervals by drawing examples, or clients, again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

Interval = tuple[float, float] | None

FEWEST = 8  # clients: resampling fewer gives intervals that are too narrow
TIMES = 2000  # that clients are resampled


def bootstrap(
    measure: Callable[[Tensor], Mapping[str, float]],
    count: int,
    times: int,
    seed: int,
    watch: Callable[[dict[str, int]], None] | None = None,
) -> dict[str, Interval]:
    """The 95% intervals of measures, by drawing as many examples or clients again and again.

    `measure` is given which of `count` were drawn, some of them twice. The interval is between
    quantiles of what it gives; None if it never gives a number. `watch` is called with each time:
    `drawn` is its number, `of` how many there are.
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
    """That of a mean over clients, if they are not too few to stand for others."""
    if len(values) < FEWEST:
        return None
    found = bootstrap(lambda drawn: {"": float(values[drawn].mean())}, len(values), TIMES, seed)
    return found[""]
