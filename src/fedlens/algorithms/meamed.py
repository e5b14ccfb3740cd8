"""Mean around the median (Xie, Koyejo and Gupta, 2018, arXiv:1802.10116).

Of each coordinate, the C - f values nearest to their median are averaged.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithms.median import central, of_ordered
from fedlens.algorithms.trust import Byzantine, with_byzantine
from fedlens.core import Cohort, Tree
from fedlens.network.layout import Layout


@dataclass(frozen=True)
class AroundMedian(Byzantine):
    byzantine: int

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        keep = len(shares) - self.byzantine
        return {name: around_median(u, keep) for name, u in updates.items()}


def around_median(update: Tensor, keep: int) -> Tensor:  # [C, ...]
    """The mean of those `keep` values of each coordinate that are nearest to its median."""
    return of_ordered(update, partial(_nearest, keep=keep))


def _nearest(ordered: Tensor, keep: int) -> Tensor:  # [C, W] to [W]
    """In order these values are neighbours, the middle one among them: those that reach least far.

    Sums go from the middle outwards: what is far away, and not among them, takes no digits.
    """
    centre, at = central(ordered), (len(ordered) - 1) // 2
    nothing = torch.zeros_like(ordered[:1])
    below = torch.cat([nothing, ordered[:at].flip(0)]).cumsum(0)
    above = ordered[at:].cumsum(0)
    least, best = torch.full_like(centre, torch.inf), centre
    for first in range(max(at - keep + 1, 0), min(at, len(ordered) - keep) + 1):
        last = first + keep - 1
        reach = torch.maximum(centre - ordered[first], ordered[last] - centre)
        mean = (below[at - first] + above[last - at]) / keep
        best = torch.where(reach < least, mean, best)
        least = torch.minimum(least, reach)
    return best


@paper
def meamed(base: Algorithm, byzantine: int = 1) -> Algorithm:
    """Average the values nearest to the median, coordinate by coordinate.

    Args:
        byzantine: f, how many clients of a round may be hostile.
    """
    return with_byzantine(base, "meamed", AroundMedian(byzantine))
