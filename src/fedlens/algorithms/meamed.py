"""Mean around the median (Xie, Koyejo and Gupta, 2018, arXiv:1802.10116).

Of each coordinate, the C - f values nearest to their median are averaged. Of two that are equally
near, but for rounding, it is the lower one.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithms.median import of_ordered
from fedlens.algorithms.trust import Byzantine, with_byzantine
from fedlens.core import Cohort, Tree
from fedlens.network import ops
from fedlens.network.layout import Layout

ALIKE = 1e-12  # of a value: a smaller difference between distances may be rounding


@dataclass(frozen=True)
class AroundMedian(Byzantine):
    byzantine: int

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        keep = len(shares) - self.byzantine
        return {name: around_median(u, keep) for name, u in updates.items()}


def around_median(update: Tensor, keep: int) -> Tensor:  # [C, ...]
    """The mean of those `keep` values of each coordinate that are nearest to its median."""
    rows = update.reshape(len(update), -1)
    if ops.by_kernels(rows):
        return ops.mean_around(rows, keep, ALIKE).view(update.shape[1:])
    return of_ordered(update, partial(_nearest, keep=keep))


def _nearest(ordered: Tensor, keep: int) -> Tensor:  # [C, W] to [W]
    """In order these values are neighbours, the middle one among them.

    From the lowest such window on, a value leaves it for the one above it that is nearer. Sums go
    from the middle outwards: what is far away, and not among them, takes no digits.
    """
    at = (len(ordered) - 1) // 2
    twice = ordered[at] + ordered[len(ordered) // 2]  # the median
    nothing = torch.zeros_like(ordered[:1])
    below = torch.cat([nothing, ordered[:at].flip(0)]).cumsum(0)
    above = ordered[at:].cumsum(0)
    start, end = max(at - keep + 1, 0), min(at, len(ordered) - keep)
    low, high = ordered[start:end], ordered[start + keep : end + keep]
    alike = ALIKE * torch.maximum(low.abs(), high.abs())
    first = start + (low + high < twice - alike).sum(0, keepdim=True)
    return ((below.gather(0, at - first) + above.gather(0, first + keep - 1 - at)) / keep)[0]


@paper
def meamed(base: Algorithm, byzantine: int = 1) -> Algorithm:
    """Average the values nearest to the median, coordinate by coordinate.

    Args:
        byzantine: f, how many clients of a round may be hostile.
    """
    return with_byzantine(base, "meamed", AroundMedian(byzantine))
