"""Coordinate-wise trimmed mean (Yin et al., ICML 2018, arXiv:1803.01498), option II.

For each coordinate the largest and the smallest values are left out, a share `beta` of the clients
at each end, and the rest is averaged without weights. With beta = 0 it is the plain mean.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedlens.algorithm import Algorithm, paper
from fedlens.algorithm.slots import Combine
from fedlens.algorithms.median import mean_between
from fedlens.core import Cohort, Tree
from fedlens.network.layout import Layout


@dataclass(frozen=True)
class TrimmedMean(Combine):
    share: float
    uses_shares: ClassVar[bool] = False
    reads_cohort: ClassVar[bool] = False

    def withstands(self, clients: int) -> int:
        # 0.29 * 100 = 28.999999999999996 must count as 29 clients.
        return int(self.share * clients + 1e-9)

    def __call__(self, updates: Tree, shares: Tensor, cohort: Cohort, layout: Layout) -> Tree:
        cut = self.withstands(len(shares))
        return {name: mean_between(u, cut) for name, u in updates.items()}


@paper
def trimmed_mean(base: Algorithm, share: float = 0.1) -> Algorithm:
    """Leave out the extremes of each coordinate.

    Args:
        share: beta, of the clients at each end.
    """
    if not 0 <= share < 0.5:
        raise ValueError(f"trimmed-mean: share is {share}: choose 0 to below 0.5")
    return replace(base, combine=TrimmedMean(share))
