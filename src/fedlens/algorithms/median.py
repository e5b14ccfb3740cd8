"""Coordinate-wise median (Yin et al., ICML 2018, arXiv:1803.01498), option I.

Every coordinate of the update is the median of the clients' values. It ignores how many examples
clients hold.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.slots import Combine
from fedlens.core import Cohort, Tree
from fedlens.network.layout import Layout


@dataclass(frozen=True)
class Median(Combine):
    uses_shares: ClassVar[bool] = False
    reads_cohort: ClassVar[bool] = False

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        return {name: middle(u) for name, u in updates.items()}


def middle(update: Tensor) -> Tensor:  # [C, ...]
    """The median of each coordinate; of an even number of values, the mean of the middle two."""
    low, high = (len(update) - 1) // 2, len(update) // 2  # equal if the number is odd
    ordered = update.sort(0).values
    return (ordered[low] + ordered[high]) / 2


@paper
def median(base: Algorithm) -> Algorithm:
    """Take the median of the clients' updates, coordinate by coordinate."""
    return replace(base, combine=Median())
